# SPDX-License-Identifier: Apache-2.0
"""Train DeepSeek-V4 in JAX and Flax.

Names are imported when they are first used, so that `from dsv4_jax import optim` loads neither the model nor tyro.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_jax import optim
    from dsv4_jax.config import Config
    from dsv4_jax.config.files import load_config
    from dsv4_jax.generate import generate
    from dsv4_jax.model.config import ModelConfig
    from dsv4_jax.model.deepseek import DeepSeek, Output
    from dsv4_jax.section import ConfigError, RunError
    from dsv4_jax.train import train
    from dsv4_jax.train.checkpoint import load_model
    from dsv4_jax.train.run import run
    from dsv4_jax.weights.checkpoint import load_checkpoint
    from dsv4_jax.weights.configs import model_config_from_official
    from dsv4_jax.weights.export import save_checkpoint
    from dsv4_jax.weights.names import load_official, to_official

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "ConfigError": "section",
    "DeepSeek": "model.deepseek",
    "ModelConfig": "model.config",
    "Output": "model.deepseek",
    "RunError": "section",
    "load_checkpoint": "weights.checkpoint",
    "load_config": "config.files",
    "load_model": "train.checkpoint",
    "load_official": "weights.names",
    "model_config_from_official": "weights.configs",
    "run": "train.run",
    "save_checkpoint": "weights.export",
    "to_official": "weights.names",
}

__all__ = [
    "Config",
    "ConfigError",
    "DeepSeek",
    "ModelConfig",
    "Output",
    "RunError",
    "generate",
    "load_checkpoint",
    "load_config",
    "load_model",
    "load_official",
    "model_config_from_official",
    "optim",
    "run",
    "save_checkpoint",
    "to_official",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in ("generate", "optim", "train"):  # packages; `generate` and `train` are functions too
        return importlib.import_module(f"dsv4_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dsv4_jax' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"dsv4_jax.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
