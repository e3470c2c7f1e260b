# SPDX-License-Identifier: Apache-2.0
"""The whole model: embedding, scanned layers, collapse, head, multi-token prediction."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from dsv4_jax.mesh import QUICK_CPU, act_spec, emulated, ensure_mesh, on_cpu, row_spec
from dsv4_jax.model import hyper
from dsv4_jax.model.block import MTP, Block, Stack, Tokens, collapsed, stack
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.dspark import Anchors, DraftBlock, Drafts, drafts
from dsv4_jax.model.engram import compute_engram_rows, make_token_map_buffer
from dsv4_jax.model.images import embed_images, make_delimiters
from dsv4_jax.model.params import Params, recomputed, rms_norm, whole
from dsv4_jax.model.plan import plan
from dsv4_jax.model.tables import Tables, make_tables
from dsv4_jax.model.token_types import TEXT
from dsv4_jax.model.vision import Aligner, Vision
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.ops.documents import next_ids
from dsv4_jax.ops.indexer import in_blocks
from dsv4_jax.optim.roles import Role

COLLECTABLE = ("streams", "pre_mix", "topk", "candidates", "router_scores", "features", "vision")
_TOLD = ("experts", "load", "clamped", "balance", "indexer", "recall")  # what every layer tells, whatever is collected


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """What the layers make of a batch, before the head.

    Attributes:
        h: normed features [B, S, D] that the head turns into the next token.
        mtp: the same for the token after the next, or None without an MTP block.
        layers: what every layer tells (see `Block`), in order; the MTP block's comes last.
        at: tables of the rows.
        seen: what the vision tower and the aligner make of the images, by name; None without images.
    """

    h: jax.Array
    mtp: jax.Array | None
    layers: list[dict[str, jax.Array]]
    at: Tables
    seen: dict[str, jax.Array] | None = None


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
    """A DeepSeek language model; a pytree of parameters under the official names."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.plan = plan(cfg.layer_specs)
        with ensure_mesh():
            make = Params(rngs, cfg.init_std)
            vocab, dim = ("vocab", cfg.vocab_size), ("embed", cfg.dim)
            self.embed = make.table(vocab, dim)
            self.token_map = make_token_map_buffer(cfg, make)
            if cfg.vision_n_layers:
                self.vision, self.aligner = Vision(cfg, make), Aligner(cfg, make)
                self.image_start, self.image_newline, self.image_end = make_delimiters(cfg, make)
            self.groups = nnx.List([])
            for group in self.plan:
                stacked = Params(rngs, cfg.init_std, layers=group.repeats)
                positions = range(group.period)
                self.groups.append(
                    nnx.List(
                        [Block(cfg, stacked, cfg.layer_specs[group.start + j], group.layers(j)) for j in positions]
                    )
                )
            blocks = range(cfg.n_mtp_layers)
            dspark = bool(cfg.dspark_target_layer_ids)
            self.mtp = nnx.List([DraftBlock(cfg, make, i) if dspark else MTP(cfg, make) for i in blocks])
            if not cfg.hc_single_pass:
                self.hc_head_fn, self.hc_head_base, self.hc_head_scale = hyper.make_head(make, cfg)
            self.norm = make.ones(("norm", cfg.dim))
            self.head = make.kernel(dim, vocab, role=Role("table", rows=-1))

    def __call__(
        self,
        ids: jax.Array,
        segment_ids: jax.Array | None = None,
        token_types: jax.Array | None = None,
        patches: jax.Array | None = None,
        image_grids: jax.Array | None = None,
        engram_rows: jax.Array | None = None,
        forced_experts: Sequence[jax.Array | None] | None = None,
        collect: Sequence[str] = (),
    ) -> Output:
        """Logits of token ids int [B, S].

        Args:
            ids: token ids.
            segment_ids: int [B, S]; documents of packed rows are 1, 2, ... and padding is 0. One
                document a row if absent.
            token_types: int [B, S]: -1 text, and inside images 0 start, 1 image, 2 end of a line, 3 end.
            patches: float [P, 3, p, p], all images' patches one after another in reading order.
            image_grids: int [images, 4]: row, position of the start, rows and columns of patches; a line
                without patch rows is padding.
            engram_rows: int32 [B, S, Engrams, columns], rows of the Engrams' tables; from `ids` if absent.
            forced_experts: for every layer int [B, S, k], laid out like `Output.experts`: replaces
                the choice of learned layers, whose weights still come from the current scores. Hashed
                layers may have None.
            collect: names of what to return of every layer: `streams` [B, S, N, D] after it; `pre_mix`
                [B, S, N], the input mix it hands on; `topk` [B, S, k], the entries its indexer selected
                in order (-1: none); `candidates` bool [B, S, M], the pool it made; `router_scores`
                [B, S, E]; `features` [B, S, D], what the draft blocks read of it. And `vision`: the
                outputs of the tower [P, width] and of the aligner [image tokens, D].

        Raises:
            ValueError: for an argument of the wrong shape or an unknown name in `collect`.
        """
        if unknown := set(collect) - set(COLLECTABLE):
            raise ValueError(f"cannot collect {sorted(unknown)}, expected names among {COLLECTABLE}")
        inputs = {
            "ids": ids,
            "segment_ids": segment_ids,
            "token_types": token_types,
            "patches": patches,
            "image_grids": image_grids,
            "engram_rows": engram_rows,
        }
        arrays = {name: jnp.asarray(x) for name, x in inputs.items() if x is not None}
        with ensure_mesh():
            # Operation by operation the pass would compile hundreds of programs, anew in every call: make it one.
            # Inside `jax.jit` even a constant is a tracer. Under `grad` outside it options are not allowed.
            if isinstance(jnp.zeros(()), Tracer):
                forward = _outputs
            elif any(isinstance(x, Tracer) for x in jax.tree.leaves((self, arrays, forced_experts))) or not on_cpu():
                forward = _forward
            else:
                forward = _forward_on_cpu
            return forward(self, arrays, forced_experts, tuple(collect))

    def _output(self, out: Features, collect: Sequence[str]) -> Output:
        """Apply the head to the features of a pass."""
        layers = out.layers[: self.cfg.n_layers]
        return Output(
            logits=head_logits(out.h, whole(self.head)),
            mtp_logits=None if out.mtp is None else head_logits(out.mtp, whole(self.head)),
            experts=[told["experts"] for told in layers],
            collected={name: self._collected(name, out) for name in collect},
        )

    def features(
        self,
        ids: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        following: jax.Array | None = None,
        token_types: jax.Array | None = None,
        patches: jax.Array | None = None,
        image_grids: jax.Array | None = None,
        engram_rows: jax.Array | None = None,
        replay_starts: jax.Array | None = None,
        forced_experts: Sequence[jax.Array | None] | None = None,
        collect: Sequence[str] = (),
        with_mtp: bool = True,
    ) -> Features:
        """Features for the head, and what the layers tell.

        Args:
            following: int [B, S], the token after each one, which the MTP block reads. If absent it
                is taken from `ids` inside each document (after the last comes the first).
            replay_starts: int [B, S], the row position at which the decoder begins for a token's document:
                the windows of decoder layers see nothing before it (bounded replay, V4.1 section 3.2.2).
                Without it they see the whole document.
            with_mtp: run the MTP block, if there is one.
            others: as for a call.
        """
        cfg = self.cfg
        ids, segment_ids, forced_experts = self._checked(ids, segment_ids, forced_experts)
        token_types, engram_rows = self._checked_inputs(ids, token_types, patches, image_grids, engram_rows)
        if replay_starts is not None:
            replay_starts = jax.reshard(jnp.asarray(replay_starts), row_spec(2))
        at = make_tables(cfg, jax.reshard(segment_ids, row_spec(2)), replay_starts)
        mtp_blocks = list(self.mtp) if with_mtp and not cfg.dspark_target_layer_ids else []
        if following is None and mtp_blocks:
            shift = jax.shard_map(next_ids, in_specs=row_spec(2), out_specs=row_spec(2))
            following = jax.reshard(shift(jax.reshard(ids, row_spec(2)), at.docs), act_spec(2))
        dtype = _dtype(cfg)
        e, seen = self._embed(ids, dtype), None
        image = None if token_types is None else token_types != TEXT
        if patches is not None and image_grids is not None:
            e, seen = embed_images(self, e, token_types, patches, image_grids, cfg, dtype)
        real = segment_ids > 0
        if cfg.engram_layer_ids and engram_rows is None:
            engram_rows = compute_engram_rows(
                cfg, self.token_map, ids, real if image is None else real & ~image, at.docs
            )
        tokens = Tokens(ids, at, real, image, engram_rows)
        down = stack(cfg, e, dtype)
        kept = {*_TOLD, *collect} | ({"entering"} if "features" in collect else set())

        def layer(block: Block, down: Stack, forced: jax.Array | None):
            down, told = block(down, tokens, dtype, forced)
            return down, {name: x for name, x in (told | {"streams": down.x_BSND}).items() if name in kept}

        layers: list[Any] = [None] * cfg.n_layers
        for group, blocks in zip(self.plan, self.groups, strict=True):
            down, told = _scan(layer, cfg, down, list(blocks), _forced(forced_experts, group))
            for j in range(group.period):
                for r, i in enumerate(group.layers(j)):
                    layers[i] = jax.tree.map(lambda a, r=r: a[r], told[j])
        mtp = None
        for block in mtp_blocks:
            assert following is not None  # made above
            predict = recomputed(functools.partial(MTP.predict, dtype=dtype), cfg.remat)
            mtp, told = predict(block, down.x_BSND, self._embed(following, dtype), tokens)
            layers.append(told)
        return Features(rms_norm(collapsed(self, down), cfg.norm_eps, self.norm), mtp, layers, at, seen)

    def drafts(self, out: Features, anchors: Anchors) -> Drafts:
        """The drafts of all anchors [B, A] after a pass that collected `features`.

        Raises:
            ValueError: if it did not, or the model has no draft blocks.
        """
        cfg = self.cfg
        if not cfg.dspark_target_layer_ids or "entering" not in out.layers[0]:
            raise ValueError("drafts need model.dspark_target_layer_ids and a pass with collect = ['features']")
        read = jnp.concatenate([out.layers[i]["entering"] for i in cfg.dspark_target_layer_ids], axis=-1)
        anchors = jax.tree.map(lambda x: jax.reshard(jnp.asarray(x), act_spec(2)), anchors)
        return drafts(self, read, anchors, out.at, lambda ids: self._embed(ids, _dtype(cfg)), _dtype(cfg))

    def _collected(self, name: str, out: Features) -> list[jax.Array | None]:
        """What the layers tell under a collectable name."""
        cfg = self.cfg
        if name == "vision":
            return list((out.seen or {}).values())
        layers = out.layers[: cfg.n_layers]
        if name == "features":
            return [told["entering"] if i in cfg.dspark_target_layer_ids else None for i, told in enumerate(layers)]
        found = [told.get(name) for told in layers]
        if name == "topk":
            none = jnp.iinfo(jnp.int32).max  # sorts to the end
            ordered = lambda topk: jnp.sort(jnp.where(topk < 0, none, topk))
            found = [None if x is None else jnp.where(ordered(x) == none, -1, ordered(x)) for x in found]
        if name == "candidates":
            M = [0 if ratio == 0 else out.h.shape[1] // ratio for ratio in cfg.compress_ratios]
            found = [None if x is None else in_blocks(x, M[i], cfg.candidate_block_size) for i, x in enumerate(found)]
        return found

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
            forced = [f if f is None else jax.reshard(jnp.asarray(f), act_spec(3)) for f in forced]
            shapes, want = {f.shape for f in forced if f is not None}, (*ids.shape, cfg.n_activated_experts)
            learned = len(forced) == cfg.n_layers and all(
                f is not None or spec.hashed for f, spec in zip(forced, cfg.layer_specs, strict=True)
            )
            if not learned or shapes - {want}:
                raise ValueError(
                    f"forced_experts must be {cfg.n_layers} arrays {list(want)}, or None for hashed layers; found "
                    f"{len(forced)} of shapes {sorted(shapes)}"
                )
        return jax.reshard(ids, act_spec(2)), jax.reshard(segment_ids, act_spec(2)), forced

    def _checked_inputs(self, ids, token_types, patches, image_grids, engram_rows):
        cfg = self.cfg
        if (patches is None) != (image_grids is None):
            raise ValueError("patches and image_grids belong together: one of them is missing")
        if patches is not None and token_types is None:
            raise ValueError("patches need token_types [B, S], which say where the images lie")
        if token_types is not None:
            token_types = jnp.asarray(token_types)
            if token_types.shape != ids.shape:
                raise ValueError(f"token_types must be {list(ids.shape)} like ids, found {list(token_types.shape)}")
            token_types = jax.reshard(token_types, act_spec(2))
        if engram_rows is not None:
            engram_rows, columns = jnp.asarray(engram_rows), (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
            want = (*ids.shape, len(cfg.engram_layer_ids), columns)
            if engram_rows.shape != want or not jnp.issubdtype(engram_rows.dtype, jnp.integer):
                raise ValueError(
                    f"engram_rows must be integers {list(want)}, found {engram_rows.dtype}{list(engram_rows.shape)}"
                )
            engram_rows = jax.reshard(engram_rows, act_spec(4))
        return token_types, engram_rows


def structure(cfg: ModelConfig) -> DeepSeek:
    """A model's structure, without arrays; traced once for each configuration and mesh."""
    return _made.eval_shape(cfg)


@functools.partial(jax.jit, static_argnums=0)
def _made(cfg: ModelConfig) -> DeepSeek:
    return DeepSeek(cfg, rngs=nnx.Rngs(0))


def _outputs(
    model: DeepSeek, inputs: dict[str, Any], forced: Sequence[jax.Array | None] | None, collect: tuple[str, ...]
) -> Output:
    """Compute `model(...)` from its arguments."""
    return model._output(model.features(**inputs, forced_experts=forced, collect=collect), collect)


_forward = jax.jit(_outputs, static_argnums=3)
_forward_on_cpu = jax.jit(_outputs, static_argnums=3, compiler_options=QUICK_CPU)


def _dtype(cfg: ModelConfig) -> jnp.dtype:
    """The compute type; `auto` is float32 on CPU and bfloat16 elsewhere."""
    name = cfg.compute_dtype
    if name == "auto":
        name = "float32" if on_cpu() else "bfloat16"
    return jnp.dtype(name)


def _forced(forced, group) -> list[jax.Array | None]:
    """Forced experts of a group, stacked for the scan, one array per position of its period; None if hashed."""
    if forced is None:
        return [None] * group.period
    chosen = [[forced[i] for i in group.layers(j)] for j in range(group.period)]
    return [None if any(f is None for f in layers) else jnp.stack(layers) for layers in chosen]


def _scan(layer, cfg: ModelConfig, down: Stack, blocks: list[Block], forced: list[jax.Array | None]):
    """Runs a group: a scan over its repeats, whose body runs the layers of the period in order.

    What needs no layer, such as Engram's lookups, may run beside that loop, which emulated devices do not bear.
    """
    layer = recomputed(layer, cfg.remat)
    unroll = emulated() and bool(cfg.engram_layer_ids or cfg.vision_n_layers)

    def body(down, xs):
        told = []
        for block, forced_BSk in zip(*xs, strict=True):
            down, t = layer(block, down, forced_BSk)
            told.append(t)
        return down, told

    return jax.lax.scan(body, down, (blocks, forced), unroll=unroll)
