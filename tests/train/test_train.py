# SPDX-License-Identifier: Apache-2.0
"""Training: a short run end to end, resume, the optimizer's groups, balance biases, start-up checks."""

import dataclasses
import io
import itertools
import json
import math
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from support.runs import MODEL, config, metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax.cli import main
from dsv4_jax.config import OptimConfig
from dsv4_jax.data.batch import put_batch
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.generate.sample import sample
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.params import HashTable, RouterBias
from dsv4_jax.optim.schedules import Clock
from dsv4_jax.train import loop, run
from dsv4_jax.train import step as step_module
from dsv4_jax.train.checkpoint import Checkpoints, load_model
from dsv4_jax.train.checks import start_warnings
from dsv4_jax.train.console import Display
from dsv4_jax.train.objectives.pretrain import compute_losses
from dsv4_jax.train.optimizer import make_schedule
from dsv4_jax.train.state import init_state
from dsv4_jax.train.step import make_train_step, update_biases

pytestmark = pytest.mark.usefixtures("cheap_compilation")


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """A run of eight steps in one go: its directory and what it said."""
    run_dir = tmp_path_factory.mktemp("straight")
    return run_dir, train(config(corpus, run_dir, 8))


def test_a_run_learns_and_writes_its_directory(straight, corpus):
    run_dir, said = straight
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert abs(lines[0]["loss"] - math.log(257)) < 0.5 and lines[-1]["loss"] < lines[0]["loss"] - 1
    assert all(line["tokens"] > last["tokens"] for last, line in itertools.pairwise(lines))
    assert {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "train/mtp_loss",
        "train/balance_loss",
        "train/indexer_loss",
    } <= lines[0].keys()
    assert [line["step"] for line in lines if "eval/loss" in line] == [4, 8]
    assert json.loads((run_dir / "config.json").read_text())["train"]["steps"] == 8
    assert list((run_dir / "tensorboard").iterdir())
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"6", "8"}  # the newest two
    assert "warning" not in said, said
    assert "unigram entropy" in said and "2 x" not in said


@pytest.fixture(scope="module")
def small_straight(corpus, tmp_path_factory):
    """A run of the small model in one go: its directory and what it said."""
    run_dir = tmp_path_factory.mktemp("small")
    return run_dir, train(small(corpus, run_dir, profile_steps="2:4"))


def test_resuming_equals_never_having_stopped(small_straight, corpus, tmp_path, monkeypatch):
    """Losses, data, evaluation and parameters after a kill past step 3 are those of the run in one go."""

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "evaluate", die)  # the first evaluation is at step 4, the checkpoint at step 3
        train(small(corpus, tmp_path))
    said = train(small(corpus, tmp_path))
    assert "at step 3" in said
    assert timeless(metrics(tmp_path)) == timeless(metrics(small_straight[0]))
    one, two = (ds.to_official(load_model(small(corpus, d))) for d in (small_straight[0], tmp_path))
    assert all((one[name] == two[name]).all() for name in one)


def test_a_run_is_converted_to_published_weights(small_straight, corpus, tmp_path, capsys):
    """The newest checkpoint, exactly in fp32; an earlier one by its step. What cannot be meant ends with status 2."""
    run, want = str(small_straight[0]), ds.to_official(load_model(small(corpus, small_straight[0])))
    main(["convert", run, str(tmp_path / "weights"), "--format", "f32"])
    assert f"{len(want)} tensors" in capsys.readouterr().out
    back = ds.to_official(ds.load_checkpoint(tmp_path / "weights"))
    assert back.keys() == want.keys() and all((back[name] == want[name]).all() for name in want)
    main(["convert", f"{run}@6", str(tmp_path / "earlier")])
    early = ds.to_official(ds.load_checkpoint(tmp_path / "earlier"))
    assert not np.allclose(early["norm.weight"], want["norm.weight"], atol=1e-6)
    main(["convert", str(tmp_path / "weights"), str(tmp_path / "four"), "--format", "fp4"])
    assert len(ds.load_checkpoint(tmp_path / "four").mtp) == len(load_model(small(corpus, small_straight[0])).mtp)
    for words, message in (
        ([run, str(tmp_path / "weights")], "is not empty"),
        ([run, str(tmp_path / "new"), "--format", "fp5"], "expected f32, bf16"),
        ([str(tmp_path), str(tmp_path / "new")], "is not a run directory"),
        ([f"{run}@4", str(tmp_path / "new")], "no checkpoint of step 4"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["convert", *words])
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def test_a_finished_run_resumes_to_nothing(straight, corpus):
    before = metrics(straight[0])
    assert "finished" in train(config(corpus, straight[0], 8))
    assert metrics(straight[0]) == before


def test_a_run_starts_from_anothers_parameters(small_straight, corpus, tmp_path):
    """Its parameters alone: steps, moments, schedule and data begin anew."""
    said = train(small(corpus, tmp_path, init_from=str(small_straight[0])))
    assert f"parameters  from {small_straight[0]}" in said
    old, new = metrics(small_straight[0]), metrics(tmp_path)
    assert [line["step"] for line in new] == list(range(1, 9)) and new[0]["lr"] == old[0]["lr"]
    assert new[0]["loss"] < old[0]["loss"] - 1 and new[0]["tokens"] == old[0]["tokens"]


def test_another_model_in_the_run_directory_is_refused(straight, corpus):
    other = dataclasses.replace(MODEL, dim=64)
    with pytest.raises(ds.ConfigError, match=r"model\.dim: 32 there, 64 here"):
        train(config(corpus, straight[0], 9, model=other))


def test_samples_repeat_and_greedy_takes_the_likeliest(straight, corpus):
    model = load_model(config(corpus, straight[0], 8))
    one = sample(model, Bytes(), "The ", 6, seed=1)
    assert one == sample(model, Bytes(), "The ", 6, seed=1)
    greedy = sample(model, Bytes(), "The ", 6, seed=1, temperature=0.0)[0].encode()
    ids = jnp.asarray(np.frombuffer(b"\0The " + greedy, np.uint8).astype(np.int32))[None].at[0, 0].set(256)
    best = np.asarray(jax.jit(lambda m, i: m(i))(model, ids).logits.argmax(-1))[0, 4:-1]
    assert bytes(best.astype(np.uint8)) == greedy


def put(batch):
    return put_batch(batch, [0, 1], 2)


@pytest.fixture(scope="module")
def batch():
    ensure_mesh()
    rng = np.random.RandomState(0)
    ids = rng.randint(0, 256, (2, 64)).astype(np.int32)
    segments = np.ones((2, 64), np.int32)
    segments[0, 20:] = 2
    segments[1, 50:] = 0
    targets = np.where(segments > 0, rng.randint(0, 256, (2, 64)), -1).astype(np.int32)
    return {"ids": ids, "segment_ids": segments, "targets": targets, "mtp_targets": targets}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dense", "warmup"])
def test_a_stage_trains_exactly_its_parameters(batch, mode, corpus, tmp_path):
    """Indexer warm-up moves the indexer alone; the dense stage leaves it as it is, without decay.

    What moves by Muon is orthogonal: the singular values of a matrix's step say so.
    """
    cfg = config(corpus, tmp_path, 8, model=dataclasses.replace(MODEL, attention=mode))
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, name="deepseek_v4"))
    state = jax.jit(lambda: init_state(cfg))()
    after, told = jax.jit(make_train_step(cfg))(state, put(batch))
    for (path, old), (_, new) in zip(nnx.to_flat_state(state.params), nnx.to_flat_state(after.params), strict=True):
        moved = not np.array_equal(old.get_value(), new.get_value())
        if mode == "warmup" or "indexer" in path:
            assert moved == ("indexer" in path and mode == "warmup"), path
        elif path[-1] in ("wq_a", "w2"):
            matrices = np.asarray((1 - 0.1 * 5e-3) * old.get_value() - new.get_value()) / 5e-3
            values = np.linalg.svd(matrices, compute_uv=False) / (0.18 * max(matrices.shape[-2:]) ** 0.5)
            assert np.median(values) == pytest.approx(1, abs=0.01), path
    assert start_warnings(cfg, jax.device_get(told), after.buffers) == []


def test_losses_ignore_padding_and_are_means_over_targets(batch, corpus, tmp_path):
    """Content of padding changes nothing; the loss is the mean of -log p over targets."""
    cfg = config(corpus, tmp_path, 8)
    model = ds.DeepSeek(cfg.model, rngs=nnx.Rngs(0))
    run_losses = jax.jit(compute_losses)
    found, load = run_losses(model, put(batch))
    other = dict(batch, ids=np.where(batch["segment_ids"] > 0, batch["ids"], 7))
    again, load_again = run_losses(model, put(other))
    assert all(float(found[name]) == float(again[name]) for name in found)
    np.testing.assert_array_equal(load, load_again)
    np.testing.assert_allclose(load.sum(1), 2 * (batch["segment_ids"] > 0).sum())
    logits = jax.jit(lambda m, i, s: m(i, s).logits)(model, batch["ids"], batch["segment_ids"])
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    at = batch["targets"] >= 0
    want = -np.take_along_axis(log_p, np.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0][at].mean()
    assert abs(float(found["loss"]) - want) < 1e-5


def test_biases_move_against_the_load(corpus, tmp_path):
    model = ds.DeepSeek(MODEL, rngs=nnx.Rngs(0))
    _, _, buffers = nnx.split(model, nnx.Param, ...)
    load = jnp.asarray(np.random.RandomState(0).randint(0, 9, (3, 4)).astype(np.float32))
    load = load.at[1].set(3.0)  # an even load moves nothing
    moved = nnx.to_flat_state(update_biases(model, buffers, load, 0.25))
    found = {}
    for path, variable in moved:
        if isinstance(variable, RouterBias):
            for row, layer in zip(np.atleast_2d(variable.get_value()), model.layers_of(path), strict=True):
                found[layer] = row
    assert sorted(found) == [1, 2]  # layer 0 is hashed; 2 is the MTP block
    for layer, row in found.items():
        np.testing.assert_array_equal(row, 0.25 * np.sign(np.mean(load[layer]) - load[layer]))


def test_the_schedule_fills_the_run():
    """The first step is not wasted on a rate of 0, and the last one has the end rate."""
    cfg = OptimConfig(learning_rate=1.0, end_learning_rate=0.1, warmup_steps=4, decay_steps=10)
    rate = make_schedule(cfg, 100, Clock())
    np.testing.assert_allclose([rate(t) for t in (0, 3, 89, 94, 99)], [0.25, 1, 1, 0.55, 0.1], rtol=1e-6)


@pytest.mark.slow
def test_the_other_table_trains_with_a_momentum_in_bf16(batch, corpus, tmp_path):
    cfg = config(corpus, tmp_path, 8)
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, name="deepseek_v41", momentum_dtype="bfloat16"))
    state = jax.jit(lambda: init_state(cfg))()
    types = jax.tree.map(jax.typeof, state)
    assert sum(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state)) > 20
    step, told = jax.jit(make_train_step(cfg)), []
    for _ in range(4):
        state, metrics = step(state, put(batch))
        told.append(float(metrics["loss"]))
    assert told[3] < told[0] - 0.3
    assert jax.tree.map(jax.typeof, state) == types and step._cache_size() == 1  # one compilation for all steps


def test_start_warnings_name_what_is_wrong(batch, corpus, tmp_path):
    cfg = config(corpus, tmp_path, 8)
    _, _, buffers = nnx.split(ds.DeepSeek(MODEL, rngs=nnx.Rngs(0)), nnx.Param, ...)
    good = {
        "loss": math.log(257),
        "train/mtp_loss": 5.5,
        "train/balance_loss": 1.0,
        "train/indexer_loss": 0.1,
        "grad_norms": {},
    }
    assert start_warnings(cfg, good, buffers) == []
    norms = {"head": np.float32(1), "groups.0.0.attn.wkv": np.array([1.0, 0.0])}
    (said,) = start_warnings(cfg, good | {"grad_norms": norms}, buffers)
    assert "groups.0.0.attn.wkv" in said and "[1]" in said
    (said,) = start_warnings(cfg, good | {"loss": 9.0}, buffers)
    assert "9.00" in said and "ln(vocabulary) = 5.55" in said
    (said,) = start_warnings(cfg, good | {"train/mtp_loss": 0.0}, buffers)
    assert "mtp_loss" in said
    with pytest.raises(RuntimeError, match="mtp_loss"):
        start_warnings(cfg, {k: v for k, v in good.items() if k != "train/mtp_loss"}, buffers)
    for _, variable in nnx.to_flat_state(buffers):
        if isinstance(variable, HashTable):
            variable.set_value(jnp.zeros_like(variable.get_value()))
    (said,) = start_warnings(cfg, good, buffers)
    assert "tid2eid" in said


def test_the_time_left_is_that_of_steps_alone():
    said = io.StringIO()
    with Display(Console(file=said, width=200), steps=10, done=2, every_s=0.0) as display:
        for step, seconds in ((3, 1.0), (4, 3.0)):
            display.update({"step": step, "loss": 1.0, "tokens_per_s": 9.0, "lr": 1e-3}, seconds)
    assert [line.partition("ETA ")[2] for line in said.getvalue().splitlines()] == ["7 s", "12 s"]


POISON, HUGE = -7, -8  # MTP targets that mean nothing, but to the objective below


def poisoned_loss(cfg, objective, make=step_module.make_loss):
    loss = make(cfg, objective)

    def poisoned(trained, others, buffers, batch, count):
        total, rest = loss(trained, others, buffers, batch, count)
        factor = jnp.where((batch["mtp_targets"] == POISON).any(), jnp.nan, 1.0)
        return total * jnp.where((batch["mtp_targets"] == HUGE).any(), 1e25, factor), rest

    return poisoned


@pytest.fixture
def poison(monkeypatch):
    """Batches that are marked by POISON have an objective of NaN, others their own; marks the calls named."""
    put_it = run.put_batch

    def mark(numbers):
        calls = itertools.count()  # the first one is an example for the compiler

        def put_marked(batch, own, rows):
            if next(calls) in numbers:
                batch = batch | {"mtp_targets": np.full_like(batch["mtp_targets"], POISON)}
            return put_it(batch, own, rows)

        monkeypatch.setattr(run, "put_batch", put_marked)

    monkeypatch.setattr(step_module, "make_loss", poisoned_loss)
    return mark


def test_a_step_that_is_not_finite_changes_nothing(batch, poison, corpus, tmp_path):
    """Parameters, moments, the schedule's count and biases stay; the step after it is as if it had not been."""
    cfg = small(corpus, tmp_path)
    step = jax.jit(make_train_step(cfg))
    first, _ = step(jax.jit(lambda: init_state(cfg))(), put(batch))
    # A huge gradient is finite, but its square is not: the step is skipped, and the norm is reported.
    for mark in (HUGE, POISON):
        after, told = step(first, put(dict(batch, mtp_targets=np.full_like(batch["mtp_targets"], mark))))
        assert not told["finite"] and int(after.skipped) == 1 and int(after.step) == 2
        assert math.isnan(told["train/objective"]) == math.isnan(told["grad_norm"]) == (mark == POISON)
        same = dataclasses.replace(after, step=first.step, skipped=first.skipped)
        jax.tree.map(np.testing.assert_array_equal, same, first)
        if mark == HUGE:
            assert 1e22 < float(told["grad_norm"]) < 1e30
    (one, told), (two, want) = step(after, put(batch)), step(first, put(batch))
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(one, step=two.step, skipped=two.skipped), two)
    assert float(told["lr"]) == float(want["lr"]) and float(told["loss"]) == float(want["loss"])


def test_a_burst_of_bad_steps_longer_than_the_kept_checkpoints(corpus, tmp_path, poison):
    """Every step is saved, two are kept: what is saved stays finite, the data moves on, and training goes on."""
    poison(range(4, 8))
    cfg = small(corpus, tmp_path, checkpoint_every=1, keep=2, eval_every=99)
    said = train(cfg)
    lines = metrics(tmp_path)
    assert [line["train/objective"] is None for line in lines] == [3 < line["step"] < 8 for line in lines], said
    assert [line["train/skipped"] for line in lines] == [0, 0, 0, 1, 2, 3, 4, 4]
    assert "step 4: skipped: objective nan" in said and lines[-1]["loss"] < lines[2]["loss"]
    assert all(line["tokens"] > last["tokens"] for last, line in itertools.pairwise(lines))
    assert all(np.isfinite(x).all() for x in ds.to_official(load_model(cfg)).values())


def test_too_many_bad_steps_end_the_run(corpus, tmp_path, poison):
    poison(range(4, 99))
    cfg = small(corpus, tmp_path, bad_steps=3, eval_every=99)
    with pytest.raises(ds.RunError, match="3 steps in a row were not finite, the last one 6"):
        train(cfg)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        assert checkpoints.latest() == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(small_straight, corpus, tmp_path, number, monkeypatch):
    put_it, calls = run.put_batch, itertools.count()

    def put_and_signal(*arguments, **own):
        if next(calls) == 5:
            signal.raise_signal(number)
        return put_it(*arguments, **own)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(run, "put_batch", put_and_signal)
        train(small(corpus, tmp_path))
    assert stop.value.code == 128 + number
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    if number == signal.SIGTERM:
        assert "at step 5" in train(small(corpus, tmp_path))
        assert timeless(metrics(tmp_path)) == timeless(metrics(small_straight[0]))


def test_profiled_steps_are_traced(small_straight):
    run_dir, said = small_straight
    assert "profile     of steps 2 to 3" in said and list((run_dir / "profile").rglob("*.xplane.pb"))


def test_what_changes_at_a_resume_is_said(small_straight, corpus, tmp_path):
    shutil.copytree(small_straight[0], tmp_path, dirs_exist_ok=True)
    cfg = small(corpus, tmp_path)
    more = dataclasses.replace(cfg.train, steps=9, keep=3, profile_steps="2:20", new_data=True)
    said = train(dataclasses.replace(cfg, train=more, data=dataclasses.replace(cfg.data, held_out=0.3)))
    assert "train.keep: 2 before, 3 now" in said and "data.held_out: 0.2 before, 0.3 now" in said
    assert "other data" in said and "train.steps" not in said
    assert "profile     of steps 9 to 9" in said  # resumed inside the steps to trace, and ended inside
    muon = dataclasses.replace(cfg, train=more, optim=dataclasses.replace(cfg.optim, name="deepseek_v4"))
    with pytest.raises(ds.ConfigError, match="holds the state of another configuration"):
        train(muon)
