# SPDX-License-Identifier: Apache-2.0
"""The Sinkhorn-balanced update against the algorithm as it is printed, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import optim_reference as ref

from dsv4_jax.optim import scale_by_sinkhorn, sinkhorn_balanced, sinkhorn_scales

RNG = np.random.default_rng(0)
G = np.array(
    [(1, 2, 3, 4), (0.1, 0.2, -0.1, 0.05), (1e-6, -1e-6, 1e-6, 1e-6),
     (-2, 1, 0.5, 0.25), (0.3, -0.4, 0.5, 0.6), (5, 5, -5, 1)], np.float32,
)  # fmt: skip
UPDATE = np.array(
    [(0.291618, 0.580739, 1.05067, 1.57283), (0.763455, 1.520373, -0.916884, 0.514708), (0, 0, 0, 0),
     (-1.710954, 0.851815, 0.5137, 0.288374), (0.533734, -0.708599, 1.068328, 1.439337),
     (1.068054, 1.063481, -1.282697, 0.288025)]
)  # fmt: skip


def balanced(x, rows=-2, **options):
    return np.asarray(scale_by_sinkhorn(rows, scale=1.0, **options).update(jnp.asarray(x), optax.EmptyState())[0])


def rms(x, axis):
    return np.sqrt((x * x).mean(axis))


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1, 1e18, 1e30])
def test_published_vector(scale):
    got = balanced(G * np.float32(scale))
    np.testing.assert_allclose(got, UPDATE, atol=2e-6)
    assert (got[2] == 0).all()
    np.testing.assert_allclose(rms(got, 1)[[0, 1, 3, 4, 5]], 1, rtol=1e-6)
    np.testing.assert_allclose(rms(got, 0), np.sqrt(5 / 6), rtol=5e-3)


@settings(max_examples=12)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1, 2, 3, 10, 11]))
def test_two_vectors_do_what_rewriting_does(m, n, seed, iterations):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, n)) * 10.0 ** rng.integers(-5, 2, (m, 1)) * (rng.random((m, n)) < 0.8)
    r, c = jax.jit(functools.partial(sinkhorn_scales, iterations=iterations))(jnp.asarray(x, jnp.float32))
    want = ref.sinkhorn(x, iterations)
    active = np.linalg.norm(x, axis=1) / (np.linalg.norm(x, axis=1).mean() or 1)
    if (np.abs(active / 1e-3 - 1) > 1e-4).all():  # not on the edge of the mask
        np.testing.assert_allclose(np.asarray(r, np.float64) * x * c, want, atol=2e-5)


def test_edges():
    """Nothing, one row, dead columns; none of it is NaN."""
    assert (balanced(np.zeros((3, 4), np.float32)) == 0).all()
    one = balanced(np.array([[3, -1, 0.2, 0, 5, -4]], np.float32))
    np.testing.assert_allclose(one, np.sqrt(6 / 5) * np.array([[1, -1, 1, 0, 1, -1]]), rtol=1e-6)
    np.testing.assert_allclose(balanced(np.array([[-2.0]], np.float32)), [[-1]], rtol=1e-6)
    x = RNG.normal(size=(8, 16)).astype(np.float32)
    x[3], x[:, 5] = 0, 0
    got = balanced(x)
    assert (got[3] == 0).all() and (got[:, 5] == 0).all()
    # Balanced as far as eleven iterations take it.
    np.testing.assert_allclose(rms(got, 1)[[0, 1, 2, 4, 5, 6, 7]], 1, rtol=1e-5)
    np.testing.assert_allclose(np.delete(rms(got, 0), 5), np.sqrt(7 / 8 * 16 / 15), rtol=0.05)


def test_rows_in_any_place():
    x = RNG.normal(size=(2, 12, 5)).astype(np.float32)
    want = np.stack([ref.sinkhorn(t) * 5**0.5 for t in x])
    np.testing.assert_allclose(balanced(x), want, atol=1e-5)
    np.testing.assert_allclose(balanced(x.swapaxes(1, 2), -1).swapaxes(1, 2), want, atol=1e-5)
    np.testing.assert_allclose(balanced(x.swapaxes(0, 1), 0).swapaxes(0, 1), want, atol=1e-5)


def test_three_steps_against_float64():
    table = RNG.normal(size=(20, 8)).astype(np.float32)
    gradients = [(RNG.normal(size=(20, 8)) * (RNG.random((20, 1)) < 0.5)).astype(np.float32) for _ in range(3)]
    gradients[0][7], gradients[1][7], gradients[2][7] = 0, 0, 0
    tx = sinkhorn_balanced(0.01)
    params, state = jnp.asarray(table), tx.init(table)
    for g in gradients:
        updates, state = tx.update(g, state)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, ref.sinkhorn_balanced(gradients, table), atol=1e-5)
    np.testing.assert_array_equal(params[7], table[7])  # never seen: not a bit has changed


@pytest.mark.parametrize("tau, steps", [(1e-3, 110), (1e-2, 66), (0.1, 22), (0.3, 4)])
def test_how_long_one_gradient_lasts(tau, steps):
    """A row with one gradient among rows that always have one, as documented."""
    rng = np.random.default_rng(0)
    tx = sinkhorn_balanced(1.0, tau=tau)
    update = jax.jit(tx.update)
    g = rng.normal(size=(150, 64, 32))
    g = (g / np.linalg.norm(g, axis=-1, keepdims=True)).astype(np.float32)
    g[1:, 0] = 0
    state, moved = tx.init(g[0]), 0
    for x in g:
        updates, state = update(x, state)
        if not np.asarray(updates)[0].any():
            break
        assert rms(np.asarray(updates)[0], 0) == pytest.approx(0.18, rel=1e-3)  # at full size to the end
        moved += 1
    assert abs(moved - steps) <= 1


def test_memory_of_two_vectors():
    """The compiled update of a table keeps less than 5 % of it beside the table itself."""
    x = jax.ShapeDtypeStruct((4000, 512), jnp.float32)
    program = jax.jit(scale_by_sinkhorn().update, donate_argnums=0).lower(x, optax.EmptyState()).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.05 * 4 * x.size


def test_composes_and_refuses():
    tx = optax.inject_hyperparams(sinkhorn_balanced, static_args=("iterations", "rows"))(0.1, tau=0.5)
    state = tx.init(G)
    first = tx.update(G, state)[0]
    state.hyperparams["tau"] = jnp.asarray(1e-3)
    np.testing.assert_allclose(tx.update(G, state)[0], -0.018 * UPDATE, atol=1e-6)
    assert (np.asarray(first)[1] == 0).all()
    with pytest.raises(ValueError, match="odd"):
        scale_by_sinkhorn(iterations=10)
    with pytest.raises(ValueError, match="two axes"):
        balanced(np.ones(3, np.float32))
