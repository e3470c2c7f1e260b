# SPDX-License-Identifier: Apache-2.0
"""Describe a tensor to an optimizer: its kind and the matrices in it. A model imports nothing else from `optim`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Axes = int | Sequence[int]


class MatrixSpec(NamedTuple):
    """Which axes of a tensor make its matrices. A superset of `optax.contrib.MuonDimensionNumbers`.

    Axes that are not named stack matrices: scanned layers, experts, heads. Several axes of one side
    are flattened in the given order. A side that holds several matrices next to one another is split,
    into equal parts (a number) or parts of given sizes (a sequence).

    `MatrixSpec(0, 2)` on [in, heads, dim] and `MatrixSpec(0, 1, output_split=heads)` on
    [in, heads * dim] are head-wise; `MatrixSpec(0, (1, 2))` takes the former as one matrix.

    Attributes:
        reduction_axis: axes that the layer sums over.
        output_axis: axes that it makes.
        reduction_split: matrices along the reduction side.
        output_split: matrices along the output side.
    """

    reduction_axis: Axes = -2
    output_axis: Axes = -1
    reduction_split: Axes = 1
    output_split: Axes = 1


class Role(NamedTuple):
    """What a tensor is to an optimizer.

    Attributes:
        kind: "matrix" (one or more), "table" that is looked up, "norm" weight, or any other "vector".
        matrix: which matrices it holds.
        heads: matrices along the output side for a head-wise update, which comes instead of
            `matrix.output_split`; 1: no heads.
        rows: axis of a table that is looked up.
        part: "", "engram" or "vision": parts of V4.1 with a learning rate of their own.
    """

    kind: Literal["matrix", "table", "norm", "vector"]
    matrix: MatrixSpec = MatrixSpec()
    heads: int = 1
    rows: int = -2
    part: str = ""
