# SPDX-License-Identifier: Apache-2.0
"""Documents of text and images as token ids: an image is its positions, which all carry one id."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsv4_jax.data.images import Layout


class Document(NamedTuple):
    """A document's tokens, and its images.

    Attributes:
        ids: int [n], without borders.
        spans: int32 [k, 4], for each image: the token where it starts (the border before the document is token 0),
            its positions, and the rows and columns of its patches.
        images: what `images.read` takes, or texts to be drawn.
    """

    ids: np.ndarray
    spans: np.ndarray
    images: Sequence[bytes | str] = ()


NO_SPANS = np.zeros((0, 4), np.int32)


def interleave(texts: Sequence[np.ndarray], layouts: Sequence[Layout], image_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and spans (see `Document`) of a text, an image, a text, an image, ..., a text."""
    ids, spans, at = [texts[0]], [], 1 + len(texts[0])
    for text, layout in zip(texts[1:], layouts, strict=True):
        spans.append((at, layout.positions, *layout.patches))
        ids += [np.full(layout.positions, image_id, np.int32), text]
        at += layout.positions + len(text)
    return np.concatenate(ids), np.array(spans, np.int32).reshape(-1, 4)


@dataclasses.dataclass(frozen=True)
class Spans:
    """Where the images of a source's documents lie.

    Attributes:
        ends: int64 [documents], images up to and including each one's.
        table: int32 [images, 4], the `spans` of one document after another.
    """

    ends: np.ndarray
    table: np.ndarray

    @classmethod
    def of(cls, spans: Sequence[np.ndarray]) -> "Spans | None":
        """Of all documents; None if they have no image."""
        ends = np.cumsum([len(some) for some in spans], dtype=np.int64)
        return cls(ends, np.concatenate(spans)) if len(ends) and ends[-1] else None

    def numbers(self, document: int) -> range:
        """The numbers of a document's images: lines of `table`."""
        return range(int(self.ends[document - 1]) if document else 0, int(self.ends[document]))

    @property
    def counts(self) -> np.ndarray:
        """Images of each document, int64 [documents]."""
        return np.diff(self.ends, prepend=0)

    @property
    def patches(self) -> np.ndarray:
        """Patches of each image, int64 [images]."""
        return self.table[:, 2].astype(np.int64) * self.table[:, 3]

    def total(self, of_images: np.ndarray) -> np.ndarray:
        """Sums over each document's images of a number for every image: int64 [documents]."""
        return np.diff(np.concatenate([[0], np.cumsum(of_images)])[self.ends], prepend=0)
