# SPDX-License-Identifier: Apache-2.0
"""Run directories that cannot be used, and saves that fail: refused or noticed at once, and nothing is lost."""

import contextlib
import json
import signal

import pytest
from support.checkpoints import names, state_of
from support.runs import small, train

from dsv4_jax.config import TrainConfig
from dsv4_jax.section import ConfigError
from dsv4_jax.train import manifests, run
from dsv4_jax.train.checkpoint import CheckpointError, Checkpoints


def test_an_address_is_refused_for_several_processes():
    with pytest.raises(ConfigError, match=r"train\.run_dir = 'gs://bucket/run1' is an address, which one"):
        TrainConfig(steps=1, run_dir="gs://bucket/run1", distributed="auto")


def failing(monkeypatch, *steps):
    """Has the saves of these steps fail when they are verified, as on a full disk."""
    write = manifests.write

    def fail(folder, content, *more):
        if content["step"] in steps:
            raise OSError(28, "No space left on device")
        return write(folder, content, *more)

    monkeypatch.setattr(manifests, "write", fail)


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_failed_save_is_noticed_at_once_and_the_next_one_made(tmp_path, monkeypatch):
    failing(monkeypatch, 5, 6)
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step in (4, 5, 6, 7):
            checkpoints.save(step, state_of(step), {})
            if checkpoints._saving:  # not after two failures: that save is over
                checkpoints._saving[1].exception(60)
            reason = checkpoints.failed()
            assert ("No space left" in reason) == (step in (5, 6)), step
            assert not checkpoints.failed()  # once
    assert names(tmp_path) == {"4", "7"}


def test_a_failure_that_the_next_save_waits_for_is_reported_too(tmp_path, monkeypatch):
    failing(monkeypatch, 4)
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(4, state_of(4), {})
        checkpoints.save(5, state_of(5), {})
        assert "saving checkpoint 4 failed" in checkpoints.failed() and not checkpoints.failed()
    assert names(tmp_path) == {"5"}


def test_the_third_save_in_a_row_that_fails_ends_the_run(tmp_path, monkeypatch):
    failing(monkeypatch, 4, 5, 6)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(4, state_of(4), {})
    checkpoints.save(5, state_of(5), {})
    with pytest.raises(CheckpointError, match=r"saving checkpoint 6 failed: .*last of 3 saves in a row"):
        checkpoints.save(6, state_of(6), {})
    checkpoints.close()


def test_a_run_whose_save_fails_goes_on_and_ends_well(corpus, tmp_path, monkeypatch):
    """Steps 3 and 6 are saved, and 8, the last; that of 3 fails."""
    failing(monkeypatch, 3)
    monkeypatch.setattr(Checkpoints, "save", waiting(Checkpoints.save))
    said = train(small(corpus, tmp_path))
    assert "step 4: save: saving checkpoint 3 failed: OSError: [Errno 28] No space left" in said
    assert [(e["step"], e["event"]) for e in events(tmp_path)] == [(4, "save")]
    assert names(tmp_path / "checkpoints") == {"6", "8"}


def waiting(save):
    """Saves that are over when the next step begins."""

    def wait(checkpoints, *arguments):
        save(checkpoints, *arguments)
        checkpoints._saving[1].exception(60)

    return wait


@pytest.mark.parametrize("fails, status", [((3,), 143), ((3, 4), None)])
def test_a_signal_after_a_failed_save_saves(corpus, tmp_path, monkeypatch, fails, status):
    """What was lost was the save at the signal: the failure of the one before was raised in its place."""
    failing(monkeypatch, *fails)
    stop = lambda: contextlib.nullcontext(lambda step: signal.SIGTERM if step == 4 else 0)
    monkeypatch.setattr(run, "stop_signals", stop)
    with pytest.raises(SystemExit if status else CheckpointError) as ended:
        train(small(corpus, tmp_path))
    assert not status or ended.value.code == status
    assert names(tmp_path / "checkpoints") & {"3", "4"} == ({"4"} if status else set())
