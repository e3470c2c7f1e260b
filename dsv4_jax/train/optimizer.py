# SPDX-License-Identifier: Apache-2.0
"""Make the optimizer of a run: the learning rate, the parameters that are trained, their groups and their rules."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dsv4_jax.config import Config, OptimConfig
from dsv4_jax.config.plugins import call, resolve
from dsv4_jax.optim import adamw_groups, grouped, v4_groups, v41_groups
from dsv4_jax.optim.groups import custom_groups
from dsv4_jax.optim.schedules import Clock, trapezoid
from dsv4_jax.section import ConfigError
from dsv4_jax.train.objectives import objective_of


def make_schedule(cfg: OptimConfig, steps: int, clock: Clock) -> optax.Schedule:
    """Return the learning rate as a function of the steps done: linear warm-up, constant, cosine decay.

    The decay takes the last `decay_steps` of `steps` or, with `decay_tokens`, runs between two token counts of `clock`.
    """
    if cfg.decay_tokens:
        decay = cfg.decay_tokens
    else:
        decay, clock = (decay_start(cfg, steps, clock), steps), Clock()
    return trapezoid(cfg.learning_rate, cfg.end_learning_rate, cfg.warmup_steps, *decay, clock)


def decay_start(cfg: OptimConfig, steps: int, clock: Clock) -> int:
    """Return the number of steps before the first one of the decay."""
    return clock.steps(cfg.decay_tokens[0]) if cfg.decay_tokens else steps - cfg.decay_steps


def frozen_pattern(cfg: Config) -> str | None:
    """Return the pattern of the parameters that the objective or `train.frozen` leaves alone."""
    patterns = [cfg.train.frozen, *objective_of(cfg).frozen]
    return "|".join(f"(?:{pattern})" for pattern in patterns if pattern) or None


def split_trained(cfg: Config, params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split the parameters into those that a stage trains and the others.

    Raises:
        ConfigError: if `train.frozen` matches no parameter, or nothing is left to train.
    """
    flat = [(".".join(map(str, path)), path, v) for path, v in nnx.to_flat_state(params)]
    own, pattern = cfg.train.frozen, frozen_pattern(cfg)
    if own and not any(re.search(own, name) for name, _, _ in flat):
        raise ConfigError(f"train.frozen = {own!r} matches no parameter, such as {flat[0][0]}")
    stays = [pattern is not None and re.search(pattern, name) is not None for name, _, _ in flat]
    if all(stays):
        raise ConfigError(
            f"train.frozen = {own!r} and model.attention = {cfg.model.attention!r} leave nothing to train"
        )
    part = lambda which: nnx.from_flat_state([(p, v) for (_, p, v), s in zip(flat, stays, strict=True) if s == which])
    return part(False), part(True)


def group_parameters(cfg: Config, params: Any, frozen: str | None = None) -> Any:
    """Return the `optim.Group` of every parameter; with `optim.make` all but frozen ones have the rule "custom"."""
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


def make_optimizer(cfg: Config, params: Any, clock: Clock | None = None) -> optax.GradientTransformationExtraArgs:
    """Make the optimizer: clip the gradient's global norm, then apply the configured rule of every parameter.

    Its `update` accepts `norm`, the global norm of the gradients, so that it is not computed twice.

    Args:
        cfg: configuration of the run or of one of its stages.
        params: the parameters that are trained, or their shapes, an `nnx.State`.
        clock: token counts of the run's steps, for the learning rate; those of `cfg` if absent.
    """
    optim, rate = cfg.optim, make_schedule(cfg.optim, cfg.steps, clock or cfg.resolved_stages[0].clock)
    # Without clipping the state has the same structure, so that a stage or a resumed run may switch it.
    clip = clip_by_norm(optim.clip) if optim.clip else optax.identity()
    if optim.make:
        return optax.chain(clip, _custom(optim.make, rate, params))
    rules = grouped(
        rate,
        group_parameters(cfg, params),
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


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Clip the global norm of the gradients as optax does; `update` accepts a `norm` that is computed already.

    Gradients are multiplied, which XLA does inside the operations that read them. optax divides: XLA stores the result.
    """

    def update(updates: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **extra_args: Any):
        del params, extra_args
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.where(norm < limit, 1, limit / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _custom(name: str, rate: optax.Schedule, params: Any) -> optax.GradientTransformation:
    """Call the function that `optim.make` names.

    Raises:
        ConfigError: if there is none, if it fails, or if it returns something else than a transformation.
    """
    tx = call(resolve(name, "optim.make"), name, "optim.make", rate, params)
    if not isinstance(tx, optax.GradientTransformation):
        raise ConfigError(
            f"optim.make = {name!r} must return an optax.GradientTransformation, found {type(tx).__name__}"
        )
    return tx


def part_of(state: Any, like: Any) -> Any:
    """Return the leaves of `state` whose paths `like` has too, in the structure of `like`."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    return jax.tree.map_with_path(lambda path, _: leaves[jax.tree_util.keystr(path)], like)


def with_part(state: Any, part: Any) -> Any:
    """Return `state` with the leaves of `part` in place of those with the same paths."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(part)}
    return jax.tree.map_with_path(lambda path, leaf: leaves.get(jax.tree_util.keystr(path), leaf), state)
