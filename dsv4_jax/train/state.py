# SPDX-License-Identifier: Apache-2.0
"""The state of a run: one pytree of parameters, buffers, optimizer state and step; and what of it a stage trains."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from dsv4_jax.config import Config, OptimConfig
from dsv4_jax.config.plugins import resolve
from dsv4_jax.mesh import current_mesh
from dsv4_jax.model.deepseek import DeepSeek, trace_structure
from dsv4_jax.optim import adamw_groups, grouped, v4_groups, v41_groups
from dsv4_jax.optim.groups import custom_groups
from dsv4_jax.optim.schedules import Clock, trapezoid
from dsv4_jax.section import ConfigError
from dsv4_jax.train.objectives import objective_of


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
        routes: experts of the batches to come, chosen ahead (`anticipation`).
    """

    params: Any
    buffers: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    routes: tuple[jax.Array, ...] = ()


def schedule(cfg: OptimConfig, steps: int, clock: Clock) -> optax.Schedule:
    """Learning rate by steps done before: linear warm-up, constant, cosine decay.

    The decay is over the last of all `steps`, or between two counts of tokens by the run's clock.
    """
    if cfg.decay_tokens:
        decay = cfg.decay_tokens
    else:
        decay, clock = (decay_start(cfg, steps, clock), steps), Clock()
    return trapezoid(cfg.learning_rate, cfg.end_learning_rate, cfg.warmup_steps, *decay, clock)


def decay_start(cfg: OptimConfig, steps: int, clock: Clock) -> int:
    """Return the number of steps before the first one of the decay."""
    return clock.steps(cfg.decay_tokens[0]) if cfg.decay_tokens else steps - cfg.decay_steps


def frozen(cfg: Config) -> str | None:
    """Return the pattern of the parameters that the objective or `train.frozen` leaves alone."""
    patterns = [cfg.train.frozen, *objective_of(cfg).frozen]
    return "|".join(f"(?:{pattern})" for pattern in patterns if pattern) or None


def split_trained(cfg: Config, params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The parameters that a stage trains, and the others.

    Raises:
        ConfigError: if `train.frozen` matches no parameter, or nothing is left to train.
    """
    flat = [(".".join(map(str, path)), path, v) for path, v in nnx.to_flat_state(params)]
    own, pattern = cfg.train.frozen, frozen(cfg)
    if own and not any(re.search(own, name) for name, _, _ in flat):
        raise ConfigError(f"train.frozen = {own!r} matches no parameter, such as {flat[0][0]}")
    stays = [pattern is not None and re.search(pattern, name) is not None for name, _, _ in flat]
    if all(stays):
        raise ConfigError(
            f"train.frozen = {own!r} and model.attention = {cfg.model.attention!r} leave nothing to train"
        )
    part = lambda which: nnx.from_flat_state([(p, v) for (_, p, v), s in zip(flat, stays, strict=True) if s == which])
    return part(False), part(True)


def parameter_groups(cfg: Config, params: Any, frozen: str | None = None) -> Any:
    """The `optim.Group` of every parameter; with `optim.make` all but frozen ones are of the rule "custom"."""
    optim = cfg.optim
    if optim.make:
        return custom_groups(params, frozen=frozen)
    tables = {
        "deepseek_v4": v4_groups,
        "deepseek_v41": functools.partial(
            v41_groups, engram_factor=optim.engram_factor, vision_factor=optim.vision_factor
        ),
        "adamw": adamw_groups,
    }
    return tables[optim.name](params, frozen=frozen, weight_decay=optim.weight_decay)


def optimizer(cfg: Config, params: Any, clock: Clock | None = None) -> optax.GradientTransformation:
    """Clipping of the gradient's global norm, then the configured rule of every parameter.

    Args:
        cfg: the run's configuration, or a stage's.
        params: the parameters that are trained, or their shapes, an `nnx.State`.
        clock: of the run, for the learning rate; that of `cfg` if absent.
    """
    optim, rate = cfg.optim, schedule(cfg.optim, cfg.steps, clock or cfg.legs[0].clock)
    # Without clipping the state has the same structure, so that a stage or a resumed run may switch it.
    clip = optax.clip_by_global_norm(optim.clip) if optim.clip else optax.identity()
    if optim.make:
        return optax.chain(clip, _custom(optim.make, rate, params))
    rules = grouped(
        rate,
        parameter_groups(cfg, params),
        momentum=optim.momentum,
        momentum_dtype=optim.momentum_dtype,
        coefficients=optim.coefficients,
        precision=None if optim.precision == "auto" else optim.precision,
        gram=optim.gram,
        batch_size=optim.batch_size or None,
        rms=optim.rms,
        tau=optim.tau,
        iterations=optim.sinkhorn_iterations,
        b1=optim.b1,
        b2=optim.b2,
        eps=optim.eps,
    )
    return optax.chain(clip, rules)


def _custom(name: str, rate: optax.Schedule, params: Any) -> optax.GradientTransformation:
    """Call the function that `optim.make` names.

    Raises:
        ConfigError: if there is none, or it fails or returns something else than a transformation.
    """
    make = resolve(name, "optim.make")
    try:
        tx = make(rate, params)
    except Exception as error:
        raise ConfigError(f"optim.make = {name!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(tx, optax.GradientTransformation):
        raise ConfigError(
            f"optim.make = {name!r} must return an optax.GradientTransformation, found {type(tx).__name__}"
        )
    return tx


def part_of(state: Any, like: Any) -> Any:
    """The leaves of `state` that `like` has too, by their paths, in the structure of `like`."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    return jax.tree.map_with_path(lambda path, _: leaves[jax.tree_util.keystr(path)], like)


def with_part(state: Any, part: Any) -> Any:
    """`state` with the leaves of `part` in place of its own."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(part)}
    return jax.tree.map_with_path(lambda path, leaf: leaves.get(jax.tree_util.keystr(path), leaf), state)


def abstract_model(cfg: Config) -> DeepSeek:
    """The model's structure, without arrays."""
    return trace_structure(cfg.model)


def abstract_state(cfg: Config) -> TrainState:
    """Shapes, types and shardings of a run's state."""
    whole = NamedSharding(current_mesh(), jax.P())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or whole)

    return jax.tree.map(placed, jax.eval_shape(lambda: init_state(cfg)))


def init_state(cfg: Config) -> TrainState:
    """A new run's state; call it under `jax.jit`, so that every array is made where it belongs.

    The optimizer's is that of all parameters that a stage trains.
    """
    _, params, buffers = nnx.split(DeepSeek(cfg.model, rngs=nnx.Rngs(cfg.train.seed)), nnx.Param, ...)
    trained = nnx.merge_state(*(split_trained(leg.cfg, params)[0] for leg in cfg.legs))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, buffers, optimizer(cfg, trained).init(trained), zero, zero)
