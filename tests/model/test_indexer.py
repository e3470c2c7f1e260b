# SPDX-License-Identifier: Apache-2.0
"""How the indexer of CSA layers learns, and the three stages of its training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden_models import ruled_model, small_config

from dsv4_jax.model.inputs import Inputs
from dsv4_jax.weights.names import official_tensors

TENSORS = {
    "wq_b.weight",
    "weights_proj.weight",
    "compressor.ape",
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "compressor.norm.weight",
}


def test_only_its_own_loss_trains_the_indexer(pro):
    """With the loss all six tensors of every CSA layer move; no other gradient changes by a bit."""
    without, with_loss = pro.next_token_loss(), pro.next_token_loss(indexer=1.0)
    assert with_loss.loss > without.loss
    moved = {name for name, grad in with_loss.grads.items() if ".indexer." in name and np.abs(grad).max() > 0}
    csa = [i for i, spec in enumerate(pro.cfg.layer_specs) if spec.ratio == 4]
    assert moved == {f"layers.{i}.attn.indexer.{name}" for i in csa for name in TENSORS}
    for name, grad in without.grads.items():
        if ".indexer." in name:
            assert (grad == 0).all(), name
        else:
            np.testing.assert_array_equal(grad, with_loss.grads[name], err_msg=name)


def test_the_loss_is_linear_in_its_weight(pro):
    one, half = pro.next_token_loss(indexer=1.0), pro.next_token_loss(indexer=0.5)
    for name in (n for n in one.grads if ".indexer." in n):
        np.testing.assert_allclose(half.grads[name], 0.5 * one.grads[name], rtol=1e-5, atol=1e-9)


IDS = np.random.RandomState(0).randint(0, 64, (1, 24))


@pytest.fixture(scope="module")
def stages():
    """A CSA layer in every stage, with the same weights: the model and its hidden states."""
    run, found = jax.jit(lambda model: model.hidden(Inputs(IDS), collect=["topk"])), {}
    for stage in ("dense", "warmup", "sparse"):
        model = ruled_model(small_config(attention=stage, n_mtp_layers=0, compress_ratios=(4,)))
        found[stage] = model, run(model)
    return found


def test_warmup_computes_what_dense_does(stages):
    """Both attend to all visible entries; sparse, with two picks, differs as soon as there are three."""
    dense, warmup, sparse = (stages[stage][1] for stage in ("dense", "warmup", "sparse"))
    np.testing.assert_allclose(warmup.h, dense.h, rtol=0, atol=1e-6)
    np.testing.assert_allclose(sparse.h[:, :11], dense.h[:, :11], rtol=0, atol=1e-6)
    assert jnp.abs(sparse.h - dense.h)[:, 11:].max() > 1e-3


def test_dense_has_no_indexer_loss(stages):
    for stage, (_, out) in stages.items():
        assert (out.layers[0].indexer > 0) == (stage != "dense")
        assert (out.layers[0].collected.topk is not None) == (stage == "sparse")


@pytest.mark.parametrize("stage", [pytest.param("dense", marks=pytest.mark.slow), "warmup"])
def test_stages_train_the_indexer_or_not(stages, stage: str):
    """Dense leaves it alone: gradients of exactly zero rather than none. Warm-up trains it, with no top-k."""
    model, _ = stages[stage]
    grads = jax.jit(jax.grad(lambda model: model.hidden(Inputs(IDS)).layers[0].indexer))(model)
    trained = {n for n, g in official_tensors(model, grads).items() if np.abs(g).max() > 0}
    assert trained == ({f"layers.0.attn.indexer.{name}" for name in TENSORS} if stage == "warmup" else set())
