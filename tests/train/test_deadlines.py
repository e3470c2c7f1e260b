# SPDX-License-Identifier: Apache-2.0
"""Saving and stopping by time."""

import dataclasses

import numpy as np
import pytest
from support.runs import metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax.config import TrainConfig
from dsv4_jax.train import deadlines
from dsv4_jax.train.deadlines import EVERY, Deadlines


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def made(**minutes):
    clock = Clock()
    return clock, Deadlines(TrainConfig(**minutes), clock)


def test_minutes_count_from_the_last_save_and_from_the_start():
    clock, watch = made(checkpoint_minutes=1.0, stop_after_minutes=2.5)
    found = []
    for seconds in (59, 60, 61, 119, 121, 150):
        clock.now = 100.0 + seconds
        found.append(watch.passed(1))
        if found[-1][0]:
            watch.saved()
    assert found == [(False, False), (True, False), (False, False), (False, False), (True, False), (False, True)]
    clock, watch = made()
    clock.now = 1e9
    assert watch.passed(1) == (False, False)
    for value in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ds.ConfigError, match="stop_after_minutes"):
            TrainConfig(stop_after_minutes=value)


def test_several_processes_go_by_the_first_ones_clock(monkeypatch):
    """Also where their own clock gives something else; between the questions none of them saves or stops."""
    clock, watch = made(checkpoint_minutes=1.0)
    clock.now += 61
    monkeypatch.setattr(deadlines.jax, "process_count", lambda: 2)
    monkeypatch.setattr(deadlines.multihost_utils, "broadcast_one_to_all", lambda mine: np.logical_not(mine))
    assert watch.passed(EVERY) == (False, True) and watch.passed(EVERY + 1) == (False, False)


@pytest.mark.usefixtures("cheap_compilation")
def test_a_run_saves_by_time_and_stops_by_time(corpus, tmp_path):
    cfg = small(corpus, tmp_path / "run", checkpoint_every=100, keep=9, eval_every=100, checkpoint_minutes=1e-9)
    stops = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, stop_after_minutes=1e-9))
    for step in (1, 2):
        with pytest.raises(SystemExit) as stop:
            train(stops)
        assert stop.value.code == 143 and len(metrics(tmp_path / "run")) == step
    train(cfg)
    assert {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()} == set(range(1, 9))
    straight = small(corpus, tmp_path / "straight", checkpoint_every=100, eval_every=100)
    train(straight)
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(tmp_path / "straight"))
