# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 in miniature through the stages of a published run: rows grow, attention becomes sparse, the rate decays.

python train.py configs/tiny_stages.py
"""

import dataclasses
from pathlib import Path

from dsv4_jax.config import AnticipationConfig, Config, RoutingConfig, Stage
from dsv4_jax.config_files import load_config

STEP = 1024  # tokens


def config() -> Config:
    """The model of tiny_v4.py; should its loss spike, the run goes back and routes with anticipation for a while."""
    base = load_config(Path(__file__).with_name("tiny_v4.py"))
    peak = base.optim.learning_rate
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, seq_len=256, batch_size=4),
        optim=dataclasses.replace(base.optim, decay_tokens=(110 * STEP, 170 * STEP)),
        routing=RoutingConfig(anticipation=AnticipationConfig(mode="auto", delay=4, hold=20)),
        train=dataclasses.replace(
            base.train, steps=0, run_dir="runs/tiny_stages", eval_every=10, eval_batches=4, checkpoint_every=20
        ),
        stages=(
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
        ),
    )
