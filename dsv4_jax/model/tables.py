# SPDX-License-Identifier: Apache-2.0
"""Tables of packed rows, computed once per batch and read by every layer: borders, windows and angles.

Letters: B rows, S positions of a chunk of the row (of the whole row with one device), T tokens that a cache is extended
by, M compressed entries, m entries of a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import BATCH
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.rope import Rotation, compute_frequencies, compute_rotation
from dsv4_jax.ops.context import chunk_start, cut_chunk
from dsv4_jax.ops.documents import Documents, Windows, find_documents, find_windows


class Tables(NamedTuple):
    """Integer and angle tables of a batch; every device holds them for all positions of its rows.

    Attributes:
        docs: document borders.
        windows: compression windows, by ratio.
        rotations: angles of every position, without and with compression (keys False, True).
        starts: angles of every window's first token, by ratio.
        near_BS: row position from which the window of a decoder layer may see; None without bounded replay.
        ending: windows that end in the chunk that a cache is extended by, by ratio, whose angles are then `starts`;
            None in training, where each device finds its own.
    """

    docs: Documents
    windows: dict[int, Windows]
    rotations: dict[bool, Rotation]
    starts: dict[int, Rotation]
    near_BS: jax.Array | None
    ending: dict[int, Windows] | None = None


def make_tables(cfg: ModelConfig, segment_ids: jax.Array, replay_starts: jax.Array | None = None) -> Tables:
    """Make the tables of packed rows; `segment_ids` and `replay_starts` [B, S] are laid out as `mesh.row_spec`."""
    run = functools.partial(_make_tables, cfg)
    return jax.shard_map(run, in_specs=jax.P(BATCH), out_specs=jax.P(BATCH))(segment_ids, replay_starts)


def _make_tables(cfg: ModelConfig, segment_ids: jax.Array, replay_BS: jax.Array | None) -> Tables:
    docs = find_documents(segment_ids)
    near = None
    if replay_BS is not None:  # queries from the start of the replay on see nothing before it
        replayed = jnp.arange(segment_ids.shape[1]) >= replay_BS
        near = jnp.where(replayed, jnp.maximum(docs.first_BS, replay_BS), docs.first_BS)
    ratios = sorted(set(cfg.compress_ratios) - {0})
    freqs = {compressed: compute_frequencies(cfg, compressed) for compressed in (False, True)}
    wins = {r: find_windows(docs, r) for r in ratios}
    return Tables(
        docs,
        wins,
        {c: compute_rotation(f, docs.position_BS) for c, f in freqs.items()},
        {r: compute_rotation(freqs[True], w.index_BM * r) for r, w in wins.items()},
        near,
    )


def make_chunk_tables(cfg: ModelConfig, length_B: jax.Array, n_B: jax.Array, T: int, capacity: int) -> Tables:
    """Make the tables of the next T tokens of rows that a cache holds; positions count from the first of the T.

    Each row is one document, which began `length` tokens before. Padding has its document's start after the chunk,
    so that it sees nothing.

    Args:
        cfg: the model.
        length_B: tokens in the cache.
        n_B: how many of the T tokens are real.
        T: tokens of the chunk.
        capacity: tokens for whose entries the cache has room.
    """
    run = functools.partial(_make_chunk_tables, cfg, T, capacity)
    run = jax.shard_map(run, in_specs=jax.P(BATCH), out_specs=jax.P(BATCH))
    return run(*(jax.reshard(jnp.asarray(x, jnp.int32), jax.P(BATCH)) for x in (length_B, n_B)))


def _make_chunk_tables(cfg: ModelConfig, T: int, capacity: int, length_B: jax.Array, n_B: jax.Array) -> Tables:
    length_B1, n_B1, t = length_B[:, None], n_B[:, None], jnp.arange(T)
    docs = Documents(
        first_BS=jnp.where(t < n_B1, -length_B1, T),
        position_BS=jnp.where(t < n_B1, jnp.maximum(length_B1 + t, 0), 0),
        last_BS=t == n_B1 - 1,
    )

    def windows_of(number_BM: jax.Array, ratio: int) -> Windows:
        start_BM = number_BM * ratio - length_B1
        return Windows(start_BM, start_BM + ratio - 1, number_BM)

    freqs = {compressed: compute_frequencies(cfg, compressed) for compressed in (False, True)}
    windows, ending, starts = {}, {}, {}
    for m in sorted(set(cfg.compress_ratios) - {0}):
        # Every entry that the cache has room for; those not made yet end after every real token.
        windows[m] = windows_of(jnp.broadcast_to(jnp.arange(-(-capacity // m)), (len(length_B), -(-capacity // m))), m)
        own = windows_of(length_B1 // m + jnp.arange(-(-T // m)), m)
        ending[m] = own._replace(end_BM=jnp.where(own.end_BM < n_B1, own.end_BM, T))  # `compress` skips those at T
        starts[m] = compute_rotation(freqs[True], own.index_BM * m)
    rotations = {c: compute_rotation(f, docs.position_BS) for c, f in freqs.items()}
    return Tables(docs, windows, rotations, starts, None, ending)


class Chunk(NamedTuple):
    """Place of a chunk of S queries. Positions of queries, keys and windows are counted from one token, whichever.

    Attributes:
        rotation: angles of the positions, [B, S, ...].
        head_rotation: the same with an axis for heads, [B, S, 1, ...]. Made once: the backward pass keeps one copy.
        first_BS: position of the first token of each query's document.
        near_BS: position from which each query's window may see; None: from its document's first token.
        offset: position of the first query.
    """

    rotation: Rotation
    head_rotation: Rotation
    first_BS: jax.Array
    near_BS: jax.Array | None
    offset: jax.Array | int


def make_chunk(
    rotation: Rotation, first_BS: jax.Array, near_BS: jax.Array | None = None, offset: jax.Array | int = 0
) -> Chunk:
    """Make a chunk from the attributes of the same names."""
    return Chunk(rotation, jax.tree.map(lambda a: a[:, :, None], rotation), first_BS, near_BS, offset)


def take_chunk(tables: Tables, S: int, compressed: bool, replayed: bool) -> Chunk:
    """Take this device's chunk of S positions, for a layer with or without compression and bounded replay."""
    near_BS = cut_chunk(tables.near_BS, S) if replayed and tables.near_BS is not None else None
    return make_chunk(
        cut_chunk(tables.rotations[compressed], S), cut_chunk(tables.docs.first_BS, S), near_BS, chunk_start(S)
    )
