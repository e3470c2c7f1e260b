# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4-Flash at full size: 291 billion parameters, 14.1 billion of which a token uses.

python -m dsv4_jax plan configs/v4_flash.py

The model and the run are the published ones; what the report leaves open is marked as our choice. The meshes of 512
devices are examples.
"""

from dsv4_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, Stage, TrainConfig
from dsv4_jax.optim.schedules import DEEPSEEK_V4_FLASH

T, B = 10**12, 10**9


def stages() -> tuple[Stage, ...]:
    """Dense attention for 1T tokens while batch and rows grow, indexer warm-up, sparse attention, decay, 1M rows."""
    ramp = [
        Stage(
            name=f"ramp {k}",
            until=k * 80 * B,
            changes={"data.batch_size": k * 3072, "train.accumulate": k * 6},
            chosen=("until", "data.batch_size"),
        )
        for k in range(1, 6)
    ]
    return (
        *ramp,
        Stage(name="4K", until=T // 2, changes={"data.batch_size": 18432, "train.accumulate": 36}, chosen=("until",)),
        Stage(name="16K", until=T, changes={"data.seq_len": 16384, "data.batch_size": 4608, "train.accumulate": 9}),
        Stage(
            name="warm-up of the indexer",
            until=T + 75 * B,
            changes={
                "data.seq_len": 65536,
                "data.batch_size": 1152,
                "mesh.data": 8,
                "mesh.context": 4,
                "model.attention": "warmup",
                "model.remat": "full",
                "optim.learning_rate": 1e-3,
            },
            chosen=("until", "optim.learning_rate"),
        ),
        Stage(
            name="64K",
            until=26 * T,
            changes={"model.attention": "sparse", "optim.learning_rate": DEEPSEEK_V4_FLASH.peak},
            chosen=("until",),
        ),
        Stage(name="decay", until=30 * T, changes={"loss.mtp": 0.1}, chosen=("until",)),
        Stage(
            name="1M",
            until=32 * T,
            changes={
                "data.seq_len": 2**20,
                "data.batch_size": 72,
                "mesh.data": 1,
                "mesh.expert": 8,
                "mesh.context": 64,
                "model.yarn": True,
            },
            chosen=("model.yarn",),
        ),
    )


def config() -> Config:
    """Two window layers, then CSA and HCA in turn; three hash-routed layers; an MTP block."""
    recipe = DEEPSEEK_V4_FLASH
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
        data=DataConfig(seq_len=4096, batch_size=3072),
        optim=OptimConfig(
            learning_rate=recipe.peak,
            end_learning_rate=recipe.end,
            warmup_steps=recipe.warmup_steps,
            decay_tokens=recipe.decay,
        ),
        mesh=MeshConfig(data=32, expert=16),
        train=TrainConfig(run_dir="runs/v4_flash", eval_every=1000),
        stages=stages(),
    )
