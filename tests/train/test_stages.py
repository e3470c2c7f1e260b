# SPDX-License-Identifier: Apache-2.0
"""Runs of several stages: token counts decide, the state goes through, data goes on; and rollback from spikes."""

import contextlib
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from support.runs import MODEL, metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax.config import AnticipationConfig, MeshConfig, RoutingConfig, SpikesConfig, Stage, TrainConfig
from dsv4_jax.config.files import config_from_json
from dsv4_jax.mesh import make_mesh
from dsv4_jax.train import run
from dsv4_jax.train.checkpoint import Checkpoints, load_model
from dsv4_jax.train.feed import read_data
from dsv4_jax.train.optimizer import split_trained
from dsv4_jax.train.run_dir import resolved
from dsv4_jax.train.state import init_state
from dsv4_jax.train.step import make_train_step
from dsv4_jax.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("cheap_compilation")


def staged(cfg, *stages):
    """The configuration with stages (name, tokens at the end, changes)."""
    stages = tuple(Stage(name=name, until=until, changes=changes) for name, until, changes in stages)
    return dataclasses.replace(cfg, stages=stages, train=dataclasses.replace(cfg.train, steps=0))


def grown(corpus, run_dir, **changes):
    """8 steps of the small model: three of 2 x 64, three of 4 x 32, two of 2 x 64 without biases."""
    return staged(
        small(corpus, run_dir, **changes),
        ("short", 3 * 128, {}),
        ("wide", 6 * 128, {"data.seq_len": 32, "data.batch_size": 4, "optim.learning_rate": 5e-3}),
        ("long", 8 * 128, {"data.seq_len": 64, "data.batch_size": 2, "routing.bias_speed": 0.0}),
    )


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 5), st.sampled_from([8, 16, 64])), min_size=1, max_size=6)
)
def test_token_counts_decide_exactly(parts):
    """A step belongs to the stage in which it begins, by counting one step after another."""
    base = ds.Config(model=MODEL, train=TrainConfig(steps=9), optim=small("", "").optim)
    ends = list(itertools.accumulate(length for length, _, _ in parts))
    stages = [
        (str(i), u, {"data.batch_size": b, "data.seq_len": s})
        for i, (u, (_, b, s)) in enumerate(zip(ends, parts, strict=True))
    ]
    seen, step, want = 0, 0, []
    for until, (_, b, s) in zip(ends, parts, strict=True):
        first = step
        while seen < until:
            seen, step = seen + b * s, step + 1
        want.append((first, step))
    base = dataclasses.replace(base, optim=dataclasses.replace(base.optim, warmup_steps=0))
    if any(first == last for first, last in want):
        with pytest.raises(ds.ConfigError, match="no step begins before it ends"):
            staged(base, *stages)
        return
    stages = staged(base, *stages).resolved_stages
    assert [(stage.first, stage.last) for stage in stages] == want
    assert [stage.clock.tokens(stage.last) for stage in stages][-1] == seen and all(
        stage.cfg.steps == step for stage in stages
    )


def test_what_a_stage_may_change_and_what_not():
    cfg = small("", "run")
    wrong = {
        "model.dim": "cannot change 'model.dim'",
        "data.seq_length": "the nearest valid key is 'data.seq_len'",
        "routing.anticipation.mod": "unknown key",
        "optim.name": "cannot change",
    }
    for key, words in wrong.items():
        with pytest.raises(ds.ConfigError, match=words) as error:
            staged(cfg, ("a", 128, {}), ("b", 256, {key: 1}))
        assert "stage 2 (b)" in str(error.value)
    with pytest.raises(ds.ConfigError, match=r"stage 1 \(a\): data.seq_len = 'x'"):
        staged(cfg, ("a", 128, {"data.seq_len": "x"}))
    with pytest.raises(ds.ConfigError, match="ascending"):
        staged(cfg, ("a", 256, {}), ("b", 256, {}))
    with pytest.raises(ds.ConfigError, match="same number of devices"):
        staged(cfg, ("a", 256, {}), ("b", 512, {"mesh.context": 2}))
    with pytest.raises(ds.ConfigError, match="steps must be above 0"):
        dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=0))
    with pytest.raises(ds.ConfigError, match="exceeds the 2 steps of the stages"):
        dataclasses.replace(staged(cfg, ("a", 256, {})), train=TrainConfig(steps=3)).check_steps()


def test_stages_survive_config_json():
    cfg = staged(small("", "run"), ("a", 128, {}), ("b", 256, {"data.mixture": {"x": 1.0}, "data.path": ""}))
    assert config_from_json(json.loads(json.dumps(resolved(cfg)))) == cfg


@pytest.fixture(scope="module")
def in_one_go(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("stages")
    return run_dir, train(grown(corpus, run_dir))


def test_a_run_of_stages(in_one_go, corpus):
    """Shapes change at the step that the tokens say; rates follow the stage; events say so."""
    run_dir, said = in_one_go
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 9)) and lines[-1]["loss"] < lines[0]["loss"]
    assert [line["lr"] for line in lines] == pytest.approx([5e-3, 1e-2, 1e-2, *[5e-3] * 5])
    assert lines[5]["moe/bias_max"] > 0 and lines[7]["moe/bias_max"] == lines[5]["moe/bias_max"]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["event"]) for e in events] == [(0, "stage"), (3, "stage"), (6, "stage")]
    assert "data.seq_len = 32" in events[1]["text"] and "wide up to step 6" in said
    assert said.count("compiled    step") == 3


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 6])
def test_a_stage_resumes_where_it_stood(in_one_go, corpus, tmp_path, step, monkeypatch):
    """Also from the border of two stages: the same steps, bit for bit, as in one go."""
    save, saved = Trainer.save, []

    def save_and_die(trainer, state):
        save(trainer, state)
        if saved.append(int(state.step)) or saved[-1] == step:
            trainer.checkpoints.wait()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "save", save_and_die)
        train(grown(corpus, tmp_path))
    assert f"at step {step}" in train(grown(corpus, tmp_path))
    assert timeless(metrics(tmp_path)) == timeless(metrics(in_one_go[0]))
    assert (tmp_path / "events.jsonl").read_text() == (in_one_go[0] / "events.jsonl").read_text()


def test_stages_do_not_repeat_each_others_documents(corpus, tmp_path):
    """Each goes on where the one before ended in every source, whatever its rows are."""
    cfg = grown(corpus, tmp_path)
    plans = [data.training for data in read_data(cfg)]
    ends = [plan._rounds[0]._ends[-1] for plan in plans[:-1]]
    read = [{plan._rounds[0][i].document for i in range(int(n))} for plan, n in zip(plans, ends, strict=False)]
    epoch = plans[0].parts[0].tokens - len(plans[0].parts[0].documents)
    assert 2 * 3 * 128 < epoch and not read[0] & read[1]
    tokens = sum(plans[0].parts[0].source.lengths[d] - 1 for d in read[0])
    assert tokens == pytest.approx(3 * 128, abs=400)  # a document more or less


def test_the_state_goes_through_stages_that_freeze_parts(corpus, tmp_path):
    """Parameters and moments of what a stage leaves alone keep their bits; the others' moments go on."""
    cfg = staged(
        dataclasses.replace(small(corpus, tmp_path), model=INDEXED),
        ("dense", 128, {"model.attention": "dense", "train.frozen": r"^embed$"}),
        ("warm-up", 256, {"model.attention": "warmup", "train.frozen": ""}),
        ("sparse", 384, {"model.attention": "sparse"}),
    )
    state = jax.jit(lambda: init_state(cfg))()
    rng = np.random.RandomState(0)
    ids = rng.randint(0, 256, (2, 64)).astype(np.int32)
    batch = {"ids": ids, "segment_ids": np.ones_like(ids), "targets": ids, "mtp_targets": ids}
    trains = {
        "dense": lambda path: "indexer" not in path and path[0] != "embed",
        "warm-up": lambda path: "indexer" in path,
        "sparse": lambda path: True,
    }
    counts = []
    for stage in cfg.resolved_stages:
        after, told = jax.jit(make_train_step(stage.cfg, stage.clock))(state, run.put_batch(batch, [0, 1], 2))
        pairs = zip(nnx.to_flat_state(state.params), nnx.to_flat_state(after.params), strict=True)
        moved = {path for (path, a), (_, b) in pairs if not np.array_equal(a.get_value(), b.get_value())}
        want = {path for path, _ in nnx.to_flat_state(state.params) if trains[stage.declared.name](path)}
        assert moved == want, moved ^ want
        assert set(told["grad_norms"]) == {".".join(map(str, path)) for path in want}
        flat = lambda state: jax.tree.leaves_with_path(state.opt_state)
        kept = [np.array_equal(a, b) for (_, a), (_, b) in zip(flat(state), flat(after), strict=True)]
        names = [jax.tree_util.keystr(path) for path, _ in flat(after)]
        own = split_trained(stage.cfg, state.params)[0]
        own = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(own)}
        for name, same in zip(names, kept, strict=True):
            if "count" not in name:
                held = any(name.endswith(path) and not name.removesuffix(path).endswith("]") for path in own)
                assert same == (not held), name
        counts.append(sum(kept))
        state = after
    assert counts[1] > counts[0] > counts[2]  # the warm-up leaves most alone


def test_a_pattern_that_freezes_nothing_or_everything_is_refused(corpus, tmp_path):
    for pattern, words in (("nonsense", "matches no parameter"), (".", "leave nothing to train")):
        cfg = small(corpus, tmp_path, frozen=pattern)
        with pytest.raises(ds.ConfigError, match=words):
            train(cfg)


# One CSA layer.
INDEXED = dataclasses.replace(
    MODEL, n_layers=1, n_heads=4, n_hash_layers=0, n_mtp_layers=0, compress_ratios=(4,), index_topk=2, window_size=8,
    hc_sinkhorn_iters=2, compress_rope_theta=1e4,
)  # fmt: skip
SPIKES = SpikesConfig(window=8, loss=1.0, grad_norm=0.0)


def spiky(corpus, run_dir, *, delay=2, hold=3, **spikes):
    """12 steps of the small model that go back from a spike."""
    cfg = small(corpus, run_dir, steps=12, eval_every=99, keep=9)
    anticipation = AnticipationConfig(mode="auto", delay=delay, hold=hold)
    routing = RoutingConfig(anticipation=anticipation)
    return dataclasses.replace(cfg, routing=routing, spikes=dataclasses.replace(SPIKES, **spikes))


@pytest.fixture
def poisoned(monkeypatch):
    """A batch of the training data, by its number from 0, that is all wrong: its targets are one rare byte."""
    make = run.streams

    def plant(number):
        read, spot, positions = [], [None], []

        class Poisoned:
            def __init__(self, stream):
                self.stream, self.own, self.log = stream, stream.own, []

            @property
            def position(self):
                return self.stream.position

            def changed(self, batch, position):
                bad = tuple(position) == tuple(spot)
                return batch | {"targets": np.where(batch["targets"] >= 0, 1, -1)} if bad else batch

            def peek(self, ahead=0):
                return self.stream.peek(ahead)

            def __next__(self):
                before = self.stream.position
                read.append(tuple(before))
                return self.changed(next(self.stream), before)

        @contextlib.contextmanager
        def wrapped(cfg, data, start):
            with make(cfg, data, start) as (stream, evaluation):
                if spot == [None]:
                    rows = data.training.rows(start)
                    at = [tuple(start), *(tuple(p) for _, p in itertools.islice(rows, 2 * 40))][::2]
                    spot[:] = at[number]
                    positions.extend(at)
                yield Poisoned(stream), evaluation

        monkeypatch.setattr(run, "streams", wrapped)
        return lambda: [positions.index(p) for p in read]

    return plant


def lines_of(run_dir, name):
    return [(line["step"], line[name]) for line in metrics(run_dir)]


def test_the_whole_story_of_a_spike(corpus, tmp_path, poisoned):
    """Found at its step, back to the checkpoint before it, its batches left out, anticipation on and off again."""
    read = poisoned(7)
    said = train(spiky(corpus, tmp_path, skip=-1))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["event"]) for e in events] == [(8, "spike"), (8, "rollback"), (11, "anticipation")]
    assert "to step 6, leaving out 2 batches, with anticipatory routing up to step 11" in events[1]["text"]
    steps = [step for step, _ in lines_of(tmp_path, "step")]
    assert steps == [*range(1, 9), *range(7, 13)]
    # Steps 7 and 8 had the batches 6 and 7; a ninth was under way. Then step 7 has batch 8.
    assert [n for n in read() if n != 8][:8] == list(range(8)) and read()[-6:] == list(range(8, 14))
    assert [lag for _, lag in lines_of(tmp_path, "train/lag")][8:] == [0, 1, 2, 2, 2, 0]
    assert [n for _, n in lines_of(tmp_path, "train/rollbacks")] == [0] * 8 + [1] * 6
    assert max(loss for _, loss in lines_of(tmp_path, "loss")[8:]) < lines_of(tmp_path, "loss")[7][1] - 0.5
    assert "step 8: rollback: to step 6" in said


def test_going_back_without_leaving_out_repeats_bit_for_bit(corpus, tmp_path, poisoned):
    """Parameters, moments, biases, schedule and data together; and a run that cannot get past a spike ends."""
    poisoned(7)
    with pytest.raises(ds.RunError, match="went back 2 times from the spike at step 8"):
        train(spiky(corpus, tmp_path, hold=0, limit=2))
    lines = [
        {k: v for k, v in x.items() if k not in ("train/spikes", "train/rollbacks")}
        for x in timeless(metrics(tmp_path))
    ]
    assert [line["step"] for line in lines] == [*range(1, 9), 7, 8, 7, 8]
    assert lines[8:10] == lines[6:8] == lines[10:12]
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        assert checkpoints.latest() == 6


@pytest.mark.slow
def test_a_rollback_inside_the_profiled_steps_ends_their_trace(corpus, tmp_path, poisoned):
    poisoned(7)
    cfg = spiky(corpus, tmp_path, skip=-1)
    said = train(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, profile_steps="7:12")))
    assert "profile     of steps 7 to 9" in said and said.count("profile     ") == 1
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    lines = metrics(tmp_path)
    assert lines[-1]["step"] == 12 and lines[7]["perf/seconds/lost"] == 0 < lines[-1]["perf/seconds/lost"]
    assert lines[7]["perf/seconds/restore"] < lines[-1]["perf/seconds/restore"]


@pytest.mark.parametrize("at", [3, 4])
def test_a_kill_in_a_rolled_back_run_changes_nothing(corpus, tmp_path, poisoned, monkeypatch, at):
    """Right after going back, past a checkpoint that is of the other course; and while routing is anticipatory."""
    poisoned(7)
    want = tmp_path / "want"
    train(spiky(corpus, want, skip=-1, margin=2))
    save, calls = Trainer.save, itertools.count()

    def save_and_die(trainer, state):
        save(trainer, state)
        if next(calls) == at:
            trainer.checkpoints.wait()
            raise KeyboardInterrupt

    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "save", save_and_die)
        train(spiky(corpus, run_dir, skip=-1, margin=2))
    assert f"at step {3 if at == 3 else 6}" in train(spiky(corpus, run_dir, skip=-1, margin=2))
    assert timeless(metrics(run_dir)) == timeless(metrics(want))
    assert (run_dir / "events.jsonl").read_text() == (want / "events.jsonl").read_text()
    one, two = (ds.to_official(load_model(spiky(corpus, d))) for d in (want, run_dir))
    assert all((one[name] == two[name]).all() for name in one)


def test_a_spike_is_only_said_where_nothing_is_to_be_done(corpus, tmp_path, poisoned):
    poisoned(7)
    cfg = spiky(corpus, tmp_path)
    said = train(dataclasses.replace(cfg, routing=RoutingConfig()))
    assert "step 8: spike: loss" in said and "rollback" not in said
    assert [n for _, n in lines_of(tmp_path, "train/spikes")] == [0] * 7 + [1] * 5


def test_the_first_checkpoint_is_that_of_the_start(corpus, tmp_path, poisoned):
    """A spike before any other goes back to the beginning."""
    poisoned(2)
    cfg = spiky(corpus, tmp_path, skip=-1, window=4, loss=0.3)
    said = train(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=5, checkpoint_every=99)))
    assert "rollback: to step 0, leaving out 3 batches" in said
    assert [step for step, _ in lines_of(tmp_path, "step")] == [1, 2, 3, 1, 2, 3, 4, 5]


def test_ordinary_runs_have_no_spikes(in_one_go):
    assert {n for _, n in lines_of(in_one_go[0], "train/spikes")} == {0}


@pytest.mark.slow
def test_recall_rises_from_dense_attention_through_the_warm_up_to_sparse(tmp_path):
    """Documents ask again and again for a letter far back; the indexer learns which entries attention reads.

    In the warm-up nothing but the recall changes; a choice at random would cover far less.
    """
    rng = np.random.RandomState(0)
    for i in range(200):
        letter = rng.choice(list("ABCDEFGH"))
        asked = "".join("?" + letter if x < 0.2 else "." for x in rng.random_sample(100))
        (tmp_path / f"{i}.txt").write_text(letter + "." * 8 + asked)
    cfg = small(str(tmp_path), tmp_path / "run", eval_every=10, checkpoint_every=999)
    data = dataclasses.replace(cfg.data, seq_len=128, batch_size=4)
    cfg = dataclasses.replace(cfg, model=INDEXED, data=data)
    parts = ((79, "dense"), (110, "warmup"), (130, "sparse"))
    train(staged(cfg, *((name, step * 4 * 128, {"model.attention": name}) for step, name in parts)))
    lines = {line["step"]: line for line in metrics(tmp_path / "run") if "eval/loss" in line}
    assert "eval/recall" not in lines[70] and lines[70]["train/indexer_loss"] == 0
    recall = {step: line["eval/recall"] for step, line in lines.items() if step >= 80}
    chance = lines[80]["eval/recall_random"]
    assert 0.1 < chance < 0.25 and recall[80] < 1.5 * chance  # after one step of warm-up
    assert recall[110] > 1.6 * chance and recall[110] > recall[80] + 0.05 and recall[130] > 1.6 * chance
    assert lines[110]["train/indexer_loss"] < 0.2 * lines[80]["train/indexer_loss"]
    assert lines[80]["eval/loss"] == lines[110]["eval/loss"]


@pytest.mark.slow
def test_a_stage_with_another_mesh(corpus, tmp_path):
    """The state moves to it; the losses are those on one mesh."""
    losses = {}
    for name, change in (("one", {}), ("two", {"mesh.data": 1, "mesh.expert": 2, "mesh.context": 4})):
        cfg = small(corpus, tmp_path / name)
        data, grid = dataclasses.replace(cfg.data, batch_size=8), MeshConfig(data=8)
        cfg = staged(dataclasses.replace(cfg, data=data, mesh=grid), ("a", 3 * 512, {}), ("b", 6 * 512, change))
        with jax.set_mesh(make_mesh(8)):
            train(cfg)
            assert tuple(jax.sharding.get_abstract_mesh().shape.values()) == ((1, 2, 4) if change else (8, 1, 1))
        losses[name] = [loss for _, loss in lines_of(tmp_path / name, "loss")]
    assert jax.sharding.get_abstract_mesh().size == 1
    np.testing.assert_allclose(losses["two"], losses["one"], rtol=1e-5)
