# SPDX-License-Identifier: Apache-2.0
"""Devices and processes: a run on eight emulated devices, in one process and in two, and what is refused."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from support import ROOT

CONFIG = """
from dsv4_jax.config import *
def config():
    model = ModelConfig(
        vocab_size=257, dim=32, n_layers=2, n_heads=2, head_dim=16, rope_head_dim=8, q_lora_rank=16, o_groups=1,
        o_lora_rank=16, moe_inter_dim=16, n_routed_experts=4, n_activated_experts=2, compress_ratios=(4, 16, 0),
        n_hash_layers=1, window_size=16, index_n_heads=16, index_head_dim=8, index_topk=4, hc_mult=2,
        attention_block=32, remat="none",
    )
    train = TrainConfig(steps=4, eval_every=2, eval_batches=2, checkpoint_every=2, sample_tokens=4)
    optim = OptimConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=0)
    return Config(model=model, train=train, optim=optim, data=DataConfig(seq_len=62, batch_size=4, held_out=0.3))
"""


def start(folder, name, *arguments, config=None, **environment):
    """A training run in a process of its own: of another configuration, or of `CONFIG` on some text."""
    if config is None:
        config = folder / "config.py"
        config.write_text(CONFIG)
        (folder / "text").mkdir(exist_ok=True)
        for i in range(30):
            (folder / "text" / f"{i}.txt").write_text(
                f"The quick brown fox number {i} jumps over the lazy dog. " * (i % 7 + 1)
            )
        arguments = ("--data.path", str(folder / "text"), *arguments)
    command = [sys.executable, str(ROOT / "train.py"), str(config), "--train.run-dir", str(folder / name), *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(*processes):
    done = [process.communicate(timeout=500) for process in processes]
    assert all(p.returncode == 0 for p in processes), [err[-2000:] for _, err in done]
    return [out for out, _ in done]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_eight_devices_in_one_process_and_in_two(tmp_path):
    """The losses of one device; one config, one metrics file, checkpoints that the other layout resumes."""
    mesh = ["--mesh.data", "2", "--mesh.expert", "2", "--mesh.context", "2"]
    address = f"localhost:{free_port()},2"
    alone = finish(start(tmp_path, "one"), start(tmp_path, "eight", *mesh, "--train.cpu-devices", "8"))
    two = [
        start(tmp_path, "two", *mesh, "--train.cpu-devices", "4", "--train.distributed", f"{address},{i}")
        for i in (0, 1)
    ]
    said = finish(*two)
    assert "held-out loss" in said[0] and "held-out loss" not in said[1]
    unigram = [re.findall("unigram entropy.*", text) for text in (*alone, said[0])]
    assert len(unigram[0]) == 1 and unigram[0] == unigram[1] == unigram[2]
    for a, b, c in zip(*(metrics(tmp_path / name) for name in ("one", "eight", "two")), strict=True):
        for name in ("loss", "train/mtp_loss", "train/balance_loss", "train/indexer_loss", "grad_norm", "tokens", "lr"):
            np.testing.assert_allclose([b[name], c[name]], a[name], rtol=2e-4, err_msg=name)
        np.testing.assert_allclose(c["loss"], b["loss"], rtol=1e-5)
    # What two processes have saved, eight devices in one go on with, and one device too; with other workers.
    shutil.copytree(tmp_path / "two", tmp_path / "copy")
    more = ["--train.steps", "6"]
    finish(start(tmp_path, "eight", *more, *mesh, "--train.cpu-devices", "8"))
    assert "resumed" in finish(start(tmp_path, "two", *more, *mesh, "--train.cpu-devices", "8"))[0]
    finish(start(tmp_path, "copy", *more, "--data.workers", "3"))
    for name in ("two", "copy"):
        for got, want in zip(metrics(tmp_path / name)[4:], metrics(tmp_path / "eight")[4:], strict=True):
            assert got["tokens"] == want["tokens"] and got["step"] in (5, 6)
            np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)


V41 = """
--data.batch-size 2 --data.row-patches 1001 --model.vision-n-layers 2 --optim.warmup-steps 1 --optim.decay-steps 0
--train.steps 3 --train.eval-every 3 --train.eval-batches 2 --train.sample-tokens 4 --model.vocab-size 259
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_v41_on_devices_along_context(tmp_path):
    """Pictures in chunks, an odd vocabulary, and all that a run does beside its steps."""
    shapes = {"one": (1, 1, 1), "context": (1, 1, 8), "data": (2, 1, 4)}
    for name, shape in shapes.items():
        mesh = [f"--mesh.{axis}={size}" for axis, size in zip(("data", "expert", "context"), shape, strict=True)]
        devices = f"--train.cpu-devices={math.prod(shape)}"
        finish(start(tmp_path, name, *V41.split(), *mesh, devices, config=ROOT / "configs" / "tiny_v41.py"))
    for found in zip(*(metrics(tmp_path / name) for name in shapes), strict=True):
        for name in ("loss", "grad_norm", "tokens"):
            np.testing.assert_allclose([x[name] for x in found], found[0][name], rtol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--train.cpu-devices", "4", "--mesh.data", "2"], "2 x 1 x 1 = 2, but there are 4 devices"),
        (["--mesh.data", "4", "--train.accumulate", "3"], "data.batch_size = 4 must be a multiple of"),
        (["--train.distributed", "localhost:1,2,2"], "NUMBER below COUNT"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, arguments, message):
    process = start(tmp_path, "none", *arguments)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and message in err and "Traceback" not in err
    assert not (tmp_path / "none").exists()


def test_importing_starts_no_backend():
    code = "import dsv4_jax, jax; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
