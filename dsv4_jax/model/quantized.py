# SPDX-License-Identifier: Apache-2.0
"""Round keys and entries to the formats in which caches hold them, where `ComputeConfig.quantize` asks for it.

The gradient passes unchanged. V4 stores the channels that RoPE rotates in bfloat16 and the others in 8 bits. V4.1, with
CSA2, stores whole vectors: window keys in 8 bits and entries in 4. Index queries and
keys have 4 bits in both.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.model.config import ModelConfig
from dsv4_jax.ops.quantize import ENTRIES, FP4, ROWS_32, ROWS_64, fake_bfloat16, fake_quantize


def quantize_window(cfg: ModelConfig, kv: jax.Array) -> jax.Array:
    """Round rotated keys [..., S, K] of the sliding window."""
    if "window" not in cfg.quantize:
        return kv
    return fake_quantize(kv, ROWS_32) if cfg.kv_source_layers else _quantize_still(cfg, kv)


def quantize_entries(cfg: ModelConfig, entries: jax.Array) -> jax.Array:
    """Round rotated compressed entries [..., M, K]."""
    if "entries" not in cfg.quantize:
        return entries
    return fake_quantize(entries, ENTRIES) if cfg.kv_source_layers else _quantize_still(cfg, entries)


def quantize_index(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """Round rotated queries or keys [..., J] of the indexer; those of V4 are first mixed by a Hadamard matrix.

    The matrix is orthogonal, so that it leaves the scores alone. It spreads a large channel over all of them.
    """
    if "index" not in cfg.quantize:
        return x
    if not cfg.kv_source_layers:
        signs = jnp.asarray(hadamard(x.shape[-1]), x.dtype)  # 1 and -1: exact in every type
        mixed = jnp.matmul(x, signs, precision="highest", preferred_element_type=jnp.float32)
        x = (mixed * x.shape[-1] ** -0.5).astype(x.dtype)
    return fake_quantize(x, FP4)


def hadamard(n: int) -> np.ndarray:
    """Make the Hadamard matrix of Sylvester, n x n numbers 1 and -1; n is a power of two."""
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _quantize_still(cfg: ModelConfig, x: jax.Array) -> jax.Array:
    still, turning = x[..., : -cfg.rope_head_dim], x[..., -cfg.rope_head_dim :]
    return jnp.concatenate([fake_quantize(still, ROWS_64), fake_bfloat16(turning)], axis=-1)
