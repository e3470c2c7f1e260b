# SPDX-License-Identifier: Apache-2.0
"""Apply one function to all matrices of many sharded tensors.

A `MatrixSpec` takes a tensor apart into blocks [N, n, m] with n <= m. `map_matrices` joins the blocks of equal
shape of all tensors in one stack, gives every device its share of whole matrices, and returns the results to
the devices of the tensors.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax.optim.roles import Axes, MatrixSpec


def _tuple(axes: Axes) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


class _Layout(NamedTuple):
    """Resolve a spec for one shape: axes as positions, and the sizes of the parts of both sides."""

    stack: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def _resolve(spec: Any, shape: tuple[int, ...]) -> _Layout:
    """Resolve a spec for `shape`; refuse one that does not fit it."""
    spec = MatrixSpec(*spec)
    sides = []
    # Each side has its axes, counted from 0, and the sizes of its parts, which fill it.
    for axes, split in ((spec.reduction_axis, spec.reduction_split), (spec.output_axis, spec.output_split)):
        axes = _tuple(axes)
        if not axes or any(not -len(shape) <= axis < len(shape) for axis in axes):
            raise ValueError(f"{spec} names an axis that shape {shape} does not have; give the leaf a spec of its own")
        axes = tuple(axis % len(shape) for axis in axes)
        size = math.prod(shape[axis] for axis in axes)
        parts = (size // max(split, 1),) * split if isinstance(split, int) else tuple(split)
        empty = isinstance(split, int) and split > 0 == size  # matrices without entries
        if not empty and (not parts or sum(parts) != size or min(parts) < 1):
            raise ValueError(f"{spec} does not split the {size} entries of axes {axes} of shape {shape}")
        sides.append((axes, parts))
    (reduction, rows), (output, columns) = sides
    if len({*reduction, *output}) != len(reduction) + len(output):
        raise ValueError(f"{spec} names an axis of shape {shape} twice")
    stack = tuple(axis for axis in range(len(shape)) if axis not in (*reduction, *output))
    return _Layout(stack, reduction, output, rows, columns)


def list_matrices(spec: MatrixSpec, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """List the shape (reduction, output) of every matrix that the spec finds in a tensor of `shape`.

    Raises:
        ValueError: if the spec does not fit the shape.
    """
    layout = _resolve(spec, shape)
    if not math.prod(shape):
        return []
    return [(n, m) for n in layout.rows for m in layout.columns] * math.prod(shape[axis] for axis in layout.stack)


def _blocks(x: jax.Array, layout: _Layout) -> list[jax.Array]:
    """Permute x to stacks of matrices [N, rows, columns]: one stack if all parts are equal, else one per pair."""
    shape = [math.prod(x.shape[axis] for axis in axes) for axes in (layout.stack, layout.reduction, layout.output)]
    x = x.transpose(*layout.stack, *layout.reduction, *layout.output).reshape(shape)
    if len({*layout.rows}) == len({*layout.columns}) == 1:
        (p, n), (q, m) = ((len(parts), parts[0]) for parts in (layout.rows, layout.columns))
        return [x.reshape(-1, p, n, q, m).transpose(0, 1, 3, 2, 4).reshape(-1, n, m)]
    rows = jnp.split(x, _borders(layout.rows), axis=1)
    return [part for row in rows for part in jnp.split(row, _borders(layout.columns), axis=2)]


def _borders(sizes: Sequence[int]) -> list[int]:
    """List where each part but the first begins, as `jnp.split` expects."""
    return list(itertools.accumulate(sizes))[:-1]


class _Spread(NamedTuple):
    """Exchange a stack of matrices between whole tensors and whole matrices.

    Attributes:
        rows: mesh axes over which the rows of each matrix are split.
        columns: mesh axes over which its columns are split.
        copies: mesh axes over which the stack is replicated.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    def gather(self, x: jax.Array) -> jax.Array:
        """Give this device whole matrices, from its share [N, rows, columns] of each.

        The stack is padded with zero matrices so that the devices divide it.
        """
        copies = _size(self.copies)
        x = jnp.pad(x, ((0, -len(x) % math.prod(map(_size, self))), (0, 0), (0, 0)))
        # Exchange a part of the stack for the missing rows, then of the rest for the missing columns.
        for axis, names in enumerate(self[:2], 1):
            x = jax.lax.all_to_all(x, names, 0, axis, tiled=True) if names else x
        if not self.copies:
            return x
        # Devices with the same matrices each take their own share of them.
        share = len(x) // copies
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.copies) * share, share)

    def scatter(self, x: jax.Array, N: int) -> jax.Array:
        """Invert `gather`: return this device's share of each of N matrices."""
        if self.copies:
            x = jax.lax.all_gather(x, self.copies, tiled=True, to="invarying")
        for axis, names in ((2, self.columns), (1, self.rows)):
            x = jax.lax.all_to_all(x, names, axis, 0, tiled=True) if names else x
        return x[:N]


def _size(names: tuple[str, ...]) -> int:
    """Return the number of devices along mesh axes; 1 without axes, where `axis_size` has no answer."""
    return jax.lax.axis_size(names) if names else 1


class _Auto(NamedTuple):
    """Do what `_Spread` does on a mesh with Auto axes, where XLA moves the data."""

    mesh: Any

    def gather(self, x: jax.Array) -> jax.Array:
        return self._placed(jnp.pad(x, ((0, -len(x) % self.mesh.size), (0, 0), (0, 0))))

    def scatter(self, x: jax.Array, N: int) -> jax.Array:
        return self._placed(x)[:N]  # placed after f too: otherwise XLA splits the iteration of f itself

    def _placed(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(self.mesh.axis_names)))


class _Held(NamedTuple):
    """Describe a device's part of a tensor: its layout, its spread, and the PartitionSpec that makes this part."""

    layout: _Layout
    spread: Any
    spec: P


def _held(layout: _Layout, x: jax.Array, mesh: Any) -> _Held:
    """Choose the exchange that makes a tensor's matrices whole, from how its axes are split over the mesh.

    Three cases for the first axis of a side; its other axes are always gathered first:

    | a device's piece of the side | exchange |
    |---|---|
    | whole matrices (equal parts, whose number the devices divide) | none |
    | an even share of one matrix | its rows or columns are exchanged by `_Spread` |
    | anything else | the axis is gathered first |

    Where an axis is gathered first, `spec` is not the tensor's own.
    """
    # names: mesh axes of every axis of the tensor.
    names = [(s,) if isinstance(s, str) else tuple(s or ()) for s in jax.typeof(x).sharding.spec]
    names += [()] * (x.ndim - len(names))
    local, sides = [], []
    for axes, parts in ((layout.reduction, layout.rows), (layout.output, layout.columns)):
        pieces = math.prod(mesh.shape[name] for name in names[axes[0]])
        whole = len({*parts}) == 1 and len(parts) % pieces == 0
        for axis in axes if not (whole or len(parts) == 1) else axes[1:]:
            names[axis] = ()  # to be gathered first
        # Whole matrices are exchanged over no axis: this device has its part of their number, else of their size.
        sides.append(() if whole else names[axes[0]])
        pieces = math.prod(mesh.shape[name] for name in names[axes[0]])
        local.append(parts[: len(parts) // pieces] if whole else tuple(size // pieces for size in parts))
    # Over mesh axes that split nothing, the devices hold copies.
    copies = tuple(name for name in mesh.axis_names if not any(name in axes for axes in names))
    rows, columns = local
    spec = P(*(axes or None for axes in names))
    return _Held(layout._replace(rows=rows, columns=columns), _Spread(*sides, copies), spec)


def map_matrices(
    f: Callable[[jax.Array], jax.Array], xs: Sequence[jax.Array], specs: Sequence[MatrixSpec]
) -> list[jax.Array]:
    """Apply `f` to every matrix of every tensor, on any mesh. Call it under `jax.jit`.

    `f` gets all matrices of equal shape in one stack, whichever tensors they come from, transposed where they
    have more rows than columns. On a mesh every device gets the same number of whole matrices, and each matrix
    goes to one device only. Inside a `shard_map` of the caller the part of a tensor on a device counts as a
    whole tensor.

    Args:
        f: maps a stack [N, n, m] with n <= m to one of the same shape and dtype, each matrix independently of
            the others, and zeros to zeros.
        xs: tensors of any rank; on a mesh with Explicit axes, or with Auto axes.
        specs: the axes of the matrices of each tensor.

    Returns:
        Tensors like `xs`, on the same devices.

    Raises:
        ValueError: if a spec does not fit its tensor.
    """
    if not all(x.size for x in xs):  # a tensor without entries has no matrix to hand to f
        some = [i for i, x in enumerate(xs) if x.size]
        ys = dict(zip(some, map_matrices(f, [xs[i] for i in some], [specs[i] for i in some]), strict=True))
        return [ys.get(i, x) for i, x in enumerate(xs)]
    if not xs:
        return []
    layouts = [_resolve(spec, x.shape) for x, spec in zip(xs, specs, strict=True)]
    mesh = jax.typeof(xs[0]).sharding.mesh
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return _map_held(f, xs, [_Held(layout, _Spread(), P()) for layout in layouts], layouts)
    if AxisType.Auto in mesh.axis_types:
        return _map_held(f, xs, [_Held(layout, _Auto(mesh), P()) for layout in layouts], layouts)
    held = [_held(layout, x, mesh) for layout, x in zip(layouts, xs, strict=True)]
    places = tuple(h.spec for h in held)
    run = jax.shard_map(lambda *xs: _map_held(f, xs, held, layouts), mesh=mesh, in_specs=places, out_specs=list(places))
    ys = run(*(jax.reshard(x, NamedSharding(mesh, h.spec)) for x, h in zip(xs, held, strict=True)))
    return [jax.reshard(y, jax.typeof(x).sharding) for x, y in zip(xs, ys, strict=True)]


def _map_held(
    f: Callable[[jax.Array], jax.Array],
    xs: Sequence[jax.Array],
    held: Sequence[_Held],
    layouts: Sequence[_Layout],
) -> list[jax.Array]:
    """Apply `f` to the matrices of a device's parts of tensors."""
    # Take tensors apart; `alike` sorts their blocks (tensor, part) by shape, then by spread, side and type.
    alike: dict[Any, dict[Any, list[tuple[int, int]]]] = {}
    blocks, undo = [], []
    for i, (x, layout, h) in enumerate(zip(xs, layouts, held, strict=True)):
        # Taking apart only permutes entries, so its transpose puts them back.
        parts, back = jax.vjp(functools.partial(_blocks, layout=h.layout), x)
        blocks.append(parts)
        undo.append(back)
        for j, (_, shape) in enumerate(zip(parts, itertools.product(layout.rows, layout.columns), strict=False)):
            key = (h.spread, shape[0] > shape[1], x.dtype)
            alike.setdefault(tuple(sorted(shape)), {}).setdefault(key, []).append((i, j))
    for same_shape in alike.values():
        # One stack [N, n, m] of all whole matrices of a shape, each gathered with those of its spread.
        stacks = []
        for (spread, tall, _), numbers in same_shape.items():
            x = spread.gather(jnp.concatenate([blocks[i][j] for i, j in numbers]))
            stacks.append(x.mT if tall else x)
        results = jnp.split(f(jnp.concatenate(stacks)), _borders([len(x) for x in stacks]))
        # The results go back the same way, each in the place of its block.
        for ((spread, tall, dtype), numbers), y in zip(same_shape.items(), results, strict=True):
            sizes = [len(blocks[i][j]) for i, j in numbers]
            y = spread.scatter((y.mT if tall else y).astype(dtype), sum(sizes))
            for (i, j), piece in zip(numbers, jnp.split(y, _borders(sizes)), strict=True):
                blocks[i][j] = piece
    return [back(parts)[0] for back, parts in zip(undo, blocks, strict=True)]
