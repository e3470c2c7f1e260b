# SPDX-License-Identifier: Apache-2.0
"""Score compressed entries with the lightning indexer, compute its loss, and select a few entries.

Letters: B rows, T queries, M compressed entries, H heads, k selected entries, c candidate blocks,
I index heads, J index width.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.mesh import on_cpu, varying
from dsv4_jax.ops.documents import Windows

# Sizes of a tile of entries: the least, and the heads' scores of a tile (`count_tile`).
TILE, CPU_SCORES, SCORES = 128, 2**18, 2**25
LONG = 128  # entries over selected ones from which a selection goes by blocks: on CPU it takes as long, or less


class Index(NamedTuple):
    """Hold the inputs of the lightning indexer.

    Attributes:
        q_BSIJ: queries, fp32.
        w_BSI: weights of the index heads, fp32.
        k_BMJ: keys of the entries, fp32.
        topk: entries to select for each query. 0: attend to every visible entry and still train the
            indexer (warm-up).
        pool: (blocks, entries of a block) of the pool of candidates; None: no pool.
        candidates_BSc: pool made by an earlier layer, to select from; None: make one if `pool` is given.
        recall: number of picks whose share of the attention is measured; 0: no measurement.
    """

    q_BSIJ: jax.Array
    w_BSI: jax.Array
    k_BMJ: jax.Array
    topk: int
    pool: tuple[int, int] | None = None
    candidates_BSc: jax.Array | None = None
    recall: int = 0


def index_scores(q_BTIJ: jax.Array, w_BTI: jax.Array, k_BMJ: jax.Array) -> jax.Array:
    """Score entries for every query, fp32 [B, T, M] (section 2.3.1, lightning indexer).

    All queries of a row share its M entries, or each has its own k of them, with keys [B, T, k, J]. Shared entries are
    scored a tile at a time, in the backward pass too, so that the heads' scores [T, I, M] never exist at once.
    """
    M, tile = k_BMJ.shape[1], count_tile(q_BTIJ)
    if k_BMJ.ndim == 4 or M <= tile:
        return _score(q_BTIJ, w_BTI, k_BMJ)
    tiles = jnp.pad(k_BMJ, [(0, 0), (0, -M % tile), (0, 0)]).reshape(k_BMJ.shape[0], -1, tile, k_BMJ.shape[2])
    score = jax.checkpoint(lambda k: _score(q_BTIJ, w_BTI, k))
    scores = jax.lax.map(score, jnp.moveaxis(tiles, 1, 0))  # [tiles, B, T, tile]
    return jnp.moveaxis(scores, 0, 2).reshape(*w_BTI.shape[:2], -1)[..., :M]


def score_allowed(q_BTIJ: jax.Array, w_BTI: jax.Array, k_BMJ: jax.Array, allowed_BTM: jax.Array) -> jax.Array:
    """Score the allowed entries as `index_scores` does, without a gradient.

    A tile of entries of which no query may select one is skipped and has the score -inf: entries later than all queries
    or of documents before them.
    """
    (B, T, M), tile = allowed_BTM.shape, count_tile(q_BTIJ)
    q_BTIJ, w_BTI, k_BMJ = jax.lax.stop_gradient((q_BTIJ, w_BTI, k_BMJ))
    if M <= tile:
        return _score(q_BTIJ, w_BTI, k_BMJ)
    allowed_M = jnp.pad(allowed_BTM.any((0, 1)), (0, -M % tile))
    needed = allowed_M.reshape(-1, tile).any(1)
    order = jnp.argsort(~needed)  # the tiles to score come first

    def add(i: jax.Array, scores: jax.Array) -> jax.Array:
        start = order[i] * tile  # the last tile begins so that it ends with the last entry, here and there
        keys = jax.lax.dynamic_slice_in_dim(k_BMJ, start, tile, 1)
        return jax.lax.dynamic_update_slice_in_dim(scores, _score(q_BTIJ, w_BTI, keys), start, 2)

    empty = varying(jnp.full((B, T, M), -jnp.inf), q_BTIJ, k_BMJ, allowed_BTM)
    return jax.lax.fori_loop(0, needed.sum(), add, empty)


def count_tile(q_BTIJ: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Count the entries that are scored at a time: a multiple of 128 for which the heads' scores [T, I, tile] fit.

    On CPU they fit into the caches. On accelerators they only pass through fast memory: a tile is large so that it
    takes as long as its products.
    """
    heads = q_BTIJ.shape[1] * q_BTIJ.shape[2]
    return max(TILE, (CPU_SCORES if on_cpu() else SCORES) // heads // TILE * TILE)


def explain_choice(M: int, k: int, q_BTIJ: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Describe how a block of queries, or its shape, scores M entries and finds the k largest; k = 0: no selection."""
    tile = count_tile(q_BTIJ)
    scores = f"{M:,} scores of a query at once" if M <= tile else f"{M:,} scores of a query in tiles of {tile:,}"
    if not k:
        return f"{scores}; no selection"
    short = f"sorts whole rows, which are shorter than {LONG} k"
    return f"{scores}; top-k " + (short if M < LONG * k else "sorts the k blocks of the largest maxima")


def _score(q_BTIJ: jax.Array, w_BTI: jax.Array, k_BMJ: jax.Array) -> jax.Array:
    """Score entries [B, M, J] or [B, T, k, J] at once."""
    keys = "bmj" if k_BMJ.ndim == 3 else "btmj"
    hit = jax.nn.relu(jnp.einsum(f"btij,{keys}->btim", q_BTIJ, k_BMJ, preferred_element_type=jnp.float32))
    return jnp.einsum("bti,btim->btm", w_BTI * (q_BTIJ.shape[-1] * q_BTIJ.shape[-2]) ** -0.5, hit)


def indexer_loss(p_BTHM: jax.Array, score_BTM: jax.Array, allowed_BTM: jax.Array) -> jax.Array:
    """Compute KL(attention || softmax of the scores) over the allowed entries, in nats [B, T].

    The target is the attention's softmax over window, entries and sink: its part on the entries, summed over
    heads, normalised and detached.
    """
    target = jax.lax.stop_gradient(p_BTHM).sum(2)
    total = target.sum(-1, keepdims=True)
    target = target / jnp.where(total > 0, total, 1.0)
    score = jnp.where(allowed_BTM, score_BTM, -jnp.inf)
    safe = jnp.where(allowed_BTM.any(-1, keepdims=True), score, 0.0)
    log_q = jnp.where(allowed_BTM, jax.nn.log_softmax(safe, axis=-1), 0.0)
    return (jax.scipy.special.xlogy(target, target) - target * log_q).sum(-1)


def indexer_recall(p_BTHM: jax.Array, visible_BTM: jax.Array, topk_BTk: jax.Array) -> jax.Array:
    """Measure the share of the attention that the k selected entries cover, fp32 [B, T, 3], to be summed over queries.

    The three numbers are the share of the attention on all visible entries (`p_BTHM`, summed over heads) that
    falls on the selected ones; k over the number of visible entries, the expected share of a random choice; and
    1, to count queries. All are 0 where at most k entries are visible, as there is nothing to choose.
    """
    mass_BTM, visible = p_BTHM.sum(2), visible_BTM.sum(-1)
    picked = jnp.take_along_axis(mass_BTM, jnp.maximum(topk_BTk, 0), axis=2)
    covered, total = jnp.where(topk_BTk >= 0, picked, 0.0).sum(-1), mass_BTM.sum(-1)
    counts = (visible > topk_BTk.shape[2]) & (total > 0)
    share, chance = covered / jnp.where(counts, total, 1.0), topk_BTk.shape[2] / jnp.maximum(visible, 1)
    return jnp.where(counts[..., None], jnp.stack([share, chance, jnp.ones_like(share)], -1), 0.0)


def select_entries(score_BTM: jax.Array, visible_BTM: jax.Array, k: int) -> jax.Array:
    """Select the k visible entries of highest score [B, T, k], -1 where fewer are visible; ties: the lower number."""
    score = jax.lax.stop_gradient(score_BTM)
    masked = jnp.where(visible_BTM, jnp.where(score == 0, 0.0, score), -jnp.inf)  # -0 and 0 are a tie
    value, index = find_largest(masked, k)
    return checkpoint_name(jnp.where(value > -jnp.inf, index, -1), "topk")


def find_largest(x_BTM: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Find the k largest values of each query and their numbers, [B, T, k] each: what `jax.lax.top_k` returns.

    That sorts whole rows, on accelerators with a copy of them and of their numbers. Long rows are cut into blocks of
    neighbours instead. The k largest values lie in the k blocks of the largest maxima, and only those are sorted.
    """
    B, T, M = x_BTM.shape
    if M < LONG * k:  # `explain_choice` describes this choice
        return jax.lax.top_k(x_BTM, k)
    size = 2 ** round(math.log2(M / k) / 2)  # about as many blocks as values in k of them
    padded = jnp.pad(x_BTM, [(0, 0), (0, 0), (0, -M % size)], constant_values=-jnp.inf)
    x_BTbz = padded.reshape(B, T, -1, size)
    _, blocks = jax.lax.top_k(x_BTbz.max(-1), k)
    blocks = jnp.sort(blocks, -1)  # in order, so that ties go to the lower number here too
    taken = jnp.take_along_axis(x_BTbz, blocks[..., None], 2, mode="promise_in_bounds")
    value, place = jax.lax.top_k(taken.reshape(B, T, k * size), k)
    block = jnp.take_along_axis(blocks, place // size, 2, mode="promise_in_bounds")
    return value, block * size + place % size


def mask_entries(index_BTk: jax.Array, M: int) -> jax.Array:
    """Make the mask [B, T, M] of the entries of the given numbers [B, T, k], -1 for none."""

    def row(index_k: jax.Array) -> jax.Array:
        return jnp.zeros(M, bool).at[jnp.where(index_k < 0, M, index_k)].set(True, mode="drop")

    return jax.vmap(jax.vmap(row))(index_BTk)


def select_blocks(score_BTM: jax.Array, visible_BTM: jax.Array, windows: Windows, blocks: int, size: int) -> jax.Array:
    """Select each query's pool, its `blocks` best blocks of entries: their first entries [B, T, c], -1 for none.

    A block is `size` neighbours, counted from each document's first entry. Its score is that of its best visible
    entry. The block with the newest visible entry is always selected (V4.1 section 2.3.2).
    """
    M = score_BTM.shape[-1]
    score = jnp.where(visible_BTM, jax.lax.stop_gradient(score_BTM), -jnp.inf)
    # At each entry the best score of it and the size - 1 after it; those of later documents are not visible.
    ahead = [(0, 0), (0, 0), (0, size - 1)]
    best = jax.lax.reduce_window(score, -jnp.inf, jax.lax.max, (1, 1, size), (1, 1, 1), ahead)
    newest = visible_BTM.sum(-1, keepdims=True) - 1  # number of that entry inside its document
    index = windows.index_BM[:, None]
    best = jnp.where(index == newest // size * size, jnp.inf, best)
    return select_entries(best, visible_BTM & (index % size == 0), min(blocks, -(-M // size)))


def mask_blocks(first_BTc: jax.Array, M: int, size: int) -> jax.Array:
    """Make the mask [B, T, M] of the entries in the blocks that begin at `first_BTc`, -1 for none.

    A document's last block may be cut short. The mask then has entries of the next document, which no query of
    this one sees.
    """
    starts = mask_entries(first_BTc, M)
    behind = [(0, 0), (0, 0), (size - 1, 0)]
    return jax.lax.reduce_window(starts, False, jax.lax.bitwise_or, (1, 1, size), (1, 1, 1), behind)
