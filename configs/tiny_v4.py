# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 in miniature: every kind of layer, trained on the Python standard library's source.

python train.py configs/tiny_v4.py
"""

from dsv4_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def config() -> Config:
    """Five layers: a sliding window only, hash-routed, then CSA and HCA in turn; and an MTP block."""
    return Config(
        model=ModelConfig(
            vocab_size=257,
            dim=128,
            n_layers=5,
            n_heads=4,
            head_dim=32,
            rope_head_dim=16,
            q_lora_rank=64,
            o_groups=2,
            o_lora_rank=64,
            moe_inter_dim=64,
            n_routed_experts=20,
            n_activated_experts=2,
            compress_ratios=(0, 4, 32, 4, 32, 0),
            n_hash_layers=1,
            window_size=64,
            index_n_heads=16,
            index_head_dim=16,
            index_topk=32,
            original_seq_len=512,
            attention_block=64,
            remat="none",
        ),
        data=DataConfig(seq_len=512, batch_size=2),
        optim=OptimConfig(learning_rate=7e-3, end_learning_rate=1e-4, warmup_steps=15, decay_steps=110),
        train=TrainConfig(steps=150, run_dir="runs/tiny_v4", eval_every=75, eval_batches=16, sample_tokens=200),
    )
