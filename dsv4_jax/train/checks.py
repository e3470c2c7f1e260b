# SPDX-License-Identifier: Apache-2.0
"""Checks on the first step of a run, for what otherwise goes wrong in silence."""

import math
import re
from typing import Any

import numpy as np
from flax import nnx

from dsv4_jax.config import Config
from dsv4_jax.model.params import HashTable
from dsv4_jax.train.objectives import objective_of


def start_warnings(cfg: Config, metrics: dict[str, Any], buffers: nnx.State, new: bool = True) -> list[str]:
    """What looks wrong about the first step of a new run or of a stage; `metrics` are the step's, on the host.

    Raises:
        RuntimeError: if a loss that the configuration names is not in the objective.
    """
    objective = objective_of(cfg)
    weights = objective.weights
    if absent := weights.keys() - metrics.keys():
        raise RuntimeError(f"the objective lacks {sorted(absent)}, which the configuration names")
    warnings = [f"{name} is 0 in the first step" for name in weights if float(metrics[name]) == 0]
    expected, first = objective.uniform_loss, float(metrics["loss"])
    if new and not cfg.train.init_from and expected is not None and abs(first - expected) > 0.5:
        warnings.append(
            f"the first loss is {first:.2f}, far from ln(vocabulary) = {expected:.2f}: is model.init_std too large?"
        )
    return warnings + _hash_tables(cfg, buffers) + _gradients(cfg, metrics)


def _hash_tables(cfg: Config, buffers: nnx.State) -> list[str]:
    warnings = []
    for path, variable in nnx.to_flat_state(buffers):
        if isinstance(variable, HashTable):
            for layer, table in enumerate(np.asarray(variable.get_value())):
                count = np.bincount(table.reshape(-1), minlength=cfg.model.n_routed_experts)
                if count.max() > 1.1 * count.mean() + 1:
                    name = ".".join(map(str, path))
                    warnings.append(
                        f"{name}[{layer}] sends {count.max()} token ids to one expert, {count.mean():.0f} on average"
                    )
    return warnings


def _gradients(cfg: Config, metrics: dict[str, Any]) -> list[str]:
    """Parameters of the stage that got no gradient, by path and layer of their stack."""
    indexed = "indexer_loss" in objective_of(cfg).weights
    no_images = math.isnan(float(metrics.get("load_max_image", math.nan)))
    warnings = []
    for name, norm in metrics["grad_norms"].items():
        if "indexer" in name.split(".") and not indexed:
            continue
        if no_images and re.match("vision|aligner|image_", name):
            continue
        layers = np.flatnonzero(np.atleast_1d(norm) == 0)
        if layers.size:
            where = f" of layers {layers.tolist()} of its stack" if np.ndim(norm) else ""
            warnings.append(f"{name}{where} got no gradient in the first step")
    return warnings
