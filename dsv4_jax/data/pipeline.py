# SPDX-License-Identifier: Apache-2.0
"""Batches of packed rows, made ahead of time by threads; every process reads only the rows that it needs.

A batch is a dict of int32 arrays: `ids`; `segment_ids` (0 padding, 1, 2, ... documents); `targets`, the
token after each one, and `mtp_targets`, the one after that, -1 where there is none. Targets come from whole
documents, so a document longer than a row loses none where it is cut. The stream depends on the sources, the
seed, S and B alone: not on workers, processes or the mesh.
"""

import collections
import concurrent.futures
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dsv4_jax.data.packing import START, Part, Piece, Plan, Position

Batch = dict[str, np.ndarray]
PADDING = {"ids": 0, "segment_ids": 0, "targets": -1, "mtp_targets": -1}


def fill(row: Sequence[Piece], parts: Sequence[Part], S: int) -> Batch:
    """One row [S] from its pieces."""
    batch = {name: np.full(S, value, np.int32) for name, value in PADDING.items()}
    at = 0
    for segment, piece in enumerate(row, 1):
        n, first = piece.length, piece.first
        tokens = parts[piece.source].source.tokens(piece.document, first, first + n + 2)
        here = slice(at, at + n)
        batch["ids"][here], batch["segment_ids"][here], batch["targets"][here] = tokens[:n], segment, tokens[1 : n + 1]
        after = tokens[2 : n + 2]  # one fewer at the end of a document
        batch["mtp_targets"][at : at + len(after)] = after
        at += n
    return batch


class Stream(Iterator[Batch]):
    """Batches of B rows, of which this process has `own`."""

    def __init__(
        self,
        plan: Plan,
        B: int,
        *,
        own: Sequence[int] | None = None,
        workers: int = 0,
        ahead: int = 2,
        multiple: int = 1,
        start: Position = START,
    ):
        """Batches from `start` on.

        Args:
            plan: the rows.
            B: rows of a batch; the last of a plan that ends is filled up with padding.
            own: numbers of the rows to read, in order; all if absent.
            workers: threads; 0 makes a batch when it is asked for.
            ahead: batches that each thread makes ahead.
            multiple: rows are padded to a multiple of it.
            start: where to begin: the `position` of another stream of the same plan.
        """
        self._plan, self._B, self.own = plan, B, list(range(B)) if own is None else list(own)
        self._length = plan.S + -plan.S % multiple
        self._rows, self.position, self._seen = plan.rows(start), start, start
        self._queue: collections.deque[tuple[Position, concurrent.futures.Future[Batch]]] = collections.deque()
        self._threads = concurrent.futures.ThreadPoolExecutor(workers) if workers else None
        self._ahead = workers * ahead

    def _make(self, rows: list[list[Piece]]) -> Batch:
        made = [fill(rows[r] if r < len(rows) else [], self._plan.parts, self._length) for r in self.own]
        return {name: np.stack([row[name] for row in made]) for name in PADDING}

    def _schedule(self, batches: int) -> None:
        """Has so many batches waiting, or as many as there are."""
        while len(self._queue) < batches:
            rows = list(itertools.islice(self._rows, self._B))
            if not rows:
                return
            self._seen = rows[-1][1]
            pieces = [row for row, _ in rows]
            future: concurrent.futures.Future[Batch]
            if self._threads:
                future = self._threads.submit(self._make, pieces)
            else:
                future = concurrent.futures.Future()
                future.set_result(self._make(pieces))
            self._queue.append((self._seen, future))

    def peek(self, number: int = 0) -> Batch:
        """The batch that comes after `number` others; it still comes.

        Raises:
            StopIteration: if there is none.
        """
        self._schedule(max(number + 1, self._ahead))
        if number >= len(self._queue):
            raise StopIteration
        return self._queue[number][1].result()

    def __next__(self) -> Batch:
        batch = self.peek()
        self.position = self._queue.popleft()[0]
        return batch

    def close(self) -> None:
        """Ends the threads; what they were making is lost."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
