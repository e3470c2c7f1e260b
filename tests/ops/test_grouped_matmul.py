# SPDX-License-Identifier: Apache-2.0
"""The grouped matrix product, both forms, against one dense product per row; with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.ops.grouped_matmul import BLOCK, grouped_matmul

D, F = 6, 5
SIZES = {
    "one row": (1, [0, 1, 0]),
    "no rows in any group": (4, [0, 0, 0]),
    "empty groups": (7, [3, 0, 4, 0]),
    "empty first and last": (9, [0, 4, 0, 5, 0]),
    "one group has all": (300, [0, 300, 0]),
    "rows past the last group": (40, [5, 0, 9, 2]),
    "around a block": (4 * BLOCK + 30, [BLOCK - 1, BLOCK, BLOCK + 1, 30]),
    "several blocks and rows past": (500, [1, 2 * BLOCK + 3, 0, BLOCK]),
}


def inputs(N: int, G: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    r = np.random.RandomState(N)
    return tuple(jnp.asarray(r.standard_normal(s), jnp.float32) for s in ((N, D), (G, D, F), (N, F)))


def oracle(x, w, dy, sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Product and gradients, row by row in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), F)), np.zeros_like(x), np.zeros_like(w)
    for n, g in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        y[n], dx[n] = x[n] @ w[g], w[g] @ dy[n]
        dw[g] += np.outer(x[n], dy[n])
    return y, dx, dw


def product_and_gradients(x, w, dy, sizes, impl):
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, impl), x, w)
    return y, *back(dy)


@functools.partial(jax.jit, static_argnums=4)
def on_devices(x, w, dy, sizes, impl):
    """Where the experts use it: rows differ between devices, kernels come over `expert`."""
    rows, kernels = jax.P(("data", "expert")), jax.P("expert")
    local = functools.partial(product_and_gradients, impl=impl)
    run = jax.shard_map(local, in_specs=(rows, kernels, rows, rows), out_specs=(rows, rows, kernels))
    return run(*(jax.reshard(a, spec) for a, spec in ((x, rows), (w, kernels), (dy, rows), (sizes, rows))))


def check(got, want, sizes):
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5, err_msg=name)
    used = np.abs(got[2]).max((1, 2)) > 0
    np.testing.assert_array_equal(used, np.array(sizes) > 0)  # exactly zero where a group is empty
    past = sum(sizes)
    assert (np.asarray(got[0])[past:] == 0).all() and (np.asarray(got[1])[past:] == 0).all()


@pytest.mark.parametrize("impl", ["blocked", "ragged"])
@pytest.mark.parametrize("N, sizes", SIZES.values(), ids=SIZES)
def test_equals_one_product_per_row(N: int, sizes: list[int], impl: str):
    x, w, dy = inputs(N, len(sizes))
    check(on_devices(x, w, dy, jnp.array(sizes), impl), oracle(x, w, dy, sizes), sizes)


@pytest.mark.parametrize("impl", ["blocked", "auto"])
def test_on_whole_arrays(impl: str):
    """On CPU auto is the blocked form, which needs no manual code around it."""
    x, w, dy = inputs(7, 4)
    sizes = [3, 0, 4, 0]
    got = jax.jit(product_and_gradients, static_argnums=4)(x, w, dy, jnp.array(sizes), impl)
    check(got, oracle(x, w, dy, sizes), sizes)


@given(st.lists(st.sampled_from([0, 0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 200]), min_size=5, max_size=5))
def test_any_sizes(sizes: list[int]):
    """Groups of any size in any order; one compilation, rows that are left lie past the last group."""
    N = 5 * 200
    x, w, dy = inputs(N, 5)
    check(on_devices(x, w, dy, jnp.array(sizes), "blocked"), oracle(x, w, dy, sizes), sizes)


@pytest.mark.parametrize("impl", ["blocked", "ragged"])
def test_bf16_accumulates_in_fp32(impl: str):
    """512 terms of 2^-9 and 2^-8 sum to 1.5 in fp32 and to less in bf16; bf16 comes back."""
    x, dy = jnp.ones((300, 512), jnp.bfloat16), jnp.ones((300, 3), jnp.bfloat16)
    w = jnp.full((2, 512, 3), 2.0**-9, jnp.bfloat16).at[:, ::2].set(2.0**-8)
    y, dx, dw = on_devices(x, w, dy, jnp.array([200, 100]), impl)
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, np.full((300, 3), 1.5))
    np.testing.assert_array_equal(dw, np.broadcast_to(np.array([200, 100])[:, None, None], w.shape))
