# SPDX-License-Identifier: Apache-2.0
"""Check a run before its first step and after it, for what otherwise goes wrong in silence."""

import math
import re
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv4_jax.config import Config
from dsv4_jax.config.plugins import failure, resolve
from dsv4_jax.config.sections import OBJECTIVES
from dsv4_jax.data.batch import abstract_batch, with_engram_rows
from dsv4_jax.mesh import abstract_mesh
from dsv4_jax.model.params import HashTable
from dsv4_jax.section import ConfigError
from dsv4_jax.train.custom import custom_metrics
from dsv4_jax.train.loggers import find_loggers
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.state import abstract_state
from dsv4_jax.train.step import make_train_step
from dsv4_jax.train.step_metrics import loss_metrics


def find_functions(cfg: Config) -> None:
    """Import the functions that the configuration names: the optimizer, the objective, losses, metrics and loggers.

    Raises:
        ConfigError: for a name that leads nowhere.
    """
    if cfg.optim.make:
        resolve(cfg.optim.make, "optim.make")
    for stage in cfg.resolved_stages:
        objective_of(stage.cfg)
    custom_metrics(cfg)
    find_loggers(cfg.train.loggers)


def trace_functions(cfg: Config) -> None:
    """Trace the step of every stage that calls functions of the configuration, on the stage's mesh, without arrays.

    Raises:
        ConfigError: if one of them fails or returns what it must not.
    """
    for stage in cfg.resolved_stages:
        train, mesh = stage.cfg.train, stage.cfg.mesh
        own = train.objective if train.objective not in OBJECTIVES else ""
        if not (own or stage.cfg.loss.extra or train.metrics):
            continue
        with abstract_mesh(mesh.data, mesh.expert, mesh.context):
            batch = with_engram_rows(abstract_batch(stage.cfg, stage.cfg.data.batch_size), stage.cfg.model)
            try:
                jax.eval_shape(make_train_step(stage.cfg, stage.clock), abstract_state(cfg), batch)
            except ConfigError:
                raise
            except Exception as error:
                if not own:
                    raise
                raise failure(error, resolve(own, "train.objective"), own, "train.objective") from error


def start_warnings(cfg: Config, metrics: dict[str, Any], buffers: nnx.State, new: bool = True) -> list[str]:
    """Return warnings about the first step of a new run or of a stage.

    Args:
        cfg: configuration of the run or of the stage.
        metrics: of the step, on the host.
        buffers: of the state.
        new: whether the step is the first of the run.

    Raises:
        RuntimeError: if a loss of the objective's weights is not among the metrics.
    """
    objective = objective_of(cfg)
    weights = objective.weights
    names = loss_metrics(dict.fromkeys(weights))
    if absent := names.keys() - metrics.keys():
        raise RuntimeError(f"the objective lacks {sorted(absent)}, which the configuration names")
    warnings = [f"{name} is 0 in the first step" for name in names if float(metrics[name]) == 0]
    expected, first = objective.uniform_loss, float(metrics["loss"])
    if new and not cfg.train.init_from and expected is not None and abs(first - expected) > 0.5:
        warnings.append(
            f"the first loss is {first:.2f}, far from ln(vocabulary) = {expected:.2f}: is model.init_std too large?"
        )
    return warnings + _hash_tables(cfg, buffers) + _gradients(cfg, metrics)


def _hash_tables(cfg: Config, buffers: nnx.State) -> list[str]:
    """Warn of hash tables that send more than 1.1 times the mean number of token ids to one expert."""
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
    """Warn of trained parameters whose gradient is 0, by path and layer of their stack."""
    indexed = "indexer_loss" in objective_of(cfg).weights
    no_images = math.isnan(float(metrics.get("moe/load_max_image", math.nan)))
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
