# SPDX-License-Identifier: Apache-2.0
"""Attention of a layer: latent queries, one shared key-value head, compressed entries, grouped output.

The matrix products run on sharded arrays; everything that looks along the sequence (windows, pooling,
top-k, attention itself) runs inside one `shard_map`. Letters: B rows, S positions, D width, H heads,
K head width, M entries, C compressor channels, I index heads, J index width, G output groups.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.mesh import BATCH, act_spec
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.params import Params, linear, rms_norm, saved, whole
from dsv4_jax.model.rope import Rotation, frequencies, rotate, rotation
from dsv4_jax.ops.attention import Attended, attend
from dsv4_jax.ops.context import chunk, gather_entries, offset, own_slots, own_windows, rows_at, with_left
from dsv4_jax.ops.documents import Documents, Windows, compress, documents, windows
from dsv4_jax.ops.indexer import Index
from dsv4_jax.optim.roles import MatrixSpec, Role


class Tables(NamedTuple):
    """Integer and angle tables of a batch that all layers share; positions are whole everywhere.

    Attributes:
        docs: document borders.
        windows: compression windows, by ratio.
        rotations: angles of every position, without and with compression (keys False, True).
        starts: angles of every window's first token, by ratio.
        near_BS: row position from which the window of a decoder layer may see, if replay is bounded.
    """

    docs: Documents
    windows: dict[int, Windows]
    rotations: dict[bool, Rotation]
    starts: dict[int, Rotation]
    near_BS: jax.Array | None


def tables(cfg: ModelConfig, segment_ids: jax.Array, replay_starts: jax.Array | None = None) -> Tables:
    """Tables of packed rows, `segment_ids` and `replay_starts` [B, S] with whole rows on each device."""
    run = functools.partial(_tables, cfg)
    return jax.shard_map(run, in_specs=jax.P(BATCH), out_specs=jax.P(BATCH))(segment_ids, replay_starts)


def _tables(cfg: ModelConfig, segment_ids: jax.Array, replay_BS: jax.Array | None) -> Tables:
    docs = documents(segment_ids)
    near = None
    if replay_BS is not None:  # queries from the start of the replay on see nothing before it
        replayed = jnp.arange(segment_ids.shape[1]) >= replay_BS
        near = jnp.where(replayed, jnp.maximum(docs.first_BS, replay_BS), docs.first_BS)
    ratios = sorted(set(cfg.compress_ratios) - {0})
    freqs = {compressed: frequencies(cfg, compressed) for compressed in (False, True)}
    wins = {r: windows(docs, r) for r in ratios}
    return Tables(
        docs,
        wins,
        {c: rotation(f, docs.position_BS) for c, f in freqs.items()},
        {r: rotation(freqs[True], w.index_BM * r) for r, w in wins.items()},
        near,
    )


class Shared(NamedTuple):
    """What a CSA2 layer hands down the stack (V4.1 section 2.3); all split over `context`.

    Attributes:
        entries_BmK: rotated compressed entries, each on the device where its window ends.
        keys_BmJ: their index keys; None if no indexer runs.
        topk_BSk: entries that the last indexer selected; None unless attention is sparse.
        candidates_BSc: its pool of candidates; None without one.
    """

    entries_BmK: jax.Array
    keys_BmJ: jax.Array | None
    topk_BSk: jax.Array | None
    candidates_BSc: jax.Array | None


def nothing_shared(cfg: ModelConfig, B: int, S: int, dtype: jnp.dtype) -> dict[int, Shared]:
    """The start of what CSA2 layers hand down, by ratio: zeros, which the first `full` layer replaces."""
    devices = jax.sharding.get_abstract_mesh().shape["context"]

    def zeros(*shape: int, dtype: jnp.dtype = dtype) -> jax.Array:
        return jnp.zeros((B, *shape), dtype, out_sharding=act_spec(3))

    def start(ratio: int) -> Shared:
        m, M = devices * own_slots(S // devices, ratio), S // ratio
        keys = None if cfg.attention == "dense" else zeros(m, cfg.index_head_dim)
        sparse, pool = cfg.attention == "sparse", min(cfg.candidate_topk_blocks, -(-M // cfg.candidate_block_size))
        topk = zeros(S, min(cfg.index_topk, M), dtype=jnp.int32) if sparse else None
        candidates = zeros(S, pool, dtype=jnp.int32) if sparse and cfg.candidate_source_layer >= 0 else None
        return Shared(zeros(m, cfg.head_dim), keys, topk, candidates)

    return {r: start(r) for r in set(cfg.compress_ratios) - {0}} if cfg.kv_source_layers else {}


class Compressor(nnx.Module):
    """Pools windows of tokens into entries of `width` channels: CSA, HCA (section 2.3) and CSA2.

    CSA2's has no position bias, and at ratio 1 no gate either: it is a projection (V4.1 section 2.3).
    """

    def __init__(self, cfg: ModelConfig, make: Params, spec: LayerSpec, width: int):
        self.overlap = spec.mode == "csa"
        self.channels = channels = width * (2 if self.overlap else 1)
        # The two halves of an overlapping compressor are projections of their own.
        halves = Role("matrix", MatrixSpec(output_split=channels // width))
        if spec.mode != "full":
            self.ape = make.full(0.0, ("window", spec.ratio), ("head_dim", channels))
        self.wkv = make.kernel(("embed", cfg.dim), ("head_dim", channels), role=halves)
        if spec.mode != "full" or spec.ratio > 1:
            self.wgate = make.kernel(("embed", cfg.dim), ("head_dim", channels), role=halves)
        self.norm = make.ones(("head_dim", width))

    def project(self, x_BSD: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Values and gate logits of every token, [B, S, C] each."""
        value = linear(x_BSD, self.wkv, dtype)
        return value, linear(x_BSD, self.wgate, dtype) if hasattr(self, "wgate") else jnp.zeros_like(value)

    def tables(self, ratio: int) -> tuple[jax.Array, jax.Array]:
        """Position bias [m, C] and norm weight [width]."""
        ape = whole(self.ape) if hasattr(self, "ape") else jnp.zeros((ratio, self.channels))
        return ape, whole(self.norm)


class Indexer(nnx.Module):
    """The lightning indexer's tensors: scores every compressed entry for every query.

    Its keys come from a compressor of its own in CSA and from the entries in `full` layers.
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
        self, x_BSD: jax.Array, shared: dict[int, Shared], at: Tables, dtype: jnp.dtype
    ) -> tuple[jax.Array, Attended, dict[int, Shared]]:
        """Output [B, S, D], the core's result for its loss and its selection, and what is handed down."""
        cfg, spec = self.cfg, self.spec
        B, S, _ = x_BSD.shape
        q, latent = self.queries(x_BSD, dtype)
        kv = self.keys(x_BSD, dtype)
        act: dict[str, Any] = {"q": q, "kv": kv}
        weights: dict[str, Any] = {"sink": whole(self.attn_sink)}
        if spec.mode in ("csa", "hca", "full"):
            act["main"] = self.compressor.project(x_BSD, dtype)
            weights["main"] = self.compressor.tables(spec.ratio)
        if spec.indexed and cfg.attention != "dense":
            # The indexer learns from its own loss alone: its inputs are detached (V3.2 section 2.1).
            x, latent = jax.lax.stop_gradient((x_BSD, latent))
            shape = (B, S, cfg.index_n_heads, cfg.index_head_dim)
            act["index_q"] = linear(latent, self.indexer.wq_b, dtype).reshape(shape)
            act["index_w"] = linear(x, self.indexer.weights_proj, dtype).astype(jnp.float32)
            if spec.mode == "csa":
                act["index"] = self.indexer.compressor.project(x, dtype)
                weights["index"] = self.indexer.compressor.tables(spec.ratio)
            elif spec.mode == "full":
                weights["keys"] = whole(self.indexer.wk), whole(self.indexer.k_norm)

        tokens, rows = jax.P(BATCH, "context"), jax.P(BATCH)
        core = functools.partial(_core, cfg, spec)
        core = jax.shard_map(core, in_specs=(tokens, jax.P(), rows, tokens), out_specs=tokens)
        out, own = core(act, weights, at, shared.get(spec.ratio))
        y = self.output(out.o_BSHK, dtype)
        return y, out, shared if own is None else shared | {spec.ratio: own}

    def queries(self, x_BSD: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Queries [B, S, H, K] before RoPE, and their latent [B, S, lora]."""
        cfg = self.cfg
        latent = rms_norm(linear(x_BSD, self.wq_a, dtype), cfg.norm_eps, self.q_norm)
        q = linear(latent, self.wq_b, dtype).reshape(*x_BSD.shape[:2], cfg.n_heads, cfg.head_dim)
        return rms_norm(q, cfg.norm_eps) if cfg.query_norm else q, latent

    def keys(self, x_BSD: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The window's shared keys and values [B, S, K] before RoPE."""
        return rms_norm(linear(x_BSD, self.wkv, dtype), self.cfg.norm_eps, self.kv_norm)

    def output(self, o_BSHK: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The grouped output projection [B, S, D] of what the heads read."""
        B, S, H, K = o_BSHK.shape
        groups = self.cfg.o_groups
        o_BSGI = jnp.reshape(saved(o_BSHK), (B, S, groups, H * K // groups), out_sharding=act_spec(4))
        u = linear(o_BSGI, self.wo_a, dtype)
        return linear(u.reshape(B, S, -1), self.wo_b, dtype)


def _core(
    cfg: ModelConfig,
    spec: LayerSpec,
    act: dict[str, Any],
    weights: dict[str, Any],
    at: Tables,
    shared: Shared | None,
) -> tuple[Attended, Shared | None]:
    """Everything that looks along the sequence, on one device's rows and chunk of positions."""
    S, ratio = act["q"].shape[1], spec.ratio
    angles = chunk(at.rotations[ratio > 0], S)
    heads = jax.tree.map(lambda a: a[:, :, None], angles)  # the same angles for every head

    def pool(name: str) -> tuple[jax.Array, Rotation]:
        """This device's entries [B, m, K], normed and not rotated, and their angles."""
        overlap = spec.mode == "csa"
        (kv, gate), (ape, norm) = with_left(act[name], (2 if overlap else 1) * ratio - 1), weights[name]
        own, number_BM = own_windows(at.windows[ratio], ratio, S, kv.shape[1] - S)
        pooled = compress(kv, gate, ape, own, overlap)
        starts = jax.tree.map(lambda a: rows_at(a, number_BM), at.starts[ratio])
        return rms_norm(pooled, cfg.norm_eps) * norm, starts

    def entries(name: str) -> jax.Array:
        return rotate(*pool(name)).astype(act["kv"].dtype)

    gather = lambda own: gather_entries(own, at.windows[ratio], S)
    some = ratio > 0 and at.windows[ratio].end_BM.shape[1] > 0  # a row shorter than the ratio has no entries
    if some and spec.mode == "full":
        assert shared is not None  # there is a slot for every ratio
        latent, starts = pool("main")
        shared = shared._replace(entries_BmK=rotate(latent, starts).astype(act["kv"].dtype))
        if "keys" in weights:
            wk, norm = weights["keys"]
            keys = jnp.einsum("bmk,kj->bmj", jax.lax.stop_gradient(latent), wk)
            keys = rotate(rms_norm(keys, cfg.norm_eps) * norm, starts).astype(act["kv"].dtype)
            shared = shared._replace(keys_BmJ=keys)
    main = None
    if some:
        main = gather(entries("main") if shared is None else shared.entries_BmK)
    index = topk = None
    sparse = cfg.attention == "sparse"
    if some and "index_q" in act:
        keys = gather(entries("index") if shared is None else shared.keys_BmJ)
        pooled = (cfg.candidate_topk_blocks, cfg.candidate_block_size) if spec.candidates and sparse else None
        given = shared.candidates_BSc if shared is not None and spec.candidates == "user" else None
        query, k = rotate(act["index_q"], heads), cfg.index_topk
        index = Index(query, act["index_w"], keys, k * sparse, pooled, given, k * cfg.recall)
    elif some and shared is not None:
        topk = shared.topk_BSk
    out = attend(
        rotate(act["q"], heads),
        with_left(rotate(act["kv"], angles), cfg.window_size - 1),
        weights["sink"],
        chunk(at.docs.first_BS, S),
        window=cfg.window_size,
        offset=offset(S),
        entries_BMK=main,
        at=at.windows.get(ratio),
        index=index,
        topk_BSk=topk,
        near_BS=chunk(at.near_BS, S) if spec.decoder and at.near_BS is not None else None,
        block=cfg.attention_block,
        select=cfg.select,
    )
    if index is not None and shared is not None and sparse:
        shared = shared._replace(topk_BSk=out.topk_BSk)
        if spec.candidates == "source":
            shared = shared._replace(candidates_BSc=out.candidates_BSc)
    return out._replace(o_BSHK=rotate(out.o_BSHK, heads, inverse=True)), shared
