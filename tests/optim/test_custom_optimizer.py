# SPDX-License-Identifier: Apache-2.0
"""A run with the optimizer of docs/extending.md: trains, keeps the name in config.json, resumes."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support.runs import metrics, small, timeless, train

import dsv4_jax as ds
from dsv4_jax.config.files import config_from_json


@pytest.fixture
def lion(tmp_path):
    """The name of the documented example, written to a file."""
    page = Path("docs/extending.md").read_text()
    (code,) = re.findall(r"in `lion.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "lion.py").write_text(code)
    return f"{tmp_path / 'lion.py'}:lion"


def with_make(cfg, make):
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, make=make, learning_rate=1e-3))


@pytest.mark.slow
def test_lion_trains_and_a_resumed_run_goes_on_with_it(corpus, tmp_path, lion):
    whole = with_make(small(corpus, tmp_path / "whole"), lion)
    assert f"optimizer   {lion}: custom" in train(whole)
    lines = metrics(tmp_path / "whole")
    assert all("optim/update_ratio/custom" in line for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    saved = config_from_json(json.loads((tmp_path / "whole" / "config.json").read_text()))
    assert saved.optim.make == lion
    cut = with_make(small(corpus, tmp_path / "cut", steps=3), lion)
    train(cut)
    train(dataclasses.replace(cut, train=dataclasses.replace(cut.train, steps=8)))
    losses = [[line["loss"] for line in timeless(metrics(tmp_path / name))] for name in ("whole", "cut")]
    assert losses[0] == pytest.approx(losses[1])


def test_a_configuration_file_may_give_the_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dsv4_jax import load_config\nfrom dataclasses import replace\nimport optax\n"
        "def lion(rate, params): return optax.lion(rate)\n"
        "def config():\n    c = load_config('configs/tiny_v4.py')\n"
        "    return replace(c, optim=replace(c.optim, make=lion))\n"
    )
    assert ds.load_config(path).optim.make == f"{path}:lion"
    assert ds.load_config("configs/tiny_v4.py", ["--optim.make", "a.b:c"]).optim.make == "a.b:c"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:sqrt", "failed: TypeError"),
        ("builtins:max", "failed: TypeError"),
        ("builtins:print", "must return an optax.GradientTransformation, found NoneType"),
    ],
)
def test_a_function_that_makes_no_optimizer_is_refused(corpus, tmp_path, make: str, what: str, capsys):
    with pytest.raises(ds.ConfigError) as error:
        train(with_make(small(corpus, tmp_path / "run"), make))
    assert f"optim.make = {make!r}" in str(error.value) and what in str(error.value)


def test_what_is_no_function_is_refused():
    with pytest.raises(ds.ConfigError, match=r"optim\.make = 'lion': expected 'module:function'"):
        ds.load_config("configs/tiny_v4.py", ["--optim.make", "lion"])
