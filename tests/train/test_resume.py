# SPDX-License-Identifier: Apache-2.0
"""What a command does to a run directory that holds a run already: refuse it unchanged, or go on from there."""

import dataclasses
import errno
import json
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from support import ROOT
from support.runs import SMALL, metrics, small, train

import dsv4_jax as ds
from dsv4_jax.config import Stage
from dsv4_jax.config.files import config_from_json
from dsv4_jax.train import manifests
from dsv4_jax.train import run_dir as run_dir_module
from dsv4_jax.train.feed import read_data
from dsv4_jax.train.run_dir import RunLock

pytestmark = pytest.mark.usefixtures("cheap_compilation")


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The directory of a finished run of eight steps."""
    run_dir = tmp_path_factory.mktemp("finished")
    train(small(corpus, run_dir))
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_config(run_dir, change):
    """Changes the configuration as config.json and every checkpoint hold it."""
    path = run_dir / "config.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    for folder in (run_dir / "checkpoints").iterdir():
        manifest = manifests.read(folder)
        change(manifest["host"]["config"])
        (folder / manifests.NAME).write_bytes(manifests._render(manifest))


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("optim.name", "deepseek_v4", "state of another configuration"),
        ("model.dim", 32, r"model\.dim: 16 there, 32 here"),
        ("data.path", "nowhere", "nowhere"),
        ("train.frozen", "nonsense", "matches no parameter"),
    ],
)
def test_a_refused_command_changes_no_file(run_dir, corpus, key, value, words):
    before = content(run_dir)
    with pytest.raises(ds.ConfigError, match=words):
        train(small(corpus, run_dir, steps=9).replace({key: value}))
    assert content(run_dir) == before


def test_a_key_that_an_older_version_did_not_have_has_its_default(run_dir, corpus, finished):
    """Deleted from config.json and from the checkpoints, as before an upgrade: the run goes on, and nothing changed."""

    def forget(tree):
        del tree["model"]["query_norm"], tree["data"]["mixture"], tree["optim"]["tau"], tree["train"]["keep"]
        del tree["spikes"]

    edit_config(run_dir, forget)
    tree = json.loads((run_dir / "config.json").read_text())
    assert config_from_json(tree) == small(corpus, finished)
    said = train(small(corpus, run_dir, steps=9))
    assert "resumed" in said and "changed" not in said
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, 10))
    with pytest.raises(ds.ConfigError, match=r"model\.query_norm: True there, False here"):
        train(small(corpus, run_dir, steps=9).replace({"model": dataclasses.replace(SMALL, query_norm=False)}))


def test_a_key_that_this_version_does_not_have(run_dir, corpus):
    """One of the model is refused by name, since the weights may need it; another is only said."""
    edit_config(run_dir, lambda tree: tree["train"].update(tempo=3))
    assert "train.tempo: 3 before, no key of this version" in train(small(corpus, run_dir, steps=9))
    edit_config(run_dir, lambda tree: tree["model"].update(query_norms=2))
    with pytest.raises(ds.ConfigError, match=r"model.query_norms = 2 .* no key of this version.*'query_norm'"):
        train(small(corpus, run_dir, steps=9))


HOLDER = "import sys; from pathlib import Path; from dsv4_jax.train.run_dir import RunLock; "
HOLDER += "lock = RunLock(Path(sys.argv[1])); lock.take(); print('taken', flush=True); sys.stdin.read()"


def test_a_second_process_is_refused_at_once(run_dir, corpus):
    """By name, and nothing changes; the lock of a process that was killed does not count."""
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert holder.stdout.readline() == "taken\n"
        before = content(run_dir)
        with pytest.raises(ds.RunError, match=f"in use by process {holder.pid} on {socket.gethostname()}"):
            train(small(corpus, run_dir, steps=9))
        assert content(run_dir) == before
    finally:
        holder.kill()
        holder.communicate()
    assert holder.returncode == -signal.SIGKILL and (run_dir / "lock").exists()
    assert "resumed" in train(small(corpus, run_dir, steps=9))
    assert not (run_dir / "lock").exists()


def test_one_process_may_hold_several_runs_but_each_once(tmp_path, monkeypatch):
    one, two, again = RunLock(tmp_path / "one"), RunLock(tmp_path / "two"), RunLock(tmp_path / "one")
    one.take()
    one.take()
    two.take()
    with pytest.raises(ds.RunError, match="in use by process"):
        again.take()
    one.release()
    again.take()
    again.release()
    two.release()

    (tmp_path / "file").touch()
    with pytest.raises(ds.RunError, match=r"train.run_dir = .*file' cannot be written"):
        RunLock(tmp_path / "file").take()

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(run_dir_module.fcntl, "flock", refuse)
    with pytest.raises(ds.RunError, match="file system that locks files"):
        one.take()


def test_another_batch_changes_only_the_steps_to_come(corpus, tmp_path):
    """50 steps of 2 x 64 tokens, then 4 x 64: the decay begins at 7,000 tokens, in the third of the new steps."""
    cfg = small(corpus, tmp_path, steps=50, eval_every=50, eval_batches=1, checkpoint_every=50)
    cfg = cfg.replace({"optim.decay_tokens": (7000, 12000), "optim.warmup_steps": 2, "optim.learning_rate": 1e-2})
    train(cfg)
    larger = cfg.replace({"data.batch_size": 4, "train.steps": 53})
    said = train(larger)
    assert "data.batch_size: 2 before, 4 now" in said and "learning rate" not in said and "other data" not in said
    rates = [line["lr"] for line in metrics(tmp_path)]
    ends = np.array([6400 + 256, 6400 + 512, 6400 + 768])
    cosine = 0.5 * (1 + np.cos(np.pi * np.clip((ends - 7000) / 5000, 0, 1)))
    assert rates[2:50] == [rates[49]] * 48 and rates[49] == pytest.approx(1e-2)
    np.testing.assert_allclose(rates[50:], 3e-4 + (1e-2 - 3e-4) * cosine, rtol=1e-6)
    assert rates[51] == pytest.approx(1e-2) and rates[52] < 0.999e-2
    history = manifests.read(tmp_path / "checkpoints" / "53")["host"]
    assert history["progress"]["clock"] == [[0, 0], [50, 6400], [53, 7168]]


def test_another_batch_leaves_stages_where_their_tokens_are(corpus, tmp_path):
    """And the order of the data that the stage has begun to read."""
    until = 6 * 128, 12 * 128, 14 * 128
    stages = tuple(Stage(name=str(i), until=n, changes={}) for i, n in enumerate(until))
    cfg = small(corpus, tmp_path).replace({"stages": stages, "train.steps": 0})
    assert [(stage.first, stage.last) for stage in cfg.resolved_stages] == [(0, 6), (6, 12), (12, 14)]
    larger = cfg.replace({"data.batch_size": 4})
    after = larger.after(((0, 0), (3, 384)))
    assert [(stage.first, stage.last) for stage in after.resolved_stages] == [(0, 5), (5, 8), (8, 9)]
    assert [after.resolved_stages[0].clock.tokens(step) for step in (3, 5, 8, 9)] == [384, 896, 1664, 1920]
    assert read_data(after)[0].identity == read_data(cfg)[0].identity != read_data(larger.after(((0, 0),)))[1].identity
    train(cfg.replace({"train.steps": 3}))
    said = train(larger.replace({"train.steps": 6}))
    assert "resumed" in said and "other data" not in said
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["event"]) for event in events] == [(0, "stage"), (5, "stage")]


def test_longer_training_names_the_rate_it_goes_back_to(corpus, tmp_path):
    """And the newest checkpoint from before the decay is still there, which a run without it can start from."""
    cfg = small(corpus, tmp_path, keep=1, checkpoint_every=2).replace({"optim.decay_steps": 3})
    train(cfg)
    saved = tmp_path / "checkpoints"
    assert {path.name for path in saved.iterdir()} == {"4", "8"}
    longer = cfg.replace({"train.steps": 12})
    said = train(longer)
    assert "changed     learning rate of step 9: 0.0003 before, 0.01 now" in said
    assert {path.name for path in saved.iterdir()} == {"8", "12"}
    assert "learning rate" not in train(longer)
