# SPDX-License-Identifier: Apache-2.0
"""Which piece of which document lies in which row: integers only, a pure function of the seed and a position.

Documents are cut into pieces of at most S inputs. The pieces of every source are shuffled, anew in each of its
epochs. A block takes the next `BLOCK` of them, from every source its share, and is packed on its own: longest
piece first, into the fullest row that has room; then its rows are shuffled. So a position in the stream is two
numbers, and whoever has them can go on from there.

A document with images is cut so that no image is: a piece ends where the next image would not fit, as positions, as
patches or as one more image of a row. Rows too are filled only up to their budget of patches and images.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from dsv4_jax.config import DataConfig
from dsv4_jax.data.images import Budget
from dsv4_jax.data.sources import Source
from dsv4_jax.section import ConfigError

BLOCK = 4096  # pieces that are packed together
_SMALL = 1 << 20


class Piece(NamedTuple):
    """`length` inputs of a document of a source, from its token `first` on.

    `images` are those that lie in it, by their numbers in the source, of so many `patches`.
    """

    source: int
    document: int
    first: int
    length: int
    images: range = range(0)
    patches: int = 0


class Position(NamedTuple):
    """The next row of a stream: the block it lies in and its number there."""

    block: int
    row: int


ORIGIN = Position(0, 0)


@dataclasses.dataclass(frozen=True)
class Part:
    """Some documents of a source, and their pieces by number.

    Attributes:
        source: the documents.
        documents: int [m], their numbers in the source.
        ends: int [m], pieces up to and including each one's.
        S: inputs of a piece at most.
        budget: its images at most.
        cuts: for each document that is cut between images, the first token of each of its pieces. They are kept
            because cutting reads all of a document's images, too much to repeat for each of its pieces.
    """

    source: Source
    documents: np.ndarray
    ends: np.ndarray
    S: int
    budget: Budget | None = None
    cuts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def pieces(self) -> int:
        """How many there are."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def tokens(self) -> int:
        """Tokens of the documents, borders included."""
        return int(self.source.lengths[self.documents].sum())

    @property
    def images(self) -> int:
        """Images of the documents."""
        return int(self.source.spans.counts[self.documents].sum()) if self.source.spans else 0

    def between(self, begin: float, end: float) -> "Part":
        """The documents in one stretch of an epoch, from its share `begin` in tokens up to `end`, in hashed order."""
        if begin <= 0 and end >= 1:
            return self
        order = np.argsort(self.source.keys[self.documents], kind="stable")
        tokens = self.source.lengths[self.documents][order] - 1
        at = np.empty(len(order))
        at[order] = (np.cumsum(tokens) - tokens) / max(tokens.sum(), 1)
        chosen = (at >= begin) & (at < end)
        counts = np.diff(self.ends, prepend=0)[chosen]
        return dataclasses.replace(self, documents=self.documents[chosen], ends=np.cumsum(counts))

    def piece(self, document: int, number: int) -> Piece:
        """Return piece `number` of a document, at a cost that depends on this piece alone. Its source is 0."""
        spans, inputs = self.source.spans, int(self.source.lengths[document]) - 1
        firsts = self.cuts.get(document)
        if firsts is None:
            first, last = number * self.S, min((number + 1) * self.S, inputs)
        else:
            first, last = int(firsts[number]), int(firsts[number + 1]) if number + 1 < len(firsts) else inputs
        if spans is None or not (images := spans.numbers(document)):
            return Piece(0, document, first, last - first)
        assert self.budget is not None  # so that an image that starts in a piece lies whole in it
        start = lambda image: int(spans.table[image, 0])
        begin, end = (bisect.bisect_left(images, token, key=start) for token in (first, last))
        images = images[begin:end]
        rows, columns = spans.table[images.start : images.stop, 2:].astype(np.int64).T
        return Piece(0, document, first, last - first, images, int((rows * columns).sum()))

    def numbered(self, index: int) -> Piece:
        """Piece `index` of all."""
        at = int(np.searchsorted(self.ends, index, side="right"))
        return self.piece(int(self.documents[at]), index - (int(self.ends[at - 1]) if at else 0))

    def cut(self, document: int) -> np.ndarray:
        """Cut a document with images: return the first token of each piece, int64 [pieces]."""
        spans, budget = self.source.spans, self.budget
        assert spans is not None and budget is not None
        images, inputs = spans.numbers(document), int(self.source.lengths[document]) - 1
        firsts, first = [], 0
        while first < inputs:
            firsts.append(first)
            last, begin, patches = min(first + self.S, inputs), images.start, 0
            while images:
                start, positions, rows, columns = spans.table[images.start].tolist()
                if start >= last:
                    break
                patches += rows * columns
                count = images.start - begin + 1
                if start + positions > last or patches > budget.patches or count > budget.images:
                    last = start
                    break
                images = images[1:]
            first = last
        return np.array(firsts, np.int64)


def part(source: Source, chosen: np.ndarray, S: int, budget: Budget | None = None) -> Part:
    """The documents where `chosen` [n] is true, to be cut for rows of S, with images up to a `budget`.

    Raises:
        ConfigError: if an image does not fit in a row.
    """
    documents = np.flatnonzero(chosen)
    inputs = source.lengths[documents] - 1  # the last token is a target only
    counts = -(-inputs // S)
    spans, cuts = source.spans, {}
    if spans is not None and budget is not None:
        _check_images(source, S, budget)
        whole = (inputs <= S) & (spans.total(spans.patches)[documents] <= budget.patches)
        whole &= spans.counts[documents] <= budget.images
        every = Part(source, documents, counts, S, budget)
        for i in np.flatnonzero(~whole & (spans.counts[documents] > 0)):
            cuts[int(documents[i])] = every.cut(int(documents[i]))
            counts[i] = len(cuts[int(documents[i])])
    return Part(source, documents, np.cumsum(counts), S, budget, cuts)


def _check_images(source: Source, S: int, budget: Budget) -> None:
    assert source.spans is not None
    for sizes, most, key, unit in (
        (source.spans.table[:, 1], S, "data.seq_len", "positions"),
        (source.spans.patches, budget.patches, "data.row_patches", "patches"),
    ):
        worst = int(np.argmax(sizes))
        if sizes[worst] > most:
            document = int(np.searchsorted(source.spans.ends, worst, side="right"))
            number = worst - source.spans.numbers(document).start + 1
            raise ConfigError(
                f"{source.name}: image {number} of document {document + 1} takes {sizes[worst]:,} {unit}, more than "
                f"the {most:,} of a row: raise {key} or lower model.vision_max_n_token = "
                f"{budget.vision.max_n_token}"
            )


def split(source: Source, data: DataConfig, S: int, budget: Budget | None = None) -> tuple[Part, Part]:
    """Split the documents into those to train on and those to hold out, by the hash of their names.

    Held out is the share `data.held_out`, or less where that is more than about `data.held_out_tokens`.
    """
    share = min(data.held_out, data.held_out_tokens / max(int(source.lengths.sum()), 1))
    draw = source.keys / 2**32
    return part(source, draw >= share, S, budget), part(source, draw < share, S, budget)


class Rounds:
    """The pieces of a part, epoch after epoch, each shuffled anew, from `begin` epochs on up to `end`.

    A stretch of an epoch has the same documents however the part is cut into pieces, and no others: so the stages
    of a run, which cut it differently, read each document once an epoch. Whole epochs follow after `end`.
    """

    def __init__(self, part: Part, begin: float, end: float, seed: int):
        self._part, self._seed, self._first = part, seed, int(begin)
        last = math.ceil(end) if math.isfinite(end) else self._first + 1
        self._parts = [part.between(begin - e, end - e) for e in range(self._first, last)]
        self._ends = np.cumsum([p.pieces for p in self._parts])
        self._shuffled: tuple[int, Any] = (-1, ())  # of one round

    def __getitem__(self, i: int) -> Piece:
        number = int(np.searchsorted(self._ends, i, side="right"))
        if number < len(self._parts):
            part, i = self._parts[number], i - (int(self._ends[number - 1]) if number else 0)
        else:
            part = self._part
            more, i = divmod(i - int(self._ends[-1]), part.pieces)
            number += more
        if self._shuffled[0] != number:
            self._shuffled = number, _shuffled(part.pieces, self._seed, self._first + number)
        return part.numbered(int(self._shuffled[1][i]))


def _shuffled(n: int, seed: int, epoch: int) -> Any:
    """Numbers below n in another order in every epoch."""
    if n > _SMALL:
        # Grain's index shuffle is a bijection that needs no table, where a permutation would take 8 bytes a piece in
        # every process. It costs 8 us a piece, and nothing of the epoch's size.
        return grain.MapDataset.range(n).seed(int(np.random.RandomState([seed, epoch]).randint(2**31))).shuffle()
    return np.random.RandomState([seed, epoch]).permutation(n)


class RowPlan:
    """The rows of a stream of packed pieces.

    Attributes:
        parts: what is mixed.
        S: positions of a row.
        budget: images of a row; None without vision.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        weights: Sequence[float],
        S: int,
        seed: int,
        repeat: bool,
        budget: Budget | None = None,
        epochs: Sequence[tuple[float, float]] = (),
    ):
        """Endless and shuffled with `repeat`, each part by its weight in tokens; else every piece once, in order or,
        of several parts, with the same share of each part everywhere.

        An image's positions are tokens. `epochs` says for each part which of its epochs the plan is meant for,
        from one number to another (see `Rounds`); all if absent.
        """
        self.parts, self.S, self.budget, self._seed, self._repeat = parts, S, budget, seed, repeat
        epochs = epochs or [(0, math.inf)] * len(parts)
        spans = zip(parts, epochs, strict=True)
        self._rounds = [Rounds(p, *span, seed + number) for number, (p, span) in enumerate(spans)]
        # Shares of the pieces, from shares of the targets: every token but a document's first.
        share = [w * p.pieces / (p.tokens - len(p.documents)) for w, p in zip(weights, parts, strict=False)]
        self._share = [s / sum(share) for s in share]
        self._once = np.zeros((0, 2), np.int64)  # (part, piece) of all pieces
        if not repeat:
            pieces = [np.arange(p.pieces) for p in parts]
            everything = [(np.full(len(i), number), i, (i + 0.5) / max(len(i), 1)) for number, i in enumerate(pieces)]
            part, piece, place = map(np.concatenate, zip(*everything, strict=True))
            self._once = np.stack([part, piece], axis=1)[np.argsort(place, kind="stable")]

    def _pieces(self, block: int) -> Iterator[Piece]:
        """Everything in a block."""
        if self._repeat:
            for number, share in enumerate(self._share):
                for i in range(int(block * BLOCK * share), int((block + 1) * BLOCK * share)):
                    yield self._rounds[number][i]._replace(source=number)
        else:
            for number, index in self._once[block * BLOCK : (block + 1) * BLOCK].tolist():
                yield self.parts[number].numbered(index)._replace(source=number)

    def block(self, number: int) -> list[list[Piece]]:
        """All rows of a block; none past the end."""
        pieces = list(self._pieces(number))
        if self.budget:
            costs = np.array([(p.length, p.patches, len(p.images)) for p in pieces]).reshape(-1, 3)
            numbers = best_fit_within(costs, (self.S, self.budget.patches, self.budget.images))
        else:
            numbers = best_fit([p.length for p in pieces], self.S)
        rows = [[pieces[i] for i in row] for row in numbers]
        if not self._repeat and len(self.parts) == 1:
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


def best_fit_within(costs: np.ndarray, limits: Sequence[int]) -> list[list[int]]:
    """`best_fit` of pieces [n, k] that have a length and other costs, whose sums in a row stay within k limits."""
    rows: list[list[int]] = []
    room = np.empty((len(costs), len(limits)), np.int64)  # what is left of every row
    for i in np.argsort(-costs[:, 0], kind="stable").tolist():
        fits = np.flatnonzero((room[: len(rows)] >= costs[i]).all(-1))
        if len(fits):
            row = int(fits[np.argmin(room[fits, 0])])
        else:
            row = len(rows)
            room[row] = limits
            rows.append([])
        rows[row].append(i)
        room[row] -= costs[i]
    return [sorted(row) for row in rows]
