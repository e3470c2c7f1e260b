# SPDX-License-Identifier: Apache-2.0
"""Rename tensors between the official names and those of transformers, for V4."""

import re

# Rules that lead from every dialect to the official names, in order. Transformers has two: names of its modules, and
# what its `save_pretrained` writes, which are official names but for a few. Official names match no rule.
_TO_OFFICIAL = [
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"^(layers\.\d+)\.self_attn\.", r"\1.attn."),
    (r"^(layers\.\d+)\.mlp\.", r"\1.ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_([ab])_proj\.", r".wq_\1."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.o_([ab])_proj\.", r".wo_\1."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    # The Markov head of V4's DSpark blocks.
    (r"\.(?:markov_head\.)?markov_w1(?:\.weight)?$", ".markov_head.embed.weight"),
    (r"\.(?:markov_head\.)?markov_w2(?:\.weight)?$", ".markov_head.head.weight"),
    # Scales of older files.
    (r"\.weight_scale_inv$", ".scale"),
]
_RULES = [(re.compile(pattern), new) for pattern, new in _TO_OFFICIAL]

# Rules that lead from official names to those of transformers' modules, in order.
_TO_HF = [
    (r"^head\.", "lm_head."),
    (r"^embed\.", "embed_tokens."),
    (r"^hc_head_", "hc_head.hc_"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn\.attn_sink$", ".attn.sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.wq_b\.", ".attn.compressor.indexer.q_b_proj."),
    (r"(\.compressor\.(?:indexer\.)?)norm\.", r"\1kv_norm."),
    (r"(\.compressor\.(?:indexer\.)?)wgate\.", r"\1gate_proj."),
    (r"\.ape$", ".position_bias"),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wq_([ab])\.", r".q_\1_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"^(?!lm_head)", "model."),
]

# The experts of a layer are one tensor there: [E, 2 F, D] with the rows of w1 before those of w3, and [E, D, F] of w2.
FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def official_name(name: str) -> str:
    """Return the official name of a tensor that may have a name of transformers; see `FUSED` for experts."""
    for pattern, new in _RULES:
        name = pattern.sub(new, name)
    return name


def hf_name(name: str) -> str:
    """Return the name of an official tensor in transformers' modules, which have no draft blocks: those keep theirs."""
    if name.startswith("mtp."):
        return name
    for pattern, new in _TO_HF:
        name = re.sub(pattern, new, name)
    return name
