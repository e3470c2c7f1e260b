# SPDX-License-Identifier: Apache-2.0
"""What is installed: lazy imports, the `dsv4` command, the shipped configurations, training as a function."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from support.runs import small, train

import dsv4_jax as ds
from dsv4_jax.mesh import make_mesh

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())


def python(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_optimizers_load_neither_the_model_nor_the_command_line():
    """Of this package: themselves, the mesh and its errors. A user of another trainer pays for nothing else."""
    code = "import json, sys; import dsv4_jax.optim; print(json.dumps([*sys.modules]))"
    loaded = json.loads(python("-c", code))
    own = {name.removeprefix("dsv4_jax.").partition(".")[0] for name in loaded if name.partition(".")[0] == "dsv4_jax"}
    assert own == {"dsv4_jax", "optim", "mesh", "section"}
    assert not {"flax", "grain", "orbax", "rich", "tyro"} & set(loaded) and "dsv4_jax.optim.muon" in loaded


def test_every_public_name_is_found_in_any_order():
    code = "import dsv4_jax as ds; print([getattr(ds, name).__name__ for name in reversed(ds.__all__)], dir(ds))"
    printed = python("-c", code)
    assert all(name in printed for name in ds.__all__)
    assert not set(ds.__all__) - set(dir(ds)) and ds.__version__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ds.nothing


def test_every_package_and_every_shipped_file_is_in_the_wheel():
    """`packages` is a list, as `configs/` stands outside of the package."""
    found = {path.parent.as_posix().replace("/", ".") for path in Path("dsv4_jax").rglob("*.py")}
    assert {*PROJECT["tool"]["setuptools"]["packages"]} == found | {"dsv4_jax.configs"}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"dsv4_jax.configs": "configs"}


def test_a_shipped_configuration_is_found_by_its_name(tmp_path, monkeypatch):
    here = ds.load_config("configs/tiny_v41.py")
    monkeypatch.chdir(tmp_path)
    assert ds.load_config("tiny_v41") == here and ds.load_config("tiny_stages").stages
    for name in ("tiny_v42", "configs/tiny_v41.py"):
        with pytest.raises(ds.ConfigError, match=f"no configuration file {name}; the shipped ones are .*tiny_v41"):
            ds.load_config(name)


def test_a_file_that_a_configuration_misses_is_not_called_the_configuration(tmp_path):
    file = tmp_path / "reads.py"
    file.write_text("def config(): return open('/nowhere/recipe.json')")
    with pytest.raises(ds.ConfigError, match=r"reads.py: FileNotFoundError: .*recipe.json"):
        ds.load_config(file)


def test_the_installed_command_trains_and_does_all_else(capsys, monkeypatch):
    module, _, name = PROJECT["project"]["scripts"]["dsv4"].partition(":")
    main = getattr(__import__(module, fromlist=[name]), name)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dsv4", "train", "tiny_v4", "--data.path", "/nowhere"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "data.path" in capsys.readouterr().err
    for words, text in ((["--help"], "usage: dsv4"), (["train", "--help"], "usage: dsv4 train CONFIG")):
        monkeypatch.setattr(sys, "argv", ["/usr/bin/dsv4", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert stop.value.code == 0 and text in printed.out + printed.err
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dsv4", "train", "tiny_v4", "--help"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0 and "--model.compress-ratios" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("cheap_compilation")
def test_training_in_one_process_returns_state_and_metrics_on_one_mesh_after_another(corpus, tmp_path, capsys):
    """The second run has another mesh; the same data, so the same losses; finished runs give their result again."""
    cfg = small(corpus, tmp_path / "a", steps=2).replace({"optim.warmup_steps": 0, "data.batch_size": 8})
    results = []
    with jax.set_mesh(make_mesh()):  # left as it was for the other tests
        for sizes in ((8, 1, 1), (2, 2, 2)):
            names = dict(zip(("mesh.data", "mesh.expert", "mesh.context"), sizes, strict=True))
            run_dir = str(tmp_path / "_".join(map(str, sizes)))
            results.append(ds.train(cfg.replace({**names, "train.run_dir": run_dir})))
            assert [line["step"] for line in results[-1].metrics] == [1, 2] and int(results[-1].state.step) == 2
        losses = [[line["loss"] for line in result.metrics] for result in results]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        again = ds.train(ds.load_config(_saved(tmp_path, run_dir)))
        assert again.metrics == results[1].metrics and "finished" in capsys.readouterr().out
        with pytest.raises(ds.ConfigError, match=r"another train\.cpu_devices needs a new process"):
            train(cfg.replace({"mesh.data": 2, "train.run_dir": str(tmp_path / "c")}))


def _saved(folder, run_dir):
    file = folder / "saved.py"
    file.write_text(
        "import json, pathlib\nfrom dsv4_jax.config.files import config_from_json\n"
        f"def config(): return config_from_json(json.loads(pathlib.Path({run_dir!r}, 'config.json').read_text()))"
    )
    return file
