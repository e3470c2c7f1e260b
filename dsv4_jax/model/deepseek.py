# SPDX-License-Identifier: Apache-2.0
"""The whole model: embedding, scanned layers, collapse of the streams, head, multi-token prediction."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from dsv4_jax.mesh import ONCE_CPU, act_spec, emulated, ensure_mesh, on_cpu, row_spec
from dsv4_jax.model import hyper
from dsv4_jax.model.block import Block, Carry, Collected, Hidden, LayerReport, Tokens, collapse_streams, start_carry
from dsv4_jax.model.cache import Cache, Pending
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.decode import extend
from dsv4_jax.model.dspark import Anchors, DraftBlock, Drafts, compute_drafts, compute_memory
from dsv4_jax.model.engram import compute_engram_rows, make_token_map_buffer
from dsv4_jax.model.images import embed_images, make_delimiters
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.mtp import MTP
from dsv4_jax.model.params import Params, apply_remat, rms_norm, whole
from dsv4_jax.model.place import LayerCache
from dsv4_jax.model.scan_groups import ScanGroup, find_scan_groups
from dsv4_jax.model.tables import make_tables
from dsv4_jax.model.vision import Aligner, Vision
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.ops.documents import shift_ids
from dsv4_jax.ops.indexer import mask_blocks
from dsv4_jax.optim.roles import Role


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Result of a forward pass.

    Attributes:
        logits: fp32 [B, S, V]; entry t predicts token t + 1.
        mtp_logits: fp32 [B, S, V], entry t predicts token t + 2; None without an MTP block.
        experts: int32 [B, S, k] of every layer.
        collected: the arrays that `collect` named, each a list over layers (None for a layer that has none).
    """

    logits: jax.Array
    mtp_logits: jax.Array | None
    experts: list[jax.Array]
    collected: dict[str, list[jax.Array | None]]


class DeepSeek(nnx.Module):
    """A DeepSeek language model: a pytree of parameters under the official names."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        with ensure_mesh():
            if _tracing():
                return self._make(cfg, rngs)
            # Operation by operation it would compile hundreds of programs.
            model, after = (_make_model_on_cpu if on_cpu() else _make_model)(cfg, rngs)
            nnx.update(rngs, nnx.state(after))
            for name, value in vars(model).items():
                if not name.startswith("_"):
                    setattr(self, name, value)

    def _make(self, cfg: ModelConfig, rngs: nnx.Rngs) -> None:
        """Make all parameters and buffers, on the mesh that is set."""
        self.cfg = cfg
        self.scan_groups = find_scan_groups(cfg.layer_specs)
        # The order in which tensors are made decides their random keys.
        make = Params(rngs, cfg.init_std)
        vocab, dim = ("vocab", cfg.vocab_size), ("embed", cfg.dim)
        self.embed = make.table(vocab, dim)
        self.token_map = make_token_map_buffer(cfg, make)
        if cfg.vision_n_layers:
            self.vision, self.aligner = Vision(cfg, make), Aligner(cfg, make)
            self.image_start, self.image_newline, self.image_end = make_delimiters(cfg, make)
        # A block for each position of a group's period, whose tensors are stacked over the repeats.
        self.groups = nnx.List([])
        for group in self.scan_groups:
            stacked = Params(rngs, cfg.init_std, layers=group.repeats)
            specs = cfg.layer_specs[group.start : group.start + group.period]
            self.groups.append(nnx.List([Block(cfg, stacked, s, group.layers(j)) for j, s in enumerate(specs)]))

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
        """Compute the logits of token ids [B, S].

        Outside `jax.jit` the pass is compiled as one program, which later calls on the same shapes reuse. On CPU it
        is compiled in little time rather than for speed: put many calls into `jax.jit`.

        Args:
            ids: see `Inputs`, also for the arguments that follow.
            segment_ids: documents of packed rows.
            token_types: kinds of positions.
            patches: patches of images.
            image_grids: places of images.
            engram_rows: rows of the Engrams' tables.
            forced_experts: experts of every layer.
            collect: names of arrays to return for every layer: those of `Collected`, but `topk` in ascending order
                and `candidates` as bool [B, S, M], true for entries in the pool. And `vision`: the outputs of the
                tower [P, width] and of the aligner [image tokens, D].

        Raises:
            ValueError: for an argument of the wrong shape or an unknown name in `collect`.
        """
        known = (*Collected._fields, "vision")
        if unknown := set(collect) - set(known):
            raise ValueError(f"cannot collect {sorted(unknown)}, expected names among {known}")
        inputs = {
            "ids": ids,
            "segment_ids": segment_ids,
            "token_types": token_types,
            "patches": patches,
            "image_grids": image_grids,
            "engram_rows": engram_rows,
        }
        arrays = {name: jnp.asarray(x) for name, x in inputs.items() if x is not None}
        given = Inputs(**arrays, forced_experts=forced_experts)
        with ensure_mesh():
            # Operation by operation the pass would compile hundreds of programs, anew in every call. Inside `jax.jit`
            # the caller compiles. Under `grad` outside `jit` compiler options are not allowed.
            if _tracing():
                forward = _outputs
            elif any(isinstance(x, Tracer) for x in jax.tree.leaves((self, given))) or not on_cpu():
                forward = _forward
            else:
                forward = _forward_on_cpu
            return forward(self, given, tuple(collect))

    def _output(self, out: Hidden, collect: Sequence[str]) -> Output:
        """Apply the head to the hidden states of a pass."""
        layers = out.layers[: self.cfg.n_layers]
        return Output(
            logits=head_logits(out.h, whole(self.head)),
            mtp_logits=None if out.mtp is None else head_logits(out.mtp, whole(self.head)),
            experts=[report.experts for report in layers],
            collected={name: self._collected(name, out) for name in collect},
        )

    def hidden(self, inputs: Inputs, *, collect: Sequence[str] = (), with_mtp: bool = True) -> Hidden:
        """Run the layers; return the hidden states for the head, and the report of every layer.

        Args:
            inputs: the arrays to read.
            collect: as for a call.
            with_mtp: run the MTP block, if there is one.

        Raises:
            ValueError: for inputs of the wrong shape.
        """
        cfg, dtype = self.cfg, self.cfg.dtype
        inputs = inputs.checked(cfg)
        ids, segment_ids, engram_rows = inputs.ids, inputs.segment_ids, inputs.engram_rows
        assert segment_ids is not None  # filled in by the check
        tables = make_tables(cfg, jax.reshard(segment_ids, row_spec(2)), inputs.replay_starts)

        # The MTP block reads the next token, which comes from the right neighbour at a chunk's end.
        mtp_blocks = list(self.mtp) if with_mtp and not cfg.dspark_target_layer_ids else []
        following = inputs.following
        if following is None and mtp_blocks:
            shift = jax.shard_map(shift_ids, in_specs=row_spec(2), out_specs=row_spec(2))
            following = jax.reshard(shift(jax.reshard(ids, row_spec(2)), tables.docs), act_spec(2))

        # Rows of the Engrams' tables, which depend on ids alone: once for all layers.
        real, image = segment_ids > 0, inputs.image
        if cfg.engram_layer_ids and engram_rows is None:
            text = real if image is None else real & ~image
            engram_rows = compute_engram_rows(cfg, self.token_map, ids, text, tables.docs)

        # All layers, on N streams [B, S, N, D].
        tokens = Tokens(ids, tables, real, image, engram_rows)
        e, images = self.embed_inputs(inputs)
        start = start_carry(cfg, e, dtype)
        carry, layers, _ = self.run_layers(start, tokens, inputs.forced_experts, collect)

        mtp = None
        for block in mtp_blocks:
            assert following is not None  # made above
            predict = apply_remat(functools.partial(MTP.predict, dtype=dtype), cfg.remat)
            mtp, report = predict(block, carry.x_BSND, self.embed_ids(following, dtype), tokens)
            layers.append(report._replace(collected=Collected()))
        return Hidden(rms_norm(collapse_streams(self, carry), cfg.norm_eps, self.norm), mtp, layers, tables, images)

    def embed_inputs(self, inputs: Inputs) -> tuple[jax.Array, dict[str, jax.Array] | None]:
        """Compute the embeddings [B, S, D] of checked inputs, and with images the outputs of tower and aligner.

        At image positions the aligner's vectors take the place of the ids' embeddings.
        """
        cfg, dtype = self.cfg, self.cfg.dtype
        e = self.embed_ids(inputs.ids, dtype)
        if inputs.patches is None:
            return e, None
        assert inputs.token_types is not None and inputs.image_grids is not None  # checked
        return embed_images(self, e, inputs.token_types, inputs.patches, inputs.image_grids, cfg, dtype)

    def extend(
        self,
        cache: Cache,
        ids: jax.Array,
        n: jax.Array,
        *,
        embeddings: jax.Array | None = None,
        token_types: jax.Array | None = None,
        forced_experts: Sequence[jax.Array | None] | None = None,
        collect: Sequence[str] = (),
    ) -> tuple[Hidden, Pending]:
        """Compute the next T tokens of the rows of a cache. `cache.commit` then adds them to it.

        The hidden states are those that `hidden` computes from the whole rows. The MTP block, if the cache has it, is
        one token behind: it reads the streams before each of the T tokens, so its states too predict the token after
        each.

        Args:
            cache: the tokens before.
            ids: int [B, T], token ids; the mesh's context divides T.
            n: int [B], number of real tokens in each row, 0 to T; what follows them is padding.
            embeddings: [B, T, D] in place of those of the ids, for images.
            token_types: see `Inputs`.
            forced_experts: see `Inputs`.
            collect: as for a call.
        """
        inputs = Inputs(ids, token_types=token_types, forced_experts=forced_experts).checked(self.cfg)
        return extend(self, cache, inputs, n, embeddings, collect)

    def run_layers(
        self,
        carry: Carry,
        tokens: Tokens,
        forced: Sequence[jax.Array | None] | None,
        collect: Sequence[str],
        caches: Sequence[Sequence[LayerCache | None]] | None = None,
    ) -> tuple[Carry, list[LayerReport], list[list[Any]]]:
        """Scan the groups of layers.

        Returns:
            The carry after the last layer, every layer's report, in order, and the updates of the caches, stacked like
            the layers.
        """

        def run(
            block: Block, carry: Carry, forced_BSk: jax.Array | None, cache: LayerCache | None
        ) -> tuple[Carry, LayerReport]:
            carry, report = block(carry, tokens, self.cfg.dtype, forced_BSk, cache)
            return carry, report._replace(collected=report.collected.only(collect))

        layers: list[Any] = [None] * self.cfg.n_layers
        updates: list[list[Any]] = []
        for number, (group, blocks) in enumerate(zip(self.scan_groups, self.groups, strict=True)):
            cached = [None] * group.period if caches is None else list(caches[number])
            carry, reports = _scan(run, self.cfg, carry, list(blocks), _stack_forced(forced, group), cached)
            updates.append([report.update for report in reports])
            reports = [report._replace(update=None) for report in reports]
            # The scan has stacked the reports of each position of the period over its repeats.
            for j in range(group.period):
                for r, i in enumerate(group.layers(j)):
                    layers[i] = jax.tree.map(lambda a, r=r: a[r], reports[j])
        return carry, layers, updates

    def draft(self, out: Hidden, anchors: Anchors) -> Drafts:
        """Run the draft blocks from all anchors [B, A], after a pass `out` that collected `features`.

        Raises:
            ValueError: if `out` has no features, or the model no draft blocks.
        """
        cfg = self.cfg
        memory_BSD = compute_memory(self, out.layers)
        anchors = jax.tree.map(lambda x: jax.reshard(jnp.asarray(x), act_spec(2)), anchors)
        read = lambda _, block: block.context(memory_BSD, out.tables, cfg.dtype)
        return compute_drafts(self, read, anchors, lambda ids: self.embed_ids(ids, cfg.dtype), cfg.dtype)

    def _collected(self, name: str, out: Hidden) -> list[jax.Array | None]:
        """Take what `collect` named from the reports of the layers, in the form of `Output.collected`."""
        cfg = self.cfg
        if name == "vision":
            return list((out.images or {}).values())
        values = [getattr(report.collected, name) for report in out.layers[: cfg.n_layers]]
        if name == "features":
            return [x if i in cfg.dspark_target_layer_ids else None for i, x in enumerate(values)]
        if name == "topk":
            none = jnp.iinfo(jnp.int32).max  # sorts to the end
            ordered = lambda topk: jnp.sort(jnp.where(topk < 0, none, topk))
            return [None if x is None else jnp.where(ordered(x) == none, -1, ordered(x)) for x in values]
        if name == "candidates":
            M = [0 if ratio == 0 else out.h.shape[1] // ratio for ratio in cfg.compress_ratios]
            return [None if x is None else mask_blocks(x, M[i], cfg.candidate_block_size) for i, x in enumerate(values)]
        return values

    def layers_of(self, path: tuple[Any, ...]) -> range:
        """Return the numbers of the layers that the variable at `path` belongs to: several if they are stacked.

        Draft blocks are numbered after the last layer. The range is empty for a variable outside the layers.
        """
        if path[0] == "groups":
            return self.scan_groups[path[1]].layers(path[2])
        first = self.cfg.n_layers + path[1] if path[0] == "mtp" else 0
        return range(first, first + (path[0] == "mtp"))

    def embed_ids(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Look up the embeddings [B, S, D] of token ids."""
        return whole(self.embed).at[ids].get(out_sharding=act_spec(3)).astype(dtype)


def trace_structure(cfg: ModelConfig) -> DeepSeek:
    """Make a model without arrays: its structure, shapes and shardings. Traced once for each configuration and mesh."""
    return _make_abstract.eval_shape(cfg)


@functools.partial(jax.jit, static_argnums=0)
def _make_abstract(cfg: ModelConfig) -> DeepSeek:
    return DeepSeek(cfg, rngs=nnx.Rngs(0))


def _tracing() -> bool:
    """Return whether we are inside `jax.jit` or another trace, where even a constant is a tracer."""
    return isinstance(jnp.zeros(()), Tracer)


def _model_and_rngs(cfg: ModelConfig, rngs: nnx.Rngs) -> tuple[DeepSeek, nnx.Rngs]:
    """Make a model; also return `rngs`, which have moved on."""
    return DeepSeek(cfg, rngs=rngs), rngs


_make_model = jax.jit(_model_and_rngs, static_argnums=0)
_make_model_on_cpu = jax.jit(_model_and_rngs, static_argnums=0, compiler_options=ONCE_CPU)


def _outputs(model: DeepSeek, inputs: Inputs, collect: tuple[str, ...]) -> Output:
    """Compute `model(...)` from its arguments."""
    return model._output(model.hidden(inputs, collect=collect), collect)


_forward = jax.jit(_outputs, static_argnums=2)
_forward_on_cpu = jax.jit(_outputs, static_argnums=2, compiler_options=ONCE_CPU)


def _stack_forced(forced: Sequence[jax.Array | None] | None, group: ScanGroup) -> list[jax.Array | None]:
    """Stack the forced experts of a group for its scan: one array a position of the period, None if hashed."""
    if forced is None:
        return [None] * group.period
    stacked: list[jax.Array | None] = []
    for j in range(group.period):
        given = [f for i in group.layers(j) if (f := forced[i]) is not None]
        stacked.append(jnp.stack(given) if len(given) == group.repeats else None)
    return stacked


def _scan(run, cfg: ModelConfig, carry: Carry, blocks: list[Block], *others: list[Any]):
    """Run a group: a scan over its repeats, whose body runs the layers of the period in order.

    On emulated devices the scan is unrolled if there are Engrams or images: their collectives need no layer, so
    XLA's CPU runtime could run them beside the loop, and deadlock (see `mesh.emulated`).
    """
    run = apply_remat(run, cfg.remat)
    unroll = emulated() and bool(cfg.engram_layer_ids or cfg.vision_n_layers)

    def body(carry, xs):
        reports = []
        for block, *given in zip(*xs, strict=True):
            carry, report = run(block, carry, *given)
            reports.append(report)
        return carry, reports

    return jax.lax.scan(body, carry, (blocks, *others), unroll=unroll)
