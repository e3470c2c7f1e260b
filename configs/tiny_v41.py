# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 in miniature, on 8 emulated devices: source text, and drawn lines of it to be read.

python train.py configs/tiny_v41.py
"""

from dsv4_jax.config import Config, DataConfig, LossConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig


def config() -> Config:
    """Three layers of CSA2 (two that make entries, one that reuses), an Engram, a vision tower, a draft block."""
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
            n_routed_experts=12,
            n_activated_experts=2,
            compress_ratios=(2, 1, 1, 0),
            kv_source_layers=(0, 1),
            index_source_layers=(0, 1),
            n_hash_layers=0,
            n_mtp_layers=1,
            window_size=64,
            index_n_heads=16,
            index_head_dim=16,
            index_topk=32,
            norm_eps=1e-20,
            hc_single_pass=True,
            query_norm=False,
            modality_bias=True,
            engram_layer_ids=(1,),
            engram_vocab_size=4000,
            engram_n_heads=2,
            engram_head_dim=16,
            engram_pad_id=256,
            vision_n_layers=1,
            vision_dim=64,
            vision_n_heads=4,
            vision_inter_dim=128,
            vision_patch_size=6,
            vision_downsample_ratio=2,
            vision_max_n_token=32,
            vision_min_pixels=144,
            image_token_id=257,
            dspark_target_layer_ids=(1, 2),
            dspark_block_size=4,
            dspark_noise_token_id=257,
            dspark_markov_rank=32,
            dspark_n_routed_experts=8,
            dspark_n_activated_experts=2,
            original_seq_len=512,
            attention_block=64,
            remat="none",
        ),
        data=DataConfig(mixture={"": 1.0, "drawn:": 1.0}, seq_len=512, batch_size=2, row_patches=896, row_images=14),
        loss=LossConfig(mtp=0.0),
        optim=OptimConfig(
            name="deepseek_v41", learning_rate=7e-3, end_learning_rate=1e-4, warmup_steps=10, decay_steps=60
        ),
        mesh=MeshConfig(data=1, expert=2, context=4),
        train=TrainConfig(
            steps=120, run_dir="runs/tiny_v41", eval_every=120, eval_batches=10, sample_tokens=200, cpu_devices=8
        ),
    )
