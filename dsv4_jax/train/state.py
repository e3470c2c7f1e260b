# SPDX-License-Identifier: Apache-2.0
"""The state of a run: one pytree of parameters, buffers, optimizer state and step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from dsv4_jax.config import Config, OptimConfig
from dsv4_jax.model.deepseek import DeepSeek


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes.

    Attributes:
        params: the trainable parameters, an `nnx.State`.
        buffers: router biases and hash tables, an `nnx.State`.
        opt_state: state of the optax optimizer.
        step: steps done, int32.
    """

    params: Any
    buffers: Any
    opt_state: Any
    step: jax.Array


def schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of a step: linear warm-up, constant, cosine decay over the last steps."""
    flat = steps - cfg.warmup_steps - cfg.decay_steps
    return optax.join_schedules(
        [
            lambda step: cfg.learning_rate * (step + 1) / max(cfg.warmup_steps, 1),
            optax.constant_schedule(cfg.learning_rate),
            optax.cosine_decay_schedule(
                cfg.learning_rate, max(cfg.decay_steps, 1), alpha=cfg.end_learning_rate / cfg.learning_rate
            ),
        ],
        [cfg.warmup_steps, cfg.warmup_steps + flat],
    )


def is_trained(cfg: Config, path: tuple[Any, ...]) -> bool:
    """Whether the stage trains the parameter: the indexer warm-up trains the indexer alone."""
    return cfg.model.attention != "warmup" or "indexer" in path


def optimizer(cfg: Config) -> optax.GradientTransformation:
    """AdamW with global-norm clipping on the parameters of the stage; the others stay as they are."""
    optim = cfg.optim
    adamw = optax.adamw(
        schedule(optim, cfg.train.steps), optim.b1, optim.b2, optim.eps, weight_decay=optim.weight_decay
    )
    trained = optax.chain(optax.clip_by_global_norm(optim.clip), adamw)

    def labels(params: nnx.State) -> nnx.State:
        flat = [(path, "trained" if is_trained(cfg, path) else "frozen") for path, _ in nnx.to_flat_state(params)]
        return jax.tree.unflatten(jax.tree.structure(params), [label for _, label in flat])

    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, labels)


def abstract_model(cfg: Config) -> DeepSeek:
    """The model's structure, without arrays."""
    return jax.eval_shape(lambda: DeepSeek(cfg.model, rngs=nnx.Rngs(cfg.train.seed)))


def abstract_state(cfg: Config) -> TrainState:
    """Shapes, types and shardings of a run's state."""
    whole = NamedSharding(jax.sharding.get_mesh(), jax.P())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or whole)

    return jax.tree.map(placed, jax.eval_shape(lambda: init_state(cfg)))


def init_state(cfg: Config) -> TrainState:
    """A new run's state; call it under `jax.jit`, so that every array is made where it belongs."""
    _, params, buffers = nnx.split(DeepSeek(cfg.model, rngs=nnx.Rngs(cfg.train.seed)), nnx.Param, ...)
    return TrainState(params, buffers, optimizer(cfg).init(params), jnp.zeros((), jnp.int32))
