# SPDX-License-Identifier: Apache-2.0
"""Make batches of packed rows ahead of time in threads; each process reads only its own rows.

`data/batch.py` lists the arrays of a batch. The content of a batch depends on the plan of rows and on B. It does not
depend on the number of threads or processes; the mesh changes only the padding of rows.
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
    """Make the arrays of one row of S positions.

    Args:
        row: the pieces of the row, which are written one after another.
        parts: the parts of the plan; `Piece.source` is a number in them.
        S: number of positions.
        budget: maximum of patches and images in the row; None without vision.
        number: number of the row in the batch, for `image_grids`.
    """
    batch = empty_row(S, budget)
    at = count = used = 0  # positions, images and patches that are filled
    for segment, piece in enumerate(row, 1):
        n, first, source = piece.length, piece.first, parts[piece.source].source
        # Two tokens more than inputs give the targets and the targets of MTP. The document's end may cut them short.
        tokens = source.tokens(piece.document, first, first + n + 2)
        here = slice(at, at + n)
        batch["ids"][here], batch["segment_ids"][here], batch["targets"][here] = tokens[:n], segment, tokens[1 : n + 1]
        after = tokens[2 : n + 2]  # [n], or [n - 1] at the end of a document
        batch["mtp_targets"][at : at + len(after)] = after
        for image in piece.images:
            assert budget and source.spans
            start, positions, rows, columns = source.spans.table[image].tolist()
            start += at - first  # from the image's token in the document to its position in the row
            ratio = budget.vision.downsample_ratio
            types = token_types((-(-rows // ratio), -(-columns // ratio)))
            batch["token_types"][start : start + positions] = types
            batch["image_grids"][count] = number, start, rows, columns
            batch["patches"][used : used + rows * columns] = _read_patches(source, image, budget.vision)
            count, used = count + 1, used + rows * columns
        at += n
    if budget:
        # The id of images is no target, and where there is no target there is none of MTP.
        batch["targets"][batch["targets"] == budget.vision.image_token_id] = -1
        no_target = (batch["targets"] < 0) | (batch["mtp_targets"] == budget.vision.image_token_id)
        batch["mtp_targets"][no_target] = -1
    return batch


def _read_patches(source: Source, image: int, vision: VisionLayout) -> np.ndarray:
    """Read an image of a source as patches, float32 [n, 3, p, p].

    Raises:
        RunError: if it cannot be read.
    """
    try:
        return read(source.image(image), vision)
    except ImageError as error:  # `documents.inspected` has decoded it before
        raise RunError(f"{source.name}: image {image + 1} of all cannot be read any more: {error}") from error


class Stream(Iterator[HostBatch]):
    """The batches of a plan, each with those of its B rows that this process reads.

    Attributes:
        own: numbers of the rows that this process reads.
        position: position of the row after the last batch that was returned.
    """

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
        """Start the threads; the first batch begins with the row at `start`.

        Args:
            plan: the plan of the rows.
            B: number of rows of a batch. The last batch of a plan that ends is filled up with rows of padding.
            own: numbers of the rows to read, ascending; all if absent.
            workers: number of threads; 0: each batch is made when it is needed.
            ahead: number of batches that each thread makes ahead.
            multiple: the positions and the patches of a row are padded to a multiple of this number.
            start: position of the first row, as `position` of another stream of the same plan.
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
        """Make the arrays of a batch, [len(own), ...], from the pieces of at most B rows."""
        plan, get = self._plan, lambda r: rows[r] if r < len(rows) else []
        made = [fill(get(r), plan.parts, self._length, self._budget, r) for r in self.own]
        return {name: np.stack([row[name] for row in made]) for name in made[0]}

    def _schedule(self, batches: int) -> None:
        """Start to make batches until `batches` of them are in the queue or the plan ends."""
        while len(self._queue) < batches:
            rows = list(itertools.islice(self._rows, self._B))
            if not rows:
                return
            # Position of the row after this batch; the batch waits with it, since `position` moves when it is returned.
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
        """Return the batch after the next `number` ones, and leave it in the stream.

        Raises:
            StopIteration: if the plan ends before it.
        """
        self._schedule(max(number + 1, self._ahead))
        if number >= len(self._queue):
            raise StopIteration
        return self._queue[number][1].result()

    def __next__(self) -> HostBatch:
        """Return the next batch, and move `position` past it."""
        batch = self.peek()
        self.position = self._queue.popleft()[0]
        return batch

    def close(self) -> None:
        """Stop the threads and drop the batches in the queue."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
