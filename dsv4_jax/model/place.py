# SPDX-License-Identifier: Apache-2.0
"""Place a chunk of positions in its row: what attention needs of the tokens left of it, and the entries of the row.

Attention computes a chunk in the same way whether the rest of the row lies on the neighbouring devices of the `context`
axis (training) or was kept when it was computed (decoding). Both places have the same methods, which are called inside
`shard_map`.

Letters: B rows, S positions of a chunk, K head width, J index width, C compressor channels, W window, h tokens of a
tail, M entries of a row, m entries of a chunk, U = tokens kept and tokens of the chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.model.config import LayerSpec
from dsv4_jax.model.rope import Rotation
from dsv4_jax.model.tables import Chunk, Tables, make_chunk, take_chunk
from dsv4_jax.ops.context import gather_entries, prepend_left, take_own_windows, take_slots
from dsv4_jax.ops.documents import Windows


def count_tail(spec: LayerSpec) -> int:
    """Count the tokens before a chunk that its windows can reach: a window less one token; in CSA two less one."""
    return (2 if spec.mode == "csa" else 1) * spec.ratio - 1


def count_channels(spec: LayerSpec, width: int) -> int:
    """Count the channels of a compressor with entries of `width`; in CSA those of the window before come first."""
    return width * (2 if spec.mode == "csa" else 1)


class Gated(NamedTuple):
    """Input of a compressor's pooling, [B, S, C] each: the value of every token and the logit of its gate."""

    value_BSC: jax.Array
    gate_BSC: jax.Array


class Entries(NamedTuple):
    """Compressed entries [B, m, K] and their index keys [B, m, J], both rotated; no keys where no indexer runs."""

    entries_BmK: jax.Array
    keys_BmJ: jax.Array | None


class Recent(NamedTuple):
    """Tokens that a later chunk reads again. A part that the layer does not have is None.

    Attributes:
        window_BUK: rotated keys of the window, U = W - 1 in a cache.
        main: input of the pooling into entries, U = h in a cache: the tokens that an unfinished window can reach.
        index: the same for the pooling into index keys.
    """

    window_BUK: jax.Array
    main: Gated | None
    index: Gated | None


class LayerCache(NamedTuple):
    """What attention keeps of the tokens before a chunk, in one layer.

    Attributes:
        recent: the last tokens.
        entries: room for all entries of the row [B, M, ...], those not made yet being zeros or out of date; None in a
            layer that makes none.
    """

    recent: Recent
    entries: Entries | None


class LayerUpdate(NamedTuple):
    """What a chunk adds to the cache of a layer.

    Attributes:
        recent: tokens of the cache, followed by those of the chunk.
        entries: entries of the windows that end in the chunk; None in a layer that makes none.
        slot_Bm: numbers of those entries in the row.
    """

    recent: Recent
    entries: Entries | None
    slot_Bm: jax.Array | None


class Neighbours(NamedTuple):
    """Place of a device's chunk of S positions in training: the rest of the rows is on other devices of `context`.

    Attributes:
        tables: tables of the whole rows.
    """

    tables: Tables

    def chunk(self, spec: LayerSpec, S: int) -> Chunk:
        """Return positions and angles of the chunk, for a layer."""
        return take_chunk(self.tables, S, compressed=spec.ratio > 0, replayed=spec.decoder)

    def windows(self, ratio: int) -> Windows:
        """Return the windows of all entries of the row, [B, M]."""
        return self.tables.windows[ratio]

    def ending(self, ratio: int, S: int, before: int) -> tuple[Windows, Rotation]:
        """Return the windows that end in the chunk, counted from `before` tokens left of it, and their angles."""
        windows, number_Bm = take_own_windows(self.tables.windows[ratio], ratio, S, before)
        return windows, jax.tree.map(lambda a: take_slots(a, number_Bm), self.tables.starts[ratio])

    def prepend(self, name: str, tokens: Any, n: int) -> Any:
        """Put the tokens left of the chunk, at most n, before those of the chunk, in arrays [B, S, ...].

        They are the attribute `name` of `Recent`.
        """
        return prepend_left(tokens, n)

    def store(self, own: Entries, ratio: int) -> Entries:
        """Put the chunk's entries where `gather` finds them, in this layer and in those that share them."""
        return own

    def gather(self, stored_BmK: jax.Array, ratio: int, S: int) -> jax.Array:
        """Return the entries of the row [B, M, K], or their keys, in the order of `windows`."""
        return gather_entries(stored_BmK, self.tables.windows[ratio], S)

    def update(self, recent: Recent, own: Entries | None, ratio: int) -> LayerUpdate | None:
        """Return what the chunk adds to the layer's cache; None without one."""
        return None


class Cached(NamedTuple):
    """Place of a chunk of S tokens that follow those of a cache. Its methods are those of `Neighbours`.

    Attributes:
        tables: tables of the chunk.
        cache: what the layer keeps of the tokens before.
    """

    tables: Tables
    cache: LayerCache

    def chunk(self, spec: LayerSpec, S: int) -> Chunk:
        """Return positions and angles of the chunk, counted from its first token."""
        return make_chunk(self.tables.rotations[spec.ratio > 0], self.tables.docs.first_BS)

    def windows(self, ratio: int) -> Windows:
        """Return the windows of all entries that the cache has room for."""
        return self.tables.windows[ratio]

    def ending(self, ratio: int, S: int, before: int) -> tuple[Windows, Rotation]:
        """Return the windows that end in the chunk, counted from `before` tokens left of it, and their angles."""
        windows = self._ending(ratio)
        shifted = windows._replace(start_BM=windows.start_BM + before, end_BM=windows.end_BM + before)
        return shifted, self.tables.starts[ratio]

    def prepend(self, name: str, tokens: Any, n: int) -> Any:
        """Put the kept tokens before those of the chunk."""
        join = lambda kept, new: jnp.concatenate([kept, new], axis=1)
        return jax.tree.map(join, getattr(self.cache.recent, name), tokens)

    def store(self, own: Entries, ratio: int) -> Entries:
        """Put the chunk's entries into a copy of the cache."""
        assert self.cache.entries is not None  # the layer makes entries
        return put_entries(self.cache.entries, own, self._ending(ratio).index_BM)

    def gather(self, stored_BmK: jax.Array, ratio: int, S: int) -> jax.Array:
        """Return the entries as they are stored."""
        return stored_BmK

    def update(self, recent: Recent, own: Entries | None, ratio: int) -> LayerUpdate:
        """Return what `commit` puts into the layer's cache."""
        return LayerUpdate(recent, own, None if own is None else self._ending(ratio).index_BM)

    def _ending(self, ratio: int) -> Windows:
        assert self.tables.ending is not None  # those of `make_chunk_tables`
        return self.tables.ending[ratio]


def put_entries(entries: Entries, own: Entries, slot_Bm: jax.Array) -> Entries:
    """Put entries [B, m, ...] into slots of [B, M, ...]; those past the last slot are dropped."""
    put = jax.vmap(lambda x_MK, slot_m, own_mK: x_MK.at[slot_m].set(own_mK, mode="drop"))
    return jax.tree.map(lambda x, new: put(x, slot_Bm, new), entries, own)
