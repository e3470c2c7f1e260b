# SPDX-License-Identifier: Apache-2.0
"""Call functions that a configuration names inside the training step: losses (`loss.extra`), metrics (`train.metrics`).

docs/extending.md defines their arguments and results.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.config import Config
from dsv4_jax.config.plugins import call, resolve
from dsv4_jax.data.batch import Batch
from dsv4_jax.section import ConfigError

ExtraLoss = Callable[[Any, Any, Batch, dict[str, jax.Array]], jax.Array]


def extra_weights(cfg: Config) -> dict[str, float]:
    """Return the weights of the losses of `loss.extra` that are in the weighted sum, by the metric's name."""
    return {_metric(name): weight for name, weight in cfg.loss.extra.items() if weight}


def extra_losses(cfg: Config) -> dict[str, ExtraLoss]:
    """Return the losses of `loss.extra` by the metric's name: functions of model, outputs, batch and counts.

    Raises:
        ConfigError: for a name that leads nowhere. The functions raise it for a result that is no scalar.
    """

    def loss(name: str) -> ExtraLoss:
        function = resolve(name, "loss.extra")
        return lambda *given: _scalar(call(function, name, "loss.extra", *given), f"loss.extra = {name!r}")

    return {_metric(name): loss(name) for name in cfg.loss.extra}


def custom_metrics(cfg: Config) -> Callable[[Any, Any, Any, Batch], dict[str, jax.Array]]:
    """Return the function of parameters, gradients, updates and batch that computes all metrics of `train.metrics`.

    Raises:
        ConfigError: for a name that leads nowhere. The function raises it for a result that is no dict of scalars, and
            for two metrics of one name.
    """
    functions = {name: resolve(name, "train.metrics") for name in cfg.train.metrics}

    def compute(*given: Any) -> dict[str, jax.Array]:
        metrics: dict[str, jax.Array] = {}
        for name, function in functions.items():
            found = call(function, name, "train.metrics", *given)
            if not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
                raise ConfigError(
                    f"train.metrics = {name!r} must return a dict of scalars by name, found {type(found).__name__}"
                )
            for key, value in found.items():
                if f"custom/{key}" in metrics:
                    raise ConfigError(f"train.metrics = {name!r}: another function returns {key!r} too")
                metrics[f"custom/{key}"] = _scalar(value, f"train.metrics = {name!r}: {key!r}")
        return metrics

    return compute


def _metric(name: str) -> str:
    return f"loss/{name.rpartition(':')[2]}"


def _scalar(value: Any, what: str) -> jax.Array:
    """Return the value as fp32.

    Raises:
        ConfigError: if it is no real scalar.
    """
    try:
        x = jnp.asarray(value)
    except TypeError:
        raise ConfigError(f"{what} must be a scalar, found {type(value).__name__}") from None
    if x.shape or jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ConfigError(f"{what} must be a scalar, found {x.dtype}{list(x.shape)}")
    return x.astype(jnp.float32)
