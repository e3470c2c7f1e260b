# SPDX-License-Identifier: Apache-2.0
"""DeepSeekMoE: routing by learned scores or by token id, routed and shared experts, balance.

Letters: B rows, S positions, D width, E experts, k experts of a token, F expert width, N tokens.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax.mesh import BATCH, act_spec, on_cpu
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import HashTable, Params, RouterBias, linear, whole
from dsv4_jax.ops.context import chunk_start
from dsv4_jax.ops.documents import Documents
from dsv4_jax.ops.experts import Experts, Kernels, apply_experts, count_clamped, swiglu
from dsv4_jax.ops.shards import ParamShards


class Routing(NamedTuple):
    """Routing of a layer's tokens to experts.

    Attributes:
        scores_BSE: affinities sqrt(softplus(logit)), fp32.
        shares_BSE: each score divided by the sum of the token's scores, fp32.
        experts_BSk: chosen experts, int32.
        weights_BSk: weights of the chosen experts' outputs, fp32.
    """

    scores_BSE: jax.Array
    shares_BSE: jax.Array
    experts_BSk: jax.Array
    weights_BSk: jax.Array


def sqrt_softplus(z: jax.Array) -> jax.Array:
    """Compute sqrt(log(1 + e^z)) with a finite gradient everywhere.

    Softplus underflows to 0 below about -104 in fp32, where the root's gradient would be infinite. Below -20 the
    function equals e^(z/2) to all digits, so that is computed instead.
    """
    low = z < -20
    root = jnp.sqrt(jax.nn.softplus(jnp.where(low, 0.0, z)))
    return jnp.where(low, jnp.exp(jnp.where(low, z, -20.0) / 2), root)


def log_sqrt_softplus(z: jax.Array) -> jax.Array:
    """Compute log(sqrt(log(1 + e^z))), which stays finite where the root underflows to 0.

    Quotients of scores are computed as a softmax of this. A sum of tiny scores would underflow, and its square in the
    gradient would do so earlier.
    """
    low = z < -20
    return jnp.where(low, z / 2, jnp.log(jax.nn.softplus(jnp.where(low, 0.0, z))) / 2)


def make_hash_table(vocab: int, n_experts: int, k: int, seed: int) -> np.ndarray:
    """Draw the experts of every token id, int32 [vocab, k]: k distinct ones, and every expert equally often.

    In every round each expert is given out equally often: tokens in random order take k neighbours each of a cycle
    of all experts, whose order is drawn anew for the round. Only the last, unfinished round is uneven. The rule of
    the published tables is unknown; load those with the weights.
    """
    rng = np.random.RandomState(seed)  # its stream is frozen: the same table on every machine
    tokens = n_experts // np.gcd(n_experts, k)  # tokens that use every expert equally often
    rounds = -(-vocab // tokens)
    orders = np.argsort(rng.random_sample((rounds, n_experts)), axis=1, kind="stable")
    slots = np.arange(tokens * k).reshape(tokens, k) % n_experts
    rows = orders[:, slots].reshape(-1, k)[:vocab]
    return rows[rng.permutation(vocab)].astype(np.int32)


class Gate(nnx.Module):
    """The router: `weight`, and the balance `bias` (and `bias_vl`) or, in hash layers, the table `tid2eid`."""

    def __init__(self, cfg: ModelConfig, make: Params, layers: range | None, hashed: bool):
        self.cfg, self.hashed = cfg, hashed
        E, k = cfg.n_routed_experts, cfg.n_activated_experts
        self.weight = make.kernel(("embed", cfg.dim), ("router", E), suffix="")
        if hashed and layers is not None:
            tables = [make_hash_table(cfg.vocab_size, E, k, cfg.hash_seed + i) for i in layers]
            self.tid2eid = make.buffer(HashTable, jnp.asarray(np.stack(tables)), "tokens", "choices")
        else:
            self.bias = make.full(0.0, ("router", E), kind=RouterBias)
            if cfg.modality_bias:
                self.bias_vl = make.full(0.0, ("router", E), kind=RouterBias)

    def __call__(
        self, x_BSD: jax.Array, ids_BS: jax.Array, image_BS: jax.Array | None, forced_BSk: jax.Array | None
    ) -> Routing:
        """Route all tokens.

        Args:
            x_BSD: input of the experts.
            ids_BS: token ids, from which hashed layers choose.
            image_BS: positions of images, balanced by `bias_vl` if there is one (V4.1 section 2.1.1); None without.
            forced_BSk: experts that replace the choice of a learned layer (section 4.2.3).
        """
        cfg = self.cfg
        x, w = x_BSD.astype(jnp.float32), whole(self.weight)
        logits = jnp.einsum("bsd,de->bse", x, w, precision="highest") / cfg.gate_temp
        scores, log_scores = sqrt_softplus(logits), log_sqrt_softplus(logits)
        # The choice [B, S, k]: by token id, given, or the best biased scores.
        if self.hashed:
            experts = jax.reshard(self.tid2eid[...], jax.P()).at[ids_BS].get(out_sharding=act_spec(3))
        elif forced_BSk is not None:
            experts = forced_BSk.astype(jnp.int32)
        else:
            bias = whole(self.bias)
            if cfg.modality_bias and image_BS is not None:
                bias = jnp.where(image_BS[..., None], whole(self.bias_vl), bias)
            biased = jax.lax.stop_gradient(scores) + bias
            tokens = act_spec(3)  # in shard_map: XLA would gather the scores of all devices for a sharded top-k
            best = lambda scores: jax.lax.top_k(scores, cfg.n_activated_experts)[1]
            experts = jax.shard_map(best, in_specs=tokens, out_specs=tokens)(biased)
        weights = jax.nn.softmax(jnp.take_along_axis(log_scores, experts, axis=-1), axis=-1) * cfg.route_scale
        return Routing(scores, jax.nn.softmax(log_scores, axis=-1), experts, weights)


class RoutedExperts(nnx.Module):
    """Parameters of the routed experts, stacked: w1 (gate) and w3 (up) [E, D, F], w2 (down) [E, F, D]."""

    def __init__(self, cfg: ModelConfig, make: Params):
        E, D, F = ("experts", cfg.n_routed_experts), ("embed", cfg.dim), ("mlp", cfg.moe_inter_dim)
        self.w1, self.w2, self.w3 = make.kernel(E, D, F), make.kernel(E, F, D), make.kernel(E, D, F)


class SharedExpert(nnx.Module):
    """Parameters of the shared expert, which every token uses."""

    def __init__(self, cfg: ModelConfig, make: Params):
        D, F = ("embed", cfg.dim), ("mlp", cfg.moe_inter_dim)
        self.w1, self.w2, self.w3 = make.kernel(D, F), make.kernel(F, D), make.kernel(D, F)


class MoE(nnx.Module):
    """The feed-forward part of a layer (section 2.1)."""

    def __init__(self, cfg: ModelConfig, make: Params, layers: range | None, hashed: bool):
        self.cfg = cfg
        self.gate = Gate(cfg, make, layers, hashed)
        self.experts = RoutedExperts(cfg, make)
        self.shared_experts = SharedExpert(cfg, make)

    def __call__(
        self,
        x_BSD: jax.Array,
        ids_BS: jax.Array,
        real_BS: jax.Array,
        image_BS: jax.Array | None,
        forced_BSk: jax.Array | None,
        dtype: jnp.dtype,
    ) -> tuple[jax.Array, Routing, jax.Array]:
        """Compute the output [B, S, D], the routing, and the number of real tokens' activations that SwiGLUs clamp.

        Tokens that are not `real_BS` are padding and go to no routed expert. `dtype` is the type of the products.
        """
        cfg, tokens = self.cfg, jax.P(BATCH, "context")
        routing = self.gate(x_BSD, ids_BS, image_BS, forced_BSk)
        # Routed experts: tokens go to the devices of their experts, and the outputs come back.
        kernels = Kernels(*(w[...] for w in (self.experts.w1, self.experts.w3, self.experts.w2)))
        specs = tuple(jax.typeof(w).sharding.spec for w in kernels)
        run = functools.partial(apply_experts, _make_settings(cfg, specs))
        in_specs = tokens, tokens, tokens, tokens, Kernels(*specs)
        run = jax.shard_map(run, in_specs=in_specs, out_specs=(tokens, jax.P()))
        y, hit = run(x_BSD.astype(dtype), routing.experts_BSk, routing.weights_BSk, real_BS, kernels)
        # The shared expert runs on every token where it is.
        shared = self.shared_experts
        gate, up = linear(x_BSD, shared.w1, dtype), linear(x_BSD, shared.w3, dtype)
        hit += (count_clamped(gate, up, cfg.swiglu_limit) * real_BS).sum()
        return y + linear(swiglu(gate, up, cfg.swiglu_limit), shared.w2, dtype), routing, hit


def _find_split(spec: jax.P) -> tuple[int, tuple[str, ...]]:
    """Find the axis of an expert's matrix that `spec` splits, and over which mesh axes; axis 0 holds the experts."""
    over = [(axis, (names,) if isinstance(names, str) else tuple(names)) for axis, names in enumerate(spec) if names]
    return next(((axis, names) for axis, names in over if axis), (0, ()))


def _make_settings(cfg: ModelConfig, specs: tuple[jax.P, ...]) -> Experts:
    """Make the settings of `apply_experts` for kernels sharded by `specs`."""
    exchange, devices = cfg.expert_exchange, jax.sharding.get_abstract_mesh().shape["expert"]
    # A gather sends a token once to each device, an exchange once to each of its experts.
    if exchange == "auto":
        many = devices > cfg.n_activated_experts and not on_cpu()
        exchange = "ragged" if many or cfg.expert_waves > 1 else "gather"
    w1, w3, w2 = (ParamShards(*_find_split(s), cfg.expert_gradients) for s in specs)
    limit, impl, rounded = cfg.swiglu_limit, cfg.expert_matmul, "experts" in cfg.quantize
    return Experts(cfg.n_routed_experts, limit, exchange, cfg.expert_waves, impl, (w1, w3, w2), rounded)


def count_loads(routing: Routing, real_BS: jax.Array, n_experts: int) -> jax.Array:
    """Count the real tokens that each expert got, fp32 [E]."""
    return (jax.nn.one_hot(routing.experts_BSk, n_experts) * real_BS[..., None, None]).sum((0, 1, 2))


def compute_balance_loss(routing: Routing, docs: Documents) -> jax.Array:
    """Compute the sequence-wise balance loss of one layer, summed over real tokens (section 2.1.2 of V3).

    A sequence is a document. For a document of T tokens, f_e = E/(kT) * (tokens routed to e) and P_e = mean share of
    e in the scores. The result is the sum of T * sum_e f_e P_e over documents; divide it by the number of real
    tokens. f carries no gradient.
    """
    E, k = routing.shares_BSE.shape[-1], routing.experts_BSk.shape[-1]

    def rows(shares_BSE: jax.Array, experts_BSk: jax.Array, first_BS: jax.Array) -> jax.Array:
        S = first_BS.shape[1]
        origin = chunk_start(S)
        # What a document adds up over its tokens, [B, S, 2E + 1]: choices of each expert, its shares, tokens.
        values = jnp.concatenate(
            [jax.nn.one_hot(experts_BSk, E).sum(2), shares_BSE, jnp.ones_like(shares_BSE[..., :1])], -1
        )
        # Sums [B, S + 1, 2E + 1] by the chunk's position at which a document begins, plus 1. Slot 0 is the document
        # that began left of this chunk, if any. Padding, whose `first` is after the row, is dropped.
        slot_BS = jnp.where(first_BS >= origin, first_BS - origin + 1, 0)
        sums = jax.vmap(lambda x, slot: jax.ops.segment_sum(x, slot, num_segments=S + 1))(values, slot_BS)
        # A document's sums belong to the device where it begins: add the slots 0 of the devices after it.
        begun_PB, parts_PBE = (jax.lax.all_gather(a, "context") for a in (first_BS[:, 0], sums[:, 0]))
        home_PB = jnp.where((begun_PB >= origin) & (begun_PB < origin + S), begun_PB - origin + 1, S + 1)
        # [P, B, ...] of all devices; S + 1 is no slot, so sums that belong elsewhere are dropped.
        add = lambda total, slot, part: total.at[slot].add(part, mode="drop")
        sums = jax.vmap(add, (0, 1, 1))(sums, home_PB, parts_PBE)
        chosen, share, length = jnp.split(sums[:, 1:], (E, 2 * E), axis=-1)
        return jax.lax.psum((E / k * chosen * share / jnp.maximum(length, 1)).sum((1, 2)), "context")

    tokens = jax.P(BATCH, "context")
    run = jax.shard_map(rows, in_specs=tokens, out_specs=jax.P(BATCH))
    return run(routing.shares_BSE, routing.experts_BSk, jax.reshard(docs.first_BS, act_spec(2))).sum()
