# SPDX-License-Identifier: Apache-2.0
"""Attend to a sliding window, compressed entries and a sink under one softmax, in blocks of queries.

Letters: B rows, S positions, H heads, K head width, M compressed entries, k selected entries, I index
heads, J index width; within a block T queries and U window keys.

`attend` handles `block` queries at a time and recomputes each block in the backward pass, so memory
grows linearly with S. `attend_reference` computes the same from whole [S, S] and [S, M] masks; the tests
compare the two. All of it is local to one device. A device that has a chunk of the row's queries needs the
window keys left of the chunk too, and all entries.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import varying
from dsv4_jax.ops.documents import Windows
from dsv4_jax.ops.indexer import (
    Index,
    index_scores,
    indexer_loss,
    indexer_recall,
    mask_blocks,
    mask_entries,
    score_allowed,
    select_blocks,
    select_entries,
)

# Gathering k entries for each query costs about as much as attending to this many times k entries under a
# shared mask. On CPU gathering wins from 2 on (`benchmarks/attention.py`); on accelerators a gather is dearer.
GATHER_COST = 3

_NOWHERE = 2**30  # a position past every row

Select = Literal["auto", "masked", "gathered"]


class Attended(NamedTuple):
    """Hold the results of the attention core.

    Attributes:
        o_BSHK: outputs; zero where a query sees no key.
        kl_BS: the indexer's loss of each query in nats, fp32; zero without an indexer.
        topk_BSk: numbers of the entries that each query attends to, -1 for none; None without selection.
        candidates_BSc: first entry of each block in the indexer's pool, -1 for none; None without a pool.
        recall_BS3: `indexer_recall` of each query; None unless `index.recall` asks for it.
    """

    o_BSHK: jax.Array
    kl_BS: jax.Array
    topk_BSk: jax.Array | None
    candidates_BSc: jax.Array | None
    recall_BS3: jax.Array | None


def gathers(M: int, k: int, select: Select) -> bool:
    """Return whether each query gathers its k entries of M, or attends to all under a mask. k = 0: no selection."""
    return 0 < k < M and (select == "gathered" or (select == "auto" and M > GATHER_COST * k))


def explain_choice(M: int, k: int, select: Select) -> str:
    """Describe how queries reach k selected entries of M, and why; k = 0: no selection."""
    if not 0 < k < M:
        return f"all {M:,} entries under a mask: each query attends to all that it may see"
    chosen = "gathered" if gathers(M, k, select) else "masked"
    reasons = {
        "gathered": "their products cost less than those of all entries under a mask",
        "masked": f"a gather costs as much as a mask over {GATHER_COST} times as many entries",
    }
    return f"{k:,} of {M:,} entries for each query, {chosen}{' (auto)' * (select == 'auto')}: {reasons[chosen]}"


def softmax_with_sink(logits: tuple[jax.Array, ...], sink_H: jax.Array) -> tuple[jax.Array, ...]:
    """Compute one softmax over all groups of keys [..., H, .]; exp(sink) joins the denominator only.

    Masked logits are -inf. A query without keys gets zeros and sends no gradient.
    """
    sink = jnp.broadcast_to(sink_H[:, None], (*logits[0].shape[:-1], 1))
    top = functools.reduce(jnp.maximum, (x.max(-1, keepdims=True) for x in logits if x.shape[-1]), sink)
    top = jax.lax.stop_gradient(top)
    weights = tuple(jnp.exp(x - top) for x in logits)
    total = sum((w.sum(-1, keepdims=True) for w in weights), jnp.exp(sink - top))
    return tuple(w / total for w in weights)


def _query(q_BTHK: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply queries by keys [B, U, K] that all share, or by keys [B, T, k, K] of each: fp32 [B, T, H, .].

    For shared keys queries and heads are the rows of one matrix. Queries stay before heads, as they come, so that no
    array is transposed for it.
    """
    if keys.ndim == 4:
        return jnp.einsum("bthk,btmk->bthm", q_BTHK, keys, preferred_element_type=jnp.float32)
    B, T, H, K = q_BTHK.shape
    x = jnp.einsum("brk,buk->bru", q_BTHK.reshape(B, T * H, K), keys, preferred_element_type=jnp.float32)
    return x.reshape(B, T, H, -1)


def _weigh(p_BTHU: jax.Array, keys: jax.Array) -> jax.Array:
    """Sum keys with the weights of the heads, [B, T, H, K]; keys as in `_query`."""
    p_BTHU = p_BTHU.astype(keys.dtype)
    if keys.ndim == 4:
        return jnp.einsum("bthm,btmk->bthk", p_BTHU, keys)
    B, T, H, U = p_BTHU.shape
    return jnp.einsum("bru,buk->brk", p_BTHU.reshape(B, T * H, U), keys).reshape(B, T, H, -1)


def attend(
    q_BSHK: jax.Array,
    kv_BSK: jax.Array,
    sink_H: jax.Array,
    first_BS: jax.Array,
    *,
    window: int,
    offset: jax.Array | int = 0,
    entries_BMK: jax.Array | None = None,
    windows: Windows | None = None,
    index: Index | None = None,
    topk_BSk: jax.Array | None = None,
    near_BS: jax.Array | None = None,
    block: int = 128,
    select: Select = "auto",
) -> Attended:
    """Attend from each query to its window, its compressed entries and the sink (section 2.3).

    Args:
        q_BSHK: queries with RoPE.
        kv_BSK: keys shared by all heads, which are also the values. Up to `window` - 1 keys of earlier
            positions may precede those of the queries: [B, before + S, K].
        sink_H: sink logits, fp32.
        first_BS: row position of each query's document (`Documents.first_BS`).
        window: positions a query sees, itself included.
        offset: row position of the first query.
        entries_BMK: compressed entries, both keys and values.
        windows: the entries' windows: row positions and numbers.
        index: inputs of the lightning indexer, in layers that have one.
        topk_BSk: numbers of the entries that each query attends to, selected by an earlier layer; -1 for none.
        near_BS: first row position that each query's window may reach; None: `first_BS`.
        block: queries handled at a time.
        select: "masked" attends to all entries under a mask, "gathered" to the selected ones of each query,
            gathered; "auto" takes the cheaper.
    """
    B, S, _, K = q_BSHK.shape
    sink_H = varying(sink_H, q_BSHK)  # so that its gradient is added up over devices once, not in every block
    # Selection: M entries, of which each query attends to k (0: to all that it sees), gathered or under a mask.
    M = 0 if entries_BMK is None else entries_BMK.shape[1]
    if M == 0:
        entries_BMK, windows, index, topk_BSk = None, None, None, None
    k = 0 if topk_BSk is None else topk_BSk.shape[2]
    k = k if index is None else min(index.topk, M)
    gathered = gathers(M, k, select)
    # Sizes in blocks of T positions: the queries, the keys left of them, and how far back a window reaches.
    T = min(block, S)
    n_blocks = -(-S // T)
    before = kv_BSK.shape[1] - S
    n_left = -(-before // T)
    n_before = min(-(-(window - 1) // T), n_left + n_blocks - 1)
    reach = n_before * T if n_blocks > 1 else before  # keys before a block's own; a single block reads them as they are

    def blocks(x: jax.Array, fill: int = 0) -> jax.Array:
        """Cut [B, S, ...] into [blocks, B, T, ...], padded with `fill`."""
        pad = [(0, 0), (0, n_blocks * T - S)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill).reshape(B, n_blocks, T, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    # keys [blocks, B, U, K]: for each block of queries its own keys and those of the n_before blocks before it.
    keys = kv_BSK[None]
    if n_blocks > 1:
        left = jnp.pad(kv_BSK[:, :before], [(0, 0), (reach - before, 0), (0, 0)])
        left = jnp.moveaxis(left.reshape(B, n_before, T, K), 1, 0)
        kv_blocks = jnp.concatenate([left, blocks(kv_BSK[:, before:])])
        keys = jnp.concatenate([kv_blocks[i : i + n_blocks] for i in range(n_before + 1)], axis=2)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("topk"))
    def one(xs):
        # Window: query t sees key u of its document if u is one of the last `window` positions up to t.
        b, q_BTHK, kv_BUK, first_BT, near_BT, (index_q, index_w, pool), topk = xs
        t = offset + b * T + jnp.arange(T)
        u = offset + b * T - reach + jnp.arange(reach + T)
        near_TU = (u <= t[:, None]) & (u > t[:, None] - window)
        seen_BTU = near_TU & (u >= near_BT[..., None])

        def logits(keys: jax.Array, allowed: jax.Array) -> jax.Array:
            return jnp.where(allowed[:, :, None], _query(q_BTHK, keys) * K**-0.5, -jnp.inf)

        near = logits(kv_BUK, seen_BTU)
        if entries_BMK is None or windows is None:
            (p,) = softmax_with_sink((near,), sink_H)
            o = _weigh(p, kv_BUK)
            return o, varying(jnp.zeros(first_BT.shape), o), None, None, None

        # Entries: visible [B, T, M] are those of the query's document whose window has ended; a pool narrows them.
        allowed = visible = (windows.end_BM[:, None] <= t[:, None]) & (windows.start_BM[:, None] >= first_BT[..., None])
        score = made = recall = None
        entries = entries_BMK
        if index is not None:
            if pool is not None and index.pool:
                allowed = visible & mask_blocks(pool, M, index.pool[1])
            # All scores serve the choice. Without a mask the loss reads only those of the chosen entries, made below.
            asked = index_q, index_w, index.k_BMJ
            score = score_allowed(*asked, allowed) if gathered else index_scores(*asked)
            if pool is None and index.pool:
                made = select_blocks(score, allowed, windows, *index.pool)
            topk = select_entries(score, allowed, k) if k else None
            if index.recall:  # measured on the attention to all visible entries, also where the layer selects
                _, p_all = softmax_with_sink((near, logits(entries_BMK, visible)), sink_H)
                recall = indexer_recall(p_all, visible, select_entries(score, allowed, min(index.recall, M)))
        # The keys of the far part: each query's k entries [B, T, k, K], or all [B, M, K] under a mask.
        if topk is not None and gathered:
            allowed = topk >= 0
            take = jax.vmap(lambda x_MK, i_Tk: x_MK[i_Tk])
            entries = take(entries_BMK, jnp.maximum(topk, 0))
            if index is not None:
                score = index_scores(index_q, index_w, take(index.k_BMJ, jnp.maximum(topk, 0)))
        elif topk is not None and k < M:
            allowed = mask_entries(topk, M)
        # One softmax over window, entries and sink; the indexer learns from the entries' share of it.
        far = logits(entries, allowed)
        p, p_far = softmax_with_sink((near, far), sink_H)
        o = _weigh(p, kv_BUK)
        o += _weigh(p_far, entries)
        kl = varying(jnp.zeros(first_BT.shape), o) if score is None else indexer_loss(p_far, score, allowed)
        return o, kl, topk, made, recall

    def rows(x: jax.Array) -> jax.Array:
        """Join [blocks, B, T, ...] to [B, S, ...]."""
        return jnp.moveaxis(x, 0, 1).reshape(B, n_blocks * T, *x.shape[3:])[:, :S]

    # Padded queries have `first` past every position, so they see nothing.
    first = blocks(first_BS, fill=_NOWHERE)
    near = first if near_BS is None else blocks(near_BS, fill=_NOWHERE)
    asked = (None,) * 3 if index is None else jax.tree.map(blocks, (index.q_BSIJ, index.w_BSI, index.candidates_BSc))
    chosen = None if topk_BSk is None else blocks(topk_BSk, fill=-1)
    xs = (jnp.arange(n_blocks), blocks(q_BSHK), keys, first, near, asked, chosen)
    return Attended(*jax.tree.map(rows, jax.lax.map(one, xs)))


def attend_reference(
    q_BSHK: jax.Array,
    kv_BSK: jax.Array,
    sink_H: jax.Array,
    first_BS: jax.Array,
    *,
    window: int,
    entries_BMK: jax.Array | None = None,
    windows: Windows | None = None,
    index: Index | None = None,
    topk_BSk: jax.Array | None = None,
    near_BS: jax.Array | None = None,
) -> Attended:
    """Compute what `attend` does from whole [S, S] and [S, M] masks: short, quadratic in S, for the tests."""
    B, S, _, K = q_BSHK.shape
    t, s = jnp.arange(S)[:, None], jnp.arange(S)
    keys, kl, topk, made, recall = kv_BSK, jnp.zeros((B, S)), topk_BSk, None, None
    allowed = (s <= t) & (s > t - window) & (s >= (first_BS if near_BS is None else near_BS)[..., None])
    if entries_BMK is not None and windows is not None and entries_BMK.shape[1]:
        M = entries_BMK.shape[1]
        entry = visible = (windows.end_BM[:, None] <= t) & (windows.start_BM[:, None] >= first_BS[..., None])
        if index is not None:
            score = index_scores(index.q_BSIJ, index.w_BSI, index.k_BMJ)
            if index.pool and index.candidates_BSc is None:
                made = select_blocks(score, entry, windows, *index.pool)
            elif index.pool and index.candidates_BSc is not None:
                entry = visible & mask_blocks(index.candidates_BSc, M, index.pool[1])
            topk = select_entries(score, entry, min(index.topk, M)) if index.topk else None
            asked = select_entries(score, entry, min(index.recall, M)) if index.recall else None
        if topk is not None:
            entry = (topk[..., None] == jnp.arange(M)).any(2)
        keys = jnp.concatenate([keys, entries_BMK], axis=1)
        allowed, every = (jnp.concatenate([allowed, far], axis=2) for far in (entry, visible))

    def softmax(allowed: jax.Array) -> jax.Array:
        logit = jnp.einsum("bthk,bsk->bths", q_BSHK, keys) * K**-0.5
        logit = jnp.where(allowed[:, :, None], logit, -jnp.inf)
        sink = jnp.broadcast_to(sink_H[:, None], (*logit.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([logit, sink], axis=-1), axis=-1)[..., :-1]

    p = softmax(allowed)
    if index is not None and keys is not kv_BSK:
        kl = indexer_loss(p[..., S:], score, entry)
        if asked is not None:
            recall = indexer_recall(softmax(every)[..., S:], visible, asked)
    return Attended(jnp.einsum("bths,bsk->bthk", p, keys), kl, topk, made, recall)
