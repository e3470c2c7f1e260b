# SPDX-License-Identifier: Apache-2.0
"""Small runs for tests of the loop: their models and configurations, and what they write."""

import dataclasses
import io
import json

from rich.console import Console

import dsv4_jax as ds
from dsv4_jax.config import DataConfig, LossConfig, ModelConfig, OptimConfig, TrainConfig
from dsv4_jax.train.run import run

MODEL = ModelConfig(
    vocab_size=257,
    dim=32,
    n_layers=2,
    n_heads=2,
    head_dim=16,
    rope_head_dim=8,
    q_lora_rank=16,
    o_groups=1,
    o_lora_rank=16,
    moe_inter_dim=16,
    n_routed_experts=4,
    n_activated_experts=2,
    compress_ratios=(4, 16, 0),
    n_hash_layers=1,
    window_size=16,
    index_n_heads=16,
    index_head_dim=8,
    index_topk=4,
    hc_mult=2,
    attention_block=32,
    remat="none",
)
# For what the loop does, whatever the model: one window layer, moved by AdamW, which compiles in a few seconds.
SMALL = dataclasses.replace(
    MODEL, dim=16, n_layers=1, compress_ratios=(0,), n_hash_layers=0, n_mtp_layers=0, attention="dense",
    hc_sinkhorn_iters=2,
)  # fmt: skip
DATA = DataConfig(seq_len=64, batch_size=2, held_out=0.2)


def config(corpus, run_dir, steps, **changes):
    train = TrainConfig(
        steps=steps, run_dir=str(run_dir), eval_every=4, eval_batches=2, checkpoint_every=3, sample_tokens=0
    )
    optim = OptimConfig(name="adamw", learning_rate=1e-2, warmup_steps=2, decay_steps=0)
    data = dataclasses.replace(DATA, path=corpus)
    return ds.Config(**{"model": MODEL, "data": data, "optim": optim, "train": train} | changes)


def small(corpus, run_dir, **changes):
    """Eight steps of the small model."""
    cfg = config(corpus, run_dir, 8, model=SMALL, loss=LossConfig(mtp=0.0))
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))


def train(cfg):
    said = io.StringIO()
    run(cfg, Console(file=said, width=200, highlight=False, markup=False))
    return said.getvalue()


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def timeless(lines):
    """The lines without what depends on the machine's speed and load."""
    timed = ("tokens_per_s", "perf/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]
