# SPDX-License-Identifier: Apache-2.0
"""Hold the state of a run: one pytree of parameters, buffers, optimizer state and step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from dsv4_jax.config import Config
from dsv4_jax.mesh import current_mesh
from dsv4_jax.model.deepseek import DeepSeek, trace_structure
from dsv4_jax.train.optimizer import make_optimizer, split_trained


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes.

    Attributes:
        params: the trainable parameters, an `nnx.State`.
        buffers: router biases and hash tables, an `nnx.State`.
        opt_state: state of the optax optimizer.
        step: steps done, int32.
        skipped: steps among them that changed nothing because they were not finite, int32.
        routes: experts chosen ahead for the next batches (`anticipation`).
    """

    params: Any
    buffers: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    routes: tuple[jax.Array, ...] = ()


def abstract_model(cfg: Config) -> DeepSeek:
    """Return the model's structure, without arrays."""
    return trace_structure(cfg.model)


def abstract_state(cfg: Config) -> TrainState:
    """Return the shapes, types and shardings of a run's state."""
    whole = NamedSharding(current_mesh(), jax.P())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or whole)

    return jax.tree.map(placed, jax.eval_shape(lambda: init_state(cfg)))


def init_state(cfg: Config) -> TrainState:
    """Make the state of a new run. Call it under `jax.jit`, which makes every array with its sharding.

    The optimizer's state has the moments of every parameter that some stage of the run trains.
    """
    _, params, buffers = nnx.split(DeepSeek(cfg.model, rngs=nnx.Rngs(cfg.train.seed)), nnx.Param, ...)
    trained = nnx.merge_state(*(split_trained(stage.cfg, params)[0] for stage in cfg.resolved_stages))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, buffers, make_optimizer(cfg, trained).init(trained), zero, zero)
