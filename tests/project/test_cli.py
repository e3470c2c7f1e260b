# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: exit statuses, short messages, no device touched by mistake."""

import json
import os
import subprocess
import sys

import pytest

from dsv4_jax.cli import exit_on_error
from dsv4_jax.section import RunError

NO_DEVICE = {"JAX_PLATFORMS": "none_at_all"}  # starting a backend fails with this


def command(*words, **env):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, env=os.environ | env, check=False
    )


BAD = [
    (["--train.step", "5"], "'train.steps'"),
    (["--train.steps", "x"], "train.steps"),
    (["--model.compress-ratios", "0", "4"], "model.compress_ratios"),
    (["--data.path", "/nowhere"], "data.path"),
    (["--data.held-out", "1e-9"], "data.held_out"),
    (["--data.batch-size", "0"], "data.batch_size"),
    (["--model.vocab-size", "256"], "model.vocab_size"),
]
EACH = """
import contextlib, io, json, sys
from dsv4_jax.cli import train

for flags in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            train(["configs/tiny_v4.py", *flags])
        except SystemExit as stop:
            print(json.dumps([stop.code, said.getvalue()]))
"""


def test_bad_configuration_exits_2_before_any_device_work(tmp_path):
    run = ["--train.run-dir", str(tmp_path / "run")]
    done = command("-c", EACH, json.dumps([run + flags for flags, _ in BAD]), **NO_DEVICE)
    assert done.returncode == 0, done.stderr
    for (flags, words), line in zip(BAD, done.stdout.splitlines(), strict=True):
        code, said = json.loads(line)
        assert code == 2 and words in said and "Traceback" not in said and len(said) < 600, (flags, said)
    assert not (tmp_path / "run").exists()
    done = command("train.py", "configs/tiny_v4.py", *run, *BAD[0][0], **NO_DEVICE)
    assert done.returncode == 2 and BAD[0][1] in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_cannot_go_on_exits_1(capsys):
    def command():
        raise RunError("the disk is full")

    with pytest.raises(SystemExit) as stop:
        exit_on_error(command)
    assert stop.value.code == 1 and capsys.readouterr().err == "error: the disk is full\n"


def test_usage_and_help():
    assert command("train.py").returncode == 2
    assert command("train.py", "nowhere.py").returncode == 2
    help_text = command("train.py", "configs/tiny_v4.py", "--help", **NO_DEVICE)
    assert help_text.returncode == 0 and "--model.compress-ratios" in help_text.stdout
    assert command("-m", "dsv4_jax").returncode == 2
    assert command("-m", "dsv4_jax", "sample", "nowhere", "x", **NO_DEVICE).returncode == 2
    for words, told in (("plan configs/tiny_v4.py --stag 1", "'stag'"), ("report x --to y", "--to y")):
        done = command("-m", "dsv4_jax", *words.split(), **NO_DEVICE)
        assert done.returncode == 2 and told in done.stderr


def test_import_starts_no_backend():
    code = "import dsv4_jax, jax; jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count() == 3"
    done = command("-c", code, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="-1", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr


def test_plan_prints_the_stages_and_the_details_of_one():
    done = command("-m", "dsv4_jax", "plan", "configs/tiny_stages.py", "--stages.1.loss.mtp", "0.2", "--stage", "3")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert "dense 51.2k 92.16k 40.96k 40 2 x 512 1.024k 0.007 dense".split() in lines
    assert "warm-up of the indexer 92.16k 112.64k 20.48k 20 2 x 512 1.024k 0.014 warmup".split() in lines
    assert "sparse 112.64k 174.08k 61.44k 60 2 x 512 1.024k 0.007 to 0.0001 sparse loss.mtp = 0.1".split() in lines
    assert "Stage 3, warm-up of the indexer:" in done.stdout and "our choice" not in done.stdout
    assert "objective   indexer_loss\n" in done.stdout
    done = command("-m", "dsv4_jax", "plan", "--stage", "5", "configs/tiny_stages.py")
    assert done.returncode == 2 and "--stage 5: the run has 4 stages" in done.stderr


def test_plan_prints_the_layers_and_the_objective():
    done = command("-m", "dsv4_jax", "plan", "configs/tiny_v4.py", "--loss.mtp", "0.1")
    assert done.returncode == 0, done.stderr
    for line in ("3,740,742", "1 x [window hash]", "2 x [csa/4 learned, hca/32 learned]", "0.1 mtp_loss"):
        assert line in done.stdout
