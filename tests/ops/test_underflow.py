# SPDX-License-Identifier: Apache-2.0
"""Quotients whose denominator can underflow: values and gradients against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.golden_models import ruled_model, small_config

from dsv4_jax.mesh import act_spec
from dsv4_jax.model.moe import compute_balance_loss
from dsv4_jax.ops.documents import find_documents
from dsv4_jax.train.objectives.pretrain import compute_losses

K, E = 2, 4
LEVELS = [3.0, 0.0, -19.0, -21.0, -40.0, -80.0, -90.0, -200.0, -1e4]


def log_score(z):
    """log sqrt(log(1 + e^z)) in float64; below -30 it is z / 2 to all digits."""
    return np.where(z < -30, z / 2, np.log(np.logaddexp(0, np.maximum(z, -30))) / 2)


def slope(z):
    """Derivative of `log_score`."""
    z = np.maximum(z, -30.0)
    return 1 / (1 + np.exp(-z)) / np.logaddexp(0, z) / 2


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def pulled_back(p, dp):
    """Gradient of sum(dp p) with respect to the logits of the softmax p."""
    return p * (dp - (p * dp).sum())


@pytest.fixture(scope="module")
def gate():
    """Weights of the chosen experts and the balance loss of one token, and their gradients, by its router logits."""
    cfg = small_config()
    module = ruled_model(cfg).mtp[0].ffn.gate
    module.bias.set_value(jnp.zeros(E))
    x = jax.reshard(jnp.zeros((1, 1, cfg.dim)).at[0, 0, 0].set(1.0), act_spec(3))
    ids = jax.reshard(jnp.zeros((1, 1), int), act_spec(2))

    @jax.jit
    def run(z, forced, dw):
        def weights(z):
            w = jnp.zeros((cfg.dim, E)).at[0].set(z * cfg.gate_temp)
            filled = jax.tree.map(lambda leaf: w if leaf.shape == w.shape else leaf, module)
            return filled(x, ids, None, forced)

        chosen = lambda z: (weights(z).weights_BSk * dw).sum()
        balance = lambda z: compute_balance_loss(weights(z), find_documents(jnp.ones((1, 1), int)))
        return weights(z).weights_BSk.reshape(K) / cfg.route_scale, jax.grad(chosen)(z), jax.grad(balance)(z)

    return lambda z, forced: run(jnp.asarray(z, jnp.float32), forced, jnp.asarray([1.0, -2.0])), cfg.route_scale


@pytest.mark.parametrize("v", LEVELS)
@pytest.mark.parametrize("forced", [None, [[[3, 1]]]], ids=["chosen", "forced"])
def test_weights_of_tiny_scores_have_a_right_gradient(gate, v: float, forced):
    """The weights are ratios: they and their gradients do not depend on how small the scores are."""
    run, scale = gate
    z = v - np.arange(4.0)
    weights, dz, balance_dz = run(z, None if forced is None else jax.reshard(jnp.asarray(forced), act_spec(3)))
    experts = [0, 1] if forced is None else forced[0][0]
    p, all_p = softmax(log_score(z[experts])), softmax(log_score(z))
    want = np.zeros(E)
    want[experts] = scale * pulled_back(p, np.array([1.0, -2.0])) * slope(z[experts])
    np.testing.assert_allclose(weights, p, rtol=2e-6)
    np.testing.assert_allclose(dz, want, rtol=1e-5, atol=1e-6)
    f = np.zeros(E)
    f[experts] = E / K
    np.testing.assert_allclose(balance_dz, pulled_back(all_p, f) * slope(z), rtol=1e-5, atol=1e-6)


def test_a_model_whose_router_scores_vanish_has_the_gradients_of_an_even_router():
    """With equal router weights all experts of a token score the same, whether that is 1 or underflows.

    The weights then are equal, and so are all gradients but the router's own.
    """
    cfg = small_config(attention="dense")
    model = ruled_model(cfg)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    r = np.random.RandomState(0)
    batch = {"ids": r.randint(0, 64, (1, 12)), "targets": r.randint(0, 64, (1, 12)), "segment_ids": np.ones((1, 12))}
    batch["mtp_targets"] = batch["targets"]
    batch = {name: jax.reshard(jnp.asarray(x, jnp.int32), act_spec(2)) for name, x in batch.items()}

    @jax.jit
    def run(level):
        def fill(path, x):
            return jnp.full_like(x, level) if "'gate'" in jax.tree_util.keystr(path) else x

        def total(params):
            found, _ = compute_losses(nnx.merge(graph, params, rest), batch)
            return found["loss"] + found["mtp_loss"] + found["balance_loss"], found

        return jax.grad(total, has_aux=True)(jax.tree.map_with_path(fill, params))

    (even, _), (tiny, found) = run(0.0), run(-30.0)
    assert all(np.isfinite(x) for x in found.values())
    compared = 0
    for (path, want), got in zip(jax.tree.leaves_with_path(even), jax.tree.leaves(tiny), strict=True):
        assert np.isfinite(got).all(), path
        if "'gate'" not in jax.tree_util.keystr(path):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max(), err_msg=str(path))
            compared += 1
    assert compared > 20
