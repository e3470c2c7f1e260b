# SPDX-License-Identifier: Apache-2.0
"""The first layer whose output or gradient is not finite is named, in a batch and in a run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.runs import SMALL, config, metrics, small, train

import dsv4_jax as ds
from dsv4_jax.config import LossConfig
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.train import step as step_module
from dsv4_jax.train.checkpoint import load_model
from dsv4_jax.train.finite import find_nonfinite, next_batch, nonfinite_gradient
from dsv4_jax.train.objectives.pretrain import compute_losses

pytestmark = pytest.mark.usefixtures("cheap_compilation")
# Two stacked layers, one apart, and an MTP block.
FOUR = dataclasses.replace(SMALL, n_layers=4, compress_ratios=(0, 0, 4, 0, 0), n_mtp_layers=1, index_topk=4)
RUN = config("", "", 8, model=FOUR, loss=LossConfig(indexer=0.0))


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0).integers(0, 257, (2, 16))
    ids = np.pad(random, ((0, 0), (0, 4)))  # the last positions are padding
    real = np.arange(20) < 16
    found = {"ids": ids, "segment_ids": np.broadcast_to(real, ids.shape), "targets": np.where(real, ids, -1)}
    found["mtp_targets"] = found["targets"]
    return {name: jnp.asarray(x, jnp.int32) for name, x in found.items()}


def build(path=None, place=0, value=jnp.inf):
    """The model, with a part of a parameter replaced."""
    model = ds.DeepSeek(FOUR, rngs=nnx.Rngs(0))
    if path:
        for name, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            if ".".join(map(str, name)) == path:
                changed = variable.get_value().at[place].set(value)
                nnx.update(model, nnx.from_flat_state([(name, variable.replace(changed))]))
                return model
        raise AssertionError(f"no parameter {path}")
    return model


@pytest.mark.slow
def test_nothing_is_found_in_a_sound_step_with_padding(batch):
    assert find_nonfinite(RUN, build(), batch) == []


@pytest.mark.parametrize("path, layer, number", [("groups.0.0.attn.wq_a", 1, 1), ("groups.1.0.attn_norm", 0, 2)])
def test_the_first_layer_is_named_forward_and_what_follows_from_it(batch, path, layer, number):
    model = build(path, place=layer, value=jnp.nan)
    lines = dict(line.split(None, 1) for line in find_nonfinite(RUN, model, batch))
    within = path.split(".", 3)[3]
    assert lines["parameter"].startswith(f"layer {number} (") and lines["parameter"].endswith(f": {within}")
    assert lines["output"].startswith(f"layer {number} (") and "row 0, position" in lines["output"]
    assert lines["losses"].startswith("loss, mtp_loss") and lines["gradient"].startswith("head: ")


def test_norms_name_the_layer_nearest_the_loss():
    model = jax.eval_shape(lambda: ds.DeepSeek(FOUR, rngs=nnx.Rngs(0)))
    norms = {"embed": np.nan, "groups.0.0.attn.wq_a": np.array([np.nan, 1.0]), "head": 1.0}
    norms |= {"groups.1.1.attn.wkv": np.array([1.0]), "norm": 2.0}
    assert nonfinite_gradient(model, norms) == "layer 0 (window learned): attn.wq_a"
    norms["groups.1.1.attn.wkv"] = np.array([np.inf])
    assert nonfinite_gradient(model, norms) == "layer 3 (window learned): attn.wkv"
    assert nonfinite_gradient(model, norms | {"norm": np.inf}) == "head: norm"
    assert nonfinite_gradient(model, {"embed": 1.0}) == ""


def test_a_run_names_the_first_gradient_of_a_skipped_step(corpus, tmp_path, monkeypatch):
    made = step_module.compute_gradient_norms
    name = "groups.0.0.attn.wkv"
    monkeypatch.setattr(step_module, "compute_gradient_norms", lambda grads: (n := made(grads)) | {name: n[name] / 0})
    with pytest.raises(ds.RunError, match="2 steps in a row were not finite"):
        train(small(corpus, tmp_path, bad_steps=2, seed=77))  # no program of another test has this seed
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["skipped"] * 2
    assert events[0]["text"].startswith("objective 5.")
    assert events[0]["text"].endswith("; first gradient not finite: layer 0 (window learned): attn.wkv")


def test_the_batch_after_the_newest_checkpoint_is_that_of_the_next_step(corpus, tmp_path):
    before, after = (small(corpus, tmp_path / str(steps), steps=steps) for steps in (4, 5))
    train(before), train(after)
    stage, batch = next_batch(before)
    with ensure_mesh():
        found, _ = jax.jit(compute_losses)(load_model(stage), batch)
    np.testing.assert_allclose(found["loss"], metrics(tmp_path / "5")[-1]["loss"], rtol=1e-6)
    assert metrics(tmp_path / "5")[-1]["step"] == 5
    with pytest.raises(ds.ConfigError, match="holds no checkpoint"):
        next_batch(small(corpus, tmp_path / "none"))
