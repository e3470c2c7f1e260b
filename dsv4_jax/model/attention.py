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

from dsv4_jax.mesh import BATCH
from dsv4_jax.model.config import CSA_RATIO, ModelConfig
from dsv4_jax.model.params import Params, linear, rms_norm, saved, whole
from dsv4_jax.model.rope import Rotation, frequencies, rotate, rotation
from dsv4_jax.ops.attention import Attended, Index, attend
from dsv4_jax.ops.context import chunk, gather_entries, offset, own_windows, rows_at, with_left
from dsv4_jax.ops.documents import Documents, Windows, compress, documents, windows
from dsv4_jax.optim import MatrixSpec, Role


class Tables(NamedTuple):
    """Integer and angle tables of a batch that all layers share; positions are whole everywhere.

    Attributes:
        docs: document borders.
        windows: compression windows, by ratio.
        rotations: angles of every position, without and with compression (keys False, True).
        starts: angles of every window's first token, by ratio.
    """

    docs: Documents
    windows: dict[int, Windows]
    rotations: dict[bool, Rotation]
    starts: dict[int, Rotation]


def tables(cfg: ModelConfig, segment_ids: jax.Array) -> Tables:
    """Tables of packed rows, `segment_ids` [B, S] with whole rows on each device."""
    return jax.shard_map(functools.partial(_tables, cfg), in_specs=jax.P(BATCH), out_specs=jax.P(BATCH))(segment_ids)


def _tables(cfg: ModelConfig, segment_ids: jax.Array) -> Tables:
    docs = documents(segment_ids)
    ratios = sorted(set(cfg.compress_ratios) - {0})
    freqs = {compressed: frequencies(cfg, compressed) for compressed in (False, True)}
    wins = {r: windows(docs, r) for r in ratios}
    return Tables(
        docs,
        wins,
        {c: rotation(f, docs.position_BS) for c, f in freqs.items()},
        {r: rotation(freqs[True], w.index_BM * r) for r, w in wins.items()},
    )


class Compressor(nnx.Module):
    """Pools windows of `ratio` tokens into entries of `width` channels (section 2.3)."""

    def __init__(self, cfg: ModelConfig, make: Params, ratio: int, width: int):
        self.eps, self.overlap = cfg.norm_eps, ratio == CSA_RATIO
        channels = width * (2 if self.overlap else 1)
        self.ape = make.full(0.0, ("window", ratio), ("head_dim", channels))
        # The two halves of an overlapping compressor are projections of their own.
        halves = Role("matrix", MatrixSpec(output_split=channels // width))
        self.wkv = make.kernel(("embed", cfg.dim), ("head_dim", channels), role=halves)
        self.wgate = make.kernel(("embed", cfg.dim), ("head_dim", channels), role=halves)
        self.norm = make.ones(("head_dim", width))

    def project(self, x_BSD: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Values and gate logits of every token, [B, S, C] each."""
        return linear(x_BSD, self.wkv, dtype), linear(x_BSD, self.wgate, dtype)

    def tables(self) -> tuple[jax.Array, jax.Array]:
        """Position bias [m, C] and norm weight [width]."""
        return whole(self.ape), whole(self.norm)


class Indexer(nnx.Module):
    """The lightning indexer's tensors: scores every compressed entry for every query."""

    def __init__(self, cfg: ModelConfig, make: Params):
        heads = Role("matrix", heads=cfg.index_n_heads)
        self.wq_b = make.kernel(
            ("lora", cfg.q_lora_rank), ("heads", cfg.index_n_heads * cfg.index_head_dim), role=heads
        )
        self.weights_proj = make.kernel(("embed", cfg.dim), ("heads", cfg.index_n_heads))
        self.compressor = Compressor(cfg, make, CSA_RATIO, cfg.index_head_dim)


class Attention(nnx.Module):
    """Attention of one layer of the given ratio (section 2.3)."""

    def __init__(self, cfg: ModelConfig, make: Params, ratio: int):
        self.cfg, self.ratio = cfg, ratio
        H, K, G = cfg.n_heads, cfg.head_dim, cfg.o_groups
        self.attn_sink = make.full(0.0, ("heads", H))
        self.wq_a = make.kernel(("embed", cfg.dim), ("lora", cfg.q_lora_rank))
        self.q_norm = make.ones(("lora", cfg.q_lora_rank))
        self.wq_b = make.kernel(("lora", cfg.q_lora_rank), ("heads", H * K), role=Role("matrix", heads=H))
        self.wkv = make.kernel(("embed", cfg.dim), ("head_dim", K))
        self.kv_norm = make.ones(("head_dim", K))
        self.wo_a = make.kernel(("groups", G), ("heads", H * K // G), ("lora", cfg.o_lora_rank))
        self.wo_b = make.kernel(("lora", G * cfg.o_lora_rank), ("embed", cfg.dim))
        if ratio:
            self.compressor = Compressor(cfg, make, ratio, K)
        if ratio == CSA_RATIO:
            self.indexer = Indexer(cfg, make)

    def __call__(self, x_BSD: jax.Array, at: Tables, dtype: jnp.dtype) -> tuple[jax.Array, Attended]:
        """Output [B, S, D], and the core's result for its loss and its selection."""
        cfg, ratio = self.cfg, self.ratio
        B, S, _ = x_BSD.shape
        H, K = cfg.n_heads, cfg.head_dim
        latent = rms_norm(linear(x_BSD, self.wq_a, dtype), cfg.norm_eps, self.q_norm)
        q = rms_norm(linear(latent, self.wq_b, dtype).reshape(B, S, H, K), cfg.norm_eps)
        kv = rms_norm(linear(x_BSD, self.wkv, dtype), cfg.norm_eps, self.kv_norm)
        act: dict[str, Any] = {"q": q, "kv": kv}
        weights: dict[str, Any] = {"sink": whole(self.attn_sink)}
        if ratio:
            act["main"] = self.compressor.project(x_BSD, dtype)
            weights["main"] = self.compressor.tables()
        indexed = ratio == CSA_RATIO and cfg.attention != "dense"
        if indexed:
            # The indexer learns from its own loss alone: its inputs are detached (V3.2 section 2.1).
            x, latent = jax.lax.stop_gradient((x_BSD, latent))
            act["index_q"] = linear(latent, self.indexer.wq_b, dtype).reshape(
                B, S, cfg.index_n_heads, cfg.index_head_dim
            )
            act["index_w"] = linear(x, self.indexer.weights_proj, dtype).astype(jnp.float32)
            act["index"] = self.indexer.compressor.project(x, dtype)
            weights["index"] = self.indexer.compressor.tables()

        tokens, rows = jax.P(BATCH, "context"), jax.P(BATCH)
        core = functools.partial(_core, cfg, ratio)
        core = jax.shard_map(core, in_specs=(tokens, jax.P(), rows), out_specs=tokens)
        out: Attended = core(act, weights, at)
        u = linear(saved(out.o_BSHK), self.wo_a, dtype)
        return linear(u.reshape(B, S, -1), self.wo_b, dtype), out


def _core(cfg: ModelConfig, ratio: int, act: dict[str, Any], weights: dict[str, Any], at: Tables) -> Attended:
    """Everything that looks along the sequence, on one device's rows and chunk of positions."""
    S = act["q"].shape[1]
    angles = chunk(at.rotations[ratio > 0], S)
    heads = jax.tree.map(lambda a: a[:, :, None], angles)  # the same angles for every head

    def entries(name: str) -> jax.Array:
        overlap = ratio == CSA_RATIO
        (kv, gate), (ape, norm) = with_left(act[name], (2 if overlap else 1) * ratio - 1), weights[name]
        own, number_BM = own_windows(at.windows[ratio], ratio, S, kv.shape[1] - S)
        pooled = compress(kv, gate, ape, own, overlap)
        starts = jax.tree.map(lambda a: rows_at(a, number_BM), at.starts[ratio])
        own_BMK = rotate(rms_norm(pooled, cfg.norm_eps) * norm, starts).astype(kv.dtype)
        return gather_entries(own_BMK, at.windows[ratio], S)

    index = None
    some = ratio > 0 and at.windows[ratio].end_BM.shape[1] > 0  # a row shorter than the ratio has no entries
    if "index" in act and some:
        topk = cfg.index_topk if cfg.attention == "sparse" else 0
        index = Index(rotate(act["index_q"], heads), act["index_w"], entries("index"), topk)
    out = attend(
        rotate(act["q"], heads),
        with_left(rotate(act["kv"], angles), cfg.window_size - 1),
        weights["sink"],
        chunk(at.docs.first_BS, S),
        window=cfg.window_size,
        offset=offset(S),
        entries_BMK=entries("main") if some else None,
        at=at.windows.get(ratio),
        index=index,
        block=cfg.attention_block,
        select=cfg.select,
    )
    o = rotate(out.o_BSHK, heads, inverse=True)
    B, S, _, _ = o.shape
    return out._replace(o_BSHK=o.reshape(B, S, cfg.o_groups, -1))
