# SPDX-License-Identifier: Apache-2.0
"""Small models in folders of published weights, and changes to such folders."""

import shutil

import ml_dtypes
import numpy as np
from support.golden_models import small_config

from dsv4_jax.ops import quantize as q
from dsv4_jax.weights import export
from dsv4_jax.weights.safetensors import DTYPES, Output, find_tensors, write_folder

# Sizes that no block divides.
ODD = dict(dim=36, moe_inter_dim=20, q_lora_rank=10, n_layers=3, compress_ratios=(0, 4, 8, 0), n_hash_layers=1)
V41 = dict(
    n_layers=4,
    compress_ratios=(0, 2, 2, 1, 0, 0),
    kv_source_layers=(1, 3),
    index_source_layers=(1, 3),
    candidate_source_layer=3,
    n_mtp_layers=2,
    dspark_target_layer_ids=(2, 3),
    dspark_n_routed_experts=3,
    dspark_n_activated_experts=2,
    dspark_noise_token_id=5,
    dspark_markov_rank=6,
    engram_layer_ids=(1,),
    engram_vocab_size=60,
    engram_n_heads=2,
    engram_head_dim=8,
    hc_single_pass=True,
    query_norm=False,
    modality_bias=True,
    vision_n_layers=2,
    vision_dim=16,
    vision_n_heads=2,
    vision_inter_dim=12,
    image_token_id=7,
)
DSPARK = ODD | {key: V41[key] for key in ("dspark_target_layer_ids", "dspark_noise_token_id", "dspark_markov_rank")}
DSPARK |= dict(n_layers=4, n_mtp_layers=3, compress_ratios=(0, 4, 8, 0, 0, 0, 0))
DSPARK |= dict(dspark_n_routed_experts=4, dspark_n_activated_experts=2)
CONFIGS = {"v4": small_config(**ODD), "v41": small_config(**V41), "dspark": small_config(**DSPARK)}


def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name, strict=True)


def stored_value(name, x, storage, cfg):
    """What a folder of the format holds of a tensor."""
    form = export.storage_of(name, x.shape, storage, cfg.hc_single_pass)
    if isinstance(form, str):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32) if form == "BF16" else x
    return q.dequantize(*q.quantize(x, form), form, x.shape[-1])


def rewrite(folder, change):
    """Write the tensors of a folder again, as `change` maps (name, stored) to a list of (name, dtype, array)."""
    outputs = []
    for name, stored in find_tensors(folder).items():
        for new, dtype, array in change(name, stored):
            array = np.ascontiguousarray(array)
            assert DTYPES[dtype] == array.dtype, (new, dtype, array.dtype)
            outputs.append(Output(new, dtype, array.shape, lambda array=array: [array]))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_folder(folder, outputs, 1 << 30, lambda _: None)
    return folder


def kept(name, stored):
    return [(name, stored.dtype, stored.read())]
