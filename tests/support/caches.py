# SPDX-License-Identifier: Apache-2.0
"""What caches hold, for comparisons."""

from typing import Any

import jax
import numpy as np

from dsv4_jax.model.cache import Cache


def kept_values(cache: Cache) -> list[Any]:
    """All that a cache keeps of its rows: their last tokens, and the entries that are complete."""
    leaves = []
    for layer in (layer for group in cache.layers for layer in group):
        leaves += jax.tree.leaves(layer.recent)
        for x in jax.tree.leaves(layer.entries):
            made = np.asarray(cache.length_B) // -(-cache.capacity // x.shape[2])
            leaves.append(np.where(np.arange(x.shape[2])[:, None] < made[:, None, None], x, 0))
    return [*leaves, *jax.tree.leaves(cache.history)]
