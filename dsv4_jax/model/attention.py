# SPDX-License-Identifier: Apache-2.0
"""Attention of a layer: latent queries, one shared key-value head, compressed entries, grouped output.

The matrix products run on sharded arrays. All that combines positions (windows, pooling, top-k, attention itself)
runs inside one `shard_map`, for a chunk of every row. The tokens left of the chunk and the entries of the row come from
its place (`place.py`): in training from neighbouring devices, in decoding from a cache.

Letters: B rows, S positions, D width, H heads, K head width, U window keys, M entries of a row, m entries of a chunk,
C compressor channels, I index heads, J index width, G output groups.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.mesh import BATCH, act_spec, row_spec
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.params import Params, linear, mark_saved, rms_norm, whole
from dsv4_jax.model.place import (
    Cached,
    Entries,
    Gated,
    LayerCache,
    LayerUpdate,
    Neighbours,
    Recent,
    count_channels,
    count_tail,
)
from dsv4_jax.model.quantized import quantize_entries, quantize_index, quantize_window
from dsv4_jax.model.rope import Rotation, rotate
from dsv4_jax.model.tables import Chunk, Tables
from dsv4_jax.ops.attention import Attended, attend
from dsv4_jax.ops.context import count_slots
from dsv4_jax.ops.documents import Windows, compress
from dsv4_jax.ops.indexer import Index
from dsv4_jax.optim.roles import MatrixSpec, Role


class Shared(NamedTuple):
    """Arrays that a CSA2 layer hands to the layers after it (V4.1 section 2.3), all split over `context`.

    Attributes:
        entries_BmK: rotated compressed entries, each on the device where its window ends.
        keys_BmJ: their index keys; None if no indexer runs.
        topk_BSk: entries that the last indexer selected; None unless attention is sparse.
        candidates_BSc: pool of candidates that the `source` layer made; None without such a layer.
    """

    entries_BmK: jax.Array
    keys_BmJ: jax.Array | None
    topk_BSk: jax.Array | None
    candidates_BSc: jax.Array | None


def make_empty_shared(cfg: ModelConfig, B: int, S: int, dtype: jnp.dtype, capacity: int = 0) -> dict[int, Shared]:
    """Make the arrays that CSA2 layers hand down, by ratio: zeros, which the first `full` layer replaces.

    With the `capacity` of a cache they hold the entries that it has room for, whole on every device of `context`.
    """
    devices, spec = jax.sharding.get_abstract_mesh().shape["context"], (row_spec if capacity else act_spec)(3)

    def zeros(*shape: int, dtype: jnp.dtype = dtype) -> jax.Array:
        return jnp.zeros((B, *shape), dtype, out_sharding=spec)

    def start(ratio: int) -> Shared:
        M = -(-capacity // ratio) if capacity else S // ratio
        m = M if capacity else devices * count_slots(S // devices, ratio)
        keys = None if cfg.attention == "dense" else zeros(m, cfg.index_head_dim)
        sparse, pool = cfg.attention == "sparse", min(cfg.candidate_topk_blocks, -(-M // cfg.candidate_block_size))
        topk = zeros(S, min(cfg.index_topk, M), dtype=jnp.int32) if sparse else None
        candidates = zeros(S, pool, dtype=jnp.int32) if sparse and cfg.candidate_source_layer >= 0 else None
        return Shared(zeros(m, cfg.head_dim), keys, topk, candidates)

    return {r: start(r) for r in set(cfg.compress_ratios) - {0}} if cfg.kv_source_layers else {}


class Pooling(NamedTuple):
    """Weights of a compressor's pooling: position bias of a window's tokens, and norm of the entry."""

    ape_mC: jax.Array
    norm_K: jax.Array


class Projected(NamedTuple):
    """Products of a layer's tokens with its matrices, before RoPE. A part that the layer does not have is None.

    Attributes:
        q_BSHK: queries.
        kv_BSK: keys of the window, which are also the values.
        main: input of the pooling into entries.
        index: input of the pooling into index keys (CSA).
        index_q_BSIJ: queries of the indexer.
        index_w_BSI: weights of the indexer's heads, fp32.
    """

    q_BSHK: jax.Array
    kv_BSK: jax.Array
    main: Gated | None = None
    index: Gated | None = None
    index_q_BSIJ: jax.Array | None = None
    index_w_BSI: jax.Array | None = None


class Weights(NamedTuple):
    """Weights of the functions along the sequence, whole on every device. A part that the layer does not have is None.

    Attributes:
        sink_H: sink logits.
        main: pooling of the entries.
        index: pooling of the index keys (CSA).
        key: projection [K, J] of an entry to its index key, and norm [J] of the key (CSA2).
    """

    sink_H: jax.Array
    main: Pooling | None = None
    index: Pooling | None = None
    key: tuple[jax.Array, jax.Array] | None = None


class Compressor(nnx.Module):
    """Compressor of windows of tokens into entries of `width` channels: CSA and HCA (section 2.3), and CSA2.

    In CSA2 it has no position bias. At ratio 1 it has no gate either and is a projection (V4.1 section 2.3).
    """

    def __init__(self, cfg: ModelConfig, make: Params, spec: LayerSpec, width: int):
        self.channels = channels = count_channels(spec, width)
        # Channels of the window before and of the window itself; each half is one matrix for the optimizer.
        halves = Role("matrix", MatrixSpec(output_split=channels // width))
        if spec.mode != "full":
            self.ape = make.full(0.0, ("window", spec.ratio), ("head_dim", channels))
        self.wkv = make.kernel(("embed", cfg.dim), ("head_dim", channels), role=halves)
        if spec.mode != "full" or spec.ratio > 1:
            self.wgate = make.kernel(("embed", cfg.dim), ("head_dim", channels), role=halves)
        self.norm = make.ones(("head_dim", width))

    def project(self, x_BSD: jax.Array, dtype: jnp.dtype) -> Gated:
        """Compute the input of the pooling."""
        value = linear(x_BSD, self.wkv, dtype)
        return Gated(value, linear(x_BSD, self.wgate, dtype) if hasattr(self, "wgate") else jnp.zeros_like(value))

    def pooling(self, ratio: int) -> Pooling:
        """Gather the weights of the pooling of windows of `ratio` tokens."""
        ape = whole(self.ape) if hasattr(self, "ape") else jnp.zeros((ratio, self.channels))
        return Pooling(ape, whole(self.norm))


class Indexer(nnx.Module):
    """Parameters of the lightning indexer, which scores every compressed entry for every query.

    In CSA its keys come from a compressor of its own, in `full` layers from the entries, and in `reindex` layers from
    the `full` layer before.
    """

    def __init__(self, cfg: ModelConfig, make: Params, spec: LayerSpec):
        I, J = cfg.index_n_heads, cfg.index_head_dim
        self.wq_b = make.kernel(("lora", cfg.q_lora_rank), ("heads", I * J), role=Role("matrix", heads=I))
        self.weights_proj = make.kernel(("embed", cfg.dim), ("heads", I))
        if spec.mode == "csa":
            self.compressor = Compressor(cfg, make, spec, J)
        elif spec.mode == "full":
            self.wk = make.kernel(("head_dim", cfg.head_dim), ("index_dim", J))
            self.k_norm = make.ones(("index_dim", J))


class Attention(nnx.Module):
    """Attention of one layer of the given kind (section 2.3)."""

    def __init__(self, cfg: ModelConfig, make: Params, spec: LayerSpec):
        self.cfg, self.spec = cfg, spec
        H, K, G = cfg.n_heads, cfg.head_dim, cfg.o_groups
        self.attn_sink = make.full(0.0, ("heads", H))
        self.wq_a = make.kernel(("embed", cfg.dim), ("lora", cfg.q_lora_rank))
        self.q_norm = make.ones(("lora", cfg.q_lora_rank))
        self.wq_b = make.kernel(("lora", cfg.q_lora_rank), ("heads", H * K), role=Role("matrix", heads=H))
        self.wkv = make.kernel(("embed", cfg.dim), ("head_dim", K))
        self.kv_norm = make.ones(("head_dim", K))
        self.wo_a = make.kernel(("groups", G), ("heads", H * K // G), ("lora", cfg.o_lora_rank))
        self.wo_b = make.kernel(("lora", G * cfg.o_lora_rank), ("embed", cfg.dim))
        if spec.mode in ("csa", "hca", "full"):
            self.compressor = Compressor(cfg, make, spec, K)
        if spec.indexed:
            self.indexer = Indexer(cfg, make, spec)

    def __call__(
        self,
        x_BSD: jax.Array,
        shared: dict[int, Shared],
        tables: Tables,
        dtype: jnp.dtype,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, Attended, dict[int, Shared], LayerUpdate | None]:
        """Attend along the rows of a batch, or from a chunk that follows the tokens of a cache.

        Args:
            x_BSD: normed input of the sublayer, laid out as `mesh.act_spec`.
            shared: arrays that CSA2 layers hand down, by ratio.
            tables: tables of the rows, or of the chunk.
            dtype: type of the matrix products.
            cache: cache of the layer; None in training.

        Returns:
            The sublayer's output [B, S, D], the result of `read` with the indexer's loss and selection, `shared`
            for the next layer, and what to put into the cache.
        """
        projected, rows = self.project(x_BSD, dtype), jax.P(BATCH)
        # In training each device of `context` has its part of the positions. A chunk may be shorter than that axis:
        # all of its devices have the whole chunk.
        tokens = jax.P(BATCH, "context") if cache is None else rows
        if cache is not None:
            projected = jax.tree.map(lambda a: jax.reshard(a, row_spec(a.ndim)), projected)
        attend_chunk = functools.partial(_attend_chunk, self.cfg, self.spec)
        in_specs = (tokens, jax.P(), rows, tokens, rows)
        attend_chunk = jax.shard_map(attend_chunk, in_specs=in_specs, out_specs=(tokens, tokens, rows))
        out, own, update = attend_chunk(projected, self.weights(), tables, shared.get(self.spec.ratio), cache)
        if cache is not None:
            out = jax.tree.map(lambda a: jax.reshard(a, act_spec(a.ndim)), out)
        y = self.output(out.o_BSHK, dtype)
        return y, out, shared if own is None else shared | {self.spec.ratio: own}, update

    def project(self, x_BSD: jax.Array, dtype: jnp.dtype) -> Projected:
        """Compute the products of the tokens with the layer's matrices."""
        cfg, spec = self.cfg, self.spec
        q, latent = self.queries(x_BSD, dtype)
        projected = Projected(q, self.keys(x_BSD, dtype))
        if spec.mode in ("csa", "hca", "full"):
            projected = projected._replace(main=self.compressor.project(x_BSD, dtype))
        if not spec.indexed or cfg.attention == "dense":
            return projected
        # The indexer learns from its own loss alone: its inputs are detached (V3.2 section 2.1).
        x, latent = jax.lax.stop_gradient((x_BSD, latent))
        shape = (*x.shape[:2], cfg.index_n_heads, cfg.index_head_dim)
        query = linear(latent, self.indexer.wq_b, dtype).reshape(shape)
        head_weights = linear(x, self.indexer.weights_proj, dtype).astype(jnp.float32)
        index = self.indexer.compressor.project(x, dtype) if spec.mode == "csa" else None
        return projected._replace(index=index, index_q_BSIJ=query, index_w_BSI=head_weights)

    def weights(self) -> Weights:
        """Gather the weights of the functions along the sequence from the devices that share them."""
        spec, weights = self.spec, Weights(whole(self.attn_sink))
        if spec.mode in ("csa", "hca", "full"):
            weights = weights._replace(main=self.compressor.pooling(spec.ratio))
        if spec.indexed and self.cfg.attention != "dense":
            if spec.mode == "csa":
                weights = weights._replace(index=self.indexer.compressor.pooling(spec.ratio))
            elif spec.mode == "full":
                weights = weights._replace(key=(whole(self.indexer.wk), whole(self.indexer.k_norm)))
        return weights

    def queries(self, x_BSD: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Compute queries [B, S, H, K] before RoPE, and their latent [B, S, lora], which the indexer reads too."""
        cfg = self.cfg
        latent = rms_norm(linear(x_BSD, self.wq_a, dtype), cfg.norm_eps, self.q_norm)
        q = linear(latent, self.wq_b, dtype).reshape(*x_BSD.shape[:2], cfg.n_heads, cfg.head_dim)
        return rms_norm(q, cfg.norm_eps) if cfg.query_norm else q, latent

    def keys(self, x_BSD: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Compute the window's keys [B, S, K] before RoPE, which all heads share and which are also the values."""
        return rms_norm(linear(x_BSD, self.wkv, dtype), self.cfg.norm_eps, self.kv_norm)

    def output(self, o_BSHK: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Project the heads' outputs [B, S, H, K] to [B, S, D]: each group of heads by itself, then all together."""
        B, S, H, K = o_BSHK.shape
        groups = self.cfg.o_groups
        o_BSGI = jnp.reshape(mark_saved(o_BSHK), (B, S, groups, H * K // groups), out_sharding=act_spec(4))
        u = linear(o_BSGI, self.wo_a, dtype)
        return linear(u.reshape(B, S, -1), self.wo_b, dtype)


def _attend_chunk(
    cfg: ModelConfig,
    spec: LayerSpec,
    projected: Projected,
    weights: Weights,
    tables: Tables,
    shared: Shared | None,
    cache: LayerCache | None,
) -> tuple[Attended, Shared | None, LayerUpdate | None]:
    """Attend from one device's rows and chunk of S positions.

    Returns:
        The result for the chunk, `shared` with the arrays that this layer replaces, and what to put into the cache.
    """
    place = Neighbours(tables) if cache is None else Cached(tables, cache)
    S, ratio = projected.q_BSHK.shape[1], spec.ratio
    chunk = place.chunk(spec, S)
    entries_BMK = index = topk_BSk = own = stored = windows = None
    main, index_tokens = projected.main, projected.index
    if ratio and place.windows(ratio).end_BM.shape[1] > 0:  # a row shorter than the ratio has no entries
        windows = place.windows(ratio)
        if main is not None:
            # Entries [B, m, K] of the windows that end in this chunk; the first of them may begin left of it.
            main = place.prepend("main", main, count_tail(spec))
            index_tokens = place.prepend("index", index_tokens, count_tail(spec))
            ending, starts = place.ending(ratio, S, main.value_BSC.shape[1] - S)
            own = new_entries(cfg, spec, main, index_tokens, weights, ending, starts)
            stored = place.store(own, ratio)
        if shared is not None:
            # CSA2: a full layer replaces the entries that are handed down, and every layer reads those.
            if stored is not None:
                shared = shared._replace(entries_BmK=stored.entries_BmK, keys_BmJ=stored.keys_BmJ)
            stored = Entries(shared.entries_BmK, shared.keys_BmJ)
        assert stored is not None  # a layer with a ratio makes entries or is handed some
        # The entries of the whole row, [B, M, K], and their index keys [B, M, J], in the order of `windows`.
        entries_BMK = place.gather(stored.entries_BmK, ratio, S)
        if projected.index_q_BSIJ is not None:
            assert stored.keys_BmJ is not None
            keys_BMJ = place.gather(stored.keys_BmJ, ratio, S)
            candidates_BSc = None if shared is None else shared.candidates_BSc
            index = index_of(cfg, spec, projected, chunk, keys_BMJ, candidates_BSc)
        elif shared is not None:
            topk_BSk = shared.topk_BSk
    # The chunk's own keys after those of the window left of it: U = S + up to W - 1.
    kv_BSK = quantize_window(cfg, rotate(projected.kv_BSK, chunk.rotation))
    kv_BUK = place.prepend("window_BUK", kv_BSK, cfg.window_size - 1)
    out = read(cfg, projected.q_BSHK, kv_BUK, weights.sink_H, chunk, entries_BMK, windows, index, topk_BSk)
    if index is not None and shared is not None and cfg.attention == "sparse":
        shared = shared._replace(topk_BSk=out.topk_BSk)
        if spec.candidates == "source":
            shared = shared._replace(candidates_BSc=out.candidates_BSc)
    return out, shared, place.update(Recent(kv_BUK, main, index_tokens), own, ratio)


def new_entries(
    cfg: ModelConfig,
    spec: LayerSpec,
    main: Gated,
    index: Gated | None,
    weights: Weights,
    windows: Windows,
    starts: Rotation,
) -> Entries:
    """Pool m windows into entries, and make their index keys if the layer's indexer runs (section 2.3).

    Args:
        cfg: the model.
        spec: the layer, of mode `csa`, `hca` or `full`.
        main: input of the pooling into entries, for all tokens of the windows and, in CSA, of the windows before.
        index: the same for the index keys (CSA).
        weights: weights of the layer.
        windows: places of the windows in `main` and `index`, [B, m].
        starts: angles of the windows' first tokens, [B, m, ...].
    """
    dtype = main.value_BSC.dtype

    def pool(tokens: Gated, pooling: Pooling) -> jax.Array:
        pooled = compress(tokens.value_BSC, tokens.gate_BSC, pooling.ape_mC, windows, overlap=spec.mode == "csa")
        return rms_norm(pooled, cfg.norm_eps) * pooling.norm_K

    assert weights.main is not None
    latent_BmK = pool(main, weights.main)
    keys_BmJ = None
    if index is not None and weights.index is not None:
        keys_BmJ = rotate(pool(index, weights.index), starts).astype(dtype)
    elif weights.key is not None:  # CSA2: a projection of the entry, which the indexer's loss must not move
        wk_KJ, norm_J = weights.key
        keys_BmJ = jnp.einsum("bmk,kj->bmj", jax.lax.stop_gradient(latent_BmK), wk_KJ)
        keys_BmJ = rotate(rms_norm(keys_BmJ, cfg.norm_eps) * norm_J, starts).astype(dtype)
    keys_BmJ = None if keys_BmJ is None else quantize_index(cfg, keys_BmJ)
    return Entries(quantize_entries(cfg, rotate(latent_BmK, starts).astype(dtype)), keys_BmJ)


def index_of(
    cfg: ModelConfig,
    spec: LayerSpec,
    projected: Projected,
    chunk: Chunk,
    keys_BMJ: jax.Array,
    candidates_BSc: jax.Array | None,
) -> Index:
    """Set up the indexer's selection among M entries (section 2.3.1): queries, keys, and the rule of selection.

    `read` selects block by block, so that the scores [B, S, M] never exist at once.

    Args:
        cfg: the model.
        spec: the layer.
        projected: products of the S tokens that select.
        chunk: place of the S tokens.
        keys_BMJ: index keys of all entries.
        candidates_BSc: pool of the layer with `candidates = "source"`; None without one.
    """
    sparse = cfg.attention == "sparse"
    assert projected.index_q_BSIJ is not None and projected.index_w_BSI is not None
    return Index(
        quantize_index(cfg, rotate(projected.index_q_BSIJ, chunk.head_rotation)),
        projected.index_w_BSI,
        keys_BMJ,
        topk=cfg.index_topk * sparse,
        pool=(cfg.candidate_topk_blocks, cfg.candidate_block_size) if spec.candidates and sparse else None,
        candidates_BSc=candidates_BSc if spec.candidates == "user" else None,
        recall=cfg.index_topk * cfg.recall,
    )


def read(
    cfg: ModelConfig,
    q_BSHK: jax.Array,
    kv_BUK: jax.Array,
    sink_H: jax.Array,
    chunk: Chunk,
    entries_BMK: jax.Array | None,
    windows: Windows | None,
    index: Index | None,
    topk_BSk: jax.Array | None,
) -> Attended:
    """Attend from a chunk of queries to their windows and entries, and rotate the result back (section 2.3).

    Args:
        cfg: the model.
        q_BSHK: queries before RoPE.
        kv_BUK: rotated keys, which are also the values: those of up to W - 1 tokens before the chunk, then of its S.
        sink_H: sink logits.
        chunk: place of the chunk.
        entries_BMK: all entries that a query may see, rotated; None without compression.
        windows: places of the entries' windows, [B, M]; an entry whose window ends after a query is not visible to it.
        index: indexer that selects among the entries; None without one.
        topk_BSk: entries that an earlier layer selected, -1 for none; None: those of `index`, or all.
    """
    out = attend(
        rotate(q_BSHK, chunk.head_rotation),
        kv_BUK,
        sink_H,
        chunk.first_BS,
        window=cfg.window_size,
        offset=chunk.offset,
        entries_BMK=entries_BMK,
        windows=windows,
        index=index,
        topk_BSk=topk_BSk,
        near_BS=chunk.near_BS,
        block=cfg.attention_block,
        select=cfg.select,
    )
    return out._replace(o_BSHK=rotate(out.o_BSHK, chunk.head_rotation, inverse=True))
