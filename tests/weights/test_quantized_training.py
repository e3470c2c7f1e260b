# SPDX-License-Identifier: Apache-2.0
"""The law of quantisation-aware training: what is trained, exported and imported computes the same logits exactly."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from support.golden_models import computed_as, forward, ruled_model
from support.runs import MODEL, config, metrics, train

import dsv4_jax as ds
from dsv4_jax import cli
from dsv4_jax.config import LossConfig, Stage
from dsv4_jax.train.checkpoint import load_model
from dsv4_jax.weights.convert import convert_folder

EVERYTHING = ("experts", "index", "window", "entries")
SMALL = dict(dim=16, hc_sinkhorn_iters=2, n_mtp_layers=0)
V4 = dataclasses.replace(MODEL, **SMALL, compress_ratios=(4, 16))
V41 = dataclasses.replace(
    MODEL, **SMALL, compress_ratios=(2, 1), kv_source_layers=(0, 1), index_source_layers=(0, 1), n_hash_layers=0,
    hc_single_pass=True, query_norm=False, modality_bias=True, engram_layer_ids=(0,), engram_vocab_size=50,
    engram_n_heads=2, engram_head_dim=8,
)  # fmt: skip
COMPUTE = dict(attention_block=32, remat="none", quantize=EVERYTHING)
IDS = np.random.default_rng(0).integers(0, 257, (2, 40)).astype(np.int32)
TARGETS = -np.eye(257, dtype=np.float32)[np.roll(IDS, -1, axis=1)]
MODELS = pytest.mark.parametrize("model", [V4, pytest.param(V41, marks=pytest.mark.slow)], ids=["v4", "v41"])


def experts_moved(before, after):
    """Whether some tensors differ, and all that differ are experts or balance biases."""
    before, after = (ds.to_official(ds.load_checkpoint(folder)) for folder in (before, after))
    moved = {name for name, x in before.items() if not np.array_equal(x, after[name])}
    return moved and all(".experts." in name or name.endswith(("gate.bias", "gate.bias_vl")) for name in moved)


@MODELS
def test_training_exporting_and_importing_changes_no_logit(tmp_path, model):
    """Experts trained from published weights, all else as published; written in 4 bits, then from there in 8."""
    published, four, eight = (tmp_path / name for name in ("published", "four", "eight"))
    ds.save_checkpoint(ruled_model(model), published, "fp4")

    @jax.jit
    def step(model):
        def loss(params):
            logits = nnx.merge(graph, params, rest)(IDS).logits
            return (jax.nn.log_softmax(logits) * TARGETS).mean(), logits

        graph, params, rest = nnx.split(model, nnx.Param, ...)
        grads, logits = jax.grad(loss, has_aux=True)(params)
        moved = lambda path, w, g: w - 10 * g if "'experts'" in jax.tree_util.keystr(path) else w
        return nnx.merge(graph, jax.tree.map_with_path(moved, params, grads), rest), logits

    trained = ds.load_checkpoint(published, **COMPUTE)
    for _ in range(2):
        trained, _ = step(trained)
    want = np.asarray(step(trained)[1])
    ds.save_checkpoint(trained, four, "fp4")
    convert_folder(four, eight, "fp8", Console(file=io.StringIO()))
    for folder in (four, eight):
        assert experts_moved(published, folder)
        np.testing.assert_array_equal(step(ds.load_checkpoint(folder, **COMPUTE))[1], want)
    assert np.isfinite(want).all() and not np.array_equal(want, step(ds.load_checkpoint(published, **COMPUTE))[1])


@pytest.mark.slow
@pytest.mark.usefixtures("cheap_compilation")
@MODELS
def test_a_stage_that_rounds(corpus, tmp_path, model):
    """The same by commands; what is exported needs the switch of the experts no more."""
    published, run, out = (tmp_path / name for name in ("published", "run", "out"))
    ds.save_checkpoint(ruled_model(model), published, "fp4")
    cfg = config(corpus, run, 4, model=model, loss=LossConfig(mtp=0.0))
    batch = cfg.data.batch_size * cfg.data.seq_len
    stages = (
        Stage(name="plain", until=batch),
        Stage(name="rounded", until=4 * batch, changes={"model.quantize": EVERYTHING}),
    )
    train(cfg.replace({"train.init_from": str(published), "train.frozen": r"^(?!.*\.experts\.)", "stages": stages}))
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    cli.main(["convert", str(run), str(out), "--format", "fp4"])
    assert experts_moved(published, out)
    trained, loaded = load_model(cfg, str(run)), ds.load_checkpoint(out, **COMPUTE)
    logits = lambda model, *on: np.asarray(forward()(computed_as(model, quantize=on), IDS).logits)
    want = logits(trained, *EVERYTHING)
    np.testing.assert_array_equal(logits(loaded, *EVERYTHING), want)
    np.testing.assert_array_equal(logits(loaded, *EVERYTHING[1:]), want)
    assert np.abs(want - logits(trained, *EVERYTHING[1:])).max() > 1e-4
