# SPDX-License-Identifier: Apache-2.0
"""`make compare` finds differences by name and step and measures both sides; `make hooks` checks every commit."""

import runpy
import shutil
import subprocess
import sys

import pytest
from support import ROOT

compare = runpy.run_path(str(ROOT / "benchmarks" / "compare.py"))
Result, compare_losses, compare_costs = compare["Result"], compare["compare_losses"], compare["compare_costs"]


def result(losses, name="loss", **more):
    lines = [{"step": i + 1, name: loss, "tokens_per_s": i} | more for i, loss in enumerate(losses)]
    return Result(lines, cpu_s=10.0, compile_s=4.0, temporary_bytes=1000)


def test_equal_losses_are_equal_whatever_their_prefix():
    equal, lines = compare_losses(result([3.0, 2.5]), result([3.0, 2.5], "train/loss", load_max=7.0))
    assert equal and lines == ["losses           bit-equal: loss"]


def test_the_last_bit_counts_and_the_worst_step_is_named():
    equal, lines = compare_losses(result([3.0, 2.0, 1.0]), result([3.0, 2.0 + 2**-51, 1.5]))
    assert not equal and "loss 0.33 (step 3)" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == ["3", "1", "1.5"]
    equal, lines = compare_losses(result([3.0, 2.0]), result([3.0, 2.0 + 2**-51]))
    assert not equal and "(step 2)" in lines[0]


@pytest.mark.parametrize("now", [[3.0, None], [3.0]])
def test_a_loss_that_is_not_finite_or_not_there_differs(now):
    equal, lines = compare_losses(result([3.0, 2.0]), result(now))
    assert not equal and "inf (step 2)" in lines[0]
    assert compare_losses(result([3.0, None]), result([3.0, None]))[0]


def test_other_losses_are_compared_too():
    equal, lines = compare_losses(
        result([1.0], mtp_loss=2.0, eval_loss=3.0, grad_norm=4.0),
        result([1.0], **{"train/mtp_loss": 2.5, "eval/loss": 3.0, "optim/grad_norm": 4.0, "indexer_loss": 1.0}),
    )
    assert not equal
    assert lines[0] == "only the working tree has: indexer_loss"
    assert "mtp_loss 0.2 (step 1)" in lines[1] and lines[2].split() == ["bit-equal", "eval_loss,", "grad_norm,", "loss"]
    with pytest.raises(SystemExit, match="no loss in common"):
        compare_losses(result([1.0]), result([1.0], "speed"))


def test_costs_are_ratios():
    here = Result([], cpu_s=15.0, compile_s=4.0, temporary_bytes=1500)
    lines = compare_costs(result([]), here)
    assert [line.rpartition(" ")[2] for line in lines] == ["1.500", "1.000", "1.500"]
    assert lines[2] == "temporary bytes  1,000 -> 1,500, ratio 1.500"


TRAIN = """
import json, pathlib, sys
import jax, jax.numpy as jnp
from dsv4_jax import FACTOR

args = dict(zip(sys.argv[2::2], sys.argv[3::2]))
step = jax.jit(lambda x: (jnp.sort(x) * FACTOR).sum())
x = jnp.ones(1000)
loss = float(step.lower(x).compile()(x))
run = pathlib.Path(args["--train.run-dir"])
run.mkdir()
lines = [json.dumps({"step": i + 1, args["--NAME"]: loss}) for i in range(int(args["--train.steps"]))]
(run / "metrics.jsonl").write_text("\\n".join(lines))
"""


def test_both_sides_are_measured_on_their_own_code(tmp_path):
    """A repository whose package, and the name of whose flag, change between the revisions."""

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    for folder in ("dsv4_jax", "benchmarks", "configs"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "benchmarks" / "compare.py", tmp_path / "benchmarks")
    (tmp_path / "configs" / "a.py").write_text("")
    (tmp_path / "dsv4_jax" / "__init__.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "train.py").write_text(TRAIN.replace("--NAME", "--train.stage"))
    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    (tmp_path / "train.py").write_text(TRAIN.replace("--NAME", "--train.objective"))

    def run():
        command = [sys.executable, "benchmarks/compare.py", "HEAD", "configs/a.py", "--steps", "3"]
        command += ["--base-flags", "--train.stage loss", "--", "--train.objective", "train/loss"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0, done.stderr
    assert "configs/a.py, 3 steps, HEAD -> working tree\nlosses           bit-equal: loss\n" in done.stdout
    bytes_ = done.stdout.split("temporary bytes")[1].split()
    assert bytes_[0] == bytes_[2].strip(",") != "0"
    (tmp_path / "dsv4_jax" / "__init__.py").write_text("FACTOR = 1.5\n")
    done = run()
    assert done.returncode == 1 and "loss 0.33 (step 1)" in done.stdout, done.stderr
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(worktrees.stdout.splitlines()) == 1  # the temporary one is removed


def test_the_hook_runs_the_checks_before_a_commit(tmp_path):
    def commit(recipe):
        (tmp_path / "Makefile").write_text(f"check:\n\t{recipe}\n")
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "x"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode

    subprocess.run(["git", "init"], cwd=tmp_path, check=True, capture_output=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "hooks"], cwd=tmp_path, check=True, capture_output=True)
    assert commit("false") != 0 and commit("true") == 0
