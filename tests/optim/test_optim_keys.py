# SPDX-License-Identifier: Apache-2.0
"""Keys of the optimizer section reach the optimizer."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support.runs import small

from dsv4_jax.train.optimizer import clip_by_norm, group_parameters, make_optimizer
from dsv4_jax.train.state import abstract_model

CFG = small("", "run").replace({"optim.name": "deepseek_v41", "optim.weight_decay": 0.0, "optim.momentum": 0.0})
SHAPES = nnx.state(abstract_model(CFG), nnx.Param)


def gradients(scale):
    rng = np.random.RandomState(0)
    return jax.tree.map(lambda x: (scale * rng.standard_normal(x.shape)).astype(np.float32), SHAPES)


def updates(changes, scale=1.0):
    """The first updates of one leaf that each rule moves, by rule."""
    cfg = CFG.replace(changes)
    tx, grads = make_optimizer(cfg, SHAPES), gradients(scale)
    moved = jax.jit(lambda grads: tx.update(grads, tx.init(grads), grads)[0])(grads)
    groups = jax.tree.leaves(group_parameters(cfg, SHAPES), is_leaf=lambda x: hasattr(x, "rule"))
    leaves = jax.tree.leaves(moved)
    return {group.rule: np.asarray(leaf) for group, leaf in zip(groups, leaves, strict=True)}


@pytest.fixture(scope="module")
def usual():
    return updates({})


def test_the_root_mean_square_of_updates(usual):
    twice = updates({"optim.rms": 0.36})
    for rule in ("muon", "sinkhorn"):
        np.testing.assert_allclose(twice[rule], 2 * usual[rule], rtol=1e-5)
    np.testing.assert_array_equal(twice["adamw"], usual["adamw"])


def test_matrices_at_a_time_and_gram_matrices_give_the_same(usual):
    for changes in ({"optim.batch_size": 1}, {"optim.gram": True, "optim.precision": "float32"}):
        np.testing.assert_allclose(updates(changes)["muon"], usual["muon"], rtol=2e-3, atol=1e-6)


def test_iterations_of_sinkhorn(usual):
    once = updates({"optim.sinkhorn_iterations": 1})
    assert np.abs(once["sinkhorn"] - usual["sinkhorn"]).max() > 1e-3 * np.abs(usual["sinkhorn"]).max()
    np.testing.assert_array_equal(once["muon"], usual["muon"])


def test_clipping_is_off_at_0():
    """With a large eps AdamW's update is proportional to the gradient. The state keeps its structure."""
    adamw = {"optim.name": "adamw", "optim.eps": 1e6}
    off, on = (updates({**adamw, "optim.clip": clip}, scale=10.0)["adamw"] for clip in (0.0, 1.0))
    norm = np.sqrt(sum((g * g).sum() for g in jax.tree.leaves(gradients(10.0))))
    np.testing.assert_allclose(off, norm * on, rtol=1e-4)
    states = [make_optimizer(CFG.replace({"optim.clip": clip}), SHAPES).init(gradients(1.0)) for clip in (0.0, 1.0)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e10])
def test_clipping_is_that_of_optax(scale):
    """Also where the step passes the norm that it has computed."""
    grads = gradients(scale)
    want, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    for given in ({}, {"norm": optax.tree.norm(grads)}):
        got, _ = clip_by_norm(1.0).update(grads, optax.EmptyState(), **given)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
