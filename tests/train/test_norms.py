# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.train.step_metrics import compute_norm

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-20, 1.0, 1e20, 3e37])
def test_no_square_over_or_underflows(size):
    x = (RNG.standard_normal((3, 4, 5)) * size).astype(np.float32)
    for axes in (None, (1, 2), (0,), ()):
        expected = np.sqrt((x.astype(np.float64) ** 2).sum(axes))
        np.testing.assert_allclose(jax.jit(compute_norm, static_argnums=1)(x, axes), expected, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_scaling_changes_no_digit(size):
    x = jnp.asarray(RNG.standard_normal((64, 33)) * size, jnp.float32)
    plain = jax.jit(lambda x: jnp.sqrt(jnp.square(x).sum(1)))
    np.testing.assert_array_equal(jax.jit(compute_norm, static_argnums=1)(x, (1,)), plain(x))


def test_zeros_and_what_is_not_finite():
    x = jnp.array([[0.0, 0.0], [1e20, 0.0], [jnp.inf, 1.0], [jnp.nan, jnp.inf], [3e38, 3e38]])
    np.testing.assert_allclose(compute_norm(x, (1,)), [0.0, 1e20, jnp.inf, jnp.nan, jnp.inf], rtol=1e-6)
    assert compute_norm(jnp.zeros((0, 3))) == 0
