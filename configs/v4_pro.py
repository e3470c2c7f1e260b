# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4-Pro at full size: 1.6 trillion parameters, 50.6 billion of which a token uses.

python -m dsv4_jax plan configs/v4_pro.py

The model and the run are the published ones; what the report leaves open is marked as our choice. The meshes of 1536
devices are examples.
"""

from dsv4_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, Stage, TrainConfig
from dsv4_jax.optim.schedules import DEEPSEEK_V4_PRO

T, B = 10**12, 10**9


def stages() -> tuple[Stage, ...]:
    """Dense attention for 2T tokens while batch and rows grow, indexer warm-up, sparse attention, decay, 1M rows."""
    ramp = [
        Stage(
            name=f"ramp {k}",
            until=k * 100 * B,
            changes={"data.batch_size": k * 4608, "train.accumulate": k * 3},
            chosen=("until", "data.batch_size"),
        )
        for k in range(1, 5)
    ]
    return (
        *ramp,
        Stage(name="4K", until=T, changes={"data.batch_size": 23040, "train.accumulate": 15}, chosen=("until",)),
        Stage(
            name="16K",
            until=2 * T,
            changes={"data.seq_len": 16384, "data.batch_size": 5760, "mesh.data": 16, "mesh.context": 4},
            chosen=("until",),
        ),
        Stage(
            name="warm-up of the indexer",
            until=2 * T + 94 * B,
            changes={
                "data.seq_len": 65536,
                "data.batch_size": 1440,
                "mesh.data": 4,
                "mesh.context": 16,
                "model.attention": "warmup",
                "model.remat": "full",
                "optim.learning_rate": 1e-3,
            },
            chosen=("until", "optim.learning_rate"),
        ),
        Stage(
            name="64K",
            until=27 * T,
            changes={"model.attention": "sparse", "optim.learning_rate": DEEPSEEK_V4_PRO.peak},
            chosen=("until",),
        ),
        Stage(name="decay", until=31 * T, changes={"loss.mtp": 0.1}, chosen=("until",)),
        Stage(
            name="1M",
            until=33 * T,
            changes={
                "data.seq_len": 2**20,
                "data.batch_size": 90,
                "mesh.data": 1,
                "mesh.expert": 6,
                "mesh.context": 256,
                "model.yarn": True,
            },
            chosen=("model.yarn",),
        ),
    )


def config() -> Config:
    """HCA and CSA layers in turn; three hash-routed layers; an MTP block."""
    recipe = DEEPSEEK_V4_PRO
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
        data=DataConfig(seq_len=4096, batch_size=4608),
        optim=OptimConfig(
            learning_rate=recipe.peak,
            end_learning_rate=recipe.end,
            warmup_steps=recipe.warmup_steps,
            decay_tokens=recipe.decay,
        ),
        mesh=MeshConfig(data=64, expert=24),
        train=TrainConfig(run_dir="runs/v4_pro", eval_every=1000),
        stages=stages(),
    )
