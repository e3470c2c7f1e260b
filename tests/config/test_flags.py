# SPDX-License-Identifier: Apache-2.0
"""Flags against a file and its stages: none is lost in silence, and every shipped configuration takes them."""

import dataclasses
import json
from pathlib import Path

import pytest

import dsv4_jax as ds
from dsv4_jax.config.files import config_from_json
from dsv4_jax.config.keys import keys

SHIPPED = sorted(str(path) for path in Path("configs").glob("*.py"))
STAGED = [path for path in SHIPPED if ds.load_config(path).stages]
EACH = pytest.mark.parametrize("path", SHIPPED)


def refused(path, flags):
    with pytest.raises(ds.ConfigError) as error:
        ds.load_config(path, flags.split())
    return str(error.value)


def test_the_shipped_files_are_found():
    assert len(SHIPPED) >= 7 and "configs/tiny_stages.py" in STAGED and "configs/v41_flash.py" in STAGED


@EACH
def test_a_path_and_a_mixture_replace_each_other(path):
    data = ds.load_config(path, ["--data.path", "text"]).data
    assert (data.path, data.mixture, data.paths) == ("text", {}, {"text": 1.0})
    data = ds.load_config(path, "--data.mixture web 7 pages 1".split()).data
    assert (data.path, data.mixture) == ("", {"web": 7.0, "pages": 1.0})
    assert ds.load_config(path, ["--data.path", ""]).data.paths == {"": 1.0}
    assert "cannot stand beside" in refused(path, "--data.path text --data.mixture web 7")
    assert "--data.mixture: expected pairs" in refused(path, "--data.mixture web")


@EACH
def test_every_shipped_file_can_be_cut_to_20_steps(path, capsys):
    """Warm-up and decay in steps keep their shares of the run; the schedule of stages stays theirs."""
    before, cfg = ds.load_config(path), ds.load_config(path, ["--train.steps", "20"])
    assert before.replace({"train.steps": 20}) == cfg and capsys.readouterr().err.count("\n") == 2  # one note each
    cfg = ds.load_config(path, ["--train.steps", "20"])
    assert cfg.steps == 20 and all(
        stage.cfg.train.steps == cfg.resolved_stages[-1].last for stage in cfg.resolved_stages
    )
    note = capsys.readouterr().err
    if cfg.stages:
        assert cfg.optim == before.optim and "train.steps = 20 ends the run before its stages do" in note
        return
    for key in ("warmup_steps", "decay_steps"):
        length, was = getattr(cfg.optim, key), getattr(before.optim, key)
        assert length == was * 20 // before.train.steps and f"optim.{key} = {length} instead of {was}" in note


def test_replace_cuts_a_schedule_as_a_flag_does(capsys):
    cfg = ds.load_config("configs/tiny_v41.py")  # 10 + 60 of 120 steps
    short = cfg.replace({"train.steps": 20})
    assert (short.optim.warmup_steps, short.optim.decay_steps) == (1, 10)
    assert "20 instead of 120" in capsys.readouterr().err
    assert cfg.replace({"train": dataclasses.replace(cfg.train, steps=20)}) == short
    # What config.json holds is the result; nothing is cut twice.
    again = config_from_json(json.loads(json.dumps(dataclasses.asdict(short))))
    assert again == short == short.replace({"train.steps": 20})
    # What is given with the steps is kept, or refused.
    cfg.replace({"train.steps": 20, "optim.warmup_steps": 4, "optim.decay_steps": 16})
    for given in ({"optim.warmup_steps": 12}, {"optim": cfg.optim}):
        with pytest.raises(ds.ConfigError, match=r"exceeds train\.steps = 20"):
            cfg.replace({"train.steps": 20, **given})
    # A run whose stages are taken away gets the steps of its own.
    staged = ds.load_config("configs/tiny_stages.py")
    assert staged.replace({"train.steps": 2, "stages": (), "optim.decay_tokens": ()}).steps == 2


def test_a_schedule_is_cut_only_where_it_does_not_fit(tmp_path, capsys):
    tiny = "configs/tiny_v4.py"  # 15 + 110 of 150 steps
    optim = ds.load_config(tiny).optim
    for steps in ("125", "400"):
        assert ds.load_config(tiny, ["--train.steps", steps]).optim == optim
    assert capsys.readouterr().err == ""
    cfg = ds.load_config(tiny, "--train.steps 30 --optim.warmup-steps 5".split())
    assert (cfg.optim.warmup_steps, cfg.optim.decay_steps) == (5, 22)
    assert "exceeds train.steps = 30" in refused(tiny, "--train.steps 30 --optim.warmup-steps 20")
    file = tmp_path / "endless.py"  # breaks a rule until a flag gives the steps
    file.write_text(
        f"import dsv4_jax as ds\ndef config(): return ds.load_config({tiny!r}).replace({{'train.steps': 0}})"
    )
    assert f"{file}: train.steps must be above 0" in refused(file, "")
    cfg = ds.load_config(file, ["--train.steps", "5"])
    assert (cfg.steps, cfg.optim.warmup_steps, cfg.optim.decay_steps) == (5, 0, 4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--data.seq-len 128", "--data.seq-len would be lost: stage 2 (dense) sets data.seq_len = 512"),
        ("--data.batch-size=8", "--stages.2.data.batch-size"),
        ("--model.attention sparse", "stage 1 (dense, short rows) sets model.attention = 'dense'"),
        ("--optim.learning-rate 1e-3", "--stages.3.optim.learning-rate"),
        ("--loss.mtp 0.2", "stage 4 (sparse) sets loss.mtp = 0.1"),
        ("--stages.5.data.seq-len 128", "expected one of 1 or dense-short-rows, 2 or dense, 3 or warm-up"),
        ("--stages.0.data.seq-len 128", "expected one of 1"),
        ("--stages.2 128", "expected --stages.N.section.key"),
        ("--stages.2.optim.name adamw", "a stage cannot change 'optim.name'"),
        ("--stages.2.data.seq-lne 128", "the nearest valid key is 'data.seq_len'"),
        ("--stages.2.data.seq-len x", "data.seq-len"),
        ("--stages.2.data.seq-len 0", "stage 2 (dense): data.seq_len = 0"),
        ("--stages.2.until soon", "expected a number of tokens, found 'soon'"),
    ],
)
def test_a_flag_that_a_stage_overrides_is_refused_by_its_name(flags, words):
    assert words in refused("configs/tiny_stages.py", flags)


def test_a_flag_that_repeats_the_value_of_a_stage_is_accepted():
    flags = "--data.seq-len 512 --loss.mtp=0.1 --data.batch-size 2".split()
    stages = [stage.cfg for stage in ds.load_config("configs/tiny_stages.py", flags).resolved_stages]
    assert {(cfg.data.seq_len, cfg.data.batch_size, cfg.loss.mtp) for cfg in stages} == {(512, 2, 0.1)}
    assert "stage 3 (warm-up of the indexer)" in refused("configs/tiny_stages.py", "--model.attention dense")


def test_a_run_without_stages_has_none_to_address():
    assert "the run has no stages" in refused("configs/tiny_v4.py", "--stages.1.data.seq-len 128")


def test_a_stage_is_addressed_by_number_or_name():
    flags = (
        "--stages.1.data.seq-len 64 --stages.dense.data.seq-len=128 --stages.warm-up-of-the-indexer.model.no-yarn "
        "--stages.4.until 204800 --stages.4.optim.learning-rate 1e-3"
    )
    stages = ds.load_config("configs/tiny_stages.py", flags.split()).resolved_stages
    assert [stage.cfg.data.seq_len for stage in stages] == [64, 128, 128, 128]
    assert [stage.cfg.model.yarn for stage in stages] == [True, True, False, False]
    assert stages[3].declared.until == 204800 and stages[3].cfg.optim.learning_rate == 1e-3
    # A flag of the whole run beside that of every stage that changes the key is not lost.
    cfg = ds.load_config("configs/tiny_stages.py", "--data.seq-len 64 --stages.2.data.seq-len 128".split())
    assert [stage.cfg.data.seq_len for stage in cfg.resolved_stages] == [64, 128, 128, 128]


def test_paths_and_mixtures_of_stages_are_held_by_flags_too(tmp_path):
    file = tmp_path / "mixed.py"
    file.write_text(
        "import dsv4_jax as ds\nfrom dsv4_jax.config import Stage\n"
        "def config(): return ds.load_config('configs/tiny_v4.py').replace({'train.steps': 0, 'optim.decay_steps': 0,"
        "'optim.warmup_steps': 0, 'stages': (Stage(name='a', until=2048),"
        "Stage(name='b', until=4096, changes={'data.mixture': {'x': 1.0}}))})"
    )
    assert "stage 2 (b) sets data.mixture" in refused(file, "--data.path text")
    cfg = ds.load_config(file, "--stages.2.data.path text".split())
    assert [stage.cfg.data.paths for stage in cfg.resolved_stages] == [{"": 1.0}, {"text": 1.0}]


@pytest.mark.parametrize("path", STAGED)
def test_the_mesh_of_a_flag_holds_in_every_stage(path, capsys):
    """So that a published run can be planned for any number of devices."""
    size = {"configs/tiny_stages.py": "2", "configs/v4_pro.py": "6"}.get(path, "8")
    cfg = ds.load_config(path, ["--mesh.data", "1", "--mesh.expert", size, "--mesh.context", "1"])
    assert {stage.cfg.mesh for stage in cfg.resolved_stages} == {cfg.mesh} and cfg.mesh.expert == int(size)
    changing = [
        stage for stage in ds.load_config(path).resolved_stages if any("mesh" in key for key in stage.declared.changes)
    ]
    notes = capsys.readouterr().err
    assert all(f"holds for stage {stage.number + 1} ({stage.declared.name}) too" in notes for stage in changing)


def test_a_stage_may_still_have_its_own_mesh():
    flags = "--mesh.data 2 --mesh.expert 4 --mesh.context 8 --stages.1M.mesh.data 1 --stages.1M.mesh.context 16"
    stages = ds.load_config("configs/v41_flash.py", flags.split()).resolved_stages
    assert [(m.data, m.expert, m.context) for m in (stage.cfg.mesh for stage in stages)] == [(2, 4, 8)] * 2 + [
        (1, 4, 16)
    ]


def test_a_decay_in_steps_takes_the_place_of_one_in_tokens():
    cfg = ds.load_config("configs/tiny_stages.py", "--optim.decay-steps 10".split())
    assert cfg.optim.decay_tokens == () and cfg.optim.decay_steps == 10


@EACH
def test_every_key_of_every_file_can_be_given(path):
    """All values as flags give the same run; what a stage changes cannot be given."""
    cfg, flags = ds.load_config(path), []
    changing = {key for stage in cfg.stages for key in stage.changes}
    for key in keys(cfg):
        (*sections, name), value = key.split("."), cfg
        for part in (*sections, name):
            value = getattr(value, part)
        if key in changing or (cfg.stages and (key == "optim.decay_steps" or key.startswith("mesh."))):
            continue
        if isinstance(value, dict):
            value = [word for pair in value.items() for word in pair]
        words = [str(word) for word in (value if isinstance(value, list | tuple) else [value])]
        flags += [f"--{'.'.join(sections)}.no-{name}"] if value is False else [f"--{key}"]
        flags += [] if isinstance(value, bool) else words
    assert ds.load_config(path, flags) == cfg


def test_replace_takes_keys_checks_them_and_all_of_a_section_together():
    cfg = ds.load_config("configs/tiny_v41.py")
    other = cfg.replace({"data.seq_len": 256, "routing.anticipation.delay": 3, "mesh": ds.Config.mesh})
    assert (other.data.seq_len, other.routing.anticipation.delay, other.mesh.expert) == (256, 3, 1)
    assert other.data.mixture == cfg.data.mixture and cfg.data.seq_len == 512
    assert cfg.replace({"data.path": "x"}).data.mixture == {}
    assert cfg.replace({"optim.warmup_steps": 110, "optim.decay_steps": 10}).optim.warmup_steps == 110
    for changes, words in (
        ({"data.seq_length": 5}, "unknown key 'data.seq_length'; the nearest valid key is 'data.seq_len'"),
        ({"routing.anticipation.dely": 5}, "'routing.anticipation.delay'"),
        ({"dta.seq_len": 5}, "the nearest valid key is 'data.seq_len'"),
        ({"data.seq_len.x": 5}, "unknown key 'data.seq_len.x'"),
        ({"data.seq_len": "5"}, "data.seq_len = '5'"),
        ({"optim.warmup_steps": 111}, "exceeds train.steps"),
        ({"data.path": "x", "data.mixture": {"y": 1.0}}, "cannot stand beside"),
    ):
        with pytest.raises(ds.ConfigError) as error:
            cfg.replace(changes)
        assert words in str(error.value)


def test_a_list_of_words_for_one_stage():
    """By a flag, and back from config.json, whose lists are tuples here."""
    cfg = ds.load_config("configs/tiny_stages.py", ["--stages.2.model.quantize", "experts", "index"])
    assert [stage.cfg.model.quantize for stage in cfg.resolved_stages] == [(), *[("experts", "index")] * 3]
    assert config_from_json(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg
    with pytest.raises(ds.ConfigError, match="expert"):
        ds.load_config("configs/tiny_stages.py", ["--stages.2.model.quantize", "expert"])
