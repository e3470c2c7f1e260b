# SPDX-License-Identifier: Apache-2.0
"""Loggers that a configuration names: the page's example, Weights & Biases by a stand-in, wrong ones."""

import re
import sys
import types

import pytest
from support import ROOT, runs

from dsv4_jax.config import TrainConfig
from dsv4_jax.section import ConfigError
from dsv4_jax.train.loggers import find_loggers, make_loggers

PAGE = (ROOT / "docs" / "extending.md").read_text()


def test_the_example_of_the_page_logs_a_run(corpus, tmp_path):
    (code,) = re.findall(r"in `csv_loss.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "csv_loss.py").write_text(code)
    names = ("tensorboard", f"{tmp_path}/csv_loss.py:csv_loss")
    runs.train(runs.small(corpus, tmp_path / "run", loggers=names))
    lines = (tmp_path / "run" / "loss.csv").read_text().splitlines()
    assert lines == [f"{m['step']},{m['loss']}" for m in runs.metrics(tmp_path / "run")] and len(lines) == 8
    assert list((tmp_path / "run" / "tensorboard").iterdir())


class Stub:
    def __init__(self):
        self.calls = []

    def init(self, **arguments):
        self.calls.append(("init", arguments))
        return self

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_weights_and_biases_goes_on_in_the_same_run(corpus, tmp_path, monkeypatch):
    ids = []
    for step in (0, 3):
        stub = Stub()
        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=stub.init, __spec__=True))
        (logger,) = make_loggers(runs.small(corpus, tmp_path / "run", loggers=("wandb",)), tmp_path / "run", step)
        logger.write({"step": step + 1, "loss": 2.0, "eval/loss": None})
        logger.close()
        names = [call[0] for call in stub.calls]
        assert names == ["init", "define_metric", "log", "finish"]
        assert stub.calls[2][1] == ({"step": step + 1, "loss": 2.0},)
        assert stub.calls[0][1]["resume"] == "allow" and stub.calls[0][1]["config"]["train"]["loggers"] == ["wandb"]
        ids.append(stub.calls[0][1]["id"])
    assert ids[0] == ids[1]


def test_a_run_at_an_address_has_one_id_on_every_machine(corpus, tmp_path, monkeypatch):
    ids = []
    for cache in ("here", "there"):
        stub = Stub()
        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=stub.init, __spec__=True))
        make_loggers(runs.small(corpus, "gs://bucket/run", loggers=("wandb",)), tmp_path / cache / "run", 0)
        ids.append(stub.calls[0][1]["id"])
    assert ids[0] == ids[1]


def test_wrong_loggers_are_refused(corpus, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"train\.loggers = 'tensorbord'"):
        TrainConfig(steps=1, loggers=("tensorbord",))
    with pytest.raises(ConfigError, match=r"train\.loggers = 'json:nothing'"):
        find_loggers(("json:nothing",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"dsv4_jax\[wandb\]"):
        find_loggers(("wandb",))
    (tmp_path / "none.py").write_text("def none(cfg, run_dir, step):\n    pass\n")
    cfg = runs.small(corpus, tmp_path / "run", loggers=(f"{tmp_path}/none.py:none",))
    with pytest.raises(ConfigError, match=r"write\(scalars\) and close\(\), found NoneType"):
        make_loggers(cfg, tmp_path, 0)
