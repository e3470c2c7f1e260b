# SPDX-License-Identifier: Apache-2.0
"""What a step tells of its experts: loads by layer and modality, the biases they move, the share that is clamped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.golden_models import empty_model, ruled_model, small_config

from dsv4_jax.config import Config, LossConfig, TrainConfig
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import RouterBias
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.objectives.pretrain import compute_losses, count_targets
from dsv4_jax.train.step import update_biases
from dsv4_jax.train.step_metrics import measure_balance, name_layers

E, k = 4, 2
MODEL = small_config(n_layers=3, compress_ratios=(0, 0, 0, 0), n_hash_layers=1)
ONE = dataclasses.replace(MODEL, n_layers=1, compress_ratios=(0, 0), n_hash_layers=0)


def packed():
    """Two rows of 16: two documents with padding between, and one of which half the tokens are an image."""
    r = np.random.RandomState(0)
    segments = np.array([[1] * 5 + [0] * 4 + [2] * 7, [1] * 16])
    types = np.full((2, 16), -1)
    types[1, 4:12] = [0, 1, 1, 2, 1, 1, 2, 3]
    targets = np.where(segments > 0, r.randint(0, 64, (2, 16)), -1)
    ids = r.randint(0, 64, (2, 16))
    return {"ids": ids, "segment_ids": segments, "targets": targets, "mtp_targets": targets}, types


def buffers_of(cfg):
    return nnx.split(empty_model(cfg), nnx.Param, ...)[2]


@pytest.mark.parametrize("two", [False, True], ids=["one bias", "two biases"])
def test_loads_are_split_by_modality_where_there_are_images(two: bool):
    batch, types = packed()
    model = ruled_model(dataclasses.replace(ONE, modality_bias=two))

    @jax.jit
    def run(model, types):
        return model.hidden(Inputs(batch["ids"], batch["segment_ids"], types)).layers

    real, image = batch["segment_ids"] > 0, types >= 0
    count = lambda report, where: np.bincount(np.asarray(report.experts)[where].reshape(-1), minlength=E)
    for report in run(model, types):  # the layer's and the MTP block's
        assert report.load.tolist() == [count(report, real & ~image).tolist(), count(report, image).tolist()]
    for report in run(model, None):
        found = np.asarray(report.load)
        assert found.shape == ((2, E) if two else (E,))
        assert found.reshape(-1, E)[0].tolist() == count(report, real).tolist()


NAMES = ["0", "1", "2", "mtp"]


def test_every_layer_tells_its_fullest_expert():
    """A hashed layer, two learned ones, the MTP block; the worst of them is `moe/load_max`."""
    load = jnp.array([[1, 1, 1, 1], [3, 1, 0, 0], [0, 2, 2, 0], [8, 0, 0, 0]], jnp.float32)
    found = measure_balance(load, buffers_of(MODEL), NAMES)
    want = {"moe/load_max/0": 1, "moe/load_max/1": 3, "moe/load_max/2": 2, "moe/load_max/mtp": 4, "moe/load_max": 4}
    assert {name: float(x) for name, x in found.items() if name in want} == want
    assert sum(name.startswith("moe/load_max/") for name in found) == 4


def test_images_have_loads_of_their_own():
    load = jnp.array([[[1, 1, 1, 1], [4, 0, 0, 0]]] * 4, jnp.float32)
    found = measure_balance(load, buffers_of(MODEL), NAMES)
    assert found["moe/load_max/mtp"] == 2.5 and found["moe/load_max/mtp_image"] == 4 == found["moe/load_max_image"]
    found = measure_balance(load.at[:, 1].set(0), buffers_of(MODEL), NAMES)
    assert found["moe/load_max/2"] == 1 and np.isnan(found["moe/load_max/2_image"])


def test_names_of_the_layers_that_have_loads():
    drafts = {
        "compress_ratios": (0,) * 5,
        "n_mtp_layers": 2,
        "dspark_target_layer_ids": (1,),
        "dspark_noise_token_id": 1,
    }
    none = LossConfig(mtp=0.0)
    for changes, objective, names in (
        ({}, "pretrain", NAMES),
        ({"n_mtp_layers": 0, "compress_ratios": (0, 0, 0)}, "pretrain", NAMES[:3]),
        (drafts, "pretrain", NAMES[:3]),
        (drafts, "draft", ["mtp.0", "mtp.1"]),
    ):
        model, train = dataclasses.replace(MODEL, **changes), TrainConfig(steps=200, objective=objective)
        assert name_layers(model, objective_of(Config(model=model, loss=none, train=train)).layers) == names


def test_one_bias_moves_by_the_load_of_both():
    model, buffers = empty_model(MODEL), buffers_of(MODEL)
    load = jnp.asarray(np.random.RandomState(0).randint(0, 9, (4, 2, E)).astype(np.float32))
    moved = [dict(nnx.to_flat_state(update_biases(model, buffers, x, 0.5))) for x in (load, load.sum(1))]
    biases = [path for path, v in moved[0].items() if isinstance(v, RouterBias)]
    assert len(biases) == 2
    for path in biases:
        np.testing.assert_array_equal(moved[0][path].get_value(), moved[1][path].get_value())
        assert np.abs(moved[0][path].get_value()).max() == 0.5


@pytest.mark.parametrize("limit, share", [(1e-12, 1.0), (0.0, 0.0)])
def test_the_clamped_share_is_of_all_activations_of_real_tokens(limit: float, share: float):
    """All of them are beyond a limit near 0, the MTP block's too; the parts of a batch add up to the whole."""
    batch, _ = packed()
    model = ruled_model(dataclasses.replace(ONE, swiglu_limit=limit))
    run, count = (
        jax.jit(lambda model, batch: compute_losses(model, batch, count)[0]["moe/clamped"]),
        count_targets(batch),
    )
    parts = [float(run(model, {name: x[i : i + 1] for name, x in batch.items()})) for i in range(2)]
    np.testing.assert_allclose(parts, share * np.array([12, 16]) / 28, rtol=1e-6)
