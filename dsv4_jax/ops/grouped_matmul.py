# SPDX-License-Identifier: Apache-2.0
"""Multiply rows sorted by expert by their experts' matrices, with a gradient that costs the same.

XLA:CPU computes `ragged_dot` as a dense product of every row with every expert, XLA:TPU its gradient of the
weights. The blocked form here, for CPU, and the kernels of `ops/grouped_pallas.py`, for TPU, compute only each row's
own product (`benchmarks/grouped_matmul.py`). GPU uses `ragged_dot`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import current_platform, varying
from dsv4_jax.ops import grouped_pallas
from dsv4_jax.ops.shards import WHOLE, ParamShards
from dsv4_jax.section import ConfigError

Impl = Literal["auto", "blocked", "ragged", "pallas"]
BLOCK = 128  # rows of one product of the blocked form

_FASTEST: dict[str, Impl] = {"cpu": "blocked", "tpu": "pallas"}
_REASONS = {
    "blocked": "a loop over blocks of rows computes each row's own product; ragged_dot is dense on CPU",
    "ragged": "XLA's ragged_dot; its gradient of the weights is dense on TPU",
    "pallas": "kernels compute each row's own product; ragged_dot's gradient of the weights is dense on TPU",
}
# x [N, D] rows of group g times y [N, F] rows of group g -> [G, D, F]
_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def grouped_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, impl: Impl = "auto", shards: ParamShards = WHOLE
) -> jax.Array:
    """Multiply the rows of group g of `x` by `w[g]`. Local to one device: call it inside `shard_map`.

    Args:
        x: [N, D], the rows of group 0 first, then those of group 1, ...
        w: [G, D, F], or the part of it that this device stores. It is used in x's type.
        sizes: int [G], number of rows of each group; their sum is at most N.
        impl: "blocked", "ragged" or "pallas" (TPU only); "auto" takes the fastest on the devices that we trace for.
        shards: how `w` is stored over the devices.

    Returns:
        [N, F] in x's type, accumulated in fp32. Rows past the last group are zero and have no gradient. The
        matrix of an empty group gets a zero gradient. The gradient of `w` is summed in fp32, over rows and
        devices.
    """
    return _grouped(x, w, sizes, impl, shards)


def rows_product(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    impl: Impl,
    transposed: bool = False,
    total: jax.Array | None = None,
    used: float = 1.0,
) -> jax.Array:
    """Multiply the rows of group g of `x` by the whole matrix `w[g]`, or by its transpose. Has no gradient of its own.

    Args:
        x: [N, K], the rows of group 0 first, then those of group 1, ...
        w: [G, K, F], or [G, F, K] if `transposed`, in x's type.
        sizes: int [G], number of rows of each group.
        impl: see `grouped_matmul`.
        transposed: whether to multiply by the transposes.
        total: [N, F] in x's type, to add the product to.
        used: expected share of the rows that are in groups, for the compiler's estimates.

    Returns:
        [N, F] in x's type, summed in fp32. The product's rows past the last group are zero.
    """
    impl = choose(impl)
    if impl == "pallas":
        return grouped_pallas.rows_product(x, w, sizes, transposed, total, used)
    if total is not None:
        return total + rows_product(x, w, sizes, impl, transposed)
    if impl == "blocked":
        return _blocked_rows(x, w, sizes, transposed)
    w = jnp.swapaxes(w, 1, 2) if transposed else w
    return jax.lax.ragged_dot(x, varying(w, x), sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def weight_gradient(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, impl: Impl, total: jax.Array, used: float = 1.0
) -> jax.Array:
    """Add to `total`, fp32 [G, D, F], the product x^T dy of the rows of every group. Has no gradient of its own.

    `used`: see `rows_product`.
    """
    impl = choose(impl)
    if impl == "pallas":
        return grouped_pallas.weight_gradient(x, dy, sizes, total, used)
    if impl == "blocked":
        return _blocked_outer(x, dy, sizes, total)
    return total + jax.lax.ragged_dot_general(x, dy, sizes, _OUTER, preferred_element_type=jnp.float32)


def choose(impl: Impl) -> Impl:
    """Replace "auto" by the fastest form on the devices that we trace for.

    Raises:
        ConfigError: if it is "pallas" and they are no TPUs.
    """
    where = current_platform()
    if impl == "auto":
        return _FASTEST.get(where, "ragged")
    if impl == "pallas" and where != "tpu":
        raise ConfigError(f"model.expert_matmul = 'pallas' needs TPUs, but the devices are {where}; use 'auto'")
    return impl


def explain_choice(impl: Impl) -> str:
    """Describe which form `impl` takes on the devices that we trace for, and why."""
    chosen = choose(impl)
    return f"grouped product {chosen}{' (auto)' * (impl == 'auto')}: {_REASONS[chosen]}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x: jax.Array, w: jax.Array, sizes: jax.Array, impl: Impl, shards: ParamShards) -> jax.Array:
    return rows_product(x, shards.whole(w, x.dtype), sizes, impl)


def _forward(x, w, sizes, impl, shards):
    return _grouped(x, w, sizes, impl, shards), (x, w, sizes)


def _backward(impl, shards, saved, dy):
    x, w, sizes = saved
    whole = shards.whole(w, x.dtype)
    dx = rows_product(dy, whole, sizes, impl, transposed=True)
    dw = weight_gradient(x, dy, sizes, impl, varying(jnp.zeros(whole.shape, jnp.float32), x, dy, sizes))
    return dx, shards.total(dw, w).astype(w.dtype), None


_grouped.defvjp(_forward, _backward)


def _block_table(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cut every group into blocks of at most BLOCK rows: each block's group, first row and group end; their number."""
    most = -(-rows // BLOCK) + sizes.shape[0]  # upper bound of the number of blocks, whatever the sizes
    # Block b belongs to the first group whose blocks, counted from 0, end after b.
    blocks = -(-sizes // BLOCK)
    upto, ends = jnp.cumsum(blocks), jnp.cumsum(sizes)
    group = jnp.searchsorted(upto, jnp.arange(most), side="right")
    group = jnp.minimum(group, sizes.shape[0] - 1)
    first = (ends - sizes)[group] + (jnp.arange(most) - (upto - blocks)[group]) * BLOCK
    return group, first, ends[group], upto[-1]


def _blocked_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
    """Compute `rows_product` block by block.

    Neither `x` nor the result is padded, and no matrix is transposed: such copies take as long as a product.
    """
    (N, _), T = x.shape, min(BLOCK, x.shape[0])
    group, first, end, count = _block_table(sizes, N)
    across = (((1,), (1 if transposed else 0,)), ((), ()))

    def step(b: jax.Array, y: jax.Array) -> jax.Array:
        start, own = _place(first[b], end[b], N, T)
        rows, old = (jax.lax.dynamic_slice_in_dim(a, start, T) for a in (x, y))
        out = jax.lax.dot_general(rows, w[group[b]], across, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(own, out.astype(y.dtype), old), start, axis=0)

    F = w.shape[1 if transposed else 2]
    return jax.lax.fori_loop(0, count, step, varying(jnp.zeros((N, F), x.dtype), x, w, sizes))


def _blocked_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array, total: jax.Array) -> jax.Array:
    """Add x^T dy of every group to `total`, fp32 [G, D, F]."""
    N, T = x.shape[0], min(BLOCK, x.shape[0])
    group, first, end, count = _block_table(sizes, N)

    def step(b: jax.Array, dw: jax.Array) -> jax.Array:
        start, own = _place(first[b], end[b], N, T)
        rows, drows = (jax.lax.dynamic_slice_in_dim(a, start, T) for a in (x, dy))
        part = jnp.matmul(jnp.where(own, rows, 0).T, drows, preferred_element_type=jnp.float32)
        return dw.at[group[b]].add(part)

    return jax.lax.fori_loop(0, count, step, varying(total, x, dy, sizes))


def _place(first: jax.Array, end: jax.Array, N: int, T: int) -> tuple[jax.Array, jax.Array]:
    """Find T of the N rows that hold the block from `first` on: their first, and which of them are of a group [T, 1].

    The group ends before `end`. The last block begins early enough to end with the last row.
    """
    start = jnp.minimum(first, N - T)
    row = start + jnp.arange(T)[:, None]
    return start, (row >= first) & (row < end)
