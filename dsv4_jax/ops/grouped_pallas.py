# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels for TPU: the three products of `ops/grouped_matmul.py`, each doing only the rows' own work.

XLA's `ragged_dot` computes the gradient of the weights densely, every row with every expert, and copies the weights
to transpose them. Here a kernel visits the tiles of rows one by one, and a tile once for each group that has rows in
it. A tile that lies in one group is one product; otherwise only the parts of PART rows that hold rows of the group
are computed. Matrices are read in their stored layout and sums stay in fp32 on the chip.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv4_jax.mesh import varying

TILE = 512  # rows of a tile
PART = 128  # rows of a part of a tile
LANES = 128  # tiles of columns are multiples of this
TILES = 5 / 8  # share of the chip's vector memory for a kernel's tiles
LIMIT = 7 / 8  # share that the compiler may use for the tiles and its own temporaries


class Visits(NamedTuple):
    """List a kernel's visits to tiles of rows, in order; visits past the last repeat it.

    Attributes:
        group: int [V], whose rows are computed; G: none, the tile lies past the last group.
        tile: int [V], number of the tile of rows.
        start: int [G + 2], first row of every group, then twice the end of the last group.
    """

    group: jax.Array
    tile: jax.Array
    start: jax.Array


def plan_visits(sizes: jax.Array, rows: int, tile: int, past: bool) -> Visits:
    """Plan one visit for each group and each tile that has rows of it.

    Args:
        sizes: int [G], number of rows of each group.
        rows: number of rows of the array.
        tile: rows of a tile.
        past: whether to visit the tiles past the last group, too.
    """
    G, tiles = sizes.shape[0], -(-rows // tile)
    end = jnp.cumsum(sizes.astype(jnp.int32))
    start = jnp.concatenate([jnp.zeros_like(end[:1]), end, end[-1:]])
    first = jnp.minimum(start[:-1] // tile, tiles - 1).at[G].set(-(-end[-1] // tile))
    count = jnp.where(sizes > 0, (end - 1) // tile - first[:G] + 1, 0)
    count = jnp.append(count, tiles - first[G] if past else 0)
    # Visit v belongs to the first group whose visits, counted from 0, end after v.
    upto = jnp.cumsum(count)
    visit = jnp.clip(jnp.arange(tiles + G - 1), max=jnp.maximum(upto[-1], 1) - 1)
    group = jnp.searchsorted(upto, visit, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, G if past else G - 1)  # without any row, a group is visited that has none
    return Visits(group, first[group] + visit - (upto - count)[group], start)


def rows_product(
    x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool, total: jax.Array | None = None, used: float = 1.0
) -> jax.Array:
    """Multiply the rows of group g of `x` by `w[g]`, or by its transpose; rows past the last group are zero.

    Args:
        x: [N, K].
        w: [G, K, F], or [G, F, K] if `transposed`, in x's type.
        sizes: int [G]; their sum is at most N.
        transposed: whether to multiply by the transposes.
        total: [N, F] in x's type, to which the product is added and which the result may overwrite.
        used: expected share of the rows that are in groups, for the compiler's estimates.

    Returns:
        [N, F] in x's type, summed in fp32.
    """
    (N, K), (G, *matrix), size = x.shape, w.shape, x.dtype.itemsize
    F = matrix[0 if transposed else 1]
    if N == 0:
        return varying(jnp.zeros((0, F), x.dtype), x, w, sizes)
    given = () if total is None else (total,)
    tile, budget = TILE, _memory(TILES)
    while tile > PART and 2 * tile * K * size > budget // 2:
        tile //= 2
    # Every input and output tile is held twice, to move one while the other is computed; the product once, in fp32.
    each = 2 * K * size + tile * (2 * size * (1 + len(given)) + 4)  # bytes of a column
    columns = next(c for c in _cuts(F) if 2 * tile * K * size + c * each <= budget or c <= LANES)
    tile = min(tile, N)
    visits = plan_visits(sizes, N, tile, past=True)
    x, w, *rest = _alike(x, w, *visits, *given)
    visits, given = rest[:3], rest[3:]

    # Tiles past the last group need no input: they keep the last one, which needs no copy.
    def x_block(f: Any, v: Any, group: Any, tile_of: Any, start: Any) -> tuple[Any, ...]:
        return jnp.where(group[v] < G, tile_of[v], jnp.maximum(start[G] - 1, 0) // tile), 0

    def w_block(f: Any, v: Any, group: Any, tile_of: Any, start: Any) -> tuple[Any, ...]:
        g = jnp.minimum(group[v], G - 1)
        return (g, f, 0) if transposed else (g, 0, f)

    result = pl.BlockSpec((tile, columns), lambda f, v, group, tile_of, start: (tile_of[v], f))
    moved = used * x.nbytes * pl.cdiv(F, columns) + w.nbytes + N * F * size * (1 + len(given))
    return pl.pallas_call(
        functools.partial(_rows_kernel, transposed),
        out_shape=jax.ShapeDtypeStruct((N, F), x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(F, columns), visits[0].size),
            in_specs=[
                pl.BlockSpec((tile, K), x_block),
                pl.BlockSpec((None, columns, K) if transposed else (None, K, columns), w_block),
                *[result for _ in given],
            ],
            out_specs=result,
        ),
        input_output_aliases={5: 0} if given else {},
        compiler_params=_params("parallel", "arbitrary"),
        cost_estimate=_cost(used * 2 * N * K * F, moved),
        name="grouped_rows",
    )(*visits, x, w, *given)


def _rows_kernel(transposed: bool, group: Any, tile_of: Any, start: Any, x: Any, w: Any, *rest: Any) -> None:
    """Compute one tile of `rows_product`: the rows of the visit's group. A tile's first visit begins all its rows."""
    *total, y = rest
    v, tile = pl.program_id(1), x.shape[0]
    new_tile, new_group = _changes(v, group, tile_of)

    @pl.when(new_tile)
    def _() -> None:
        y[...] = total[0][...] if total else jnp.zeros_like(y)

    @pl.when(new_tile | new_group)
    def _() -> None:
        def compute(rows: slice, own: jax.Array | None) -> None:
            contract = (((1,), (1 if transposed else 0,)), ((), ()))
            out = jax.lax.dot_general(x[rows], w[...], contract, preferred_element_type=jnp.float32)
            before = y[rows].astype(jnp.float32) if total or own is not None else 0
            out = out + before if total else out
            y[rows] = (out if own is None else jnp.where(own, out, before)).astype(y.dtype)

        _for_own_rows(compute, tile_of[v] * tile, tile, start[group[v]], start[group[v] + 1])


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array, total: jax.Array, used: float = 1.0) -> jax.Array:
    """Add x^T dy of the rows of every group to `total`; rows past the last group may hold anything, also NaN.

    Args:
        x: [N, D].
        dy: [N, F], in x's type.
        sizes: int [G]; their sum is at most N.
        total: fp32 [G, D, F], which the result may overwrite.
        used: expected share of the rows that are in groups, for the compiler's estimates.

    Returns:
        fp32 [G, D, F].
    """
    (N, D), F, G, size = x.shape, dy.shape[1], sizes.shape[0], x.dtype.itemsize
    if N == 0:
        return varying(total, x, dy, sizes)
    tile, budget = min(TILE, N), _memory(TILES)

    def held(width: int, columns: int) -> int:
        return 2 * tile * (width + columns) * size + 5 * width * columns * 4

    def read(cut: tuple[int, int]) -> int:  # rows of x are read for every tile of columns, those of dy for every width
        return D * pl.cdiv(F, cut[1]) + F * pl.cdiv(D, cut[0])

    smallest = (min(D, LANES), min(F, LANES))
    cuts = [cut for cut in itertools.product(_cuts(D), _cuts(F)) if held(*cut) <= budget] or [smallest]
    width, columns = min(cuts, key=read)
    visits = plan_visits(sizes, N, tile, past=False)
    x, dy, total, *visits = _alike(x, dy, total, *visits)
    result = pl.BlockSpec((None, width, columns), lambda d, f, v, group, tile_of, start: (group[v], d, f))
    moved = used * N * read((width, columns)) * size + 2 * total.nbytes
    return pl.pallas_call(
        _outer_kernel,
        out_shape=jax.ShapeDtypeStruct((G, D, F), jnp.float32, manual_axis_type=jax.typeof(x).manual_axis_type),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(D, width), pl.cdiv(F, columns), visits[0].size),
            in_specs=[
                pl.BlockSpec((tile, width), lambda d, f, v, group, tile_of, start: (tile_of[v], d)),
                pl.BlockSpec((tile, columns), lambda d, f, v, group, tile_of, start: (tile_of[v], f)),
                result,
            ],
            out_specs=result,
        ),
        input_output_aliases={5: 0},
        compiler_params=_params("parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(used * 2 * N * D * F, moved),
        name="grouped_outer",
    )(*visits, x, dy, total)


def _outer_kernel(group: Any, tile_of: Any, start: Any, x: Any, dy: Any, total: Any, out: Any) -> None:
    """Add the product of one tile's rows of the visit's group to that group's tile of `weight_gradient`."""
    v, tile = pl.program_id(2), x.shape[0]
    new_tile, new_group = _changes(v, group, tile_of)

    @pl.when(new_group)
    def _() -> None:
        out[...] = total[...]

    @pl.when(new_tile | new_group)
    def _() -> None:
        def compute(rows: slice, own: jax.Array | None) -> None:
            a, b = x[rows], dy[rows]
            if own is not None:  # of both: rows past the array's end may hold anything, also NaN
                a, b = (jnp.where(own, c.astype(jnp.float32), 0).astype(c.dtype) for c in (a, b))
            out[...] += jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        _for_own_rows(compute, tile_of[v] * tile, tile, start[group[v]], start[group[v] + 1])


def _changes(v: jax.Array, group: Any, tile_of: Any) -> tuple[jax.Array, jax.Array]:
    """Return whether visit `v` has another tile, and another group, than the visit before it."""
    before = jnp.maximum(v - 1, 0)
    return (v == 0) | (tile_of[v] != tile_of[before]), (v == 0) | (group[v] != group[before])


def _for_own_rows(compute: Any, first: jax.Array, tile: int, start: jax.Array, end: jax.Array) -> None:
    """Call `compute(rows, own)` for the tile's rows in [start, end); `first` is the number of the tile's first row.

    If the whole tile is inside, it is one call without a mask. Else each part with a row inside is a call with the
    mask `own` [rows, 1].
    """
    whole = (start <= first) & (first + tile <= end)

    @pl.when(whole)
    def _() -> None:
        compute(slice(None), None)

    for part in range(0, tile, PART):
        count = min(PART, tile - part)
        row = first + part

        @pl.when(~whole & (row < end) & (start < row + count))
        def _(part: int = part, count: int = count, row: jax.Array = row) -> None:
            number = row + jax.lax.broadcasted_iota(jnp.int32, (count, 1), 0)
            compute(slice(part, part + count), (start <= number) & (number < end))


def _cuts(size: int) -> list[int]:
    """List the columns of a tile if `size` columns are cut into 1, 2, 4, ... tiles: down to LANES, which is the last.

    An even number of tiles feeds both cores of a v5p.
    """
    cuts = [size]
    while cuts[-1] > LANES:
        cuts.append(pl.cdiv(pl.cdiv(cuts[-1], 2), LANES) * LANES)
    return cuts


def _alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Mark all arrays as varying over the same mesh axes, which a kernel's operands must do."""
    return tuple(varying(a, *arrays) for a in arrays)


def _memory(share: float) -> int:
    """Return a share of the vector memory of the TPU that we trace for, in bytes."""
    return int(share * pltpu.get_tpu_info().vmem_capacity_bytes)


def _params(*semantics: Any) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=_memory(LIMIT))


def _cost(operations: float, moved: float) -> pl.CostEstimate:
    """Estimate a call for XLA's scheduler, which cannot look into it."""
    return pl.CostEstimate(flops=int(operations), bytes_accessed=int(moved), transcendentals=0)
