# SPDX-License-Identifier: Apache-2.0
"""Train DeepSeek-V4 in JAX and Flax."""

from dsv4_jax.model.config import ConfigError, ModelConfig, model_config_from_official
from dsv4_jax.model.deepseek import DeepSeek, Output
from dsv4_jax.model.official import load_official, to_official

__all__ = [
    "ConfigError",
    "DeepSeek",
    "ModelConfig",
    "Output",
    "load_official",
    "model_config_from_official",
    "to_official",
]
