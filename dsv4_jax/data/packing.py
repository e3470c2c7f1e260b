# SPDX-License-Identifier: Apache-2.0
"""Plan which piece of which document is in which row of the data, as a pure function of the seed and a position.

The plan consists of integers only and reads no token. Documents are cut into pieces of at most S inputs. The pieces of
every source are shuffled, in a new order in each epoch. A block takes the next `BLOCK` pieces, a share of them from
each source, and is packed independently of other blocks: longest piece first, into the fullest row that has room. Then
the rows of the block are shuffled. Therefore a position in the stream is two numbers, the block and the row in it, and
reading can resume at any position without the rows before it.

A document with images is cut only between images. A piece ends before an image that would exceed the piece's positions
or the row's budget of patches or images. Rows are filled only up to that budget.
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
_SMALL = 1 << 20  # largest number of pieces that a stored permutation shuffles


class Piece(NamedTuple):
    """A range of a document's tokens that is in one row.

    Attributes:
        source: number of the source.
        document: number of the document in the source.
        first: first token of the piece in the document.
        length: number of inputs.
        images: the piece's images, as lines of `Spans.table`.
        patches: number of patches of these images.
    """

    source: int
    document: int
    first: int
    length: int
    images: range = range(0)
    patches: int = 0


class Position(NamedTuple):
    """The place of the next row in a stream: the number of its block, and its number in the block."""

    block: int
    row: int


ORIGIN = Position(0, 0)


@dataclasses.dataclass(frozen=True)
class Part:
    """A selection of a source's documents, cut into numbered pieces.

    Attributes:
        source: source of the documents.
        documents: int [m], numbers of the m selected documents in the source.
        ends: int [m], number of pieces of all selected documents up to and including each one.
        S: maximum number of inputs of a piece.
        budget: maximum of patches and images in a piece; None without vision.
        cuts: first token of each piece, by document, for the documents that are cut between images. The cuts are stored
            because finding them reads all images of a document, which is too slow to repeat for each piece.
    """

    source: Source
    documents: np.ndarray
    ends: np.ndarray
    S: int
    budget: Budget | None = None
    cuts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def pieces(self) -> int:
        """Count the pieces."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def tokens(self) -> int:
        """Count the tokens of the documents, including borders."""
        return int(self.source.lengths[self.documents].sum())

    @property
    def images(self) -> int:
        """Count the images of the documents."""
        return int(self.source.spans.counts[self.documents].sum()) if self.source.spans else 0

    def between(self, begin: float, end: float) -> "Part":
        """Select the documents of a part of an epoch, from the fraction `begin` of its inputs to the fraction `end`.

        For this the documents are in the order of the hashes of their names. A document belongs to the part in which
        its first token is, so that consecutive parts share none. The whole epoch is from 0 to 1.
        """
        if begin <= 0 and end >= 1:
            return self
        order = np.argsort(self.source.keys[self.documents], kind="stable")
        tokens = self.source.lengths[self.documents][order] - 1
        starts = np.empty(len(order))  # fraction of the epoch's inputs before each document
        starts[order] = (np.cumsum(tokens) - tokens) / max(tokens.sum(), 1)
        chosen = (starts >= begin) & (starts < end)
        counts = np.diff(self.ends, prepend=0)[chosen]
        return dataclasses.replace(self, documents=self.documents[chosen], ends=np.cumsum(counts))

    def piece(self, document: int, number: int) -> Piece:
        """Return piece `number` of a document, as of source 0; the cost hardly depends on the document's length.

        `RowPlan` sets the source's number.
        """
        spans, inputs = self.source.spans, int(self.source.lengths[document]) - 1
        firsts = self.cuts.get(document)
        if firsts is None:
            first, last = number * self.S, min((number + 1) * self.S, inputs)
        else:
            first, last = int(firsts[number]), int(firsts[number + 1]) if number + 1 < len(firsts) else inputs
        if spans is None or not (images := spans.numbers(document)):
            return Piece(0, document, first, last - first)
        # With a budget no image is cut: an image whose first token is in the piece is whole in it.
        assert self.budget is not None
        start = lambda image: int(spans.table[image, 0])
        begin, end = (bisect.bisect_left(images, token, key=start) for token in (first, last))
        images = images[begin:end]
        rows, columns = spans.table[images.start : images.stop, 2:].astype(np.int64).T
        return Piece(0, document, first, last - first, images, int((rows * columns).sum()))

    def numbered(self, index: int) -> Piece:
        """Return piece `index` of all pieces, which are numbered document by document."""
        place = int(np.searchsorted(self.ends, index, side="right"))  # of its document in `documents`
        return self.piece(int(self.documents[place]), index - (int(self.ends[place - 1]) if place else 0))

    def cut(self, document: int) -> np.ndarray:
        """Cut a document between images; return the first token of each piece, int64 [pieces]."""
        spans, budget = self.source.spans, self.budget
        assert spans is not None and budget is not None
        images, inputs = spans.numbers(document), int(self.source.lengths[document]) - 1
        firsts, first = [], 0
        while first < inputs:
            # The piece ends after S inputs, or before the first image that does not fit. `images` are those that are in
            # no piece yet.
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
    """Select documents of a source and cut them into pieces.

    Args:
        source: source of n documents.
        chosen: bool [n], true for the documents to select.
        S: maximum number of inputs of a piece, the positions of a row.
        budget: maximum of patches and images in a row; None without vision.

    Raises:
        ConfigError: if an image does not fit into a row.
    """
    documents = np.flatnonzero(chosen)
    inputs = source.lengths[documents] - 1  # the last token is a target only
    counts = -(-inputs // S)  # pieces of each document, without regard to images
    spans, cuts = source.spans, {}
    if spans is not None and budget is not None:
        # A document with images that fits into one piece needs no cut. Each of the others is cut between its images.
        _check_images(source, S, budget)
        whole = (inputs <= S) & (spans.total(spans.patches)[documents] <= budget.patches)
        whole &= spans.counts[documents] <= budget.images
        every = Part(source, documents, counts, S, budget)
        for i in np.flatnonzero(~whole & (spans.counts[documents] > 0)):
            cuts[int(documents[i])] = every.cut(int(documents[i]))
            counts[i] = len(cuts[int(documents[i])])
    return Part(source, documents, np.cumsum(counts), S, budget, cuts)


def _check_images(source: Source, S: int, budget: Budget) -> None:
    """Check that the largest image of a source fits into a row.

    Raises:
        ConfigError: if it does not; the message names the image and the key to raise.
    """
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
    """Split a source's documents by the hashes of their names into those for training and those held out.

    About the share `data.held_out` is held out, but not more than about `data.held_out_tokens` tokens.
    """
    share = min(data.held_out, data.held_out_tokens / max(int(source.lengths.sum()), 1))
    draw = source.keys / 2**32
    return part(source, draw >= share, S, budget), part(source, draw < share, S, budget)


class Rounds:
    """The endless sequence of a part's pieces: epoch after epoch from `begin`, each epoch in a new order.

    `begin` and `end` are numbers of epochs with fractions. The first and the last epoch may be fractions; after `end`
    whole epochs follow. A fraction of an epoch has the same documents for every length of pieces (`Part.between`).
    Therefore the stages of a run, which cut a source into different pieces, read each document once per epoch.
    """

    def __init__(self, part: Part, begin: float, end: float, seed: int):
        self._part, self._seed, self._first = part, seed, int(begin)
        last = math.ceil(end) if math.isfinite(end) else self._first + 1
        self._parts = [part.between(begin - e, end - e) for e in range(self._first, last)]
        self._ends = np.cumsum([p.pieces for p in self._parts])
        self._shuffled: tuple[int, Any] = (-1, ())  # number of an epoch, from that of `begin`, and its order of pieces

    def __getitem__(self, i: int) -> Piece:
        # Find the epoch of piece `i`, and the number of the piece in it.
        number = int(np.searchsorted(self._ends, i, side="right"))
        if number < len(self._parts):
            part, i = self._parts[number], i - (int(self._ends[number - 1]) if number else 0)
        else:
            part = self._part
            more, i = divmod(i - int(self._ends[-1]), part.pieces)
            number += more
        # Map that number through the order of the epoch, which is kept until another epoch is asked for.
        if self._shuffled[0] != number:
            self._shuffled = number, _shuffled(part.pieces, self._seed, self._first + number)
        return part.numbered(int(self._shuffled[1][i]))


def _shuffled(n: int, seed: int, epoch: int) -> Any:
    """Return a sequence of the numbers 0 to n - 1 in an order that depends on `seed` and `epoch`."""
    if n > _SMALL:
        # Grain's index shuffle computes a bijection without a table; a stored permutation would take 8 bytes per piece
        # in every process. It costs 8 us per piece and no time at the start of an epoch.
        return grain.MapDataset.range(n).seed(int(np.random.RandomState([seed, epoch]).randint(2**31))).shuffle()
    return np.random.RandomState([seed, epoch]).permutation(n)


class RowPlan:
    """The plan of a stream of rows, which are packed with pieces.

    Attributes:
        parts: the parts that are mixed, one per source.
        S: number of positions of a row.
        budget: maximum of patches and images in a row; None without vision.
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
        """Plan the rows of `parts`.

        Args:
            parts: the parts to mix.
            weights: share of each part in the tokens of the stream, with `repeat`. Positions of images are tokens.
            S: number of positions of a row.
            seed: seed of all orders.
            repeat: whether the stream is endless and shuffled. Otherwise it has every piece once: those of one part in
                order, those of several parts spread evenly over the stream.
            budget: maximum of patches and images in a row; None without vision.
            epochs: (begin, end) of each part, as for `Rounds`; if absent, (0, infinity).
        """
        self.parts, self.S, self.budget, self._seed, self._repeat = parts, S, budget, seed, repeat
        epochs = epochs or [(0, math.inf)] * len(parts)
        spans = zip(parts, epochs, strict=True)
        self._rounds = [Rounds(p, *span, seed + number) for number, (p, span) in enumerate(spans)]
        # Convert shares of targets to shares of pieces. Every token except the first of a document is a target, so a
        # part has (tokens - documents) / pieces targets per piece.
        share = [w * p.pieces / (p.tokens - len(p.documents)) for w, p in zip(weights, parts, strict=False)]
        self._share = [s / sum(share) for s in share]
        self._once = np.zeros((0, 2), np.int64)  # [pieces, 2]: number of the part and of the piece
        if not repeat:
            # Piece i of n has the place (i + 0.5) / n. Sorting by places spreads every part over the whole stream.
            pieces = [np.arange(p.pieces) for p in parts]
            everything = [(np.full(len(i), number), i, (i + 0.5) / max(len(i), 1)) for number, i in enumerate(pieces)]
            part, piece, place = map(np.concatenate, zip(*everything, strict=True))
            self._once = np.stack([part, piece], axis=1)[np.argsort(place, kind="stable")]

    def _pieces(self, block: int) -> Iterator[Piece]:
        """Yield the pieces of a block before packing."""
        if self._repeat:
            for number, share in enumerate(self._share):
                for i in range(int(block * BLOCK * share), int((block + 1) * BLOCK * share)):
                    yield self._rounds[number][i]._replace(source=number)
        else:
            for number, index in self._once[block * BLOCK : (block + 1) * BLOCK].tolist():
                yield self.parts[number].numbered(index)._replace(source=number)

    def block(self, number: int) -> list[list[Piece]]:
        """Pack a block and return its rows; past the end of the plan there are none.

        Rows are shuffled, except those of a single part that is read once.
        """
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
        """Yield the rows from `start`, each with the position of the row after it."""
        block, row = start
        while rows := self.block(block):
            for number in range(row, len(rows)):
                more = number + 1 < len(rows)
                yield rows[number], Position(block, number + 1) if more else Position(block + 1, 0)
            block, row = block + 1, 0


def best_fit(lengths: Sequence[int], S: int) -> list[list[int]]:
    """Pack pieces into rows of at most S positions: longest piece first, into the fullest row that has room.

    Return the numbers of each row's pieces, ascending.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fullest = bisect.bisect_left(room, (lengths[i], 0))
        if fullest < len(room):
            left, row = room.pop(fullest)
        else:
            left, row = S, len(rows)
            rows.append([])
        rows[row].append(i)
        if left > lengths[i]:
            bisect.insort(room, (left - lengths[i], row))
    return [sorted(row) for row in rows]


def best_fit_within(costs: np.ndarray, limits: Sequence[int]) -> list[list[int]]:
    """Pack pieces as `best_fit` does, with k limits per row.

    Args:
        costs: int [n, k]: the length of each piece, then its other costs.
        limits: maximum of the sum of each of the k costs in a row.
    """
    rows: list[list[int]] = []
    room = np.empty((len(costs), len(limits)), np.int64)  # [rows, k]: what is left of the limits in every row
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
