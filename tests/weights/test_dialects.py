# SPDX-License-Identifier: Apache-2.0
"""Folders of other spellings are read: configuration files, base weights, draft blocks, transformers."""

import dataclasses
import json
import re
import shutil

import pytest
from support.published import CONFIGS, copy, kept, rewrite, same

import dsv4_jax as ds
from dsv4_jax.ops import quantize as q
from dsv4_jax.weights import export
from dsv4_jax.weights.dialects import FUSED, hf_name, official_name
from dsv4_jax.weights.names import official_shapes
from dsv4_jax.weights.safetensors import find_tensors


def test_both_configuration_files_describe_the_model(folders):
    for (name, _), folder in folders.items():
        for file in (folder / "config.json", folder / "inference" / "config.json"):
            cfg = ds.model_config_from_official(json.loads(file.read_text()))
            assert dataclasses.replace(cfg, engram_token_map=CONFIGS[name].engram_token_map) == CONFIGS[name], file
    nested = json.loads((folders["v41", "fp4"] / "config.json").read_text())
    assert nested["text_config"]["hidden_size"] == 16 and nested["vision_config"]["hidden_size"] == 16
    assert nested["quantization_config"]["weight_block_size"] == [32, 32] and nested["expert_dtype"] == "fp4"


def test_configurations_that_differ_or_are_absent(folders, tmp_path):
    folder = copy(folders["v4", "bf16"], tmp_path)
    file = folder / "inference" / "config.json"
    file.write_text(file.read_text().replace('"window_size": 2', '"window_size": 3'))
    with pytest.raises(ds.ConfigError, match="differ in window_size: 2 and 3"):
        ds.load_checkpoint(folder)
    file.write_text(file.read_text().replace("window_size", "windw_size"))
    with pytest.raises(ds.ConfigError, match=r"inference/config\.json: .*windw_size.*window_size"):
        ds.load_checkpoint(folder)
    shutil.rmtree(folder / "inference")
    (folder / "config.json").unlink()
    with pytest.raises(ds.ConfigError, match=r"neither config\.json nor"):
        ds.load_checkpoint(folder)


# The configuration file of transformers' own `save_pretrained`, in its spelling.
SAVED = dict(
    model_type="deepseek_v4",
    hidden_size=36,
    head_dim=8,
    num_hidden_layers=3,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    mlp_layer_types=["hash_moe", "moe", "moe"],
    partial_rotary_factor=0.5,
    rope_parameters={
        "main": {"rope_type": "default"},
        "compress": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
    },
    num_nextn_predict_layers=1,
)


def test_the_configuration_that_transformers_saves():
    own = {field.name: getattr(CONFIGS["v4"], field.name) for field in dataclasses.fields(ds.ModelConfig)}
    same_names = """vocab_size q_lora_rank o_groups o_lora_rank n_routed_experts index_n_heads index_head_dim index_topk
    head_dim""".split()
    fields = {key: own[key] for key in same_names} | dict(
        num_attention_heads=2, moe_intermediate_size=20, num_experts_per_tok=2, sliding_window=2
    )
    cfg = ds.model_config_from_official(SAVED | fields)
    assert cfg == dataclasses.replace(CONFIGS["v4"], n_mtp_layers=0, compress_ratios=(0, 4, 8))
    with pytest.raises(ds.ConfigError, match="tie_word_embeddings"):
        ds.model_config_from_official(SAVED | fields | {"tie_word_embeddings": True})
    with pytest.raises(ds.ConfigError, match="hidden_sizes"):
        ds.model_config_from_official(SAVED | fields | {"hidden_sizes": 1})


def test_base_weights_have_scales_in_fp32(models, folders, tmp_path):
    """The format follows from the tensors: also if the configuration speaks of 4 bits."""
    form = q.Format(8, 128, 128, "f32")

    def change(name, stored):
        if export.storage_of(name, stored.shape, "fp8", False) != q.FP8_128:
            return kept(name, stored)
        numbers, scale = q.quantize(stored.read(), form)
        return [(name, "F8_E4M3", numbers), (re.sub("weight$", "weight_scale_inv", name), "F32", scale)]

    folder = rewrite(copy(folders["v4", "f32"], tmp_path), change)
    file = folder / "inference" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"expert_dtype": "fp4"}))
    want = {}
    for name, x in ds.to_official(models["v4"]).items():
        eight = export.storage_of(name, x.shape, "fp8", False) == q.FP8_128
        want[name] = q.dequantize(*q.quantize(x, form), form, x.shape[-1]) if eight else x
    same(ds.to_official(ds.load_checkpoint(folder)), want)


def test_the_draft_blocks_of_v4(folders, tmp_path):
    """Three blocks under `mtp`, though the configuration counts one; the Markov head has names of its own."""
    new = {"markov_head.embed.weight": "markov_w1.weight", "markov_head.head.weight": "markov_w2.weight"}

    def change(name, stored):
        for old, markov in new.items():
            name = name.replace(old, markov)
        return kept(name, stored)

    folder = rewrite(copy(folders["dspark", "bf16"], tmp_path), change)
    assert "mtp.2.markov_w1.weight" in find_tensors(folder)
    for file in (folder / "config.json", folder / "inference" / "config.json"):
        fields = json.loads(file.read_text())
        for key in ("dspark_n_routed_experts", "dspark_num_experts_per_tok", "dspark_n_activated_experts"):
            fields.pop(key, None)
        fields["num_nextn_predict_layers" if "hidden_size" in fields else "n_mtp_layers"] = 1
        file.write_text(json.dumps(fields))
    loaded = ds.load_checkpoint(folder)
    assert loaded.cfg == CONFIGS["dspark"]
    same(ds.to_official(loaded), ds.to_official(ds.load_checkpoint(folders["dspark", "bf16"])))


@pytest.mark.parametrize("dialect", ["modules", "saved"])
def test_dialects_of_transformers(models, folders, tmp_path, dialect):
    want = ds.to_official(ds.load_checkpoint(folders["v4", "bf16"]))
    if dialect == "modules":
        ds.save_checkpoint(models["v4"], tmp_path / "copy", "hf")
        names = set(find_tensors(tmp_path / "copy"))
        assert "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight" in names
        assert "model.layers.2.mlp.experts.gate_up_proj" in names and "lm_head.weight" in names
        assert "model.layers.1.self_attn.kv_norm.weight" in names
        assert "model.layers.1.self_attn.compressor.kv_norm.weight" in names
    else:

        def change(name, stored):
            name = re.sub("^hc_head_", "hc_head.hc_", re.sub("^embed.weight", "embed_tokens.weight", name))
            return kept("model." + name.replace("attn.kv_norm.", "attn.norm."), stored)

        rewrite(copy(folders["v4", "bf16"], tmp_path), change)
    same(ds.to_official(ds.load_checkpoint(tmp_path / "copy")), want)


def test_names_lead_back(models):
    names = [name for key in ("v4", "dspark") for name in official_shapes(models[key])]
    for name in names:
        assert official_name(name) == name
        if ".ffn.experts." not in name:
            assert official_name(hf_name(name)) == name
    assert len({hf_name(name) for name in names}) == len(set(names))
    assert official_name(hf_name("layers.3.ffn.experts.gate_up_proj")) == "layers.3.ffn.experts.gate_up_proj"
    assert set(FUSED) == {"gate_up_proj", "down_proj"}
    for name in official_shapes(models["v41"]):
        assert official_name(name) == name
