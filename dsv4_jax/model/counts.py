# SPDX-License-Identifier: Apache-2.0
"""Count a model's parameters and the operations of a training step."""

import math

from flax import nnx

from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.deepseek import trace_structure


def parameter_counts(cfg: ModelConfig) -> tuple[int, int]:
    """Count the model's parameters, and those that one token of pre-training uses; no array is made.

    A token uses one row of an Engram's table for each n-gram and its activated experts, and no draft blocks of DSpark.
    """
    _, params, _ = nnx.split(trace_structure(cfg), nnx.Param, ...)
    dspark, columns = bool(cfg.dspark_target_layer_ids), (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
    total = used = 0
    for path, variable in nnx.to_flat_state(params):
        shape = dict(zip(variable.axes, variable.get_value().shape, strict=True))
        if "rows" in shape:
            shape["rows"] -= variable.spare
        total += math.prod(shape.values())
        if "rows" in shape:
            shape["rows"] = columns
        if "experts" in shape:
            shape["experts"] = cfg.n_activated_experts
        used += 0 if dspark and path[0] == "mtp" else math.prod(shape.values())
    return total, used


def operations_per_token(cfg: ModelConfig, S: int) -> tuple[float, float]:
    """Count the floating-point operations of a training step per token, in matrices and in attention.

    Matrices: six for each parameter that a token uses, without the embedding, and six more for each use of the head by
    an MTP block. Attention: to the window, to the entries that a query reads on average and to those that the indexer
    scores; the forward pass once, the backward pass as twice that.

    Args:
        cfg: the model.
        S: positions of a row.
    """
    table = cfg.vocab_size * cfg.dim
    mtp = 0 if cfg.dspark_target_layer_ids else cfg.n_mtp_layers  # DSpark is not pre-trained
    return 6.0 * (parameter_counts(cfg)[1] - table + mtp * table), attention_per_token(cfg, S)


def attention_per_token(cfg: ModelConfig, S: int) -> float:
    """Count the operations of a training step per token in attention alone, see `operations_per_token`."""
    attention = 0.0
    drafts = (LayerSpec("window"),) * (0 if cfg.dspark_target_layer_ids else cfg.n_mtp_layers)
    for spec in (*cfg.layer_specs, *drafts):
        seen = S / (2 * spec.ratio) if spec.ratio else 0.0
        if spec.indexed and cfg.attention != "dense":
            attention += 3 * 2 * cfg.index_n_heads * cfg.index_head_dim * seen
        selected = cfg.attention == "sparse" and (spec.indexed or spec.mode == "reuse")
        read = min(seen, cfg.index_topk) if selected else seen
        attention += 3 * 4 * cfg.n_heads * cfg.head_dim * (min(cfg.window_size, S / 2) + read)
    return attention
