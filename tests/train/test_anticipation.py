# SPDX-License-Identifier: Apache-2.0
"""Anticipatory routing: whose choice of experts is used when, in the step and in whole runs."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from support.runs import SMALL, metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax.config import AnticipationConfig, LossConfig, RoutingConfig
from dsv4_jax.data.batch import put_batch
from dsv4_jax.mesh import make_mesh
from dsv4_jax.train import loop
from dsv4_jax.train import programs as programs_module
from dsv4_jax.train.anticipation import learned_layers, make_route, route_shape, route_type
from dsv4_jax.train.checkpoint import load_model
from dsv4_jax.train.objectives.pretrain import compute_losses
from dsv4_jax.train.state import abstract_state, init_state
from dsv4_jax.train.timing import Timing

pytestmark = pytest.mark.usefixtures("cheap_compilation")

# A hashed layer and two learned ones, of windows only.
ROUTED = dataclasses.replace(SMALL, n_layers=3, compress_ratios=(0, 0, 0), n_hash_layers=1, n_routed_experts=8)


def anticipating(corpus, run_dir, delay, mode="on", speed=1e-2, rate=None, hold=200, **changes):
    cfg = small(corpus, run_dir, **changes)
    optim = cfg.optim if rate is None else dataclasses.replace(cfg.optim, learning_rate=rate, end_learning_rate=rate)
    anticipation = AnticipationConfig(mode=mode, delay=delay, hold=hold)
    routing = RoutingConfig(bias_speed=speed, anticipation=anticipation)
    return dataclasses.replace(cfg, model=ROUTED, optim=optim, routing=routing, loss=LossConfig(mtp=0.0, balance=0.1))


def batch_of(seed, rows=2):
    rng = np.random.RandomState(seed)
    ids = rng.randint(0, 256, (rows, 64)).astype(np.int32)
    segments = np.ones_like(ids)
    segments[0, 30:], segments[1, 50:] = 2, 0
    targets = np.where(segments > 0, rng.randint(0, 256, ids.shape), -1).astype(np.int32)
    return {"ids": ids, "segment_ids": segments, "targets": targets, "mtp_targets": targets}


def put(batch):
    return put_batch(batch, list(range(len(batch["ids"]))), len(batch["ids"]))


class Programs:
    """Start, routing and step of the routed model: those that the runs here use too."""

    def __init__(self, cfg):
        self._programs = programs_module.Programs(Timing(), lambda line: None)
        self._stage = cfg.resolved_stages[0]
        self.start = jax.jit(lambda: init_state(cfg))()

    def _run(self, name, state, batch):
        # A step takes the place of the state it is given.
        return self._programs.compiled(self._stage, name, state, batch)(jax.tree.map(jnp.copy, state), batch)

    def route(self, state, batch):
        return self._run("routing", state, batch)

    def step(self, state, batch):
        return self._run("step", state, batch)


@pytest.fixture(scope="module")
def programs(cheap_compilation, corpus):
    return Programs(anticipating(corpus, "none", 2))


def test_what_is_kept_of_a_choice(programs):
    """One byte for each expert of each token in each learned layer, spread like the batch; the model's own choice."""
    state, batch = programs.start, put(batch_of(0))
    chosen = programs.route(state, batch)
    assert chosen.dtype == jnp.uint8 and chosen.shape == (2, 64, 2, 2) == route_shape(ROUTED, batch)
    assert learned_layers(ROUTED) == [1, 2]
    assert route_type(dataclasses.replace(ROUTED, n_routed_experts=384)) == jnp.uint16
    model = nnx.merge(nnx.graphdef(ds.DeepSeek(ROUTED, rngs=nnx.Rngs(0))), state.params, state.buffers)
    out = jax.jit(lambda m, b: m(b["ids"], b["segment_ids"]))(model, batch)
    np.testing.assert_array_equal(chosen, np.stack(out.experts[1:], axis=2))


def test_a_choice_of_the_same_parameters_changes_nothing(programs):
    """Forced to what it would choose itself, a step has the same bits."""
    state, batch = programs.start, put(batch_of(0))
    got = programs.step(state, batch | {"experts": programs.route(state, batch)})
    want = programs.step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_forced_experts_are_counted_and_hashed_layers_are_left_alone(programs):
    """Loads are those of the ids applied, which the biases follow; weights come from the scores of the step."""
    state, batch = programs.start, put(batch_of(0))
    forced = jnp.zeros(route_shape(ROUTED, batch), jnp.uint8).at[..., 1].set(5)
    model = nnx.merge(nnx.graphdef(ds.DeepSeek(ROUTED, rngs=nnx.Rngs(0))), state.params, state.buffers)
    found = jax.jit(compute_losses)(model, batch | {"experts": forced})
    load = np.asarray(found[1])
    real = (batch_of(0)["segment_ids"] > 0).sum()
    want = np.zeros((2, 8))
    want[:, [0, 5]] = real
    np.testing.assert_array_equal(load[1:], want)
    np.testing.assert_array_equal(load[0], jax.jit(compute_losses)(model, batch)[1][0])
    after, _ = programs.step(state, batch | {"experts": forced})
    biases = [v.get_value() for path, v in nnx.to_flat_state(after.buffers) if path[-1] == "bias"]
    for bias in np.concatenate([np.atleast_2d(b) for b in biases]):
        np.testing.assert_allclose(bias, 1e-2 * np.where(np.isin(np.arange(8), [0, 5]), -1, 1), rtol=1e-6)


def test_parts_of_a_batch_on_a_mesh_choose_like_the_whole_on_one_device(programs):
    cfg, state = anticipating("", "none", 2), programs.start
    cfg = dataclasses.replace(
        cfg, train=dataclasses.replace(cfg.train, accumulate=2), data=dataclasses.replace(cfg.data, batch_size=4)
    )
    batch = batch_of(1, rows=4)
    want = jax.jit(make_route(cfg))(state, put(batch))
    host = jax.device_get(state)
    with jax.set_mesh(make_mesh(2, 1, 2)):
        put_there = lambda x, like: jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), like.sharding.spec))
        state = jax.tree.map(put_there, host, abstract_state(cfg))
        got = jax.jit(make_route(cfg))(state, put(batch))
        assert got.sharding.spec[:2] == (("data", "expert"), "context")
    np.testing.assert_array_equal(got, want)


class Log:
    """What a run's steps see and use, by steps done; and after how many steps it chooses ahead."""

    def __init__(self, monkeypatch):
        self.states, self.batches, self.chosen = {}, {}, []
        compiled = programs_module.Programs.compiled

        def logged(programs, stage, name, state, batch):
            made = compiled(programs, stage, name, state, batch)

            def run(state, batch):
                if name == "step":
                    self.states[int(state.step)] = jax.tree.map(jnp.copy, state)
                    self.batches[int(state.step)] = batch
                elif name == "routing":
                    self.chosen.append(int(state.step))
                return made(state, batch)

            return run

        monkeypatch.setattr(programs_module.Programs, "compiled", logged)


def test_the_experts_of_step_t_are_those_of_the_parameters_d_steps_before(corpus, tmp_path, monkeypatch, programs):
    """Computed again from the parameters and biases then and the batch now; the lag grows from 0 when it begins."""
    delay, stale = 2, 0
    with monkeypatch.context() as patch:
        log = Log(patch)
        train(anticipating(corpus, tmp_path, delay))
    assert sorted(log.batches) == list(range(8))
    for t in range(8):
        batch = dict(log.batches[t])
        used = batch.pop("experts")
        np.testing.assert_array_equal(used, programs.route(log.states[max(t - delay, 0)], batch))
        stale += not np.array_equal(used, programs.route(log.states[t], batch))
    assert stale >= 5  # the delay does make a difference
    assert [line["train/lag"] for line in metrics(tmp_path)] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert log.chosen == [0, 0, 0, 1, 2, 3, 4, 5]  # none for batches that never come


@pytest.fixture(scope="module")
def on(corpus, tmp_path_factory):
    """A run with a delay of 3 in one go."""
    run_dir = tmp_path_factory.mktemp("on")
    train(anticipating(corpus, run_dir, 3))
    return run_dir


def test_a_delay_of_0_is_off(corpus, tmp_path):
    for name, how in (("off", {"mode": "off", "delay": 3}), ("zero", {"mode": "on", "delay": 0})):
        train(anticipating(corpus, tmp_path / name, **how))
    assert timeless(metrics(tmp_path / "off")) == timeless(metrics(tmp_path / "zero"))


@pytest.mark.slow
def test_without_learning_the_delay_makes_no_difference(corpus, tmp_path, on):
    """With a learning rate of 0 and biases that stay."""
    lines = []
    for name, mode in (("off", "off"), ("on", "on")):
        train(anticipating(corpus, tmp_path / name, 3, mode, speed=0.0, rate=1e-30))
        lines.append(
            [{k: v for k, v in line.items() if k != "train/lag"} for line in timeless(metrics(tmp_path / name))]
        )
    assert lines[0] == lines[1]
    assert timeless(metrics(on))[-1]["loss"] != lines[0][-1]["loss"]


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_resuming_in_the_middle_equals_never_having_stopped(corpus, tmp_path, on, monkeypatch, step):
    """What was chosen for the batches to come is in the checkpoint."""
    evaluate, calls = loop.evaluate, itertools.count(1)

    def die(*arguments):
        if next(calls) == step // 4 + 1:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "evaluate", die)
        train(anticipating(corpus, tmp_path, 3))
    assert f"at step {step}" in train(anticipating(corpus, tmp_path, 3))
    assert timeless(metrics(tmp_path)) == timeless(metrics(on))
    one, two = (ds.to_official(load_model(anticipating(corpus, d, 3))) for d in (on, tmp_path))
    assert all((one[name] == two[name]).all() for name in one)


@pytest.mark.slow
def test_other_batches_after_a_resume_are_routed_anew(corpus, tmp_path, on):
    shutil.copytree(on, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    cfg = anticipating(corpus, tmp_path / "run", 3)
    said = train(dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=4)))
    assert "anticipatory routing starts again" in said
    assert [line["train/lag"] for line in metrics(tmp_path / "run")][6:] == [0, 1]
