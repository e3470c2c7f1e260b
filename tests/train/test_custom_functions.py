# SPDX-License-Identifier: Apache-2.0
"""Losses, metrics and an objective that the configuration names: the examples of docs/extending.md, and wrong ones."""

import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from support.runs import metrics, small, train

import dsv4_jax as ds
from dsv4_jax.config.files import config_from_json
from dsv4_jax.data.batch import abstract_batch
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.train.state import abstract_model, init_state
from dsv4_jax.train.step import make_train_step

pytestmark = pytest.mark.usefixtures("cheap_compilation")
WEIGHT = 1e-2


@pytest.fixture
def example(tmp_path):
    """Writes an example of the page to its file; returns the name of the function or class in it."""

    def write(file: str, name: str) -> str:
        page = Path("docs/extending.md").read_text()
        (code,) = re.findall(rf"in `{file}`:\n\n```python\n(.*?)```", page, re.DOTALL)
        (tmp_path / file).write_text(code)
        return f"{tmp_path / file}:{name}"

    return write


def batch_of(cfg):
    """Rows whose number of targets differs, so that a mean of means would be another mean."""
    shapes, random = abstract_batch(cfg, cfg.data.batch_size), np.random.default_rng(0)
    rows = {name: random.integers(0, cfg.model.vocab_size, x.shape) for name, x in shapes.items()}
    real = np.arange(cfg.data.seq_len) < np.array([[9], [60]])
    rows |= {name: np.where(real, rows[name], -1) for name in ("targets", "mtp_targets")}
    rows["segment_ids"] = real
    return {name: jax.device_put(x.astype(np.int32), shapes[name].sharding) for name, x in rows.items()}


def test_losses_and_metrics_are_those_of_the_whole_batch_in_any_number_of_parts(corpus, tmp_path, example):
    extra = {"loss.extra": {example("z_loss.py", "z_loss"): WEIGHT}}
    cfg = small(corpus, tmp_path, metrics=(example("extremes.py", "extremes"),)).replace(extra)
    batch, found = batch_of(cfg), []
    for parts in (1, 2):
        state = jax.jit(lambda: init_state(cfg))()
        step = jax.jit(make_train_step(cfg.replace({"train.accumulate": parts})))
        after, told = jax.device_get(step(state, batch))
        found.append(told)
        moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True)]
        np.testing.assert_allclose(told["custom/largest_update"], max(moved), rtol=1e-5)
        rest = told["train/objective"] - told["loss"] - cfg.loss.balance * told["train/balance_loss"]
        np.testing.assert_allclose(rest, WEIGHT * told["loss/z_loss"], rtol=1e-3)
    for name in ("loss/z_loss", "custom/largest_gradient", "custom/largest_update", "custom/padding"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=2e-5, err_msg=name)
    model = nnx.merge(nnx.graphdef(abstract_model(cfg)), state.params, state.buffers)
    h = jax.jit(lambda model: model.hidden(Inputs.of(batch), with_mtp=False).h)(model)
    log_z = np.asarray(jax.nn.logsumexp(head_logits(h, model.head.get_value()), axis=-1))
    np.testing.assert_allclose(found[0]["loss/z_loss"], (log_z**2)[np.asarray(batch["targets"]) >= 0].mean(), rtol=1e-4)
    np.testing.assert_allclose(found[0]["custom/padding"], 1 - 69 / 128)


def test_an_objective_of_ones_own_trains_and_goes_on(corpus, tmp_path, example):
    name = example("next_token.py", "NextToken")
    cfg = small(corpus, tmp_path / "run", steps=3, objective=name, metrics=(example("extremes.py", "extremes"),))
    assert "objective   loss\n" in train(cfg)
    saved = config_from_json(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert saved.train.objective == name and saved == cfg
    assert "at step 3" in train(saved.replace({"train.steps": 5}))
    lines = metrics(tmp_path / "run")
    assert [line["loss"] == line["train/objective"] for line in lines] == [True] * 5 and lines[4]["loss"] < lines[0][
        "loss"
    ]
    assert all("custom/padding" in line and "train/balance_loss" not in line for line in lines)


def test_a_step_that_is_not_finite_has_its_metrics(corpus, tmp_path, monkeypatch):
    (tmp_path / "f.py").write_text(
        "import jax.numpy as jnp\ndef bad(model, out, batch, count): return out.h.sum() * jnp.nan\n"
        "def padding(params, grads, updates, batch): return {'padding': (batch['segment_ids'] == 0).mean()}\n"
    )
    cfg = small(corpus, tmp_path, metrics=(f"{tmp_path}/f.py:padding",)).replace(
        {"loss.extra": {f"{tmp_path}/f.py:bad": 1.0}}
    )
    state = jax.jit(lambda: init_state(cfg))()
    after, told = jax.device_get(jax.jit(make_train_step(cfg))(state, batch_of(cfg)))
    assert not told["finite"] and math.isnan(told["loss/bad"]) and math.isfinite(told["loss"])
    assert 0 < told["custom/padding"] < 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


WRONG = """
import jax.numpy as jnp
from dsv4_jax.train.objectives.pretrain import Pretrain

def vector(model, out, batch, count): return out.h.sum((0, 1))
def text(model, out, batch, count): return "one"
def fails(model, out, batch, count):
    return out.nothing
def number(params, grads, updates, batch): return 1.0
def vectors(params, grads, updates, batch): return {"a": jnp.zeros(2)}
def a(params, grads, updates, batch): return {"a": 1.0}
def b(params, grads, updates, batch): return {"a": 2.0}
class Nothing:
    def __init__(self, cfg): self.weights = {}
class Absent(Pretrain):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.weights = {"missing": 1.0}
class Fails(Pretrain):
    def losses(self, model, batch, count):
        return 1 / 0
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss.extra": {"FILE:vector": 1.0}}, ["loss.extra = 'FILE:vector' must be a scalar, found float32[16]"]),
        ({"loss.extra": {"FILE:text": 1.0}}, ["loss.extra = 'FILE:text' must be a scalar, found str"]),
        ({"loss.extra": {"FILE:fails": 1.0}}, ["loss.extra = 'FILE:fails' failed: AttributeError", "(line 8)"]),
        ({"loss.extra": {"FILE:vectro": 1.0}}, ["vectro does not exist there; the nearest valid key is 'vector'"]),
        ({"train.metrics": ("FILE:number",)}, ["'FILE:number' must return a dict of scalars by name, found float"]),
        ({"train.metrics": ("FILE:vectors",)}, ["'FILE:vectors': 'a' must be a scalar, found float32[2]"]),
        ({"train.metrics": ("FILE:a", "FILE:b")}, ["train.metrics = 'FILE:b': another function returns 'a' too"]),
        ({"train.metrics": ("no_module:f",)}, ["train.metrics = 'no_module:f': No module named 'no_module'"]),
        ({"train.objective": "FILE:Nothing"}, ["found Nothing without frozen, layers", "losses (docs/extending.md)"]),
        ({"train.objective": "FILE:Absent"}, ["train.objective = 'FILE:Absent' returns no missing"]),
        ({"train.objective": "FILE:Fails"}, ["'FILE:Fails' failed: ZeroDivisionError: division by zero (line 21)"]),
        (
            {"train.objective": "FILE:Absent", "loss.extra": {"FILE:text": 1.0}},
            ["train.objective = 'FILE:Absent' has no loss/text in its weights"],
        ),
    ],
)  # fmt: skip
def test_wrong_functions_end_the_command_before_the_run_begins(corpus, tmp_path, changes, words):
    (tmp_path / "wrong.py").write_text(WRONG)
    put = lambda text: text.replace("FILE", f"{tmp_path}/wrong.py")
    deep = {
        key: {put(k): v for k, v in value.items()} if isinstance(value, dict)
        else put(value) if isinstance(value, str) else tuple(map(put, value))
        for key, value in changes.items()
    }  # fmt: skip
    with pytest.raises(ds.ConfigError) as error:
        train(small(corpus, tmp_path / "run").replace(deep))
    assert all(put(word) in str(error.value) for word in words), error.value
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.objective pretran", "train.objective = 'pretran' must be pretrain or draft, or name a class: "),
        ("--train.metrics lion", "train.metrics = 'lion': expected 'module:function'"),
        ("--loss.extra lion 1", "loss.extra = 'lion': expected 'module:function'"),
        ("--loss.extra a:f -1", "must have weights of 0 or above"),
        ("--loss.extra a:f 0 --train.objective draft", "is for pre-training, not for train.objective = 'draft'"),
        ("--loss.extra a:f 1 b:f 1", "names two functions alike"),
    ],
)  # fmt: skip
def test_names_of_another_form_are_refused(flags, words):
    with pytest.raises(ds.ConfigError) as error:
        ds.load_config("configs/tiny_v4.py", flags.split())
    assert words in str(error.value)


def test_a_configuration_file_may_give_functions_and_a_class(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dsv4_jax import load_config\n"
        "class Mine:\n    def __init__(self, cfg): pass\n"
        "def z(model, out, batch, count): pass\n"
        "def config():\n    c = load_config('configs/tiny_v4.py')\n"
        "    return c.replace({'train.objective': Mine, 'loss.extra': {z: 1.0}, 'train.metrics': (z,)})\n"
    )
    cfg = ds.load_config(path)
    assert cfg.train.objective == f"{path}:Mine" and cfg.loss.extra == {f"{path}:z": 1.0}
    assert cfg.train.metrics == (f"{path}:z",)
