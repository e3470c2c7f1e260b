# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 in miniature through the stages of a published run: rows grow, attention becomes sparse, the rate decays.

python train.py configs/tiny_stages.py
"""

from pathlib import Path

from dsv4_jax.config import AnticipationConfig, Config, Stage
from dsv4_jax.config.files import load_config

STEP = 1024  # tokens


def config() -> Config:
    """The model of tiny_v4.py; should its loss spike, the run goes back and routes with anticipation for a while."""
    base = load_config(Path(__file__).with_name("tiny_v4.py"))
    peak = base.optim.learning_rate
    return base.replace(
        {
            "data.seq_len": 256,
            "data.batch_size": 4,
            "optim.decay_tokens": (110 * STEP, 170 * STEP),
            "routing.anticipation": AnticipationConfig(mode="auto", delay=4, hold=20),
            "train.steps": 0,
            "train.run_dir": "runs/tiny_stages",
            "train.eval_every": 10,
            "train.eval_batches": 4,
            "train.checkpoint_every": 20,
            "stages": stages(peak),
        }
    )


def stages(peak: float) -> tuple[Stage, ...]:
    """Dense attention in short and longer rows, warm-up of the indexer, sparse attention while the rate decays."""
    return (
        Stage(name="dense, short rows", until=50 * STEP, changes={"model.attention": "dense"}),
        Stage(name="dense", until=90 * STEP, changes={"data.seq_len": 512, "data.batch_size": 2}),
        Stage(
            name="warm-up of the indexer",
            until=110 * STEP,
            changes={"model.attention": "warmup", "optim.learning_rate": 2 * peak},
        ),
        Stage(
            name="sparse",
            until=170 * STEP,
            changes={"model.attention": "sparse", "optim.learning_rate": peak, "loss.mtp": 0.1},
        ),
    )
