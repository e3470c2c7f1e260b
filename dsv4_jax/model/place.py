# SPDX-License-Identifier: Apache-2.0
"""Place a chunk of positions in its row: what attention needs of the tokens left of it, and the entries of the row.

Attention computes a chunk in the same way whether the rest of the row lies on the neighbouring devices of the `context`
axis (training) or was kept when it was computed (decoding). Both places have the same methods, which are called inside
`shard_map`.

Letters: B rows, S positions of a chunk, K head width, J index width, C compressor channels, W window, h tokens of a
tail, M entries of a row, m entries of a chunk, U = tokens kept and tokens of the chunk.
"""

from typing import Any, NamedTuple, Protocol

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


class Place(Protocol):
    """Surroundings of a chunk of S positions."""

    def chunk(self, spec: LayerSpec, S: int) -> Chunk:
        """Return positions and angles of the chunk, for a layer."""
        ...

    def windows(self, ratio: int) -> Windows:
        """Return the windows of all entries of the row, [B, M]."""
        ...

    def ending(self, ratio: int, S: int, before: int) -> tuple[Windows, Rotation]:
        """Return the windows that end in the chunk, counted from `before` tokens left of it, and their angles."""
        ...

    def left(self, name: str, tokens: Any, n: int) -> Any:
        """Put the tokens left of the chunk, at most n, before those of the chunk, in arrays [B, S, ...].

        `name` is the attribute of `Recent` that they belong to.
        """
        ...

    def store(self, own: Entries, ratio: int) -> Entries:
        """Put the chunk's entries where `gather` finds them, now and in layers that share them."""
        ...

    def gather(self, stored_BmK: jax.Array, ratio: int, S: int) -> jax.Array:
        """Return the entries of the row [B, M, K], or their keys, in the order of `windows`."""
        ...

    def update(self, recent: Recent, own: Entries | None, ratio: int) -> LayerUpdate | None:
        """Return what the chunk adds to a cache; None without one."""
        ...


class Neighbours(NamedTuple):
    """Place of a device's chunk of the rows in training: the rest lies on the other devices of `context`."""

    tables: Tables

    def chunk(self, spec: LayerSpec, S: int) -> Chunk:
        return take_chunk(self.tables, S, compressed=spec.ratio > 0, replayed=spec.decoder)

    def windows(self, ratio: int) -> Windows:
        return self.tables.windows[ratio]

    def ending(self, ratio: int, S: int, before: int) -> tuple[Windows, Rotation]:
        windows, number_Bm = take_own_windows(self.tables.windows[ratio], ratio, S, before)
        return windows, jax.tree.map(lambda a: take_slots(a, number_Bm), self.tables.starts[ratio])

    def left(self, name: str, tokens: Any, n: int) -> Any:
        return prepend_left(tokens, n)

    def store(self, own: Entries, ratio: int) -> Entries:
        return own

    def gather(self, stored_BmK: jax.Array, ratio: int, S: int) -> jax.Array:
        return gather_entries(stored_BmK, self.tables.windows[ratio], S)

    def update(self, recent: Recent, own: Entries | None, ratio: int) -> None:
        return None


class Cached(NamedTuple):
    """Place of a chunk that follows the tokens of a cache; `tables` are those of `make_chunk_tables`."""

    tables: Tables
    cache: LayerCache

    def chunk(self, spec: LayerSpec, S: int) -> Chunk:
        return make_chunk(self.tables.rotations[spec.ratio > 0], self.tables.docs.first_BS)

    def windows(self, ratio: int) -> Windows:
        return self.tables.windows[ratio]

    def ending(self, ratio: int, S: int, before: int) -> tuple[Windows, Rotation]:
        assert self.tables.ending is not None
        start_Bm, end_Bm, index_Bm = self.tables.ending[ratio]
        return Windows(start_Bm + before, end_Bm + before, index_Bm), self.tables.starts[ratio]

    def left(self, name: str, tokens: Any, n: int) -> Any:
        join = lambda kept, new: jnp.concatenate([kept.astype(new.dtype), new], axis=1)
        return jax.tree.map(join, getattr(self.cache.recent, name), tokens)

    def store(self, own: Entries, ratio: int) -> Entries:
        assert self.cache.entries is not None and self.tables.ending is not None
        return put_entries(self.cache.entries, own, self.tables.ending[ratio].index_BM)

    def gather(self, stored_BmK: jax.Array, ratio: int, S: int) -> jax.Array:
        return stored_BmK

    def update(self, recent: Recent, own: Entries | None, ratio: int) -> LayerUpdate:
        assert self.tables.ending is not None
        return LayerUpdate(recent, own, None if own is None else self.tables.ending[ratio].index_BM)


def put_entries(entries: Entries, own: Entries, slot_Bm: jax.Array) -> Entries:
    """Put entries [B, m, ...] into slots of [B, M, ...]; those past the last slot are dropped."""
    put = jax.vmap(lambda x_MK, slot_m, own_mK: x_MK.at[slot_m].set(own_mK.astype(x_MK.dtype), mode="drop"))
    return jax.tree.map(lambda x, new: put(x, slot_Bm, new), entries, own)
