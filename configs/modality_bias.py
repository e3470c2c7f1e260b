# SPDX-License-Identifier: Apache-2.0
"""A small V4.1 without Engram and DSpark, on one device: text and drawn lines, for benchmarks/modality_bias.py.

python train.py configs/modality_bias.py
"""

from pathlib import Path

from dsv4_jax.config import Config, MeshConfig
from dsv4_jax.config.files import load_config


def config() -> Config:
    """The model of tiny_v41.py with 16 experts a layer; the balance biases move fast."""
    base = load_config(Path(__file__).with_name("tiny_v41.py"))
    return base.replace(
        {
            "model.n_routed_experts": 16,
            "model.compress_ratios": base.model.compress_ratios[:3],
            "model.n_mtp_layers": 0,
            "model.engram_layer_ids": (),
            "model.dspark_target_layer_ids": (),
            "data.seq_len": 256,
            "data.batch_size": 4,
            "data.row_patches": 448,
            "data.row_images": 7,
            "optim.learning_rate": 5e-3,
            "routing.bias_speed": 1e-2,
            "mesh": MeshConfig(),
            "train.steps": 150,
            "train.run_dir": "runs/modality_bias",
            "train.eval_every": 150,
            "train.eval_batches": 16,
            "train.checkpoint_every": 150,
            "train.sample_tokens": 0,
            "train.cpu_devices": 0,
        }
    )
