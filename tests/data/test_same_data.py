# SPDX-License-Identifier: Apache-2.0
"""A run goes on with the data of its checkpoint, wherever that lies; other data is refused, or allowed by a flag."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from support.runs import SMALL, config, metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax.config import LossConfig, Stage
from dsv4_jax.train.feed import check_same_data, read_data


@pytest.fixture(scope="module")
def half(corpus, tmp_path_factory):
    """A run of four of eight steps."""
    run_dir = tmp_path_factory.mktemp("half")
    train(small(corpus, run_dir, steps=4))
    return run_dir


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_spelling_and_the_place_of_a_path_do_not_count(half, corpus, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    shutil.copytree(half, run_dir)
    shutil.copytree(corpus, tmp_path / "mount" / Path(corpus).name)
    monkeypatch.chdir(tmp_path)
    train(small(corpus, tmp_path / "whole"))
    said = train(small(f"./mount/../mount/{Path(corpus).name}/", run_dir))
    assert "at step 4" in said and "other data" not in said
    assert timeless(metrics(run_dir)) == timeless(metrics(tmp_path / "whole"))


def test_other_data_is_refused_before_anything_changes(half, corpus, tmp_path, monkeypatch):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(half, run_dir)
    shutil.copytree(corpus, other)
    first = min(path for path in other.rglob("*") if path.is_file())
    first.write_text(first.read_text() + "one line more\n")
    before = contents(run_dir)
    cfg = small(str(other), run_dir)
    with monkeypatch.context() as patch:
        patch.setattr("dsv4_jax.train.run.start_devices", lambda *_: pytest.fail("no device is needed for this"))
        for changed in (cfg, small(corpus, run_dir, seed=1), cfg.replace({"data.path": corpus, "data.seq_len": 32})):
            with pytest.raises(ds.ConfigError, match=r"checkpoint 4.*--train\.new-data") as refusal:
                train(changed)
        assert "data.seq_len: 64 before, 32 now" in str(refusal.value)
    assert contents(run_dir) == before
    said = train(cfg.replace({"train.new_data": True}))
    assert "at step 4" in said and "starts at its beginning" in said and len(metrics(run_dir)) == 8


def test_entering_the_next_stage_is_not_other_data(corpus, tmp_path):
    """From the border of two planned stages; but a stage that was not entered at its border is other data."""
    stages = tuple(Stage(name=f"s{n}", until=(n + 1) * 4 * 128, changes={"loss.mtp": 0.0}) for n in range(2))
    cfg = config(corpus, tmp_path, 0, model=SMALL, loss=LossConfig(mtp=0.0), stages=stages)
    data = read_data(cfg)
    host = {"stage": 0, "identity": data[0].identity, "config": dataclasses.asdict(cfg)}
    check_same_data(cfg, data, 3, host)
    check_same_data(cfg, data, 4, host)
    check_same_data(cfg, data, 5, host | {"stage": 1, "identity": data[1].identity})
    check_same_data(cfg, data, 0, {"identity": "", "config": {}})
    for step, wrong in ((5, {}), (3, {"identity": data[1].identity}), (4, {"identity": "0-0"}), (4, {"stage": 7})):
        with pytest.raises(ds.ConfigError, match="is not that of checkpoint"):
            check_same_data(cfg, data, step, host | wrong)
