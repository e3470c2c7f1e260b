# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: its sections, its keys, and how files and flags give them."""

from dsv4_jax.config.root import Config, ResolvedStage, Stage
from dsv4_jax.config.sections import (
    AnticipationConfig,
    DataConfig,
    LossConfig,
    MeshConfig,
    OptimConfig,
    RoutingConfig,
    SpikesConfig,
    TrainConfig,
)
from dsv4_jax.model.config import ModelConfig

__all__ = [
    "AnticipationConfig",
    "Config",
    "DataConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "ResolvedStage",
    "RoutingConfig",
    "SpikesConfig",
    "Stage",
    "TrainConfig",
]
