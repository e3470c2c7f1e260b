# SPDX-License-Identifier: Apache-2.0
"""Apply routed experts that are split over the `expert` axis: no token is dropped, whatever the skew.

Inside `shard_map`. Letters: B rows, S positions, T = B S tokens, D width, F expert width, E experts of this device, k
experts per token, R rows of a part of a round (`ops/exchange.py`).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.mesh import AXES, varying
from dsv4_jax.ops.exchange import Gathered, Sent, run_rounds, zeros
from dsv4_jax.ops.grouped_matmul import Impl, rows_product, weight_gradient
from dsv4_jax.ops.quantize import FP4, fake_quantize
from dsv4_jax.ops.shards import WHOLE, ParamShards


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
        waves: number of parts in which a round is exchanged and computed, for "ragged".
        impl: form of the grouped matrix product.
        shards: how w1, w3 and w2 are stored over the devices.
        rounded: whether the matrices are rounded to `FP4`. Their gradient passes unchanged.
    """

    count: int
    limit: float
    exchange: str
    waves: int
    impl: Impl
    shards: tuple[ParamShards, ParamShards, ParamShards]
    rounded: bool = False


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
    experts_Tk = jnp.where(real_BS[..., None], experts_BSk, how.count).reshape(-1, experts_BSk.shape[-1])
    x_TD, weights_Tk = x_BSD.reshape(-1, x_BSD.shape[-1]), weights_BSk.reshape(experts_Tk.shape)
    y_TD, hit = _apply(how, x_TD, weights_Tk, experts_Tk, kernels)
    return checkpoint_name(y_TD.reshape(x_BSD.shape), "product"), jax.lax.psum(hit, AXES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    how: Experts, x_TD: jax.Array, weights_Tk: jax.Array, experts_Tk: jax.Array, kernels: Kernels
) -> tuple[jax.Array, jax.Array]:
    """Sum each token's experts; count the clamped activations of this device's experts."""
    return _forward(how, x_TD, weights_Tk, experts_Tk, kernels)[0]


def _forward(how, x_TD, weights_Tk, experts_Tk, kernels):
    """Run the rounds; keep the products of the first one, which is the last that runs."""
    own = kernels.w1.shape[0]
    if how.exchange == "gather" or own == how.count:
        rounds: Gathered | Sent = Gathered.plan(experts_Tk, own, how.count)
    else:
        rounds = Sent.plan(experts_Tk, own, how.count, how.waves)
    whole = _gather_kernels(how, kernels, x_TD.dtype)
    weights = rounds.choices(weights_Tk)
    product = functools.partial(rows_product, impl=how.impl, used=rounds.used)

    def step(part, number, carry):
        rows, hit, kept = carry
        sizes = rounds.sizes(number)
        x_RD, weight_R = rounds.receive(number, rows), rounds.receive(number, weights)
        gate, up = product(x_RD, whole.w1, sizes), product(x_RD, whole.w3, sizes)
        hidden = (weight_R[:, None] * swiglu(gate, up, how.limit)).astype(x_RD.dtype)
        rows = rounds.give(number, product(hidden, whole.w2, sizes), rows)
        hit += count_clamped(gate, up, how.limit).sum()
        return rows, hit, (*kept[:part], (gate, up), *kept[part + 1 :])

    empty = zeros((rounds.rows, whole.w1.shape[2]), x_TD.dtype, x_TD)
    kept = ((empty, empty),) * rounds.parts
    carry = rounds.tokens(x_TD), varying(jnp.zeros(()), x_TD), kept
    rows, hit, kept = run_rounds(rounds, step, carry)
    kept = checkpoint_name(kept, "product")
    return (rounds.sum_tokens(rows).astype(x_TD.dtype), hit), (x_TD, weights_Tk, kernels, rounds, kept)


def _backward(how, residuals, dy):
    """Run the same rounds with x and dy: sum the kernels' gradients, return those of x and of the weights."""
    x_TD, weights_Tk, kernels, rounds, kept = residuals
    whole = _gather_kernels(how, kernels, x_TD.dtype)
    dy_rows = rounds.tokens(dy[0])
    product = functools.partial(rows_product, impl=how.impl, used=rounds.used)
    outer = functools.partial(weight_gradient, impl=how.impl, used=rounds.used)

    def step(part, number, carry):
        rows, weights, dkernels = carry
        sizes = rounds.sizes(number)
        x_RD, dy_RD, weight_R = (rounds.receive(number, a) for a in (rows, dy_rows, weights))
        # Products of the first round are kept, those of others computed again.
        again = lambda: (product(x_RD, whole.w1, sizes), product(x_RD, whole.w3, sizes))
        if isinstance(number, int):
            gate, up = kept[part]
        else:
            gate, up = jax.lax.cond(number < rounds.parts, lambda: kept[part], again)
        hidden, back = jax.vjp(lambda gate, up: swiglu(gate, up, how.limit), gate, up)
        dhidden = product(dy_RD, whole.w2, sizes, transposed=True).astype(jnp.float32)
        dgate, dup = back(weight_R[:, None] * dhidden)
        weighted = (weight_R[:, None] * hidden).astype(x_RD.dtype)
        operands = (x_RD, dgate), (x_RD, dup), (weighted, dy_RD)  # in the order of `Kernels`
        dkernels = Kernels(*(outer(*ab, sizes, total=dw) for ab, dw in zip(operands, dkernels, strict=True)))
        dx_RD = product(dgate, whole.w1, sizes, transposed=True)
        dx_RD = product(dup, whole.w3, sizes, transposed=True, total=dx_RD)
        dweight_R = (dhidden * hidden).sum(-1)
        return rounds.give(number, dx_RD, rows), rounds.give(number, dweight_R, weights), dkernels

    dkernels = Kernels(*(varying(jnp.zeros(w.shape, jnp.float32), w, x_TD) for w in whole))
    carry = rounds.tokens(x_TD), rounds.choices(weights_Tk), dkernels
    dx, dweights, dkernels = run_rounds(rounds, step, carry)
    dkernels = Kernels(
        *(s.total(dw, w).astype(w.dtype) for s, dw, w in zip(how.shards, dkernels, kernels, strict=True))
    )
    return rounds.sum_tokens(dx).astype(x_TD.dtype), rounds.collect_choices(dweights), None, dkernels


_apply.defvjp(_forward, _backward)


def _gather_kernels(how: Experts, kernels: Kernels, dtype: jnp.dtype) -> Kernels:
    return Kernels(*(_gather(how, w, shards, dtype) for shards, w in zip(how.shards, kernels, strict=True)))


def _gather(how: Experts, w: jax.Array, shards: ParamShards, dtype: jnp.dtype) -> jax.Array:
    """Gather matrices [E, in, out] in `dtype`, rounded if `how` asks for it."""
    if how.rounded:
        # A block is a few inputs of one output. If the devices' parts cut blocks, round the whole matrix.
        if shards.over and shards.axis == 1 and w.shape[1] % FP4.columns:
            w, shards = shards.whole(w, w.dtype), WHOLE
        w = fake_quantize(w.swapaxes(1, 2), FP4).swapaxes(1, 2)
    return shards.whole(w, dtype)
