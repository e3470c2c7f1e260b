# SPDX-License-Identifier: Apache-2.0
"""One training step: batch -> losses -> gradients -> optimizer -> balance biases -> metrics."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dsv4_jax.config import Config
from dsv4_jax.data.batch import Batch, accumulation_parts
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.params import RouterBias
from dsv4_jax.optim.groups import list_groups
from dsv4_jax.optim.schedules import Clock
from dsv4_jax.train.objectives import Objective, objective_of
from dsv4_jax.train.state import (
    TrainState,
    abstract_model,
    optimizer,
    parameter_groups,
    part_of,
    schedule,
    split_trained,
    with_part,
)

Metrics = dict[str, Any]


def update_biases(model: DeepSeek, buffers: nnx.State, load_LE: jax.Array, speed: float, first: int = 0) -> nnx.State:
    """Router biases after a step: each moves by `speed` towards an even load (section 4.2.2).

    b_e += speed * sign(mean load - load_e), from the tokens of the whole batch, padding excluded; each
    bias of a layer that has two from its own modality's tokens (V4.1 section 4.2.2), one for both from
    all. The loads are those of the layers from `first` on; other layers' biases stay.
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


def gradient_norms(grads: nnx.State) -> dict[str, jax.Array]:
    """Norm of every gradient by the parameter's path, fp32; one a layer ([layers]) for stacked ones."""
    norms = {}
    for path, variable in nnx.to_flat_state(grads):
        axes = tuple(i for i, name in enumerate(variable.axes) if name != "layers")
        g = variable.get_value().astype(jnp.float32)
        norms[".".join(map(str, path))] = jnp.sqrt((g * g).sum(axes))
    return norms


def balance_metrics(load_LE: jax.Array, buffers: nnx.State, names: Sequence[str]) -> dict[str, jax.Array]:
    """How even the experts' loads are, over layers, and how far the router biases have gone.

    `load_max`: tokens of the fullest expert over the mean, in the worst layer, and `load_max/NAME` in each;
    `load_dead`: share of experts without a token; `load_entropy`: of a layer's loads over that of even ones, on
    average; `bias_max`. With loads of text and images [L, 2, E] there are all but the last of image tokens too,
    ending in `_image`; NaN without any.
    """
    if load_LE.ndim == 3:
        of_images = balance_metrics(load_LE[:, 1], buffers, names)
        del of_images["bias_max"]
        some = load_LE[:, 1].sum() > 0
        of_images = {f"{name}_image": jnp.where(some, value, jnp.nan) for name, value in of_images.items()}
        return balance_metrics(load_LE.sum(1), buffers, names) | of_images
    total = jnp.maximum(load_LE.sum(-1, keepdims=True), 1)
    entropy = jax.scipy.special.entr(load_LE / total).sum(-1) / max(math.log(load_LE.shape[-1]), 1e-9)
    biases = [v.get_value() for _, v in nnx.to_flat_state(buffers) if isinstance(v, RouterBias)]
    fullest = load_LE.max(-1) / jnp.maximum(load_LE.mean(-1), 1)
    return {f"load_max/{name}": x for name, x in zip(names, fullest, strict=True)} | {
        "load_max": fullest.max(),
        "load_dead": (load_LE == 0).mean(),
        "load_entropy": entropy.mean(),
        "bias_max": jnp.stack([jnp.abs(b).max() for b in biases] or [jnp.zeros(())]).max(),
    }


def layer_names(cfg: ModelConfig, layers: range) -> list[str]:
    """Return the names of layers in metrics: numbers, and `mtp` or `mtp.0`, `mtp.1` ... of draft blocks."""
    blocks = ["mtp"] if cfg.n_mtp_layers == 1 else [f"mtp.{i}" for i in range(cfg.n_mtp_layers)]
    return [str(i) if i < cfg.n_layers else blocks[i - cfg.n_layers] for i in layers]


def update_ratios(groups: Any, updates: Any, params: Any) -> dict[str, jax.Array]:
    """Norm of the update over the norm of the weights, for the parameters of every rule that moves some together."""
    norms: dict[str, list[jax.Array]] = {}
    for group, u, p in zip(list_groups(groups), jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        squares = jnp.stack([(x.astype(jnp.float32) ** 2).sum() for x in (u, p)])
        norms.setdefault(group.rule, []).append(squares)
    sums = {rule: jnp.sqrt(sum(found)) for rule, found in norms.items()}
    return {rule: up[0] / jnp.maximum(up[1], 1e-20) for rule, up in sums.items()}


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
        total = sum((weight * found[name] for name, weight in objective.weights.items()), jnp.zeros(()))
        return total, ({"loss": total} | found, load_LE)

    return loss


def make_train_step(
    cfg: Config, clock: Clock | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step as a pure function of state and batch, to be jitted with the state donated.

    Args:
        cfg: configuration of the run, or of a stage of it.
        clock: of the whole run, if it has stages.
    """
    clock = clock or cfg.legs[0].clock
    model, objective = abstract_model(cfg), objective_of(cfg)
    shapes, _ = split_trained(cfg, nnx.state(model, nnx.Param))
    tx, loss, groups = optimizer(cfg, shapes, clock), make_loss(cfg, objective), parameter_groups(cfg, shapes)
    moments = jax.eval_shape(tx.init, shapes)
    rate = schedule(cfg.optim, cfg.steps, clock)

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
        batch = objective.prepare(batch, state.step)
        trained, others = split_trained(cfg, state.params)
        (total, (found, load_LE)), grads = gradient(trained, others, state.buffers, batch)
        with jax.named_scope("optimizer"):
            updates, changed = tx.update(grads, part_of(state.opt_state, moments), trained)
            moved: Any = optax.apply_updates(trained, updates)
            params = nnx.merge_state(state.params, moved)
        buffers = state.buffers
        if objective.balances:
            buffers = update_biases(model, buffers, load_LE, cfg.routing.bias_speed, objective.layers.start)
        norms = gradient_norms(grads)
        norm = jnp.sqrt(sum((n * n).sum() for n in norms.values()))
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        # A step that is not finite is skipped whole: parameters, moments, the schedule's count and biases stay.
        after = (params, buffers, with_part(state.opt_state, changed))
        before = (state.params, state.buffers, state.opt_state)
        params, buffers, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        after = TrainState(params, buffers, opt_state, state.step + 1, state.skipped + ~finite)
        metrics = found | balance_metrics(load_LE, buffers, layer_names(cfg.model, objective.layers))
        metrics |= {f"update_ratio/{rule}": r for rule, r in update_ratios(groups, updates, trained).items()}
        metrics |= {
            "objective": total,
            "lr": rate(state.step - state.skipped),
            "grad_norm": norm,
            "grad_norms": norms,
            "tokens": (batch["segment_ids"] > 0).sum(),
            "finite": finite,
            "skipped": after.skipped,
        }
        return after, metrics

    return step
