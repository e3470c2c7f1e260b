# SPDX-License-Identifier: Apache-2.0
"""Update tables that are looked up with the Sinkhorn-balanced update (section 2.5 of the V4.1 report).

The update is the momentum with its rows and columns scaled until all rows that are updated have the same
norm and all columns nearly the same. Rows whose momentum has almost vanished are not updated at all.

The norm of a row's momentum does not matter until it falls below the threshold `tau`. So a row that got one
gradient, beside rows that get one every step, is updated at full size for about
ln(0.3 / tau) / ln(1 / momentum) steps. At momentum 0.95 that is 110, 66, 22 and 4 steps for tau of
1e-3, 1e-2, 0.1 and 0.3 (counted in `tests/optim/test_sinkhorn.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dsv4_jax.optim.trees import list_settings, steady

Rows = int | Any | Callable[[Any], Any]


def sinkhorn_scales(
    x: jax.Array, *, iterations: int = 11, tau: float | jax.Array = 1e-3, rows: int = -2
) -> tuple[jax.Array, jax.Array]:
    """Compute the scales r of the rows and c of the columns; r x c is the balanced matrix.

    Odd iterations give every row norm 1, even ones every column. All of them change the two vectors only. Rows
    whose norm is at most `tau` times the mean norm of the rows get 0, and so do columns that are zero in all
    other rows.

    Args:
        x: [..., m, n] or, with rows = -1, [..., n, m]; other axes stack tables.
        iterations: number of normalisations K, at least 1.
        tau: threshold of a row's norm, relative to the mean norm of the rows.
        rows: the axis that is looked up. The last of the other axes holds the columns.

    Returns:
        Two fp32 arrays of x's rank, of size 1 along the columns and along the rows, so that r * x * c is the
        result.

    Raises:
        ValueError: for fewer than two axes, or no iterations.
    """
    if x.ndim < 2 or not -x.ndim <= rows < x.ndim or iterations < 1:
        raise ValueError(
            f"a table needs two axes, rows among them, and an iteration: shape {x.shape}, {rows=}, {iterations=}"
        )
    rows %= x.ndim
    columns = x.ndim - 1 - (rows == x.ndim - 1)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # r and c are squared scales. Each sum is one pass over x, of which no scaled copy is stored; x is divided by
    # its largest entry, so that no square over- or underflows.
    size = _reciprocal(jnp.abs(x).max((rows, columns), keepdims=True))

    def squares(weights: jax.Array, axis: int) -> jax.Array:
        return jnp.square(x * (size * jnp.sqrt(weights))).sum(axis, keepdims=True)

    c = jnp.ones((), x.dtype)
    first = squares(c, columns)
    active = jnp.sqrt(first) > tau * jnp.sqrt(first).mean(rows, keepdims=True)
    r = jnp.where(active, _reciprocal(first), 0)
    for k in range(2, iterations + 1):
        if k % 2:
            r = jnp.where(active, _reciprocal(squares(c, columns)), 0)
        else:
            c = _reciprocal(squares(r, rows))
    return jnp.sqrt(r) * size, jnp.sqrt(c)


def _reciprocal(x: jax.Array) -> jax.Array:
    """Compute 1 / x for x >= 0, and 0 where x is 0 or a denormal, whose reciprocal may overflow."""
    normal = x >= jnp.finfo(x.dtype).tiny
    return jnp.where(normal, 1 / jnp.where(normal, x, 1), 0)


def scale_by_sinkhorn(
    rows: Rows = -2, *, scale: float | jax.Array = 0.18, iterations: int = 11, tau: float | jax.Array = 1e-3
) -> optax.GradientTransformation:
    """Replace every table by its balanced form times scale * sqrt(columns). There is no state.

    The entries of a row that is updated then have root mean square `scale`; those of other rows are 0.

    Args:
        rows: the axis that is looked up (-2 of [vocabulary, width], -1 of [width, vocabulary]): one
            number for all leaves, a tree of numbers, or a function from updates to such a tree.
        scale: root mean square of a row that is updated.
        iterations: K of `sinkhorn_scales`; odd, so that the rows are normalised last.
        tau: rows are updated if their norm is above `tau` times the mean norm of the rows. The larger it is,
            the sooner a row that gets no more gradients stops.

    Raises:
        ValueError: for an even number of iterations.
    """
    if iterations % 2 == 0 or iterations < 1:
        raise ValueError(f"iterations must be odd and positive, so that rows end balanced; found {iterations}")

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        axes = tuple(list_settings(rows, updates, int))
        columns = [x.shape[x.ndim - 1 - (axis % x.ndim == x.ndim - 1)] for x, axis in zip(leaves, axes, strict=True)]
        sizes = [scale * n**0.5 for n in columns]
        return treedef.unflatten(_balanced(leaves, sizes, tau, axes, iterations)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# At the top level, so that updates outside of a caller's jit are compiled once and not at every call.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _balanced(
    tables: Sequence[jax.Array],
    sizes: Sequence[float | jax.Array],
    tau: float | jax.Array,
    axes: Sequence[int],
    iterations: int,
) -> list[jax.Array]:
    """Balance every table, then multiply it by its size; an empty one stays as it is."""

    def balanced(x: jax.Array, size: float | jax.Array, axis: int) -> jax.Array:
        if not x.size:
            return x
        r, c = sinkhorn_scales(x, iterations=iterations, tau=tau, rows=axis)
        return (r * x * (size * c)).astype(x.dtype)

    return [balanced(x, size, axis) for x, size, axis in zip(tables, sizes, axes, strict=True)]


def sinkhorn_balanced(
    learning_rate: optax.ScalarOrSchedule,
    rows: Rows = -2,
    *,
    momentum: float | jax.Array = 0.95,
    nesterov: bool = True,
    momentum_dtype: Any | None = None,
    scale: float | jax.Array = 0.18,
    iterations: int = 11,
    tau: float | jax.Array = 1e-3,
) -> optax.GradientTransformation:
    """Apply Nesterov momentum, then `scale_by_sinkhorn`; no weight decay.

    Args:
        learning_rate: a number or a schedule.
        rows: see `scale_by_sinkhorn`, also for the arguments not listed here.
        momentum: decay of the momentum.
        nesterov: add the gradient once more.
        momentum_dtype: type of the momentum; None: that of the parameters.
    """
    return optax.chain(
        steady(optax.trace(momentum, nesterov, momentum_dtype)),
        scale_by_sinkhorn(rows, scale=scale, iterations=iterations, tau=tau),
        optax.scale_by_learning_rate(learning_rate),
    )
