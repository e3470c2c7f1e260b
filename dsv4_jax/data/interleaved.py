# SPDX-License-Identifier: Apache-2.0
"""Represent documents of text and images as token ids. All positions of an image have the same id."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsv4_jax.data.images import Layout


class Document(NamedTuple):
    """A document of token ids, with its images.

    Attributes:
        ids: int [n], ids of text and images, without borders.
        spans: int32 [k, 4]: (first token, number of positions, patch rows, patch columns) of each image. Token 0 is the
            border before the document, so that token i + 1 is `ids[i]`.
        images: k encoded images, or for pictures that are drawn the lines of text.
    """

    ids: np.ndarray
    spans: np.ndarray
    images: Sequence[bytes | str] = ()


NO_SPANS = np.zeros((0, 4), np.int32)


def interleave(texts: Sequence[np.ndarray], layouts: Sequence[Layout], image_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Join texts and images in turn: text, image, text, ..., text; return `ids` and `spans` of a `Document`.

    Args:
        texts: ids of the k + 1 texts around the images.
        layouts: layouts of the k images.
        image_id: id of all positions of images.
    """
    ids, spans, token = [texts[0]], [], 1 + len(texts[0])  # token 0 is the border
    for text, layout in zip(texts[1:], layouts, strict=True):
        spans.append((token, layout.positions, *layout.patches))
        ids += [np.full(layout.positions, image_id, np.int32), text]
        token += layout.positions + len(text)
    return np.concatenate(ids), np.array(spans, np.int32).reshape(-1, 4)


@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of all images of a source.

    Attributes:
        ends: int64 [documents], number of images in all documents up to and including each one.
        table: int32 [images, 4], `Document.spans` of all documents, one after another.
    """

    ends: np.ndarray
    table: np.ndarray

    @classmethod
    def of(cls, spans: Sequence[np.ndarray]) -> "Spans | None":
        """Join the `spans` of every document of a source; return None if the source has no image."""
        ends = np.cumsum([len(some) for some in spans], dtype=np.int64)
        return cls(ends, np.concatenate(spans)) if len(ends) and ends[-1] else None

    def numbers(self, document: int) -> range:
        """Return the range of a document's images, as lines of `table`."""
        return range(int(self.ends[document - 1]) if document else 0, int(self.ends[document]))

    @property
    def counts(self) -> np.ndarray:
        """Count the images of each document: int64 [documents]."""
        return np.diff(self.ends, prepend=0)

    @property
    def patches(self) -> np.ndarray:
        """Count the patches of each image: int64 [images]."""
        return self.table[:, 2].astype(np.int64) * self.table[:, 3]

    def total(self, of_images: np.ndarray) -> np.ndarray:
        """Sum the values `of_images` [images] over the images of each document: int64 [documents]."""
        return np.diff(np.concatenate([[0], np.cumsum(of_images)])[self.ends], prepend=0)
