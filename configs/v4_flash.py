# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4-Flash at full size: 291 billion parameters, 13.8 billion of which a token uses.

python -m dsv4_jax plan configs/v4_flash.py

The model is the published one. The run is its first stage, 4096 positions, dense attention, at the largest
batch; the mesh of 512 devices is an example.
"""

from dsv4_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from dsv4_jax.optim.schedules import DEEPSEEK_V4_FLASH


def config() -> Config:
    """Two window layers, then CSA and HCA in turn; three hash-routed layers; an MTP block."""
    recipe = DEEPSEEK_V4_FLASH
    steps = recipe.steps
    return Config(
        model=ModelConfig(
            vocab_size=129280,
            dim=4096,
            n_layers=43,
            n_heads=64,
            head_dim=512,
            rope_head_dim=64,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            moe_inter_dim=2048,
            n_routed_experts=256,
            n_activated_experts=6,
            route_scale=1.5,
            compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
            n_hash_layers=3,
            window_size=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            attention="dense",
            yarn=False,
            compute_dtype="bfloat16",
        ),
        data=DataConfig(seq_len=4096, batch_size=18432),
        optim=OptimConfig(
            learning_rate=recipe.peak,
            end_learning_rate=recipe.end,
            warmup_steps=recipe.warmup_steps,
            decay_steps=steps - recipe.clock.steps(recipe.decay[0]),
        ),
        mesh=MeshConfig(data=32, expert=16),
        train=TrainConfig(steps=steps, run_dir="runs/v4_flash", eval_every=1000, accumulate=36),
    )
