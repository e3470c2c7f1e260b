# SPDX-License-Identifier: Apache-2.0
"""The optimizer bench: its search, its resume, its report, and the tasks themselves."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import dsv4_jax as ds
from dsv4_jax import optim
from dsv4_jax.lab import CharLM, Contender, Lab, ZipfRegression, run_lab
from dsv4_jax.lab.figures import draw_figures, format_table
from dsv4_jax.lab.runner import find_best_rate
from dsv4_jax.report.charts import label_ticks


@dataclasses.dataclass(frozen=True)
class Bowl:
    """w^2 with noise: SGD is best at a rate near 1/2 and diverges above 1."""

    width: int = 4

    def init(self, seed):
        return {"w": np.random.default_rng(seed).normal(size=self.width).astype(np.float32)}

    def batches(self, seed, first, count):
        return np.random.default_rng((seed, first)).normal(size=(count, self.width)).astype(np.float32)

    def loss(self, params, batch):
        return ((params["w"] + 0.1 * batch) ** 2).sum()

    def evaluate(self, params):
        return {"distance": (params["w"] ** 2).sum()}


def sgd(rates=(1e-3, 2e-3), name="SGD", shorter=()):
    return Contender(name, lambda rate, params: optax.sgd(rate), rates, shorter)


def lab(*contenders, **changes):
    return Lab(
        **({"task": Bowl(), "contenders": contenders, "metric": "distance", "steps": 60, "seeds": (0, 1)} | changes)
    )


def test_the_grid_grows_until_the_best_is_inside():
    asked = []
    score = lambda rate: asked.append(rate) or abs(np.log2(rate / 8))
    assert find_best_rate((1.0, 2.0), score) == 8 and max(asked) == 16
    assert find_best_rate((32.0,), score) == 8
    with pytest.raises(ds.ConfigError, match="no best learning rate"):
        find_best_rate((1.0, 2.0), lambda rate: -rate)


def test_runs_resume_and_nothing_is_run_twice(tmp_path):
    said = []
    first = run_lab(lab(sgd(shorter=(30,))), tmp_path, said.append)
    assert len(said) == len(first.runs) == len({(r.rate, r.seed, r.steps) for r in first.runs})
    at_end = {(r.seed, r.steps) for r in first.runs}
    assert at_end == {(0, 60), (1, 60), (0, 30), (1, 30)}
    # A stop in the middle of a line loses that run only; a new contender adds its own.
    text = (tmp_path / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(text[:-20])
    said.clear()
    again = run_lab(lab(sgd(shorter=(30,)), sgd((0.25, 0.5, 1.0), "other")), tmp_path, said.append)
    assert [line.split(":")[0] for line in said][:2] == ["SGD", "other"]
    same = lambda runs: [(r.rate, r.seed, r.steps, r.measures, r.curve) for r in runs if r.contender == "SGD"]
    assert same(again.runs) == same(first.runs)
    said.clear()
    run_lab(lab(sgd(shorter=(30,)), sgd((0.25, 0.5, 1.0), "other")), tmp_path, said.append)
    assert said == []


def test_divergence_is_a_score_and_not_a_crash(tmp_path):
    results = run_lab(lab(sgd((0.25, 0.5, 64.0)), seeds=(0,), clip=0.0), tmp_path, lambda line: None)
    wild = results.find("SGD", 64.0, 0, 60)
    assert wild.measures["distance"] is None and wild.score("distance") == np.inf
    assert "inf" not in format_table(lab(sgd((0.25, 0.5, 64.0)), seeds=(0,)), results)
    assert all(
        path.stat().st_size > 10_000
        for path in draw_figures(lab(sgd((0.25, 0.5, 64.0)), seeds=(0,)), results, tmp_path)
    )


def test_a_seed_may_diverge_at_the_chosen_rate(tmp_path):
    """Its curve ends in gaps and the table says so; table and pictures come all the same."""

    class Cliff(Bowl):
        def loss(self, params, batch):
            return super().loss(params, batch) + jnp.where(jnp.abs(params["w"]).max() > 2.5, jnp.nan, 0.0)

        def init(self, seed):
            return {"w": np.full(4, 1.0 + seed, np.float32)}

    this = lab(sgd((0.25, 0.5, 1.0)), task=Cliff(), seeds=(0, 1, 2))
    results = run_lab(this, tmp_path, lambda line: None)
    assert results.find("SGD", results.rates["SGD"], 2, 60).curve == [None, None]
    assert "a seed diverged" in format_table(this, results)
    assert len(draw_figures(this, results, tmp_path)) == 2


@pytest.mark.parametrize(("high", "expected"), [(9, "2 3 4 5 6 7 8 9"), (4000, "2 5 20 50 200 500 2k")])
def test_log_axes_name_numbers_between_powers_of_ten(high, expected):
    figure = Figure()
    axes = figure.subplots()
    axes.set(yscale="log", ylim=(1.5, high))
    label_ticks(axes)
    figure.canvas.draw()
    low, high = axes.get_ylim()
    minor = zip(axes.get_yticks(minor=True), axes.get_yticklabels(minor=True), strict=True)
    assert [label.get_text() for y, label in minor if low <= y <= high and label.get_text()] == expected.split()
    assert "10" in {label.get_text() for label in axes.get_yticklabels()} and high > low


def test_another_task_is_refused(tmp_path):
    run_lab(lab(sgd((0.25, 0.5, 1.0)), seeds=(0,)), tmp_path, lambda line: None)
    with pytest.raises(ds.ConfigError, match="another clip, width"):
        run_lab(lab(sgd(), task=Bowl(5), clip=2.0), tmp_path, lambda line: None)
    with pytest.raises(ds.ConfigError, match="different names"):
        lab(sgd(), sgd())
    with pytest.raises(ds.ConfigError, match="ascending"):
        lab(sgd((2.0, 1.0)))


def test_command(tmp_path):
    """Exit status 0 with a table and pictures; 2 and a short message for a file that is no lab."""
    spec = tmp_path / "spec.py"
    spec.write_text(
        "import optax\nfrom dsv4_jax.lab import *\ndef lab():\n"
        "    sgd = Contender('SGD', lambda rate, _: optax.sgd(rate), (32.0, 64.0, 128.0))\n"
        "    return Lab(ZipfRegression(vocab=16, width=4, batch=8), [sgd], 'rare half', 60, seeds=(0,), clip=0.0)\n"
    )
    command = [sys.executable, "-m", "dsv4_jax", "optim-lab", str(spec), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| SGD | 60 |" in done.stdout and (tmp_path / "out" / "rates.png").exists()
    runs = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert {run["contender"] for run in runs} == {"SGD"}
    spec.write_text("def lab(): return 3\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "must return a dsv4_jax.lab.Lab, found int" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("task", [CharLM(layers=1, width=16, block=8, batch=4), ZipfRegression(vocab=64, width=8)])
def test_tasks(task):
    """Batches depend on seed and step alone; every leaf has a role; training lowers the loss."""
    np.testing.assert_array_equal(task.batches(3, 0, 10)[4:6], task.batches(3, 4, 2))
    assert (task.batches(3, 0, 1) != task.batches(4, 0, 1)).any()
    params = task.init(0)
    tx = optim.deepseek_v41(0.02, params, task.roles)
    step = jax.jit(lambda p, s, b: tx.update(jax.grad(task.loss)(p, b), s, p))
    evaluate = jax.jit(task.evaluate)
    state, before = tx.init(params), evaluate(params)
    for batch in task.batches(0, 0, 40):
        updates, state = step(params, state, jnp.asarray(batch))
        params = optax.apply_updates(params, updates)
    assert all(evaluate(params)[name] < 0.95 * value for name, value in before.items())


def test_the_language_model_is_causal_and_starts_uniform():
    task = CharLM(layers=1, width=16, block=8, batch=4)
    params, batch = task.init(0), task.batches(0, 0, 1)[0]
    assert float(task.loss(params, batch)) == pytest.approx(np.log(len(params["wte"])), abs=0.1)
    params["wte"] = params["wte"] * 30
    later = batch.copy()
    later[:, -1] = (later[:, -1] + 1) % len(params["wte"])
    short = lambda b: float(task.loss({**params, "wpe": params["wpe"]}, b[:, :-1]))
    assert short(batch) == short(later) and float(task.loss(params, batch)) != float(task.loss(params, later))
