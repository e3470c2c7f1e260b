# SPDX-License-Identifier: Apache-2.0
"""A small V4.1 without Engram and DSpark, on one device: text and drawn lines, for benchmarks/modality_bias.py.

python train.py configs/modality_bias.py
"""

from dsv4_jax.config import Config, DataConfig, LossConfig, ModelConfig, OptimConfig, RoutingConfig, TrainConfig


def config() -> Config:
    """Three layers of CSA2 with 16 experts each, and a vision tower; the balance biases move fast."""
    return Config(
        model=ModelConfig(
            vocab_size=258,
            dim=128,
            n_layers=3,
            n_heads=4,
            head_dim=32,
            rope_head_dim=16,
            q_lora_rank=64,
            o_groups=2,
            o_lora_rank=64,
            moe_inter_dim=64,
            n_routed_experts=16,
            n_activated_experts=2,
            compress_ratios=(2, 1, 1),
            kv_source_layers=(0, 1),
            index_source_layers=(0, 1),
            n_hash_layers=0,
            n_mtp_layers=0,
            window_size=64,
            index_n_heads=16,
            index_head_dim=16,
            index_topk=32,
            norm_eps=1e-20,
            hc_single_pass=True,
            query_norm=False,
            modality_bias=True,
            vision_n_layers=1,
            vision_dim=64,
            vision_n_heads=4,
            vision_inter_dim=128,
            vision_patch_size=6,
            vision_downsample_ratio=2,
            vision_max_n_token=32,
            vision_min_pixels=144,
            image_token_id=257,
            original_seq_len=512,
            attention_block=64,
            remat="none",
        ),
        data=DataConfig(mixture={"": 1.0, "drawn:": 1.0}, seq_len=256, batch_size=4, row_patches=448, row_images=7),
        loss=LossConfig(mtp=0.0),
        optim=OptimConfig(
            name="deepseek_v41", learning_rate=5e-3, end_learning_rate=1e-4, warmup_steps=10, decay_steps=60
        ),
        routing=RoutingConfig(bias_speed=1e-2),
        train=TrainConfig(
            steps=150,
            run_dir="runs/modality_bias",
            eval_every=150,
            eval_batches=16,
            checkpoint_every=150,
            sample_tokens=0,
        ),
    )
