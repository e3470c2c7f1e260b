# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4-Pro at full size: 1.6 trillion parameters, 49.8 billion of which a token uses.

python -m dsv4_jax plan configs/v4_pro.py

The model is the published one. The run is its first stage, 4096 positions, dense attention, at the largest
batch; the mesh of 1536 devices is an example.
"""

from dsv4_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from dsv4_jax.optim.schedules import DEEPSEEK_V4_PRO


def config() -> Config:
    """HCA and CSA layers in turn; three hash-routed layers; an MTP block."""
    recipe = DEEPSEEK_V4_PRO
    steps = recipe.steps
    return Config(
        model=ModelConfig(
            vocab_size=129280,
            dim=7168,
            n_layers=61,
            n_heads=128,
            head_dim=512,
            rope_head_dim=64,
            q_lora_rank=1536,
            o_groups=16,
            o_lora_rank=1024,
            moe_inter_dim=3072,
            n_routed_experts=384,
            n_activated_experts=6,
            route_scale=2.5,
            compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
            n_hash_layers=3,
            window_size=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=1024,
            attention="dense",
            yarn=False,
            compute_dtype="bfloat16",
        ),
        data=DataConfig(seq_len=4096, batch_size=23040),
        optim=OptimConfig(
            learning_rate=recipe.peak,
            end_learning_rate=recipe.end,
            warmup_steps=recipe.warmup_steps,
            decay_steps=steps - recipe.clock.steps(recipe.decay[0]),
        ),
        mesh=MeshConfig(data=64, expert=24),
        train=TrainConfig(steps=steps, run_dir="runs/v4_pro", eval_every=1000, accumulate=15),
    )
