# SPDX-License-Identifier: Apache-2.0
"""Which matrices a tensor holds, and one function applied to all matrices of many sharded tensors.

A `MatrixSpec` takes a tensor apart into blocks [N, n, m] with n <= m. `map_matrices` gathers the blocks
of equal shape of all tensors into one stack, gives every device its share of whole matrices, and puts
the results back where the tensors live.
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
    """A spec resolved for one shape: axes as positions, sizes of the parts of either side."""

    stack: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def _resolve(spec: Any, shape: tuple[int, ...]) -> _Layout:
    spec = MatrixSpec(*spec)
    sides = []
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


def block_shapes(spec: MatrixSpec, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Shape (reduction, output) of every matrix that the spec finds in a tensor of `shape`.

    Raises:
        ValueError: if the spec does not fit the shape.
    """
    at = _resolve(spec, shape)
    if not math.prod(shape):
        return []
    return [(n, m) for n in at.rows for m in at.columns] * math.prod(shape[axis] for axis in at.stack)


def _blocks(x: jax.Array, at: _Layout) -> list[jax.Array]:
    """The matrices as stacks [N, rows, columns], one for each pair of unequal parts; only a permutation."""
    shape = [math.prod(x.shape[axis] for axis in axes) for axes in (at.stack, at.reduction, at.output)]
    x = x.transpose(*at.stack, *at.reduction, *at.output).reshape(shape)
    if len({*at.rows}) == len({*at.columns}) == 1:
        (p, n), (q, m) = ((len(parts), parts[0]) for parts in (at.rows, at.columns))
        return [x.reshape(-1, p, n, q, m).transpose(0, 1, 3, 2, 4).reshape(-1, n, m)]
    rows = jnp.split(x, _borders(at.rows), axis=1)
    return [part for row in rows for part in jnp.split(row, _borders(at.columns), axis=2)]


def _borders(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes))[:-1]


class _Spread(NamedTuple):
    """Mesh axes over which a stack of matrices is spread: their rows, their columns, and plain copies."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    def gather(self, x: jax.Array) -> jax.Array:
        """Whole matrices for this device, from its share [N, rows, columns] of a stack.

        The stack is padded with zeros where the devices do not divide it.
        """
        copies = _size(self.copies)
        x = jnp.pad(x, ((0, -len(x) % math.prod(map(_size, self))), (0, 0), (0, 0)))
        for axis, names in enumerate(self[:2], 1):
            x = jax.lax.all_to_all(x, names, 0, axis, tiled=True) if names else x
        if not self.copies:
            return x
        share = len(x) // copies
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.copies) * share, share)

    def scatter(self, x: jax.Array, N: int) -> jax.Array:
        """The inverse of `gather`: this device's share of N matrices."""
        if self.copies:
            x = jax.lax.all_gather(x, self.copies, tiled=True, to="invarying")
        for axis, names in ((2, self.columns), (1, self.rows)):
            x = jax.lax.all_to_all(x, names, axis, 0, tiled=True) if names else x
        return x[:N]


def _size(names: tuple[str, ...]) -> int:
    return jax.lax.axis_size(names) if names else 1


class _Auto(NamedTuple):
    """The same on a mesh with Auto axes, where XLA moves the data."""

    mesh: Any

    def gather(self, x: jax.Array) -> jax.Array:
        return self._placed(jnp.pad(x, ((0, -len(x) % self.mesh.size), (0, 0), (0, 0))))

    def scatter(self, x: jax.Array, N: int) -> jax.Array:
        return self._placed(x)[:N]  # also after f, or XLA splits the iteration itself

    def _placed(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(self.mesh.axis_names)))


class _Held(NamedTuple):
    """What a device holds of a tensor: its layout there, how it is spread, and the spec that makes it so."""

    layout: _Layout
    spread: Any
    spec: P


def _held(at: _Layout, x: jax.Array, mesh: Any) -> _Held:
    """The exchange that makes a tensor's matrices whole.

    An axis whose pieces are neither whole matrices nor an even share of single ones is gathered first:
    `spec` is then not the tensor's own.
    """
    names = [(s,) if isinstance(s, str) else tuple(s or ()) for s in jax.typeof(x).sharding.spec]
    names += [()] * (x.ndim - len(names))
    local, sides = [], []
    for axes, parts in ((at.reduction, at.rows), (at.output, at.columns)):
        pieces = math.prod(mesh.shape[name] for name in names[axes[0]])
        whole = len({*parts}) == 1 and len(parts) % pieces == 0
        for axis in axes if not (whole or len(parts) == 1) else axes[1:]:
            names[axis] = ()
        sides.append(() if whole else names[axes[0]])
        pieces = math.prod(mesh.shape[name] for name in names[axes[0]])
        local.append(parts[: len(parts) // pieces] if whole else tuple(size // pieces for size in parts))
    copies = tuple(name for name in mesh.axis_names if not any(name in axes for axes in names))
    rows, columns = local
    return _Held(at._replace(rows=rows, columns=columns), _Spread(*sides, copies), P(*(axes or None for axes in names)))


def map_matrices(
    f: Callable[[jax.Array], jax.Array], xs: Sequence[jax.Array], specs: Sequence[MatrixSpec]
) -> list[jax.Array]:
    """f of every matrix of every tensor, whatever mesh they are spread over.

    Matrices of equal shape are handed to `f` together, whichever tensors they come from, transposed
    where they have more rows than columns. On a mesh every device gets whole matrices, as many as any
    other, and each is handed to one device only. Inside a `shard_map` of the caller's, what a device
    holds is taken for whole. Call it under `jax.jit`.

    Args:
        f: from a stack [N, n, m] with n <= m to one of the same shape and dtype, each matrix on its own
            and zero for zero.
        xs: tensors of any rank; on a mesh with Explicit axes, or with Auto axes.
        specs: which matrices each holds.

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
        return _map_held(f, xs, [_Held(at, _Spread(), P()) for at in layouts], layouts)
    if AxisType.Auto in mesh.axis_types:
        return _map_held(f, xs, [_Held(at, _Auto(mesh), P()) for at in layouts], layouts)
    held = [_held(at, x, mesh) for at, x in zip(layouts, xs, strict=True)]
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
    # Blocks by shape, then by how they are spread and by type: [(tensor, part of the tensor), ...].
    found: dict[Any, dict[Any, list[tuple[int, int]]]] = {}
    blocks, undo = [], []
    for i, (x, at, h) in enumerate(zip(xs, layouts, held, strict=True)):
        # Taking apart only permutes entries, so its transpose puts them back.
        parts, back = jax.vjp(functools.partial(_blocks, at=h.layout), x)
        blocks.append(parts)
        undo.append(back)
        for j, (_, shape) in enumerate(zip(parts, itertools.product(at.rows, at.columns), strict=False)):
            alike = (h.spread, shape[0] > shape[1], x.dtype)
            found.setdefault(tuple(sorted(shape)), {}).setdefault(alike, []).append((i, j))
    for same_shape in found.values():
        stacks = []
        for (spread, tall, _), at in same_shape.items():
            x = spread.gather(jnp.concatenate([blocks[i][j] for i, j in at]))
            stacks.append(x.mT if tall else x)
        results = jnp.split(f(jnp.concatenate(stacks)), _borders([len(x) for x in stacks]))
        for ((spread, tall, dtype), at), y in zip(same_shape.items(), results, strict=True):
            sizes = [len(blocks[i][j]) for i, j in at]
            y = spread.scatter((y.mT if tall else y).astype(dtype), sum(sizes))
            for (i, j), piece in zip(at, jnp.split(y, _borders(sizes)), strict=True):
                blocks[i][j] = piece
    return [back(parts)[0] for back, parts in zip(undo, blocks, strict=True)]
