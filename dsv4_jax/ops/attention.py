# SPDX-License-Identifier: Apache-2.0
"""The attention core: sliding window, compressed entries and sink under one softmax, in blocks.

Letters: B rows, S positions, H heads, K head width, M compressed entries, k selected entries, I index
heads, J index width; within a block T queries and U window keys.

`attend` handles `block` queries at a time and recomputes each block in the backward pass, so memory
grows linearly with S. `attend_reference` computes the same from whole [S, S] and [S, M] masks and is
what the tests hold it to. All of it is local to one device, which may have a chunk of the row's
queries: then it has the window keys left of the chunk too, and all entries.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.mesh import varying
from dsv4_jax.ops.documents import Windows

# Reading k entries of its own costs a query about as much as this many times k under a shared mask: on
# CPU gathering wins from 2 on (`benchmarks/attention.py`); accelerators, where a gather is dearer, want more.
GATHER_COST = 3

_NOWHERE = 2**30  # a position past every row

Select = Literal["auto", "masked", "gathered"]


class Index(NamedTuple):
    """What the lightning indexer brings: queries, head weights and keys, fp32.

    `topk` = 0 attends to every visible entry and still trains the indexer (warm-up).
    """

    q_BSIJ: jax.Array
    w_BSI: jax.Array
    k_BMJ: jax.Array
    topk: int


class Attended(NamedTuple):
    """Result of the attention core.

    Attributes:
        o_BSHK: outputs; zero where a query sees no key.
        kl_BS: the indexer's loss of every query, fp32 (zero without an indexer).
        topk_BSk: entries selected by the indexer, -1 for none; None without selection.
    """

    o_BSHK: jax.Array
    kl_BS: jax.Array
    topk_BSk: jax.Array | None


def index_scores(q_BTIJ: jax.Array, w_BTI: jax.Array, k_BMJ: jax.Array) -> jax.Array:
    """Score of every entry for every query, fp32 [B, T, M] (section 2.3.1, lightning indexer)."""
    hit = jax.nn.relu(jnp.einsum("btij,bmj->btim", q_BTIJ, k_BMJ, preferred_element_type=jnp.float32))
    scale = (q_BTIJ.shape[-1] * q_BTIJ.shape[-2]) ** -0.5
    return jnp.einsum("bti,btim->btm", w_BTI * scale, hit)


def _kl(p_BHTM: jax.Array, score_BTM: jax.Array, allowed_BTM: jax.Array) -> jax.Array:
    """KL divergence [B, T] from the attention on the allowed entries to the softmax of the scores.

    The target is the joint softmax (its denominator has the window and the sink), summed over heads,
    normalised over the entries and detached.
    """
    target = jax.lax.stop_gradient(p_BHTM).sum(1)
    total = target.sum(-1, keepdims=True)
    target = target / jnp.where(total > 0, total, 1.0)
    score = jnp.where(allowed_BTM, score_BTM, -jnp.inf)
    safe = jnp.where(allowed_BTM.any(-1, keepdims=True), score, 0.0)
    log_q = jnp.where(allowed_BTM, jax.nn.log_softmax(safe, axis=-1), 0.0)
    return (jax.scipy.special.xlogy(target, target) - target * log_q).sum(-1)


def _softmax_with_sink(logits: tuple[jax.Array, ...], sink_H: jax.Array) -> tuple[jax.Array, ...]:
    """One softmax over all key groups [B, H, T, .]; exp(sink) joins the denominator only.

    Masked logits are -inf. A query without keys gets zeros and sends no gradient.
    """
    sink = jnp.broadcast_to(sink_H[None, :, None, None], (*logits[0].shape[:-1], 1))
    top = functools.reduce(jnp.maximum, (x.max(-1, keepdims=True) for x in logits if x.shape[-1]), sink)
    top = jax.lax.stop_gradient(top)
    weights = tuple(jnp.exp(x - top) for x in logits)
    total = sum((w.sum(-1, keepdims=True) for w in weights), jnp.exp(sink - top))
    return tuple(w / total for w in weights)


def _topk(score_BTM: jax.Array, visible_BTM: jax.Array, k: int) -> jax.Array:
    """The k best visible entries [B, T, k], -1 where fewer are visible; ties go to the lower index."""
    masked = jnp.where(visible_BTM, jax.lax.stop_gradient(score_BTM), -jnp.inf)
    value, index = jax.lax.top_k(masked, k)
    return checkpoint_name(jnp.where(value > -jnp.inf, index, -1), "topk")


def _one_of(topk_BTk: jax.Array, M: int) -> jax.Array:
    """The mask [B, T, M] that holds the selected entries."""

    def row(index_k: jax.Array) -> jax.Array:
        return jnp.zeros(M, bool).at[jnp.where(index_k < 0, M, index_k)].set(True, mode="drop")

    return jax.vmap(jax.vmap(row))(topk_BTk)


def attend(
    q_BSHK: jax.Array,
    kv_BSK: jax.Array,
    sink_H: jax.Array,
    first_BS: jax.Array,
    *,
    window: int,
    offset: jax.Array | int = 0,
    entries_BMK: jax.Array | None = None,
    at: Windows | None = None,
    index: Index | None = None,
    block: int = 128,
    select: Select = "auto",
) -> Attended:
    """Attention of every query to its window, its compressed entries and the sink (section 2.3).

    Args:
        q_BSHK: queries with RoPE.
        kv_BSK: shared keys, which are also the values; before those of the queries there may be others
            [B, before + S, K], up to window - 1.
        sink_H: sink logits, fp32.
        first_BS: row position of each query's document (`Documents.first_BS`).
        window: positions a query sees, itself included.
        offset: row position of the first query.
        entries_BMK: compressed entries, keys and values; `at` says where their windows lie.
        index: the lightning indexer, in layers that have one.
        block: queries handled at a time.
        select: all entries under a mask, or each query's own gathered; auto takes the cheaper.
    """
    B, S, _, K = q_BSHK.shape
    M = 0 if entries_BMK is None else entries_BMK.shape[1]
    if M == 0:
        entries_BMK, at, index = None, None, None
    k = 0 if index is None else min(index.topk, M)
    gathered = 0 < k < M and (select == "gathered" or (select == "auto" and M > GATHER_COST * k))
    T = min(block, S)
    n_blocks = -(-S // T)
    before = kv_BSK.shape[1] - S
    n_left = -(-before // T)
    n_before = min(-(-(window - 1) // T), n_left + n_blocks - 1)  # blocks before its own that a query's window reaches

    def blocks(x: jax.Array, fill: int = 0) -> jax.Array:
        """[B, S, ...] cut into [blocks, B, T, ...]."""
        pad = [(0, 0), (0, n_blocks * T - S)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill).reshape(B, n_blocks, T, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    left = jnp.pad(kv_BSK[:, :before], [(0, 0), (n_before * T - before, 0), (0, 0)])
    left = jnp.moveaxis(left.reshape(B, n_before, T, K), 1, 0)
    kv_blocks = jnp.concatenate([left, blocks(kv_BSK[:, before:])])
    keys = jnp.concatenate([kv_blocks[i : i + n_blocks] for i in range(n_before + 1)], axis=2)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("topk"))
    def one(xs):
        b, q_BTHK, kv_BUK, first_BT, index_q, index_w = xs
        t = offset + b * T + jnp.arange(T)
        u = offset + (b - n_before) * T + jnp.arange((n_before + 1) * T)
        near_TU = (u <= t[:, None]) & (u > t[:, None] - window)
        seen_BTU = near_TU & (u >= first_BT[..., None])

        def logits(equation: str, keys: jax.Array, allowed: jax.Array) -> jax.Array:
            x = jnp.einsum(equation, q_BTHK, keys, preferred_element_type=jnp.float32)
            return jnp.where(allowed[:, None], x * K**-0.5, -jnp.inf)

        near = logits("bthk,buk->bhtu", kv_BUK, seen_BTU)
        if entries_BMK is None or at is None:
            (p,) = _softmax_with_sink((near,), sink_H)
            o = jnp.einsum("bhtu,buk->bthk", p.astype(kv_BUK.dtype), kv_BUK)
            return o, varying(jnp.zeros(first_BT.shape), o), None

        allowed = (at.end_BM[:, None] <= t[:, None]) & (at.start_BM[:, None] >= first_BT[..., None])
        score = topk = None
        entries, letters = entries_BMK, "bmk"
        if index is not None:
            score = index_scores(index_q, index_w, index.k_BMJ)
            if k:
                topk = _topk(score, allowed, k)
            if topk is not None and gathered:
                allowed, pick = topk >= 0, jnp.maximum(topk, 0)
                score = jnp.take_along_axis(score, pick, axis=2)
                entries, letters = jax.vmap(lambda e_MK, i_Tk: e_MK[i_Tk])(entries_BMK, pick), "btmk"
            elif topk is not None and k < M:
                allowed = _one_of(topk, M)
        far = logits(f"bthk,{letters}->bhtm", entries, allowed)
        p, p_far = _softmax_with_sink((near, far), sink_H)
        o = jnp.einsum("bhtu,buk->bthk", p.astype(kv_BUK.dtype), kv_BUK)
        o += jnp.einsum(f"bhtm,{letters}->bthk", p_far.astype(entries.dtype), entries)
        kl = varying(jnp.zeros(first_BT.shape), o) if score is None else _kl(p_far, score, allowed)
        return o, kl, topk

    def rows(x: jax.Array) -> jax.Array:
        """[blocks, B, T, ...] back to [B, S, ...]."""
        return jnp.moveaxis(x, 0, 1).reshape(B, n_blocks * T, *x.shape[3:])[:, :S]

    index_q, index_w = (None, None) if index is None else (blocks(index.q_BSIJ), blocks(index.w_BSI))
    xs = (jnp.arange(n_blocks), blocks(q_BSHK), keys, blocks(first_BS, fill=_NOWHERE), index_q, index_w)
    return Attended(*jax.tree.map(rows, jax.lax.map(one, xs)))


def attend_reference(
    q_BSHK: jax.Array,
    kv_BSK: jax.Array,
    sink_H: jax.Array,
    first_BS: jax.Array,
    *,
    window: int,
    entries_BMK: jax.Array | None = None,
    at: Windows | None = None,
    index: Index | None = None,
) -> Attended:
    """What `attend` computes, from whole masks: quadratic in S, short, the oracle of the tests."""
    B, S, _, K = q_BSHK.shape
    t, s = jnp.arange(S)[:, None], jnp.arange(S)
    keys, kl, topk = kv_BSK, jnp.zeros((B, S)), None
    allowed = (s <= t) & (s > t - window) & (s >= first_BS[..., None])
    if entries_BMK is not None and at is not None and entries_BMK.shape[1]:
        M = entries_BMK.shape[1]
        entry = (at.end_BM[:, None] <= t) & (at.start_BM[:, None] >= first_BS[..., None])
        if index is not None:
            score = index_scores(index.q_BSIJ, index.w_BSI, index.k_BMJ)
            if index.topk:
                topk = _topk(score, entry, min(index.topk, M))
                entry = (topk[..., None] == jnp.arange(M)).any(2)
        keys = jnp.concatenate([keys, entries_BMK], axis=1)
        allowed = jnp.concatenate([allowed, entry], axis=2)
    logit = jnp.einsum("bthk,bsk->bhts", q_BSHK, keys) * K**-0.5
    logit = jnp.where(allowed[:, None], logit, -jnp.inf)
    sink = jnp.broadcast_to(sink_H[:, None, None], (*logit.shape[:-1], 1))
    p = jax.nn.softmax(jnp.concatenate([logit, sink], axis=-1), axis=-1)[..., :-1]
    if index is not None and keys is not kv_BSK:
        kl = _kl(p[..., S:], score, entry)
    return Attended(jnp.einsum("bhts,bsk->bthk", p, keys), kl, topk)
