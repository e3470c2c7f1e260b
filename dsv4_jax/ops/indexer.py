# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer: scores of compressed entries, its loss, and the selection of a few of them.

Letters: B rows, T queries, M compressed entries, H heads, k selected entries, c candidate blocks,
I index heads, J index width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.ops.documents import Windows


class Index(NamedTuple):
    """What the lightning indexer brings: queries, head weights and keys, fp32.

    `topk` = 0 attends to every visible entry and still trains the indexer (warm-up). `pool` = (blocks,
    entries of a block) makes a pool of candidates; `candidates` is one made before, to select from.
    `recall` > 0 also measures how much of the attention that many picks cover.
    """

    q_BSIJ: jax.Array
    w_BSI: jax.Array
    k_BMJ: jax.Array
    topk: int
    pool: tuple[int, int] | None = None
    candidates_BSc: jax.Array | None = None
    recall: int = 0


def index_scores(q_BTIJ: jax.Array, w_BTI: jax.Array, k_BMJ: jax.Array) -> jax.Array:
    """Score of every entry for every query, fp32 [B, T, M] (section 2.3.1, lightning indexer)."""
    hit = jax.nn.relu(jnp.einsum("btij,bmj->btim", q_BTIJ, k_BMJ, preferred_element_type=jnp.float32))
    scale = (q_BTIJ.shape[-1] * q_BTIJ.shape[-2]) ** -0.5
    return jnp.einsum("bti,btim->btm", w_BTI * scale, hit)


def indexer_loss(p_BHTM: jax.Array, score_BTM: jax.Array, allowed_BTM: jax.Array) -> jax.Array:
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


def indexer_recall(p_BHTM: jax.Array, visible_BTM: jax.Array, topk_BTk: jax.Array) -> jax.Array:
    """How much of the attention the k selected entries cover, fp32 [B, T, 3], to be added up over queries.

    The share of the attention on all visible entries (a softmax that has them all, summed over heads) that falls
    on the selected ones; k over the number of visible ones, which is what a choice at random covers; and 1. Zeros
    where no more than k are visible: there is nothing to choose.
    """
    mass_BTM, visible = p_BHTM.sum(1), visible_BTM.sum(-1)
    picked = jnp.take_along_axis(mass_BTM, jnp.maximum(topk_BTk, 0), axis=2)
    covered, total = jnp.where(topk_BTk >= 0, picked, 0.0).sum(-1), mass_BTM.sum(-1)
    counts = (visible > topk_BTk.shape[2]) & (total > 0)
    share, chance = covered / jnp.where(counts, total, 1.0), topk_BTk.shape[2] / jnp.maximum(visible, 1)
    return jnp.where(counts[..., None], jnp.stack([share, chance, jnp.ones_like(share)], -1), 0.0)


def best_entries(score_BTM: jax.Array, visible_BTM: jax.Array, k: int) -> jax.Array:
    """The k best visible entries [B, T, k], -1 where fewer are visible; ties go to the lower index."""
    masked = jnp.where(visible_BTM, jax.lax.stop_gradient(score_BTM), -jnp.inf)
    value, index = jax.lax.top_k(masked, k)
    return checkpoint_name(jnp.where(value > -jnp.inf, index, -1), "topk")


def one_of(index_BTk: jax.Array, M: int) -> jax.Array:
    """The mask [B, T, M] that holds the entries of the given numbers, -1 for none."""

    def row(index_k: jax.Array) -> jax.Array:
        return jnp.zeros(M, bool).at[jnp.where(index_k < 0, M, index_k)].set(True, mode="drop")

    return jax.vmap(jax.vmap(row))(index_BTk)


def candidate_blocks(score_BTM: jax.Array, visible_BTM: jax.Array, at: Windows, blocks: int, size: int) -> jax.Array:
    """The pool of a query: its best blocks of entries, each by its first entry [B, T, c], -1 for none.

    Blocks are `size` neighbours, counted from each document's first entry; a block is as good as its best
    visible entry, and the one with the newest visible entry is always in (V4.1 section 2.3.2).
    """
    M = score_BTM.shape[-1]
    score = jnp.where(visible_BTM, jax.lax.stop_gradient(score_BTM), -jnp.inf)
    ahead = [(0, 0), (0, 0), (0, size - 1)]  # entries of later documents are not visible
    best = jax.lax.reduce_window(score, -jnp.inf, jax.lax.max, (1, 1, size), (1, 1, 1), ahead)
    newest = visible_BTM.sum(-1, keepdims=True) - 1  # number of that entry inside its document
    index = at.index_BM[:, None]
    best = jnp.where(index == newest // size * size, jnp.inf, best)
    return best_entries(best, visible_BTM & (index % size == 0), min(blocks, -(-M // size)))


def in_blocks(first_BTc: jax.Array, M: int, size: int) -> jax.Array:
    """The mask [B, T, M] of the entries of a pool; where a document ends so does its last block."""
    starts = one_of(first_BTc, M)
    behind = [(0, 0), (0, 0), (size - 1, 0)]
    return jax.lax.reduce_window(starts, False, jax.lax.bitwise_or, (1, 1, size), (1, 1, 1), behind)
