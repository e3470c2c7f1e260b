# SPDX-License-Identifier: Apache-2.0
"""The whole model: embedding, scanned layers, collapse, head, multi-token prediction."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.mesh import act_spec, ensure_mesh, on_cpu, row_spec
from dsv4_jax.model import hyper
from dsv4_jax.model.attention import tables
from dsv4_jax.model.block import MTP, Block
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import Params, rms_norm, whole
from dsv4_jax.model.plan import plan
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.ops.documents import next_ids
from dsv4_jax.optim import Role

COLLECTABLE = ("streams", "topk", "router_scores")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """What the layers make of a batch, before the head.

    Attributes:
        h: normed features [B, S, D] that the head turns into the next token.
        mtp: the same for the token after the next, or None without an MTP block.
        layers: what every layer tells (see `Block`), in order; the MTP block's comes last.
    """

    h: jax.Array
    mtp: jax.Array | None
    layers: list[dict[str, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Result of a forward pass.

    Attributes:
        logits: fp32 [B, S, V]; entry t predicts token t + 1.
        mtp_logits: fp32 [B, S, V], entry t predicts token t + 2; None without an MTP block.
        experts: int32 [B, S, k] of every layer.
        collected: what `collect` named, a list over layers (None where a layer has none).
    """

    logits: jax.Array
    mtp_logits: jax.Array | None
    experts: list[jax.Array]
    collected: dict[str, list[jax.Array | None]]


class DeepSeek(nnx.Module):
    """A DeepSeek-V4 language model; a pytree of parameters under the official names."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.plan = plan(cfg.layer_specs)
        with ensure_mesh():
            make = Params(rngs, cfg.init_std)
            vocab, dim = ("vocab", cfg.vocab_size), ("embed", cfg.dim)
            self.embed = make.table(vocab, dim)
            self.groups = nnx.List([])
            for group in self.plan:
                stacked = Params(rngs, cfg.init_std, layers=group.repeats)
                positions = range(group.period)
                self.groups.append(
                    nnx.List(
                        [Block(cfg, stacked, cfg.layer_specs[group.start + j], group.layers(j)) for j in positions]
                    )
                )
            self.mtp = nnx.List([MTP(cfg, make) for _ in range(cfg.n_mtp_layers)])
            self.hc_head_fn, self.hc_head_base, self.hc_head_scale = hyper.head(make, cfg)
            self.norm = make.ones(("norm", cfg.dim))
            self.head = make.kernel(dim, vocab, role=Role("table", rows=-1))

    def __call__(
        self,
        ids: jax.Array,
        segment_ids: jax.Array | None = None,
        forced_experts: Sequence[jax.Array] | None = None,
        collect: Sequence[str] = (),
    ) -> Output:
        """Logits of token ids int [B, S].

        Args:
            ids: token ids.
            segment_ids: int [B, S]; documents of packed rows are 1, 2, ... and padding is 0. One
                document a row if absent.
            forced_experts: for every layer int [B, S, k], laid out like `Output.experts`: replaces
                the choice of learned layers, whose weights still come from the current scores.
            collect: names of what to return of every layer: `streams` [B, S, N, D] after it, `topk`
                [B, S, k] entries its indexer selected (-1: none), `router_scores` [B, S, E].

        Raises:
            ValueError: for an argument of the wrong shape or an unknown name in `collect`.
        """
        if unknown := set(collect) - set(COLLECTABLE):
            raise ValueError(f"cannot collect {sorted(unknown)}, expected names among {COLLECTABLE}")
        with ensure_mesh():
            out = self.features(ids, segment_ids, forced_experts=forced_experts, streams="streams" in collect)
            layers = out.layers[: self.cfg.n_layers]
            return Output(
                logits=head_logits(out.h, whole(self.head)),
                mtp_logits=None if out.mtp is None else head_logits(out.mtp, whole(self.head)),
                experts=[told["experts"] for told in layers],
                collected={name: [told.get(name) for told in layers] for name in collect},
            )

    def features(
        self,
        ids: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        following: jax.Array | None = None,
        forced_experts: Sequence[jax.Array] | None = None,
        streams: bool = False,
        with_mtp: bool = True,
    ) -> Features:
        """Features for the head, and what the layers tell.

        Args:
            ids, segment_ids, forced_experts: as for a call.
            following: int [B, S], the token after each one, which the MTP block reads. If absent it
                is taken from `ids` inside each document (after the last comes the first).
            streams: also tell the `streams` after each layer.
            with_mtp: run the MTP block, if there is one.
        """
        cfg = self.cfg
        ids, segment_ids, forced_experts = self._checked(ids, segment_ids, forced_experts)
        at = tables(cfg, jax.reshard(segment_ids, row_spec(2)))
        mtp_blocks = list(self.mtp) if with_mtp else []
        if following is None and mtp_blocks:
            shift = jax.shard_map(next_ids, in_specs=row_spec(2), out_specs=row_spec(2))
            following = jax.reshard(shift(jax.reshard(ids, row_spec(2)), at.docs), act_spec(2))
        dtype = _dtype(cfg)
        e = self._embed(ids, dtype)
        x_BSND = jnp.broadcast_to(e[:, :, None], (*e.shape[:2], cfg.hc_mult, cfg.dim))

        def layer(block: Block, x_BSND: jax.Array, forced: jax.Array | None):
            x_BSND, told = block(x_BSND, ids, at, dtype, forced)
            return x_BSND, (told | {"streams": x_BSND} if streams else told)

        layers: list[Any] = [None] * cfg.n_layers
        for group, blocks in zip(self.plan, self.groups, strict=True):
            x_BSND, told = _scan(layer, cfg.remat, x_BSND, list(blocks), _forced(forced_experts, group))
            for j in range(group.period):
                for r, i in enumerate(group.layers(j)):
                    layers[i] = jax.tree.map(lambda a, r=r: a[r], told[j])
        h = hyper.collapse_head(x_BSND, self.hc_head_fn, self.hc_head_base, self.hc_head_scale, cfg)
        mtp = None
        for block in mtp_blocks:
            assert following is not None  # made above
            predict = _remat(functools.partial(MTP.predict, dtype=dtype), cfg.remat)
            mtp, told = predict(block, x_BSND, self._embed(following, dtype), ids, at)
            layers.append(told)
        return Features(rms_norm(h, cfg.norm_eps, self.norm), mtp, layers)

    def layers_of(self, path: tuple[Any, ...]) -> range:
        """Numbers of the layers that the variable at `path` belongs to: several if they are stacked.

        The MTP block's number follows the last layer's. Empty for what is in no layer.
        """
        if path[0] == "groups":
            return self.plan[path[1]].layers(path[2])
        first = self.cfg.n_layers + path[1] if path[0] == "mtp" else 0
        return range(first, first + (path[0] == "mtp"))

    def _embed(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return whole(self.embed).at[ids].get(out_sharding=act_spec(3)).astype(dtype)

    def _checked(self, ids, segment_ids, forced):
        cfg = self.cfg
        ids = jnp.asarray(ids)
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"ids must be integers [B, S], found {ids.dtype}{list(ids.shape)}")
        segment_ids = jnp.ones_like(ids) if segment_ids is None else jnp.asarray(segment_ids)
        if segment_ids.shape != ids.shape:
            raise ValueError(f"segment_ids must be {list(ids.shape)} like ids, found {list(segment_ids.shape)}")
        if forced is not None:
            forced = [jax.reshard(jnp.asarray(f), act_spec(3)) for f in forced]
            shapes, want = {f.shape for f in forced}, (*ids.shape, cfg.n_activated_experts)
            if len(forced) != cfg.n_layers or shapes != {want}:
                raise ValueError(
                    f"forced_experts must be {cfg.n_layers} arrays {list(want)}, found {len(forced)} "
                    f"of shapes {sorted(shapes)}"
                )
        return jax.reshard(ids, act_spec(2)), jax.reshard(segment_ids, act_spec(2)), forced


def structure(cfg: ModelConfig) -> DeepSeek:
    """A model's structure, without arrays; traced once for each configuration and mesh."""
    return _made.eval_shape(cfg)


@functools.partial(jax.jit, static_argnums=0)
def _made(cfg: ModelConfig) -> DeepSeek:
    return DeepSeek(cfg, rngs=nnx.Rngs(0))


def _dtype(cfg: ModelConfig) -> jnp.dtype:
    """The compute type; `auto` is float32 on CPU and bfloat16 elsewhere."""
    name = cfg.compute_dtype
    if name == "auto":
        name = "float32" if on_cpu() else "bfloat16"
    return jnp.dtype(name)


def _forced(forced, group) -> list[jax.Array | None]:
    """Forced experts of a group, stacked for the scan, one array per position of its period."""
    if forced is None:
        return [None] * group.period
    return [jnp.stack([forced[i] for i in group.layers(j)]) for j in range(group.period)]


def _remat(layer, remat: str):
    """The layer with the chosen part of it computed again in the backward pass."""
    if remat == "none":
        return layer
    names = ("product", "topk") if remat == "save_block_outputs" else ()
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))


def _scan(layer, remat: str, x_BSND: jax.Array, blocks: list[Block], forced: list[jax.Array | None]):
    """Runs a group: a scan over its repeats, whose body runs the layers of the period in order."""
    layer = _remat(layer, remat)

    def body(x_BSND, xs):
        told = []
        for block, forced_BSk in zip(*xs, strict=True):
            x_BSND, t = layer(block, x_BSND, forced_BSk)
            told.append(t)
        return x_BSND, told

    return jax.lax.scan(body, x_BSND, (blocks, forced))
