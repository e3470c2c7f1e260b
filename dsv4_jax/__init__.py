# SPDX-License-Identifier: Apache-2.0
"""Train DeepSeek-V4 in JAX and Flax."""

from dsv4_jax import optim
from dsv4_jax.config import Config
from dsv4_jax.config_files import load_config
from dsv4_jax.model.config import ModelConfig, model_config_from_official
from dsv4_jax.model.deepseek import DeepSeek, Output
from dsv4_jax.model.official import load_official, to_official
from dsv4_jax.validate import ConfigError, RunError

__all__ = [
    "Config",
    "ConfigError",
    "DeepSeek",
    "ModelConfig",
    "Output",
    "RunError",
    "load_config",
    "load_official",
    "model_config_from_official",
    "optim",
    "to_official",
]
