# SPDX-License-Identifier: Apache-2.0
"""Documents to batches: pieces, shuffled and best-fit packed into rows by grain.

A batch is a dict of int32 arrays [B, S]: `ids`; `segment_ids` (0 padding, 1, 2, ... documents);
`targets`, the token after each one, and `mtp_targets`, the one after that, -1 where there is none.
Targets are made from whole documents, so a document longer than a row loses none where it is cut.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset

from dsv4_jax.data.text import Document

Batch = dict[str, np.ndarray]
_PADDING = {"ids": 0, "targets": -1, "mtp_targets": -1}
_BINS = 32  # rows that packing keeps open to find the best fit


class Pieces(Sequence[Batch]):
    """Every document cut into pieces of at most `seq_len` inputs, each with its targets."""

    def __init__(self, documents: Sequence[Document], seq_len: int):
        self.documents, self.seq_len = documents, seq_len
        counts = (-(-(len(d.text) + 1) // seq_len) for d in documents)  # the last token is a target only
        self.ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: Any) -> Any:
        d = bisect.bisect_right(self.ends, index)
        first = (index - (self.ends[d - 1] if d else 0)) * self.seq_len
        tokens = np.append(self.documents[d].tokens, np.int32(-1))
        piece = tokens[first : first + self.seq_len + 2]
        n = min(self.seq_len, len(piece) - 2)
        return {"ids": piece[:n], "targets": piece[1 : n + 1], "mtp_targets": piece[2 : n + 2]}

    def __repr__(self) -> str:  # grain writes this into the iterator's state
        return f"Pieces({len(self.documents)} documents, {len(self)} pieces)"


def batches(
    documents: Sequence[Document], *, seq_len: int, rows: int, seed: int, repeat: bool = True, multiple: int = 1
) -> grain.IterDataset:
    """Batches of `rows` packed rows of `seq_len` positions, shuffled by the seed.

    Endless, with a new order every epoch; without `repeat` once, dropping an incomplete last batch. Rows
    are padded to a multiple of `multiple`.
    """
    pieces = grain.MapDataset.source(Pieces(documents, seq_len)).shuffle(seed)
    if repeat:
        pieces = pieces.repeat()
    packed = BestFitPackIterDataset(
        pieces.to_iter_dataset(),
        length_struct=dict.fromkeys(_PADDING, seq_len),
        num_packing_bins=_BINS,
        shuffle_bins=False,
        padding_struct=_PADDING,
    )

    def row(packed: Batch) -> Batch:
        batch = {name: packed[name] for name in _PADDING} | {"segment_ids": packed["ids_segment_ids"]}
        pad = (0, -seq_len % multiple)
        return {
            name: np.pad(value.astype(np.int32), pad, constant_values=_PADDING.get(name, 0))
            for name, value in batch.items()
        }

    return packed.map(row).batch(rows, drop_remainder=True)
