# SPDX-License-Identifier: Apache-2.0
"""Optimizers at the edges: leaves of the wrong rank or without entries, tiny gradients, late leaves, no jit."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dsv4_jax import optim
from dsv4_jax.optim import Role, muon, newton_schulz, sinkhorn, sinkhorn_balanced

MUON_MODULE, SINKHORN_MODULE = "dsv4_jax.optim.muon", "dsv4_jax.optim.sinkhorn"


@pytest.mark.parametrize("make", [optim.deepseek_v4, optim.deepseek_v41])
def test_a_matrix_role_on_a_vector_is_refused_at_construction(make):
    params = {"a": {"w": jnp.ones((4, 6)), "b": jnp.ones(6)}}
    with pytest.raises(
        ValueError, match=r"leaf 'a\.b' of shape \(6,\) does not fit its role 'matrix'.*Role\('vector'\)"
    ):
        make(0.1, params, [("", Role("matrix"))])


def test_a_table_role_on_a_vector_is_refused_at_construction():
    params = {"w": jnp.ones((4, 6)), "b": jnp.ones(6)}
    with pytest.raises(ValueError, match=r"leaf 'b' of shape \(6,\) does not fit its role 'table': .* two axes"):
        optim.deepseek_v41(0.1, params, [("", Role("table"))])
    optim.deepseek_v41(0.1, params, [("", Role("table"))], frozen="^b$")  # what does not move need not fit
    optim.deepseek_v4(0.1, params, [("", Role("table"))])  # AdamW moves tables of V4


@pytest.mark.parametrize("size", [1.0, 1e-15, 1e-18, 4.8e-19, 2e-19, 1e-19, 3e-20, 1e-25])
def test_adamw_makes_no_step_beyond_the_rate_for_tiny_gradients(size: float):
    """The second moment of gradients below 5e-19 is 0 in fp32; eps = 1e-20 alone would give steps of up to 48 rates."""
    params = {"b": jnp.zeros(3)}
    tx = optim.deepseek_v4(1.0, params, [("", Role("vector"))], weight_decay=0.0)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(5):
        step, state = update({"b": jnp.full(3, size)}, state, params)
        assert np.all(-np.asarray(step["b"]) <= 1 + 1e-5)
        assert np.all(-np.asarray(step["b"]) > 0)
    if size >= 1e-15:
        np.testing.assert_allclose(step["b"], -1, rtol=1e-4)


@pytest.mark.parametrize("b2, first", [(0.95, 0.1 / 0.05**0.5), (0.999, 0.1 / 0.001**0.5)])
def test_a_leaf_that_joins_late_starts_without_bias_correction(b2: float, first: float):
    """The documented choice: one count for all leaves, so the first step of a late one is (1 - b1) / sqrt(1 - b2)."""
    params = {"b": jnp.zeros(3)}
    tx = optim.deepseek_v4(1.0, params, [("", Role("vector"))], weight_decay=0.0, b2=b2)
    state, zero = tx.init(params), {"b": jnp.zeros(3)}
    late = jax.tree.map(lambda x: jnp.asarray(100_000, x.dtype) if x.dtype == jnp.int32 else x, state)
    one = {"b": jnp.ones(3)}
    np.testing.assert_allclose(tx.update(one, state, params)[0]["b"], -1, rtol=1e-5)
    np.testing.assert_allclose(tx.update(one, late, params)[0]["b"], -first, rtol=1e-3)
    assert (np.asarray(tx.update(zero, late, params)[0]["b"]) == 0).all()


@pytest.mark.parametrize("module, tx", [(MUON_MODULE, muon(0.1)), (SINKHORN_MODULE, sinkhorn_balanced(0.1))])
def test_updates_outside_of_jit_are_traced_once(module: str, tx, monkeypatch):
    traced = []

    def counted(function):
        return lambda *args, **kwargs: (traced.append(1), function(*args, **kwargs))[1]

    if module == MUON_MODULE:
        monkeypatch.setattr(sys.modules[module], "newton_schulz", counted(newton_schulz))
    else:
        monkeypatch.setattr(sys.modules[module], "sinkhorn_scales", counted(sinkhorn.sinkhorn_scales))
    params = {"w": jnp.ones((5, 23))}  # a shape of this test only
    state = tx.init(params)
    for i in range(3):
        updates, state = tx.update({"w": jnp.full((5, 23), 1.0 + i)}, state, params)
    assert np.isfinite(updates["w"]).all()
    assert len(traced) == 1


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 6)])
def test_leaves_without_entries_are_updated_by_nothing(shape, jitted: bool):
    params = {"w": jnp.ones((4, 6)), "empty": jnp.ones(shape)}
    rules = [("", Role("matrix"))]
    for tx in (
        optim.deepseek_v4(0.1, params, rules),
        optim.deepseek_v41(0.1, params, [("", Role("table"))]),
        optax.chain(muon(0.1)),
        sinkhorn_balanced(0.1),
    ):
        update = jax.jit(tx.update) if jitted else tx.update
        updates, _ = update(params, tx.init(params), params)
        assert updates["empty"].shape == shape
        assert np.isfinite(updates["w"]).all() and np.abs(updates["w"]).min() > 0
    groups = optim.v4_groups(params, rules)
    assert "empty" in optim.describe(params, groups)
