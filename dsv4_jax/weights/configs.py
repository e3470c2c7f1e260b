# SPDX-License-Identifier: Apache-2.0
"""Read and write the two configuration files of published weights, `inference/config.json` and `config.json`.

The first is flat and has the names of `ModelConfig`. The second is that of Hugging Face, which V4.1 nests.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4_jax.model.compute import ComputeConfig
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.section import ConfigError, from_fields
from dsv4_jax.weights.folder import read_json

# Fields of the flat files of how weights are stored or served, not of what the model computes.
_STORAGE = ("dtype", "expert_dtype", "scale_fmt", "scale_dtype", "max_batch_size", "max_seq_len")
# Fields that have one value in every published model; the equations here are that value's.
_FIXED: dict[str, Any] = {
    "n_shared_experts": 1,
    "score_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
}
# Keys that official files lack: how a model begins, and a temperature that is 1 in all of them.
_UNNAMED = ("init_std", "hc_init_scale", "hash_seed", "gate_temp")
# What every model of V4.1 has, and its files do not name.
_V41: dict[str, Any] = dict(hc_single_pass=True, query_norm=False, modality_bias=True, n_hash_layers=0)

# Names of Hugging Face -> flat names. Fields that have the same name in both are not listed.
_HF = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "moe_intermediate_size": "moe_inter_dim",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "num_experts_per_tok": "n_activated_experts",
    "num_hash_layers": "n_hash_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "rms_norm_eps": "norm_eps",
    "routed_scaling_factor": "route_scale",
    "scoring_func": "score_func",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
_HF_VISION = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "downsample_ratio": "vision_downsample_ratio",
    "rope_theta": "vision_rope_theta",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}
_HF_YARN = {
    "original_max_position_embeddings": "original_seq_len",
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
# Fields of Hugging Face that say nothing of the model: carried over by a conversion, written anew, and left out.
CARRIED = "transformers_version use_cache initializer_range bos_token_id eos_token_id pad_token_id".split()
_WRITTEN = "architectures model_type torch_dtype dtype quantization_config expert_dtype max_position_embeddings".split()
_IGNORED = """output_router_logits router_aux_loss_coef router_jitter_noise auto_map partial_rotary_factor
rope_parameters layer_types compress_rates mlp_layer_types _name_or_path return_dict output_hidden_states
output_attentions chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type""".split()
_NO_MODEL = {*CARRIED, *_WRITTEN, *_IGNORED}
_HF_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_HF_LAYERS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def model_config_from_official(fields: Mapping[str, Any]) -> ModelConfig:
    """Make the configuration of an official `inference/config.json` or `config.json`, given as a dict.

    Fields of storage and serving (`dtype`, `expert_dtype`, `architectures`, ...) are ignored. Fields with one possible
    value are checked. Any other unknown field is refused.

    Raises:
        ConfigError: naming the unknown, missing or unusable field.
    """
    if "hidden_size" in fields or "text_config" in fields:
        fields = _flatten(fields)
    values: dict[str, Any] = dict(_V41) if "kv_source_layers" in fields else {}
    for key, value in fields.items():
        if key in _FIXED:
            if value != _FIXED[key]:
                raise ConfigError(f"{key} = {value!r} is not supported, expected {_FIXED[key]!r}")
        elif key not in _STORAGE:
            values[key] = tuple(value) if isinstance(value, list) else value
    # The draft blocks of V4's DSpark have the experts of the backbone, and the fields count only the first of them.
    if values.get("dspark_target_layer_ids") and "kv_source_layers" not in fields:
        values.setdefault("dspark_n_routed_experts", values.get("n_routed_experts"))
        values.setdefault("dspark_n_activated_experts", values.get("n_activated_experts"))
        values["n_mtp_layers"] = len(values.get("compress_ratios", ())) - values.get("n_layers", 0)
    return from_fields(ModelConfig, values, "the official configuration")


def _flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the fields of Hugging Face into flat ones; refuse a fixed field of another value."""
    fields = dict(fields)
    text, vision = fields.pop("text_config", {}), fields.pop("vision_config", None)
    fields |= text
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if key in _HF_FIXED:
            if value != _HF_FIXED[key]:
                raise ConfigError(f"{key} = {value!r} is not supported, expected {_HF_FIXED[key]!r}")
        elif key == "rope_scaling":
            flat |= _flatten_yarn(value)
        elif key not in _NO_MODEL:
            flat[_HF.get(key, key)] = value
    for key, value in (vision or {}).items():
        if key not in _NO_MODEL:
            flat[_HF_VISION.get(key, key)] = value
    if "layer_types" in fields:
        flat |= _flatten_saved(fields)
    return flat


def _flatten_yarn(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Take the constants of YaRN from `rope_scaling`; no scaling is a factor of 1."""
    if scaling is None:
        return {"rope_factor": 1.0}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ConfigError(f"rope_scaling has the type {kind!r}, expected 'yarn'")
    return {flat: scaling[key] for key, flat in _HF_YARN.items() if key in scaling}


def _flatten_saved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Take what transformers' own `save_pretrained` spells otherwise; it saves no draft blocks."""
    kinds, rates = fields["layer_types"], {**_HF_LAYERS, **(fields.get("compress_rates") or {})}
    if unknown := set(kinds) - rates.keys():
        raise ConfigError(f"layer_types has {', '.join(map(repr, sorted(unknown)))}, expected {', '.join(_HF_LAYERS)}")
    flat: dict[str, Any] = {}
    if "compress_ratios" not in fields:
        flat = {"compress_ratios": [rates[kind] for kind in kinds], "n_mtp_layers": 0}
    if hashed := fields.get("mlp_layer_types"):
        flat["n_hash_layers"] = hashed.count("hash_moe")
        if any(kind != "hash_moe" for kind in hashed[: flat["n_hash_layers"]]):
            raise ConfigError(f"mlp_layer_types = {hashed!r}: hash_moe layers must be the first ones")
    if (part := fields.get("partial_rotary_factor")) is not None and "qk_rope_head_dim" not in fields:
        flat["rope_head_dim"] = int(part * fields["head_dim"])
    compress = (fields.get("rope_parameters") or {}).get("compress")
    if compress and "rope_scaling" not in fields:
        flat |= _flatten_yarn(None if compress.get("rope_type") == "default" else compress)
    return flat


def flat_fields(cfg: ModelConfig) -> dict[str, Any]:
    """Return the fields of `inference/config.json` for a model; `model_config_from_official` reads them back.

    A key that official files lack is written only if the model differs there from what the files imply.
    """
    given = {field.name for field in dataclasses.fields(ComputeConfig)} | {"engram_token_map"}
    keys = [field for field in dataclasses.fields(ModelConfig) if field.name not in given]
    implied = _V41 if cfg.kv_source_layers else {field.name: field.default for field in keys if field.name in _V41}
    implied = implied | {key: ModelConfig.__dataclass_fields__[key].default for key in _UNNAMED}
    fields: dict[str, Any] = {}
    for field in keys:
        value = getattr(cfg, field.name)
        part = field.name.partition("_")[0]
        used = {
            "engram": cfg.engram_layer_ids,
            "vision": cfg.vision_n_layers,
            "image": cfg.vision_n_layers,
            "dspark": cfg.dspark_target_layer_ids,
            "candidate": cfg.candidate_source_layer >= 0,
            "kv": cfg.kv_source_layers,
        }
        used["index"] = field.name != "index_source_layers" or cfg.kv_source_layers
        if used.get(part, True) and value != implied.get(field.name, dataclasses.MISSING):
            fields[field.name] = list(value) if isinstance(value, tuple) else value
    if cfg.engram_layer_ids and not cfg.engram_num_embeddings:
        del fields["engram_num_embeddings"]
    return fields | {key: _FIXED[key] for key in ("n_shared_experts", "score_func")}


def hf_fields(cfg: ModelConfig, storage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `config.json` for a model; `storage` are those of how the weights are stored."""
    flat = flat_fields(cfg)
    names = {new: old for old, new in _HF.items()}
    vision = {old: flat.pop(new) for old, new in _HF_VISION.items() if new in flat}
    yarn = {old: flat.pop(new) for old, new in _HF_YARN.items() if new in flat}
    text = {names.get(key, key): value for key, value in flat.items()}
    text |= {"hidden_act": "silu", "topk_method": "noaux_tc", "norm_topk_prob": True, **_HF_FIXED}
    text["rope_scaling"] = {"type": "yarn", **yarn}
    text["max_position_embeddings"] = int(cfg.original_seq_len * cfg.rope_factor)
    if cfg.kv_source_layers:
        top = {key: text.pop(key) for key in ("image_token_id",) if key in text}
        return {**top, "text_config": text, **({"vision_config": vision} if vision else {}), **storage}
    # Transformers knows the ratios 4 and 128 by number. Other ones need the names of the layers' kinds.
    ratios = cfg.compress_ratios[: cfg.n_layers]
    others = {ratio for ratio in ratios if ratio not in (0, 4)}
    if others - {128} and len(others) == 1:
        kinds = {0: "sliding_attention", 4: "compressed_sparse_attention"}
        text["layer_types"] = [kinds.get(ratio, "heavily_compressed_attention") for ratio in ratios]
        text["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": others.pop()}
    return {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **text, **storage}


def read_model_config(folder: Path) -> ModelConfig:
    """Read the configuration of a folder of weights, from `config.json` or `inference/config.json`.

    Raises:
        ConfigError: if neither is there or can be used, or the two describe different models.
    """
    files = [file for file in (folder / "config.json", folder / "inference" / "config.json") if file.is_file()]
    if not files:
        raise ConfigError(f"{folder} has neither config.json nor inference/config.json")
    configs = []
    for file in files:
        try:
            configs.append(model_config_from_official(read_json(file)))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
    for field in dataclasses.fields(ModelConfig):
        values = [getattr(cfg, field.name) for cfg in configs]
        if values[0] != values[-1]:
            raise ConfigError(f"{files[0]} and {files[1]} differ in {field.name}: {values[0]!r} and {values[1]!r}")
    return configs[0]
