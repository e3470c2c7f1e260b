# SPDX-License-Identifier: Apache-2.0
"""What a run trains for: the draft objective is planned, and runs that name theirs by its old key go on."""

import subprocess
import sys

import pytest
from support.runs import small, train

import dsv4_jax as ds
from dsv4_jax.config.files import config_from_json
from dsv4_jax.train import run_dir, trainer

pytestmark = pytest.mark.usefixtures("cheap_compilation")


def test_the_draft_objective_is_planned():
    """On the configuration's own mesh, without devices; what the objective draws for a batch is counted too."""
    words = ["-m", "dsv4_jax", "plan", "configs/tiny_v41.py", "--train.objective", "draft"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "objective   0.1 draft_ce" in done.stdout and "kept for the backward pass" in done.stdout


def test_the_old_key_is_refused_with_the_new_one(tmp_path):
    with pytest.raises(ds.ConfigError, match=r"'train.stage'; it is 'train.objective' now"):
        ds.load_config("configs/tiny_v41.py", ["--train.stage", "draft"])
    with pytest.raises(ds.ConfigError, match=r"'train.stage'; it is 'train.objective' now"):
        ds.load_config("configs/tiny_v41.py").replace({"train.stage": "draft"})
    file = tmp_path / "old.py"
    file.write_text("from dsv4_jax.config import TrainConfig\ndef config(): return TrainConfig(stage='draft')")
    with pytest.raises(ds.ConfigError, match=r"old.py: unknown field 'stage' of TrainConfig; it is 'train.objective'"):
        ds.load_config(file)


def test_a_run_that_was_saved_with_the_old_key_goes_on(corpus, tmp_path, monkeypatch):
    """Its config.json and its checkpoint hold the old key; the resume reports no change."""

    def as_before(cfg, resolved=run_dir.resolved):
        tree = resolved(cfg)
        tree["train"]["stage"] = tree["train"].pop("objective")
        return tree

    cfg = small(corpus, tmp_path / "run", steps=4)
    with monkeypatch.context() as patch:
        for module in (trainer, run_dir):
            patch.setattr(module, "resolved", as_before)
        train(cfg)
    assert '"stage": "pretrain"' in (tmp_path / "run" / "config.json").read_text()
    said = train(cfg.replace({"train.steps": 5}))
    assert "at step 4" in said and "objective:" not in said and "stage" not in said
    assert '"objective": "pretrain"' in (tmp_path / "run" / "config.json").read_text()


def test_the_old_key_keeps_its_value():
    tree = {"model": {}, "train": {"stage": "draft", "steps": 5}}
    with pytest.raises(ds.ConfigError, match="lacks vocab_size"):
        config_from_json(tree)
    tree["model"] = ds.load_config("configs/tiny_v41.py").model.__dict__
    assert config_from_json(tree).train.objective == "draft" and tree["train"]["stage"] == "draft"
