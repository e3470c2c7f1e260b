# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash at full size: 763 billion parameters, 197 billion of them in the Engrams' tables.

python -m dsv4_jax plan configs/v41_flash.py

The model is the published one, with its three draft blocks, and so is the run: sparse attention from the first
step, no pool of candidates (it belongs to post-training), one text token map for both modalities, seven text tokens
to one of images. The vision tower comes pre-trained and stays as it is, but for its last norm, until the decay. The
data paths and the meshes of 4096 devices are examples; model.engram_token_map has to name the tokenizer.json of the
released model.
"""

from dsv4_jax.config import Config, DataConfig, LossConfig, MeshConfig, ModelConfig, OptimConfig, Stage, TrainConfig
from dsv4_jax.optim.schedules import DEEPSEEK_V41_FLASH

T = 10**12


def stages() -> tuple[Stage, ...]:
    """Constant rate with a frozen vision tower, decay with all of it, 1M rows."""
    return (
        Stage(name="64K", until=28 * T, changes={"train.frozen": r"^vision\.(?!norm\b)"}),
        Stage(
            name="decay",
            until=34 * T,
            changes={"train.frozen": "", "optim.vision_factor": 0.1},
            chosen=("optim.vision_factor",),
        ),
        Stage(
            name="1M",
            until=45 * T,
            changes={
                "data.seq_len": 2**20,
                "data.batch_size": 96,
                "mesh.data": 2,
                "mesh.context": 128,
                "model.yarn": True,
            },
            chosen=("model.yarn",),
        ),
    )


def config() -> Config:
    """Two window layers, 18 of CSA2 at ratio 2 and 20 at ratio 1; Engrams before layers 1 and 14; vision; DSpark."""
    recipe = DEEPSEEK_V41_FLASH
    return Config(
        model=ModelConfig(
            vocab_size=129280,
            dim=5120,
            n_layers=40,
            n_heads=64,
            head_dim=512,
            rope_head_dim=64,
            q_lora_rank=1280,
            o_groups=8,
            o_lora_rank=1024,
            moe_inter_dim=2304,
            n_routed_experts=384,
            n_activated_experts=6,
            route_scale=1.5,
            compress_ratios=(0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0),
            kv_source_layers=(2, 8, 14, 20),
            index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36),
            n_hash_layers=0,
            n_mtp_layers=3,
            window_size=128,
            index_n_heads=32,
            index_head_dim=128,
            index_topk=512,
            norm_eps=1e-20,
            hc_single_pass=True,
            query_norm=False,
            modality_bias=True,
            engram_layer_ids=(1, 14),
            engram_num_embeddings=(384006168, 384016682),
            engram_compressed_vocab_size=99092,
            vision_n_layers=32,
            dspark_target_layer_ids=(37, 38, 39),
            yarn=False,
            compute_dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(mixture={"text/": 7.0, "pages/": 1.0}, seq_len=65536, batch_size=1536),
        loss=LossConfig(mtp=0.0),
        optim=OptimConfig(
            name="deepseek_v41",
            learning_rate=recipe.peak,
            end_learning_rate=recipe.end,
            warmup_steps=recipe.warmup_steps,
            decay_tokens=recipe.decay,
        ),
        mesh=MeshConfig(data=32, expert=16, context=8),
        train=TrainConfig(run_dir="runs/v41_flash", eval_every=1000, accumulate=3),
        stages=stages(),
    )
