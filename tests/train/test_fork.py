# SPDX-License-Identifier: Apache-2.0
"""Continue from a chosen step: a run taken back, a fork with everything, another run's parameters alone."""

import shutil

import numpy as np
import pytest
from support.runs import metrics, small, timeless, train
from test_resume import content

import dsv4_jax as ds
from dsv4_jax import cli
from dsv4_jax.generate import command
from dsv4_jax.train import manifests, run
from dsv4_jax.train.checkpoint import load_model
from dsv4_jax.train.run_dir import RunLock

pytestmark = pytest.mark.usefixtures("cheap_compilation")


@pytest.fixture(scope="module")
def original(corpus, tmp_path_factory):
    """The directory of a run of eight steps, whose rate decays in the last three; steps 3, 6 and 8 are saved."""
    run_dir = tmp_path_factory.mktemp("original")
    train(decaying(corpus, run_dir))
    return run_dir


@pytest.fixture
def run_dir(original, tmp_path):
    """A copy of it."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def decaying(corpus, run_dir, **changes):
    return small(corpus, run_dir, keep=9, **changes).replace({"optim.decay_steps": 3})


def saved(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


def weights(cfg, source=""):
    return ds.to_official(load_model(cfg, source))


def same(one, two):
    return all(np.array_equal(one[name], two[name]) for name in one)


def test_a_run_taken_back_repeats_its_steps_and_loses_nothing(original, run_dir, corpus, capsys):
    cli.main(["rewind", str(run_dir), "3"])
    assert f"{run_dir} is back at step 3; later checkpoints (6, 8)" in capsys.readouterr().out
    assert saved(run_dir) == [3] and [line["step"] for line in metrics(run_dir)] == [1, 2, 3]
    assert not (run_dir / "lock").exists()
    # What came later is a run directory too.
    aside = run_dir / "rewound" / "1"
    assert saved(aside) == [6, 8] and metrics(aside) == metrics(original)
    assert (aside / "events.jsonl").exists() == (original / "events.jsonl").exists()
    cfg = decaying(corpus, run_dir)
    assert same(weights(cfg, str(aside)), weights(cfg, str(original)))
    # The same command, twice: it continues from step 3, then it is finished.
    assert "resumed" in train(cfg) and "finished" in train(cfg)
    assert timeless(metrics(run_dir)) == timeless(metrics(original))
    assert same(weights(cfg), weights(cfg, str(original)))
    # Again, and other steps from there: the earlier parts stay where they are.
    cli.main(["rewind", str(run_dir), "6"])
    train(cfg.replace({"optim.learning_rate": 1e-3}))
    assert metrics(run_dir)[-1]["loss"] != metrics(original)[-1]["loss"]
    assert saved(run_dir) == [3, 6, 8] and saved(run_dir / "rewound" / "2") == [8] and saved(aside) == [6, 8]


def test_a_run_is_not_taken_back_to_what_is_missing_damaged_or_in_use(run_dir, tmp_path, capsys):
    def refused(folder, step, status):
        before = content(folder) if folder.exists() else {}
        with pytest.raises(SystemExit) as stop:
            cli.main(["rewind", str(folder), str(step)])
        assert stop.value.code == status and before == (content(folder) if folder.exists() else {})
        return capsys.readouterr().err

    assert "has no checkpoint of step 4; it has those of steps 3, 6, 8" in refused(run_dir, 4, 2)
    assert "holds no checkpoint" in refused(tmp_path / "nowhere", 4, 2)
    lock = RunLock(run_dir)
    lock.take()
    assert "in use by process" in refused(run_dir, 3, 1)
    lock.release()
    (victim, *_) = [p for p in (run_dir / "checkpoints" / "3").rglob("*") if p.is_file() and p.name != manifests.NAME]
    victim.write_bytes(bytes(len(victim.read_bytes())))
    assert "its checksum differs" in refused(run_dir, 3, 1)


def test_a_fork_continues_bit_for_bit_and_needs_the_original_no_more(original, run_dir, corpus, tmp_path):
    cfg = decaying(corpus, tmp_path / "fork", fork_from=f"{run_dir}@3")
    said = train(cfg.replace({"train.steps": 3, "optim.decay_steps": 1}))
    assert f"step 3: fork: from {run_dir}@3" in said and "finished" in said and saved(tmp_path / "fork") == [3]
    before = content(run_dir)
    said = train(cfg)
    assert "resumed" in said and content(run_dir) == before
    shutil.rmtree(run_dir)
    assert "finished" in train(cfg)
    assert timeless(metrics(tmp_path / "fork")) == timeless(metrics(original)[3:])
    assert same(weights(cfg), weights(cfg, str(original)))


def test_a_fork_may_decay_earlier(original, corpus, tmp_path):
    """From the last checkpoint at the constant rate, as one forks to try decays: steps, tokens and moments go on."""
    cfg = decaying(corpus, tmp_path, steps=10, fork_from=f"{original}@3").replace({"optim.decay_steps": 7})
    said = train(cfg)
    lines = metrics(tmp_path)
    assert "changed     optim.decay_steps: 3 before, 7 now" in said
    assert [line["step"] for line in lines] == [*range(4, 11)]
    assert [line["tokens"] for line in lines[:5]] == [line["tokens"] for line in metrics(original)[3:]]
    rates = 3e-4 + (1e-2 - 3e-4) * 0.5 * (1 + np.cos(np.pi * np.arange(1, 8) / 7))
    np.testing.assert_allclose([line["lr"] for line in lines], rates, rtol=1e-5)
    assert lines[0]["loss"] == metrics(original)[3]["loss"]  # the same parameters, the same batch


def test_a_fork_to_other_data_starts_them_at_their_beginning_if_it_is_told_to(original, corpus, tmp_path):
    cfg = decaying(corpus, tmp_path / "fork", fork_from=f"{original}@3").replace({"data.seq_len": 32})
    with pytest.raises(ds.ConfigError, match=f"(?s)checkpoint 3 of {original}@3.*seq_len: 64 before, 32 now"):
        train(cfg)
    assert not (tmp_path / "fork").exists()
    said = train(cfg.replace({"train.new_data": True}))
    assert "starts at its beginning" in said and len(metrics(tmp_path / "fork")) == 5


def test_parameters_of_a_chosen_step(original, corpus, tmp_path):
    """They alone: the first loss is that of step 4, all else is that of a first step."""
    cfg = small(corpus, tmp_path, init_from=f"{original}@3")
    assert f"parameters  from {original}@3" in train(cfg)
    lines, others = metrics(tmp_path), metrics(original)
    assert [line["step"] for line in lines] == [*range(1, 9)] and lines[0]["lr"] == others[0]["lr"]
    assert others[5]["loss"] < lines[0]["loss"] < others[1]["loss"] and lines[0]["tokens"] == others[0]["tokens"]
    three, four = weights(cfg, f"{original}@3"), weights(cfg, f"{original}@6")
    assert not same(three, four)


def test_parameters_of_published_weights(original, corpus, tmp_path, monkeypatch):
    """A run begins with them as with those of the run that they were made of; those of another model are refused."""
    folder = tmp_path / "weights"
    ds.save_checkpoint(load_model(small(corpus, original), f"{original}@3"), folder, "f32")
    for name, source in (("one", f"{original}@3"), ("two", folder)):
        assert f"parameters  from {source}" in train(small(corpus, tmp_path / name, steps=2, init_from=str(source)))
    assert timeless(metrics(tmp_path / "one")) == timeless(metrics(tmp_path / "two"))
    monkeypatch.setattr(run, "start_devices", lambda *_: pytest.fail("device work"))
    cfg = small(corpus, tmp_path / "new", init_from=str(folder))
    with pytest.raises(ds.ConfigError, match=r"another model: model\.route_scale = 2\.0, but the weights are of 1\.5"):
        train(cfg.replace({"model.route_scale": 2.0}))
    next(folder.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(ds.ConfigError, match="no whole safetensors file"):
        train(cfg)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"init_from": "{run}@4"}, "has no checkpoint of step 4; it has those of steps 3, 6, 8"),
        ({"fork_from": "{run}@4"}, "has no checkpoint of step 4; it has those of steps 3, 6, 8"),
        ({"init_from": "{run}/nowhere"}, "holds no checkpoint"),
        ({"fork_from": "{run}/nowhere@3"}, "holds no checkpoint"),
        ({"fork_from": "{run}@3", "run_dir": "{run}"}, "rewind .*run STEP"),
        ({"init_from": "{run}", "run_dir": "{run}"}, "is the run directory itself"),
        ({"fork_from": "{other}@3", "run_dir": "{run}"}, "holds a run that did not begin there"),
        ({"init_from": "{other}@3", "run_dir": "{run}"}, "holds a run that did not begin there"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_device_work(
    original, run_dir, corpus, tmp_path, monkeypatch, changes, words
):
    monkeypatch.setattr(run, "start_devices", lambda *_: pytest.fail("device work"))
    cfg, before = decaying(corpus, tmp_path / "new"), content(run_dir)
    with pytest.raises(ds.ConfigError, match=words):
        train(cfg.replace({f"train.{key}": text.format(run=run_dir, other=original) for key, text in changes.items()}))
    assert content(run_dir) == before and not (tmp_path / "new").exists()


def test_a_fork_of_another_model_or_optimizer_is_refused(original, corpus, tmp_path):
    cfg = decaying(corpus, tmp_path / "new", fork_from=str(original))
    for key, value, words in (("model.dim", 32, "model.dim: 16 there"), ("optim.name", "deepseek_v4", "another conf")):
        with pytest.raises(ds.ConfigError, match=words):
            train(cfg.replace({key: value}))
        assert not (tmp_path / "new").exists()
    with pytest.raises(ds.ConfigError, match=r"train.fork_from = .* cannot stand beside train.init_from"):
        cfg.replace({"train.init_from": "x"})


def test_a_folder_that_ends_like_a_step_is_named_with_a_slash(original, corpus, tmp_path):
    shutil.copytree(original, tmp_path / "run@3")
    assert "step 8: fork" in train(decaying(corpus, tmp_path / "new", fork_from=f"{tmp_path}/run@3/"))


def test_a_sample_is_of_the_named_step_and_folder(original, tmp_path, monkeypatch, capsys):
    """Also of a run that was moved, whose config.json names another folder; and of a run that was taken back."""
    moved, models = tmp_path / "moved", []
    shutil.copytree(original, moved)

    class Sampler:
        def __init__(self, model, *_, **__):
            models.append(ds.to_official(model))

        def stream(self):
            pass

        def report(self):
            return []

    monkeypatch.setattr(command, "Sampler", Sampler)
    for source in (original, f"{original}@3", moved, f"{moved}@3"):
        cli.main(["sample", str(source), "x"])
    newest, three, *others = models
    assert not same(newest, three) and same(newest, others[0]) and same(three, others[1])
    shutil.rmtree(moved / "checkpoints")
    for source, words in ((moved, "holds no checkpoint"), (f"{original}@4", "those of steps 3, 6, 8")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["sample", str(source), "x"])
        assert words in capsys.readouterr().err
