# SPDX-License-Identifier: Apache-2.0
"""A small V4.1 without Engram and DSpark, on one device: text and drawn lines, for benchmarks/modality_bias.py.

python train.py configs/modality_bias.py
"""

import dataclasses
from pathlib import Path

from dsv4_jax.config import Config, MeshConfig, RoutingConfig
from dsv4_jax.config_files import load_config


def config() -> Config:
    """The model of tiny_v41.py with 16 experts a layer; the balance biases move fast."""
    base = load_config(Path(__file__).with_name("tiny_v41.py"))
    model = dataclasses.replace(
        base.model,
        n_routed_experts=16,
        compress_ratios=base.model.compress_ratios[:3],
        n_mtp_layers=0,
        engram_layer_ids=(),
        dspark_target_layer_ids=(),
    )
    data = dataclasses.replace(base.data, seq_len=256, batch_size=4, row_patches=448, row_images=7)
    train = dataclasses.replace(
        base.train,
        steps=150,
        run_dir="runs/modality_bias",
        eval_every=150,
        eval_batches=16,
        checkpoint_every=150,
        sample_tokens=0,
        cpu_devices=0,
    )
    return dataclasses.replace(
        base,
        model=model,
        data=data,
        optim=dataclasses.replace(base.optim, learning_rate=5e-3),
        routing=RoutingConfig(bias_speed=1e-2),
        mesh=MeshConfig(),
        train=train,
    )
