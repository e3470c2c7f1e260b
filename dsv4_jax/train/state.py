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
from dsv4_jax.data.images import row_budget
from dsv4_jax.mesh import act_spec, row_spec
from dsv4_jax.model.deepseek import DeepSeek, structure
from dsv4_jax.optim import adamw_groups, grouped, v4_groups, v41_groups
from dsv4_jax.optim.schedules import trapezoid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes.

    Attributes:
        params: the trainable parameters, an `nnx.State`.
        buffers: router biases and hash tables, an `nnx.State`.
        opt_state: state of the optax optimizer.
        step: steps done, int32.
        skipped: how many of them changed nothing, since they were not finite, int32.
    """

    params: Any
    buffers: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array


def schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate by steps done before: linear warm-up, constant, cosine decay over the last steps."""
    return trapezoid(cfg.learning_rate, cfg.end_learning_rate, cfg.warmup_steps, steps - cfg.decay_steps, steps)


def frozen(cfg: Config) -> str | None:
    """Pattern of the parameters that the stage leaves alone.

    The indexer warm-up trains the indexer only, the draft stage the draft blocks only, every other stage
    all but DSpark's draft blocks.
    """
    if cfg.train.stage == "draft":
        return r"^(?!mtp\b)"
    if cfg.model.attention == "warmup":
        return r"^(?!.*\bindexer\b)"
    return r"^mtp\b" if cfg.model.dspark_target_layer_ids else None


def parameter_groups(cfg: Config, params: Any) -> Any:
    """The `optim.Group` of every parameter."""
    tables = {"deepseek_v4": v4_groups, "deepseek_v41": v41_groups, "adamw": adamw_groups}
    return tables[cfg.optim.name](params, frozen=frozen(cfg), weight_decay=cfg.optim.weight_decay)


def optimizer(cfg: Config, params: Any) -> optax.GradientTransformation:
    """Clipping of the gradient's global norm, then the configured rule of every parameter.

    Args:
        cfg: the run's configuration.
        params: its parameters or their shapes, an `nnx.State`.
    """
    optim = cfg.optim
    rules = grouped(
        schedule(optim, cfg.train.steps),
        parameter_groups(cfg, params),
        momentum=optim.momentum,
        momentum_dtype=optim.momentum_dtype,
        coefficients=optim.coefficients,
        precision=None if optim.precision == "auto" else optim.precision,
        tau=optim.tau,
        b1=optim.b1,
        b2=optim.b2,
        eps=optim.eps,
    )
    return optax.chain(optax.clip_by_global_norm(optim.clip), rules)


def abstract_model(cfg: Config) -> DeepSeek:
    """The model's structure, without arrays."""
    return structure(cfg.model)


def _mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """The mesh that is set, without devices if they need not exist."""
    mesh, abstract = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
    return mesh if mesh.abstract_mesh == abstract else abstract


def abstract_state(cfg: Config) -> TrainState:
    """Shapes, types and shardings of a run's state."""
    whole = NamedSharding(_mesh(), jax.P())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or whole)

    return jax.tree.map(placed, jax.eval_shape(lambda: init_state(cfg)))


def batch_spec(name: str, rank: int) -> jax.P:
    """Where an array of a batch lies: rows are split, and positions if it has some; a row's images stay together."""
    return row_spec(rank) if name in ("patches", "image_grids") else act_spec(rank)


def abstract_batch(cfg: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch of so many rows, on the mesh that is set."""
    length = -(-cfg.data.seq_len // cfg.mesh.context) * cfg.mesh.context
    names = ["ids", "segment_ids", "targets", "mtp_targets"]
    shapes: dict[str, tuple[int, ...]] = {}
    if budget := row_budget(cfg):
        names.append("token_types")
        shapes["patches"] = budget.patches, 3, *(cfg.model.vision_patch_size,) * 2
        shapes["image_grids"] = budget.images, 4
    shapes = dict.fromkeys(names, (length,)) | shapes

    def struct(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(_mesh(), batch_spec(name, 1 + len(shape)))
        return jax.ShapeDtypeStruct((rows, *shape), jnp.float32 if name == "patches" else jnp.int32, sharding=sharding)

    return {name: struct(name, shape) for name, shape in shapes.items()}


def init_state(cfg: Config) -> TrainState:
    """A new run's state; call it under `jax.jit`, so that every array is made where it belongs."""
    _, params, buffers = nnx.split(DeepSeek(cfg.model, rngs=nnx.Rngs(cfg.train.seed)), nnx.Param, ...)
    return TrainState(
        params, buffers, optimizer(cfg, params).init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    )
