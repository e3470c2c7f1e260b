# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run goes, and traces of steps that end early."""

import signal

import pytest
from support.runs import metrics, small, train

import dsv4_jax as ds
from dsv4_jax.train import loop
from dsv4_jax.train.checkpoint import Checkpoints
from dsv4_jax.train.timing import Timing

pytestmark = pytest.mark.usefixtures("cheap_compilation")


def test_seconds_by_hand():
    now = [0.0]

    def after(seconds):
        now[0] += seconds

    timing = Timing(lambda: now[0])
    after(5)  # reading the data
    timing.restart()
    with timing.during("compile") as seconds:
        after(10)
    assert seconds() == 10
    with timing.waiting():
        after(1)
    after(2)
    assert timing.lap() == 3
    with timing.during("save"):
        after(4)
    timing.saved(1)
    after(6)
    assert timing.lap() == 6
    want = {"compile": 10, "evaluate": 0, "save": 4, "restore": 0, "data": 1, "lost": 0}
    assert timing.scalars() == {f"perf/seconds/{k}": v for k, v in want.items()} | {"perf/goodput": 9 / 28}
    timing.took_back(1)  # the second step was done for nothing
    assert timing.scalars()["perf/seconds/lost"] == 6 and timing.scalars()["perf/goodput"] == 3 / 28
    line = timing.line()
    assert line.startswith("time        28 s: steps 10.7%, lost steps 21.4%, compile 35.7%, evaluate 0.0%, save 14.3%,")
    assert "other 17.9%; waiting for data 1 s" in line
    timing.took_back(0)  # a checkpoint that an earlier process saved
    assert timing.scalars()["perf/seconds/lost"] == 9


def test_a_step_that_is_evaluated_and_saved_is_not_slower(corpus, tmp_path, monkeypatch):
    """On a clock that only goes on by 1 ms at every look, and by 1000 s in an evaluation or save."""
    now = [0.0]

    def clock():
        now[0] += 1e-3
        return now[0]

    def slow(function):
        def slowly(*arguments):
            now[0] += 1000
            return function(*arguments)

        return slowly

    monkeypatch.setattr(Timing.__init__, "__defaults__", (clock,))
    monkeypatch.setattr(loop, "evaluate", slow(loop.evaluate))
    monkeypatch.setattr(Checkpoints, "save", slow(Checkpoints.save))
    said = train(small(corpus, tmp_path, steps=5, checkpoint_every=3, eval_every=3))
    lines = metrics(tmp_path)
    tokens = [0, *(line["tokens"] for line in lines)]
    seconds = [(new - old) / line["tokens_per_s"] for old, new, line in zip(tokens, tokens[1:], lines, strict=False)]
    assert 0 < max(seconds) < 1, seconds
    last = lines[-1]  # the last save comes after it
    assert int(last["perf/seconds/evaluate"]) == 2000 and int(last["perf/seconds/save"]) == 1000
    assert sum(seconds) / last["perf/goodput"] == pytest.approx(3000, abs=3)
    assert "time        " in said and ": evaluate 50.0%, save 50.0%" in said.replace("steps 0.0%, compile 0.0%, ", "")


@pytest.mark.slow
def test_a_signal_or_an_error_inside_the_profiled_steps_leaves_their_trace(corpus, tmp_path, monkeypatch):
    log_step = loop.log_step

    def at_step_4(act):
        def log_and(trainer, outputs, inputs, scalars, more):
            log_step(trainer, outputs, inputs, scalars, more)
            if int(scalars["step"]) == 4:
                act()

        return log_and

    def fail():
        raise ds.RunError("the disk is gone")

    for name, act, error in (
        ("signal", lambda: signal.raise_signal(signal.SIGTERM), SystemExit),
        ("error", fail, ds.RunError),
    ):
        monkeypatch.setattr(loop, "log_step", at_step_4(act))
        with pytest.raises(error):
            train(small(corpus, tmp_path / name, profile_steps="3:7", eval_every=99, checkpoint_every=99))
        assert list((tmp_path / name / "profile").rglob("*.xplane.pb")), name
