# SPDX-License-Identifier: Apache-2.0
"""Tables of packed rows, computed once per batch and read by every layer: borders, windows and angles.

Letters: B rows, S positions of a chunk of the row (of the whole row with one device), M compressed entries.
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
    """

    docs: Documents
    windows: dict[int, Windows]
    rotations: dict[bool, Rotation]
    starts: dict[int, Rotation]
    near_BS: jax.Array | None


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
