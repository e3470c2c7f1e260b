# SPDX-License-Identifier: Apache-2.0
"""Which piece of which document lies in which row: integers only, a pure function of the seed and a position.

Documents are cut into pieces of at most S inputs. The pieces of every source are shuffled, anew in each of its
epochs. A block takes the next `BLOCK` of them, from every source its share, and is packed on its own: longest
piece first, into the fullest row that has room; then its rows are shuffled. So a position in the stream is two
numbers, and whoever has them can go on from there.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from dsv4_jax.data.sources import Source

BLOCK = 4096  # pieces that are packed together
_SMALL = 1 << 20


class Piece(NamedTuple):
    """`length` inputs of a document of a source, from its token `first` on."""

    source: int
    document: int
    first: int
    length: int


class Position(NamedTuple):
    """The next row of a stream: the block it lies in and its number there."""

    block: int
    row: int


START = Position(0, 0)


@dataclasses.dataclass(frozen=True)
class Part:
    """Some documents of a source, and their pieces by number.

    Attributes:
        source: the documents.
        documents: int [m], their numbers in the source.
        ends: int [m], pieces up to and including each one's.
    """

    source: Source
    documents: np.ndarray
    ends: np.ndarray

    @property
    def pieces(self) -> int:
        """How many there are."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def tokens(self) -> int:
        """Tokens of the documents, borders included."""
        return int(self.source.lengths[self.documents].sum())


def part(source: Source, chosen: np.ndarray, S: int) -> Part:
    """The documents where `chosen` [n] is true, to be cut for rows of S."""
    documents = np.flatnonzero(chosen)
    inputs = source.lengths[documents] - 1  # the last token is a target only
    return Part(source, documents, np.cumsum(-(-inputs // S)))


def split(source: Source, held_out: float, S: int) -> tuple[Part, Part]:
    """Documents to train on and documents to hold out, by the hash of their names."""
    draw = source.keys / 2**32
    return part(source, draw >= held_out, S), part(source, draw < held_out, S)


class Order:
    """Numbers below n, shuffled anew in every epoch; entry i belongs to epoch i // n."""

    def __init__(self, n: int, seed: int):
        self._n, self._seed, self._epoch, self._shuffled = n, seed, -1, np.arange(0)
        self._large: Any = None
        if n > _SMALL:  # by a permutation that needs no memory; slow for small n
            self._large = grain.MapDataset.range(n).seed(seed).shuffle().repeat()

    def __getitem__(self, i: int) -> int:
        if self._large is not None:
            return int(self._large[i])
        epoch, at = divmod(i, self._n)
        if epoch != self._epoch:
            self._shuffled = np.random.RandomState([self._seed, epoch]).permutation(self._n)
            self._epoch = epoch
        return int(self._shuffled[at])


class Plan:
    """The rows of a stream of packed pieces.

    Attributes:
        parts: what is mixed.
        S: positions of a row.
    """

    def __init__(self, parts: Sequence[Part], weights: Sequence[float], S: int, seed: int, repeat: bool):
        """Endless and shuffled with `repeat`, each part by its weight in tokens; else every piece once, in order."""
        self.parts, self.S, self._seed, self._repeat = parts, S, seed, repeat
        self._orders = [Order(p.pieces, seed + number) for number, p in enumerate(parts)]
        # Shares of the pieces, from shares of the targets: every token but a document's first.
        share = [w * p.pieces / (p.tokens - len(p.documents)) for w, p in zip(weights, parts, strict=False)]
        self._share = [s / sum(share) for s in share]

    def _numbers(self, block: int) -> Iterator[tuple[int, int]]:
        """(part, piece) of everything in a block."""
        if self._repeat:
            for number, share in enumerate(self._share):
                for i in range(int(block * BLOCK * share), int((block + 1) * BLOCK * share)):
                    yield number, self._orders[number][i]
        else:
            everything = ((number, i) for number, p in enumerate(self.parts) for i in range(p.pieces))
            yield from itertools.islice(everything, block * BLOCK, (block + 1) * BLOCK)

    def _piece(self, number: int, index: int) -> Piece:
        p = self.parts[number]
        at = int(np.searchsorted(p.ends, index, side="right"))
        document = int(p.documents[at])
        first = (index - (int(p.ends[at - 1]) if at else 0)) * self.S
        return Piece(number, document, first, min(self.S, int(p.source.lengths[document]) - 1 - first))

    def block(self, number: int) -> list[list[Piece]]:
        """All rows of a block; none past the end."""
        pieces = [self._piece(*piece) for piece in self._numbers(number)]
        rows = [[pieces[i] for i in row] for row in best_fit([p.length for p in pieces], self.S)]
        if not self._repeat:
            return rows
        return [rows[i] for i in np.random.RandomState([self._seed, number]).permutation(len(rows))]

    def rows(self, start: Position) -> Iterator[tuple[list[Piece], Position]]:
        """Rows from a position on, each with the position after it."""
        block, row = start
        while rows := self.block(block):
            for number in range(row, len(rows)):
                more = number + 1 < len(rows)
                yield rows[number], Position(block, number + 1) if more else Position(block + 1, 0)
            block, row = block + 1, 0


def best_fit(lengths: Sequence[int], S: int) -> list[list[int]]:
    """Rows of at most S in all, as numbers of their pieces in order: longest first, into the fullest row with room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (positions left, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(room, (lengths[i], 0))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = S, len(rows)
            rows.append([])
        rows[row].append(i)
        if left > lengths[i]:
            bisect.insort(room, (left - lengths[i], row))
    return [sorted(row) for row in rows]
