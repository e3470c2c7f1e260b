# SPDX-License-Identifier: Apache-2.0
"""Describe a tensor to an optimizer: its kind and the matrices in it. A model imports nothing else from `optim`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Axes = int | Sequence[int]


class MatrixSpec(NamedTuple):
    """Name the axes of a tensor that make its matrices. A superset of `optax.contrib.MuonDimensionNumbers`.

    The other axes stack matrices: scanned layers, experts, heads. Several axes of one side are flattened in
    the given order. A side that holds several matrices next to one another is split, into equal parts (a
    number) or into parts of given sizes (a sequence).

    `MatrixSpec(0, 2)` on [in, heads, dim] and `MatrixSpec(0, 1, output_split=heads)` on
    [in, heads * dim] are head-wise; `MatrixSpec(0, (1, 2))` takes the former as one matrix.

    Attributes:
        reduction_axis: axes that the layer sums over.
        output_axis: axes of the layer's output.
        reduction_split: matrices along the reduction side.
        output_split: matrices along the output side.
    """

    reduction_axis: Axes = -2
    output_axis: Axes = -1
    reduction_split: Axes = 1
    output_split: Axes = 1


class Role(NamedTuple):
    """Describe a tensor to an optimizer.

    Attributes:
        kind: "matrix" (one or more), "table" that is looked up, "norm" weight, or "vector" for any other.
        matrix: the axes of its matrices.
        heads: number of heads along the output side. A head-wise update uses it instead of
            `matrix.output_split`. 1: no heads.
        rows: axis of a table that is looked up.
        part: "engram" or "vision", the parts of V4.1 with a learning rate of their own; "": the rest.
    """

    kind: Literal["matrix", "table", "norm", "vector"]
    matrix: MatrixSpec = MatrixSpec()
    heads: int = 1
    rows: int = -2
    part: str = ""
