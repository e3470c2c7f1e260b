# SPDX-License-Identifier: Apache-2.0
"""Make the training step: batch -> losses -> gradients -> optimizer -> balance biases -> metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dsv4_jax.config import Config
from dsv4_jax.data.batch import Batch, accumulation_parts
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.params import RouterBias
from dsv4_jax.optim.schedules import Clock
from dsv4_jax.section import ConfigError
from dsv4_jax.train.custom import custom_metrics
from dsv4_jax.train.metric_names import OF_THE_LOOP
from dsv4_jax.train.objectives import Objective, objective_of
from dsv4_jax.train.optimizer import group_parameters, make_optimizer, make_schedule, part_of, split_trained, with_part
from dsv4_jax.train.state import TrainState, abstract_model
from dsv4_jax.train.step_metrics import (
    compute_gradient_norms,
    compute_norm,
    compute_update_ratios,
    loss_metrics,
    measure_balance,
    name_layers,
)

Metrics = dict[str, Any]


def update_biases(model: DeepSeek, buffers: nnx.State, load_LE: jax.Array, speed: float, first: int = 0) -> nnx.State:
    """Move every router bias by `speed` towards an even load of the experts (section 4.2.2).

    b_e += speed * sign(mean load - load_e), with the loads of the whole batch's real tokens. Where a layer has a bias
    for text and one for images, each moves by the tokens of its own modality (V4.1 section 4.2.2); a single bias moves
    by all tokens. `load_LE` has the layers from number `first` on; the biases of other layers stay.
    """
    flat = []
    for path, variable in nnx.to_flat_state(buffers):
        layers = [i - first for i in model.layers_of(path)]
        if isinstance(variable, RouterBias) and 0 <= layers[0] < len(load_LE):
            bias = variable.get_value()
            load = load_LE[jnp.array(layers)]
            if load.ndim == 3:
                load = load[:, int(path[-1] == "bias_vl")] if model.cfg.modality_bias else load.sum(1)
            load = load.reshape(bias.shape)
            variable = variable.replace(bias - speed * jnp.sign(load - load.mean(-1, keepdims=True)))
        flat.append((path, variable))
    return nnx.from_flat_state(flat)


def make_loss(
    cfg: Config, objective: Objective
) -> Callable[..., tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]]:
    """Return the weighted sum of losses as a function of parameters (in two parts), buffers, batch and counts.

    It also returns every loss by name, and the loads [layers, E].
    """
    graphdef = nnx.graphdef(abstract_model(cfg))

    def loss(
        trained: nnx.State, others: nnx.State, buffers: nnx.State, batch: Batch, count: dict[str, jax.Array]
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
        found, load_LE = objective.losses(nnx.merge(graphdef, trained, others, buffers), batch, count)
        if absent := objective.weights.keys() - found.keys():
            raise ConfigError(f"train.objective = {cfg.train.objective!r} returns no {', '.join(sorted(absent))}")
        if taken := found.keys() & {"objective", "skipped", *OF_THE_LOOP}:
            names = ", ".join(sorted(taken))
            raise ConfigError(f"train.objective = {cfg.train.objective!r} returns {names}, a name of another metric")
        total = sum((weight * found[name] for name, weight in objective.weights.items()), jnp.zeros(()))
        return total, ({"loss": total} | found, load_LE)

    return loss


def make_train_step(
    cfg: Config, clock: Clock | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return the step, a pure function of state and batch, to be jitted with the state donated.

    Args:
        cfg: configuration of the run or of one of its stages.
        clock: token counts of the steps of the whole run, if it has stages.
    """
    clock = clock or cfg.resolved_stages[0].clock
    model, objective = abstract_model(cfg), objective_of(cfg)
    shapes, _ = split_trained(cfg, nnx.state(model, nnx.Param))
    tx, loss, groups = make_optimizer(cfg, shapes, clock), make_loss(cfg, objective), group_parameters(cfg, shapes)
    moments = jax.eval_shape(tx.init, shapes)
    rate, custom = make_schedule(cfg.optim, cfg.steps, clock), custom_metrics(cfg)

    def gradient(trained: nnx.State, others: nnx.State, buffers: nnx.State, batch: Batch):
        """Weighted sum, losses, loads and gradient of a prepared batch, added up over its parts."""
        count = objective.denominators(batch)

        def part(batch: Batch):
            return jax.value_and_grad(loss, has_aux=True)(trained, others, buffers, batch, count)

        if cfg.train.accumulate == 1:
            return part(batch)
        parts = accumulation_parts(batch, cfg.train.accumulate)
        shapes = jax.eval_shape(part, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding.spec), shapes)
        return jax.lax.scan(lambda total, batch: (jax.tree.map(jnp.add, total, part(batch)), None), zeros, parts)[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # Losses and gradients, of the whole batch.
        batch = objective.prepare(batch, state.step)
        trained, others = split_trained(cfg, state.params)
        (total, (found, load_LE)), grads = gradient(trained, others, state.buffers, batch)
        with jax.named_scope("norms"):
            norms = compute_gradient_norms(grads)
            norm = compute_norm(jnp.concatenate([jnp.atleast_1d(n) for n in norms.values()]))
        # New parameters and router biases. The optimizer's state has moments of what other stages train, too.
        with jax.named_scope("optimizer"):
            updates, changed = tx.update(grads, part_of(state.opt_state, moments), trained, norm=norm)
            moved: Any = optax.apply_updates(trained, updates)
            params = nnx.merge_state(state.params, moved)
        buffers = state.buffers
        if objective.balances:
            buffers = update_biases(model, buffers, load_LE, cfg.routing.bias_speed, objective.layers.start)
        # Whether the step counts.
        # fp32 must hold the norm's square: clipping computes it, and AdamW's second moments are parts of it.
        finite = jnp.isfinite(total) & jnp.isfinite(norm * norm)
        # A step that is not finite is skipped whole: parameters, moments, the schedule's count and biases stay.
        after = (params, buffers, with_part(state.opt_state, changed))
        before = (state.params, state.buffers, state.opt_state)
        params, buffers, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        after = TrainState(params, buffers, opt_state, state.step + 1, state.skipped + ~finite)
        metrics = loss_metrics(found) | measure_balance(load_LE, buffers, name_layers(cfg.model, objective.layers))
        metrics |= compute_update_ratios(groups, updates, trained)
        metrics |= custom(trained, grads, updates, batch)
        metrics |= {
            "train/objective": total,
            "lr": rate(state.step - state.skipped),
            "grad_norm": norm,
            "grad_norms": norms,
            "tokens": (batch["segment_ids"] > 0).sum(),
            "finite": finite,
            "train/skipped": after.skipped,
        }
        return after, metrics

    return step
