# SPDX-License-Identifier: Apache-2.0
"""Train DeepSeek-V4 in JAX and Flax.

Names are imported when they are first used, so that `from dsv4_jax import optim` loads neither the model nor tyro.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_jax import optim
    from dsv4_jax.config import Config
    from dsv4_jax.config_files import load_config
    from dsv4_jax.model.config import ModelConfig, model_config_from_official
    from dsv4_jax.model.deepseek import DeepSeek, Output
    from dsv4_jax.model.official import load_official, to_official
    from dsv4_jax.train import train
    from dsv4_jax.train.checkpoint import load_model
    from dsv4_jax.train.loop import run
    from dsv4_jax.validate import ConfigError, RunError

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "ConfigError": "validate",
    "DeepSeek": "model.deepseek",
    "ModelConfig": "model.config",
    "Output": "model.deepseek",
    "RunError": "validate",
    "load_config": "config_files",
    "load_model": "train.checkpoint",
    "load_official": "model.official",
    "model_config_from_official": "model.config",
    "run": "train.loop",
    "to_official": "model.official",
}

__all__ = [
    "Config",
    "ConfigError",
    "DeepSeek",
    "ModelConfig",
    "Output",
    "RunError",
    "load_config",
    "load_model",
    "load_official",
    "model_config_from_official",
    "optim",
    "run",
    "to_official",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in ("optim", "train"):  # packages; the second is a function too
        return importlib.import_module(f"dsv4_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dsv4_jax' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"dsv4_jax.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
