# SPDX-License-Identifier: Apache-2.0
"""Signals: which ones stop a run, how many of them abort it, and what several processes agree on."""

import signal
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from support import ROOT
from test_distributed import free_port, metrics, start

from dsv4_jax.train.signals import stop_signals

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize("sent", [[TERM], [TERM] * 5, [INT], [TERM, TERM, INT], [INT, TERM, TERM]])
def test_one_interrupt_and_any_number_of_sigterms_only_stop(sent):
    with stop_signals() as stopped:
        assert stopped(1) == 0
        for number in sent:
            signal.raise_signal(number)
        assert stopped(2) == sent[0]
        signal.raise_signal(TERM)  # while the state is saved
        assert stopped(3) == sent[0]


@pytest.mark.parametrize("sent", [[INT], [TERM, INT], [INT, TERM]])
def test_a_second_interrupt_aborts(sent):
    came = []
    with pytest.raises(KeyboardInterrupt), stop_signals():
        for number in sent:
            signal.raise_signal(number)
            came.append(number)
        signal.raise_signal(INT)
    assert came == sent and signal.getsignal(INT) is signal.default_int_handler


def test_a_signal_after_the_last_step_is_delivered_at_the_end():
    with pytest.raises(KeyboardInterrupt), stop_signals():
        signal.raise_signal(INT)
    assert signal.getsignal(INT) is signal.default_int_handler


@pytest.mark.parametrize("others", [0, 1])
def test_processes_agree_that_it_was_an_interrupt(monkeypatch, others):
    """SIGINT to this process, or to another one, reaches all by way of the preemption notice of jax.distributed."""
    notices = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: bool(notices) and step == 7)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine: np.array([mine, others]))
    before = signal.signal(TERM, lambda number, frame: notices.append(number))  # as the notifier's own handler
    try:
        with stop_signals() as stopped:
            if others:
                notices.append(TERM)
            else:
                signal.raise_signal(INT)
            assert notices == [TERM]
            assert [stopped(step) for step in (5, 6, 7)] == [0, 0, INT]
    finally:
        signal.signal(TERM, before)


CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from support.runs import small
def config():
    return small({corpus!r}, "", steps=100_000, checkpoint_every=100_000, eval_every=100_000)
"""


@pytest.fixture
def endless(corpus, tmp_path):
    """A function that starts a process of one run without an end in sight; what still runs at the end is killed."""
    (tmp_path / "config.py").write_text(CONFIG.format(tests=str(ROOT / "tests"), corpus=corpus))
    started = []

    def starts(*arguments):
        started.append(start(tmp_path, "run", *arguments, config=tmp_path / "config.py"))
        return started[-1]

    yield starts
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def running(folder, *processes):
    """Wait until the processes have made some steps."""
    for _ in range(1200):
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) > 3:
            return
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        time.sleep(0.1)
    raise AssertionError("no step in two minutes")


def stopped_at(folder):
    """The step of the newest checkpoint, which must be that of the last line of metrics."""
    (last,) = [int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    assert last == metrics(folder)[-1]["step"]
    return last


@pytest.mark.slow
@pytest.mark.parametrize("sent", [[TERM] * 4, [INT]])
def test_a_process_saves_and_exits_with_the_signals_status(endless, tmp_path, sent):
    process = endless()
    running(tmp_path / "run", process)
    for number in sent:
        process.send_signal(number)
        time.sleep(0.02)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 128 + sent[0] and "Traceback" not in err, err
    assert f"at step {stopped_at(tmp_path / 'run')}" in out


@pytest.mark.slow
@pytest.mark.parametrize("to, number, times", [((0, 1), INT, 1), ((1,), INT, 1), ((0, 1), TERM, 3), ((1,), TERM, 1)])
def test_two_processes_save_together(endless, tmp_path, to, number, times):
    mesh = ["--mesh.data", "2", "--train.cpu-devices", "1", "--train.distributed", f"localhost:{free_port()},2"]
    two = [endless(*mesh[:-1], f"{mesh[-1]},{i}") for i in (0, 1)]
    running(tmp_path / "run", *two)
    for _ in range(times):
        for i in to:
            two[i].send_signal(number)
        time.sleep(0.3)
    done = [process.communicate(timeout=200) for process in two]
    assert [process.returncode for process in two] == [128 + number] * 2, done
    assert not any("Traceback" in err for _, err in done), done
    assert f"at step {stopped_at(tmp_path / 'run')}" in done[0][0]
