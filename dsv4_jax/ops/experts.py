# SPDX-License-Identifier: Apache-2.0
"""Apply routed experts that are split over the `expert` axis: no token is dropped, whatever the skew.

Inside `shard_map`. Letters: B rows, S positions, D width, F expert width, E experts of this device, k experts
per token, N rows of a list of (token, expert) pairs, R rows that a device may receive, P devices of the
axis, W waves.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.mesh import AXES, varying
from dsv4_jax.ops.grouped_matmul import Impl, grouped_matmul
from dsv4_jax.ops.shards import ParamShards

AXIS = "expert"


class Kernels(NamedTuple):
    """Hold the experts' matrices as this device stores them: w1 (gate), w3 (up) [E, D, F]; w2 (down) [E, F, D]."""

    w1: jax.Array
    w3: jax.Array
    w2: jax.Array


@dataclasses.dataclass(frozen=True)
class Experts:
    """Configure how a layer's experts are exchanged and computed.

    Attributes:
        count: experts of the layer, over all devices.
        limit: clamp of the SwiGLU; 0: none.
        exchange: "gather" brings every token to every device, "ragged" sends tokens to their experts' devices.
        waves: number of parts in which a device's experts are exchanged and computed, for "ragged".
        impl: form of the grouped matrix product.
        shards: how w1, w3 and w2 are stored over the devices.
    """

    count: int
    limit: float
    exchange: str
    waves: int
    impl: Impl
    shards: tuple[ParamShards, ParamShards, ParamShards]


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Compute silu(min(gate, limit)) * clip(up, -limit, limit) in fp32; limit 0: no clamp (section 4.2.3)."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def count_clamped(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Count the activations [..., F] whose gate or up `swiglu` clamps, fp32 [...]."""
    hit = (gate.astype(jnp.float32) > limit) | (jnp.abs(up.astype(jnp.float32)) > limit)
    return (hit & (limit > 0)).sum(-1).astype(jnp.float32)


@jax.custom_vjp
def permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Take x[order] for a permutation; the gradient is a gather too, by `inverse`."""
    return x[order]


permute.defvjp(lambda x, order, inverse: (x[order], inverse), lambda inverse, dy: (dy[inverse], None, None))


def sort(key_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find the stable order of the keys and its inverse."""
    order = jnp.argsort(key_N, stable=True)
    return order, jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)


def apply_experts(
    how: Experts,
    x_BSD: jax.Array,
    experts_BSk: jax.Array,
    weights_BSk: jax.Array,
    real_BS: jax.Array,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """Sum each token's experts by weight, [B, S, D] in x's type; padding (not `real_BS`) goes to no expert.

    The second result is the number of clamped activations of all devices' tokens, fp32.
    """
    # Padding gets the number `count`, past the last expert.
    tokens = (x_BSD, weights_BSk, jnp.where(real_BS[..., None], experts_BSk, how.count))
    if kernels.w1.shape[0] == how.count:
        y, hit = _own_experts(how, *tokens, kernels)
    elif how.exchange == "gather":
        # Every device applies its experts to the tokens of all; the sums go back to the tokens' own devices.
        everyones = (jax.lax.all_gather(a, AXIS, tiled=True) for a in tokens)
        everyones_y, hit = _own_experts(how, *everyones, kernels)
        y = jax.lax.psum_scatter(everyones_y, AXIS, tiled=True)
    else:
        y, hit = _exchanged(how, *tokens, kernels)
    return y.astype(x_BSD.dtype), jax.lax.psum(hit, AXES)


def _pairs(x_BSD: jax.Array, weights_BSk: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Repeat each token for each of its k experts: inputs [N, D] and weights [N]."""
    return jnp.repeat(x_BSD.reshape(-1, x_BSD.shape[-1]), weights_BSk.shape[-1], axis=0), weights_BSk.reshape(-1)


def _own_experts(
    how: Experts, x_BSD: jax.Array, weights_BSk: jax.Array, experts_BSk: jax.Array, kernels: Kernels
) -> tuple[jax.Array, jax.Array]:
    """Sum each token's experts among this device's own, fp32; count their clamped activations."""
    # expert_N: number among this device's experts, E for rows of other devices' experts and of none.
    E = kernels.w1.shape[0]
    first = jax.lax.axis_index(AXIS) * E if how.count > E else 0
    expert_N = experts_BSk.reshape(-1) - first
    expert_N = jnp.where((expert_N >= 0) & (expert_N < E), expert_N, E)
    y_ND, hit = _apply(how, *_pairs(x_BSD, weights_BSk), expert_N, kernels, expert_N.size * E // how.count)
    return y_ND.reshape(*experts_BSk.shape, -1).sum(2, dtype=jnp.float32), hit


def _apply(
    how: Experts, x_ND: jax.Array, weight_N: jax.Array, expert_N: jax.Array, kernels: Kernels, even: int
) -> tuple[jax.Array, jax.Array]:
    """Apply to each row its expert, times its weight; rows of no expert (E) give 0. Count clamped activations.

    Sort by expert, three products, unsort. The products of the first 2 * `even` sorted rows can be kept for the
    backward pass; `even` is the number of rows with an expert if all devices receive equally many. The rows
    beyond (the buffer has room for every token choosing this device) are recomputed in the backward pass, which
    costs nothing where no row has an expert.
    """
    # Rows by expert, those of no expert last; ends [E] are the ends of the experts' parts.
    N, E = x_ND.shape[0], kernels.w1.shape[0]
    order, inverse = sort(expert_N)
    ends = jnp.cumsum(varying(jnp.zeros(E, jnp.int32), expert_N).at[expert_N].add(1, mode="drop"))
    x_ND, weight_N = permute(x_ND, order, inverse), permute(weight_N, order, inverse)
    # Two ranges of sorted rows: [0, kept) with products to keep, [kept, N) with products to recompute.
    kept = min(2 * even, N)
    done = []
    for first, last, keep in ((0, kept, True), (kept, N, False)):
        if first < last or not done:
            inside = jnp.clip(ends, first, last)  # where the experts' parts end in this range
            sizes = jnp.diff(inside, prepend=first)
            done.append(_products(how, x_ND[first:last], weight_N[first:last], sizes, kernels, keep))
    y, hits = zip(*done, strict=True)
    return permute(jnp.concatenate(y), inverse, order), sum(hits)


def _products(
    how: Experts, x_ND: jax.Array, weight_N: jax.Array, sizes: jax.Array, kernels: Kernels, keep: bool
) -> tuple[jax.Array, jax.Array]:
    """Compute w2 (weight * swiglu(w1 x, w3 x)) for rows sorted by expert; count clamped activations."""

    def product(x: jax.Array, w: jax.Array, shards: ParamShards) -> jax.Array:
        y = grouped_matmul(x, w, sizes, how.impl, shards)
        return checkpoint_name(y, "product") if keep else y

    s1, s3, s2 = how.shards
    gate, up = product(x_ND, kernels.w1, s1), product(x_ND, kernels.w3, s3)
    hidden = (weight_N[:, None] * swiglu(gate, up, how.limit)).astype(x_ND.dtype)
    return product(hidden, kernels.w2, s2), count_clamped(gate, up, how.limit).sum()


class Route(NamedTuple):
    """Describe the rows that every device sends to every other: int [from, to] each.

    Attributes:
        count: number of rows.
        source: first of them in the sender's buffer.
        target: first of them in the receiver's buffer.
    """

    count: jax.Array
    source: jax.Array
    target: jax.Array

    def back(self) -> "Route":
        """Make the route on which the same rows return."""
        return Route(self.count.T, self.target.T, self.source.T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchange(x_ND: jax.Array, rows: int, route: Route) -> jax.Array:
    """Send rows along the route; return those that this device receives, [rows, ...], zero where none arrives.

    The gradient returns by the same route. XLA:CPU has no ragged all-to-all; there all rows are gathered.
    """
    return jax.lax.platform_dependent(
        x_ND, route, cpu=functools.partial(_gathered, rows), default=functools.partial(_ragged, rows)
    )


def _ragged(rows: int, x_ND: jax.Array, route: Route) -> jax.Array:
    me = jax.lax.axis_index(AXIS)
    count, source, target = route
    room = varying(jnp.zeros((rows, *x_ND.shape[1:]), x_ND.dtype), x_ND)
    return jax.lax.ragged_all_to_all(x_ND, room, source[me], count[me], target[me], count[:, me], axis_name=AXIS)


def _gathered(rows: int, x_ND: jax.Array, route: Route) -> jax.Array:
    """Do what `_ragged` does with the rows of all devices [P, N, D]."""
    me = jax.lax.axis_index(AXIS)
    count_P, source_P, target_P = (a[:, me] for a in route)
    everyones = jax.lax.all_gather(x_ND, AXIS)
    # For each row of the result: the one device whose rows it is among, and its number there.
    place_RP = jnp.arange(rows)[:, None] - target_P
    here_RP = (place_RP >= 0) & (place_RP < count_P)
    device = here_RP.argmax(1)
    row = jnp.take_along_axis(place_RP, device[:, None], 1)[:, 0] + source_P[device]
    arrives = here_RP.any(1).reshape(-1, *(1,) * (x_ND.ndim - 1))
    return jnp.where(arrives, everyones.at[device, row].get(mode="clip"), 0)


def _exchange_forward(x_ND, rows, route):
    return exchange(x_ND, rows, route), (x_ND.shape[0], route)


def _exchange_backward(rows, residuals, dy):
    return exchange(dy, residuals[0], residuals[1].back()), None


exchange.defvjp(_exchange_forward, _exchange_backward)


def _exchanged(
    how: Experts, x_BSD: jax.Array, weights_BSk: jax.Array, experts_BSk: jax.Array, kernels: Kernels
) -> tuple[jax.Array, jax.Array]:
    """Sum each token's experts, fp32, by sending rows to the devices of their experts and back.

    Every device's experts are cut into `how.waves` parts, so that the exchange of one part can run while
    another is computed (section 3.1). The second result counts the clamped activations of this device's experts.
    """
    (B, S, k), D = experts_BSk.shape, x_BSD.shape[-1]
    E, W, P = kernels.w1.shape[0], how.waves, jax.lax.axis_size(AXIS)
    part, me = E // W, jax.lax.axis_index(AXIS)
    # Sort rows by wave, device and expert; those of no expert come last.
    device_N, own_N = jnp.divmod(experts_BSk.reshape(-1), E)
    slot_N = jnp.where(device_N < P, (own_N // part * P + device_N) * part + own_N % part, how.count)
    order, inverse = sort(slot_N)
    x_ND, weight_N = (permute(a, order, inverse) for a in _pairs(x_BSD, weights_BSk))
    sizes = varying(jnp.zeros(how.count, jnp.int32), slot_N).at[slot_N].add(1, mode="drop")
    # All devices know how many rows each sends to each: sizes [from, wave, to, expert], count [from, wave, to].
    sizes_PWPE = jax.lax.all_gather(sizes, AXIS).reshape(P, W, P, part)
    count_PWP = sizes_PWPE.sum(-1)
    before = lambda a, axis: jnp.cumsum(a, axis) - a
    source_PWP = before(count_PWP.reshape(P, -1), 1).reshape(count_PWP.shape)
    room = P * B * S * min(k, part)  # rows of a wave if all tokens choose this device
    y_ND, hits = jnp.zeros_like(x_ND), []
    for wave in range(W):
        # Send this wave's rows to their experts' devices, where they arrive by sender.
        count_PP = count_PWP[:, wave]
        route = Route(count_PP, source_PWP[:, wave], before(count_PP, 0))
        x_RD, weight_R = exchange(x_ND, room, route), exchange(weight_N, room, route)
        # Each sender's rows are sorted by expert: `arrived` numbers the (sender, expert) pair of each row.
        ends = jnp.cumsum(sizes_PWPE[:, wave, me].reshape(-1))
        arrived = jnp.searchsorted(ends, jnp.arange(room), side="right")
        expert_R = jnp.where(arrived < P * part, arrived % part, part)
        # Apply the experts of this part, then return the results; other rows of y stay zero.
        own = Kernels(*(w[wave * part : (wave + 1) * part] for w in kernels))
        y_RD, hit = _apply(how, x_RD, weight_R, expert_R, own, -(-B * S * k // W))
        hits.append(hit)
        y_ND += exchange(y_RD, x_ND.shape[0], route.back())
    return permute(y_ND, inverse, order).reshape(B, S, k, D).sum(2, dtype=jnp.float32), sum(hits)
