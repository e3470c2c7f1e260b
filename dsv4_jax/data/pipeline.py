# SPDX-License-Identifier: Apache-2.0
"""Batches of packed rows, made ahead of time by threads; every process reads only the rows that it needs.

`data/batch.py` lists the arrays of a batch. The stream depends on the sources, the seed, S and B alone: not on workers,
processes or the mesh.
"""

import collections
import concurrent.futures
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dsv4_jax.data.batch import HostBatch, empty_row
from dsv4_jax.data.images import Budget, ImageError, read, token_types
from dsv4_jax.data.packing import ORIGIN, Part, Piece, Position, RowPlan
from dsv4_jax.data.sources import Source
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.section import RunError


def fill(
    row: Sequence[Piece], parts: Sequence[Part], S: int, budget: Budget | None = None, number: int = 0
) -> HostBatch:
    """One row [S] from its pieces; it is row `number` of the batch."""
    batch = empty_row(S, budget)
    at = count = used = 0
    for segment, piece in enumerate(row, 1):
        n, first, source = piece.length, piece.first, parts[piece.source].source
        tokens = source.tokens(piece.document, first, first + n + 2)
        here = slice(at, at + n)
        batch["ids"][here], batch["segment_ids"][here], batch["targets"][here] = tokens[:n], segment, tokens[1 : n + 1]
        after = tokens[2 : n + 2]  # one fewer at the end of a document
        batch["mtp_targets"][at : at + len(after)] = after
        for image in piece.images:
            assert budget and source.spans
            start, positions, rows, columns = source.spans.table[image].tolist()
            start += at - first
            ratio = budget.vision.downsample_ratio
            types = token_types((-(-rows // ratio), -(-columns // ratio)))
            batch["token_types"][start : start + positions] = types
            batch["image_grids"][count] = number, start, rows, columns
            batch["patches"][used : used + rows * columns] = _patches(source, image, budget.vision)
            count, used = count + 1, used + rows * columns
        at += n
    if budget:
        batch["targets"][batch["targets"] == budget.vision.image_token_id] = -1
        no_target = (batch["targets"] < 0) | (batch["mtp_targets"] == budget.vision.image_token_id)
        batch["mtp_targets"][no_target] = -1
    return batch


def _patches(source: Source, image: int, vision: VisionLayout) -> np.ndarray:
    try:
        return read(source.image(image), vision)
    except ImageError as error:  # it could be read before
        raise RunError(f"{source.name}: image {image + 1} of all cannot be read any more: {error}") from error


class Stream(Iterator[HostBatch]):
    """Batches of B rows, of which this process has `own`."""

    def __init__(
        self,
        plan: RowPlan,
        B: int,
        *,
        own: Sequence[int] | None = None,
        workers: int = 0,
        ahead: int = 2,
        multiple: int = 1,
        start: Position = ORIGIN,
    ):
        """Batches from `start` on.

        Args:
            plan: the rows.
            B: rows of a batch; the last of a plan that ends is filled up with padding.
            own: numbers of the rows to read, in order; all if absent.
            workers: threads; 0 makes a batch when it is asked for.
            ahead: batches that each thread makes ahead.
            multiple: the positions and the patches of a row are padded to a multiple of it.
            start: where to begin: the `position` of another stream of the same plan.
        """
        self._plan, self._B, self.own = plan, B, list(range(B)) if own is None else list(own)
        padded = lambda size: size + -size % multiple
        self._length = padded(plan.S)
        self._budget = plan.budget and plan.budget._replace(patches=padded(plan.budget.patches))
        self._rows, self.position, self._seen = plan.rows(start), start, start
        self._queue: collections.deque[tuple[Position, concurrent.futures.Future[HostBatch]]] = collections.deque()
        self._threads = concurrent.futures.ThreadPoolExecutor(workers) if workers else None
        self._ahead = workers * ahead

    def _make(self, rows: list[list[Piece]]) -> HostBatch:
        plan, get = self._plan, lambda r: rows[r] if r < len(rows) else []
        made = [fill(get(r), plan.parts, self._length, self._budget, r) for r in self.own]
        return {name: np.stack([row[name] for row in made]) for name in made[0]}

    def _schedule(self, batches: int) -> None:
        """Has so many batches waiting, or as many as there are."""
        while len(self._queue) < batches:
            rows = list(itertools.islice(self._rows, self._B))
            if not rows:
                return
            self._seen = rows[-1][1]
            pieces = [row for row, _ in rows]
            future: concurrent.futures.Future[HostBatch]
            if self._threads:
                future = self._threads.submit(self._make, pieces)
            else:
                future = concurrent.futures.Future()
                future.set_result(self._make(pieces))
            self._queue.append((self._seen, future))

    def peek(self, number: int = 0) -> HostBatch:
        """The batch that comes after `number` others; it still comes.

        Raises:
            StopIteration: if there is none.
        """
        self._schedule(max(number + 1, self._ahead))
        if number >= len(self._queue):
            raise StopIteration
        return self._queue[number][1].result()

    def __next__(self) -> HostBatch:
        batch = self.peek()
        self.position = self._queue.popleft()[0]
        return batch

    def close(self) -> None:
        """Ends the threads; what they were making is lost."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
