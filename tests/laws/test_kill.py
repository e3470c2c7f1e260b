# SPDX-License-Identifier: Apache-2.0
"""A run that is killed again and again, while it saves too, and resumed, writes what an undisturbed one writes."""

import json
import os
import random
import signal
import subprocess
import sys
import time

from support import ROOT
from support.runs import timeless

KILLS = int(os.environ.get("KILLS", "12"))
SOAK = "KILLS" in os.environ  # `make soak`: many kills of a real model, whose step takes seconds to trace

# Imports once, then starts a fresh run in a forked process for every line it reads: the run's directory.
RUNS = """
import dataclasses, os, sys
import jax, jax.numpy as jnp
from dsv4_jax.cli import exit_on_error
from dsv4_jax.data import pipeline
from dsv4_jax.train import programs
from dsv4_jax.config import *
from dsv4_jax.train.run import run
import rich.console

def config(run_dir):
    model = ModelConfig(
        vocab_size=257, dim=16, n_layers=1, n_heads=2, head_dim=8, rope_head_dim=4, q_lora_rank=8, o_groups=1,
        o_lora_rank=8, moe_inter_dim=8, n_routed_experts=4, n_activated_experts=2, compress_ratios=(0,),
        n_hash_layers=0, n_mtp_layers=0, window_size=8, hc_mult=2, hc_sinkhorn_iters=2, attention_block=32,
        attention="dense", remat="none",
    )
    train = TrainConfig(
        steps=STEPS, run_dir=run_dir, eval_every=1000, eval_batches=1, checkpoint_every=1, keep=2, sample_tokens=0
    )
    optim = OptimConfig(name="adamw", learning_rate=1e-2, warmup_steps=2, decay_steps=0)
    data = DataConfig(path=TEXT, seq_len=32, batch_size=2, held_out=0.3, workers=2)
    return Config(model=model, train=train, optim=optim, data=data, loss=LossConfig(mtp=0.0))

def make_step(cfg, clock):
    "In place of the model: what it tells and becomes depends on all that it has seen."
    def step(state, batch):
        seen = sum(jnp.sin(x * jnp.arange(1.0, x.size + 1).reshape(x.shape)).sum() for x in batch.values())
        params = jax.tree.map(lambda p: 0.9 * p + jnp.sin(seen + p), state.params)
        loss = sum(p.mean() for p in jax.tree.leaves(params))
        rest = dict.fromkeys(("train/mtp_loss", "train/balance_loss", "lr", "grad_norm", "train/objective"), loss)
        count = {"tokens": (batch["segment_ids"] > 0).sum(), "finite": jnp.isfinite(loss), "grad_norms": {}}
        return dataclasses.replace(state, params=params, step=state.step + 1), rest | count | {"loss": loss}
    return step

if not SOAK:
    programs.make_train_step = make_step
    programs.make_eval_step = lambda cfg: lambda state, batch: {"text": (1.0, 1)}

def broken(*arguments, calls=iter(range(40)), fill=pipeline.fill):
    if next(calls, None) is None:
        raise OSError("the disk is gone")
    return fill(*arguments)

for line in sys.stdin:
    if "broken" in line:
        pipeline.fill = broken
    child = os.fork()
    if not child:
        exit_on_error(lambda: run(config(line.strip()), rich.console.Console(file=sys.stderr)))
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Runs:
    """Runs of STEPS steps in processes of their own, one at a time."""

    def __init__(self, folder, steps):
        (folder / "text").mkdir()
        for i in range(30):
            (folder / "text" / f"{i}.txt").write_text(f"The quick brown fox number {i} jumps. " * (i % 5 + 1))
        code = f"STEPS, TEXT, SOAK = {steps}, {str(folder / 'text')!r}, {SOAK}\n{RUNS}"
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONWARNINGS": "ignore"}
        # A cache of its own: one that is killed while it writes must not spoil that of other tests.
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}
        self.said = folder / "said"
        self._file = self.said.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment, stderr=self._file,
        )  # fmt: skip

    def start(self, run_dir):
        """Process id of a run in the directory."""
        self._process.stdin.write(f"{run_dir}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def status(self):
        """Exit status of the run that was started, once it has ended; negative: the signal."""
        return int(self._process.stdout.readline())

    def close(self):
        self._process.communicate(timeout=60)
        self._file.close()


def lines(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(run_dir):
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return timeless(found)


def test_killed_at_random_moments(tmp_path):
    """SIGKILL somewhere in the next few steps, every one of which is saved; then to the end."""
    rng, steps = random.Random(0), 4 * KILLS
    runs = Runs(tmp_path, steps)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    runs.start(straight)
    assert runs.status() == 0, runs.said.read_text()[-2000:]
    statuses, reached = [], []
    for _ in range(KILLS):
        process, before = runs.start(killed), lines(killed)
        deadline, goal = time.monotonic() + 120, rng.randint(1, 3)
        # Its metrics first go back to its checkpoint, then grow.
        low = before
        while time.monotonic() < deadline:
            now = lines(killed)
            low = min(low, now)
            if now - low >= goal or now == steps:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        os.kill(process, signal.SIGKILL)
        statuses.append(runs.status())
        reached.append(lines(killed))
    assert statuses.count(-signal.SIGKILL) > 0.9 * KILLS, (statuses, runs.said.read_text()[-2000:])
    runs.start(killed)
    assert runs.status() == 0, runs.said.read_text()[-2000:]
    # A thread that cannot read ends the run, soon and with one traceback; what was saved stays.
    runs.start(tmp_path / "broken")
    began = time.monotonic()
    assert runs.status() == 1 and time.monotonic() - began < 120
    runs.close()
    said = runs.said.read_text()
    assert said.count("OSError: the disk is gone") == 1 and "broken" in said
    assert any((tmp_path / "broken" / "checkpoints").iterdir())
    assert metrics(killed) == metrics(straight), reached
    assert len({*reached}) > 3, reached  # they were different moments; how many is a matter of the machine's speed
