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
from dsv4_jax.mesh import BATCH
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.params import RouterBias, whole
from dsv4_jax.ops.cross_entropy import cross_entropy
from dsv4_jax.optim.groups import group_leaves
from dsv4_jax.optim.schedules import Clock
from dsv4_jax.train.draft import anchor_count, choose_anchors, draft_losses, slot_targets, weights
from dsv4_jax.train.state import (
    TrainState,
    abstract_model,
    batch_spec,
    optimizer,
    parameter_groups,
    part_of,
    schedule,
    split_trained,
    with_part,
)

Metrics = dict[str, Any]


def objective_weights(cfg: Config) -> dict[str, float]:
    """Weight of every loss that the configuration puts into the objective, by name."""
    if cfg.train.stage == "draft":
        return {f"draft_{name}": getattr(cfg.loss, f"draft_{name}") for name in ("ce", "distance", "confidence")}
    weights = {"loss": 1.0, "mtp_loss": cfg.loss.mtp, "balance_loss": cfg.loss.balance}
    if cfg.model.attention != "dense":
        weights["indexer_loss"] = cfg.loss.indexer
    if cfg.model.attention == "warmup":
        weights = {"indexer_loss": cfg.loss.indexer}
    return {name: weight for name, weight in weights.items() if weight}


def model_inputs(batch: dict[str, jax.Array]) -> dict[str, Any]:
    """The part of a batch that the model reads, by argument."""
    names = ("ids", "segment_ids", "token_types", "patches", "image_grids", "engram_rows")
    return {name: batch[name] for name in names if name in batch}


def forced_experts(cfg: ModelConfig, batch: dict[str, jax.Array]) -> list[jax.Array | None] | None:
    """Experts of every layer [B, S, k], None in hashed ones, from those that were chosen before for a batch.

    There they lie under `experts`, [B, S, learned layers, k]; None without.
    """
    if "experts" not in batch:
        return None
    chosen = iter(range(batch["experts"].shape[2]))
    return [None if spec.hashed else batch["experts"][:, :, next(chosen)] for spec in cfg.layer_specs]


def denominators(batch: dict[str, jax.Array], drafts: tuple[int, float] | None = None) -> dict[str, jax.Array]:
    """What the losses of a batch are divided by: its targets of either kind, and its real tokens.

    With anchors, also the weights of all slots; `drafts` = (slots of a draft, decay of their weights).
    """
    counts = {name: (batch[name] >= 0).sum() for name in ("targets", "mtp_targets")}
    counts["real"] = (batch["segment_ids"] > 0).sum()
    counts = {name: jnp.maximum(count, 1) for name, count in counts.items()}
    if drafts is not None:
        n, decay = drafts
        total = weights(slot_targets(batch["targets"], batch["anchors"], n), decay).sum()
        counts["drafts"] = jnp.where(total > 0, total, 1.0)
    return counts


def losses(
    model: DeepSeek, batch: dict[str, jax.Array], whole_batch: dict[str, jax.Array] | None = None
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Every loss of a batch, fp32 scalars by name, and the load of every layer's experts.

    The load is [layers, E] or, as `Block.load` tells, [layers, 2, E] of text and images. Beside the losses
    stands `clamped`: of the activations of all experts, the share that the SwiGLU clamps.

    Each is a sum over the batch divided by how many targets or real tokens there are: in `whole_batch`,
    its `denominators`, if the batch is a part of one, so that the parts add up.
    """
    targets, count = batch["targets"], whole_batch or denominators(batch)
    forced = forced_experts(model.cfg, batch)
    out = model.features(**model_inputs(batch), following=jnp.maximum(targets, 0), forced_experts=forced)
    head = whole(model.head)
    found = {"loss": cross_entropy(out.h, head, targets) / count["targets"]}
    if out.mtp is not None:
        found["mtp_loss"] = cross_entropy(out.mtp, head, batch["mtp_targets"]) / count["mtp_targets"]
    for name in ("balance", "indexer"):
        found[f"{name}_loss"] = sum((told[name] for told in out.layers), jnp.zeros(())) / count["real"]
    cfg = model.cfg
    activations = len(out.layers) * (cfg.n_activated_experts + 1) * cfg.moe_inter_dim  # of a token
    found["clamped"] = sum(told["clamped"] for told in out.layers) / activations / count["real"]
    return found, jnp.stack([told["load"] for told in out.layers])


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


def loaded_layers(cfg: Config) -> list[str]:
    """Names of the layers whose experts' loads a step tells: numbers, and `mtp` for a draft block."""
    layers = [str(i) for i in range(cfg.model.n_layers)]
    blocks = ["mtp"] if cfg.model.n_mtp_layers == 1 else [f"mtp.{i}" for i in range(cfg.model.n_mtp_layers)]
    if cfg.train.stage == "draft":
        return blocks
    return layers if cfg.model.dspark_target_layer_ids else layers + blocks


def update_ratios(groups: Any, updates: Any, params: Any) -> dict[str, jax.Array]:
    """Norm of the update over the norm of the weights, for the parameters of every rule that moves some together."""
    norms: dict[str, list[jax.Array]] = {}
    for group, u, p in zip(group_leaves(groups), jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        squares = jnp.stack([(x.astype(jnp.float32) ** 2).sum() for x in (u, p)])
        norms.setdefault(group.rule, []).append(squares)
    sums = {rule: jnp.sqrt(sum(found)) for rule, found in norms.items()}
    return {rule: up[0] / jnp.maximum(up[1], 1e-20) for rule, up in sums.items()}


def accumulation_parts(batch: dict[str, jax.Array], parts: int) -> dict[str, jax.Array]:
    """The batch in parts [parts, B / parts, ...]; every device's rows are split evenly among them.

    The row numbers in `image_grids` become those in the part.
    """

    def split(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        found = {name: x.reshape(parts, -1, *x.shape[1:]) for name, x in batch.items()}
        if "image_grids" in found:
            grids = found["image_grids"]
            rows = grids.shape[1]
            numbers = jax.lax.axis_index(BATCH) * rows + jnp.arange(rows)
            number = jnp.where(grids[..., 2] > 0, numbers[:, None], 0)
            found["image_grids"] = jnp.concatenate([number[..., None], grids[..., 1:]], -1)
        return found

    specs = {name: batch_spec(name, x.ndim) for name, x in batch.items()}
    out_specs = {name: jax.P(None, *spec) for name, spec in specs.items()}
    return jax.shard_map(split, in_specs=(specs,), out_specs=out_specs)(batch)


def make_objective(cfg: Config) -> Callable[..., tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]]:
    """The objective as a function of parameters (in two parts), buffers, batch and the whole batch's `denominators`.

    Beside it come every loss by name and the loads [layers, E].
    """
    graphdef, factors = nnx.graphdef(abstract_model(cfg)), objective_weights(cfg)

    def objective(
        trained: nnx.State,
        others: nnx.State,
        buffers: nnx.State,
        batch: dict[str, jax.Array],
        count: dict[str, jax.Array],
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
        model = nnx.merge(graphdef, trained, others, buffers)
        if cfg.train.stage == "draft":
            decay = drafts(cfg)[1]
            found, load_LE = draft_losses(model, model_inputs(batch), batch["targets"], batch["anchors"], decay)
            found = {name: value / count["drafts"] for name, value in found.items()}
        else:
            found, load_LE = losses(model, batch, count)
        total = sum((weight * found[name] for name, weight in factors.items()), jnp.zeros(()))
        return total, ({"loss": total} | found, load_LE)

    return objective


def drafts(cfg: Config) -> tuple[int, float]:
    """Slots of a draft and the decay of their weights."""
    n = cfg.model.dspark_block_size
    return n, cfg.loss.draft_decay or n


def make_train_step(
    cfg: Config, clock: Clock | None = None
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, Metrics]]:
    """The step as a pure function of state and batch, to be jitted with the state donated.

    Args:
        cfg: configuration of the run, or of a stage of it.
        clock: of the whole run, if it has stages.
    """
    clock = clock or cfg.legs[0].clock
    graphdef, params, _ = nnx.split(abstract_model(cfg), nnx.Param, ...)
    shapes, _ = split_trained(cfg, params)
    tx, objective, groups = optimizer(cfg, shapes, clock), make_objective(cfg), parameter_groups(cfg, shapes)
    moments = jax.eval_shape(tx.init, shapes)
    rate = schedule(cfg.optim, cfg.steps, clock)

    def gradient(state: TrainState, batch: dict[str, jax.Array]):
        """Objective, losses and loads, and the gradient, added up over the parts of the batch."""
        if cfg.train.stage == "draft":
            key = jax.random.fold_in(jax.random.key(cfg.train.seed), state.step)
            batch = batch | {"anchors": choose_anchors(batch["targets"], key, anchor_count(cfg))}
        count = denominators(batch, drafts(cfg) if cfg.train.stage == "draft" else None)
        trained, others = split_trained(cfg, state.params)

        def part(batch: dict[str, jax.Array]):
            return jax.value_and_grad(objective, has_aux=True)(trained, others, state.buffers, batch, count)

        if cfg.train.accumulate == 1:
            return part(batch)
        parts = accumulation_parts(batch, cfg.train.accumulate)
        shapes = jax.eval_shape(part, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding.spec), shapes)
        return jax.lax.scan(lambda total, batch: (jax.tree.map(jnp.add, total, part(batch)), None), zeros, parts)[0]

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        (total, (found, load_LE)), grads = gradient(state, batch)
        trained, _ = split_trained(cfg, state.params)
        with jax.named_scope("optimizer"):
            updates, changed = tx.update(grads, part_of(state.opt_state, moments), trained)
            moved: Any = optax.apply_updates(trained, updates)
            params = nnx.merge_state(state.params, moved)
        model = nnx.merge(graphdef, params, state.buffers)
        buffers = state.buffers
        if cfg.model.attention != "warmup":
            first = cfg.model.n_layers if cfg.train.stage == "draft" else 0
            buffers = update_biases(model, buffers, load_LE, cfg.routing.bias_speed, first)
        norms = gradient_norms(grads)
        norm = jnp.sqrt(sum((n * n).sum() for n in norms.values()))
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        # A step that is not finite is skipped whole: parameters, moments, the schedule's count and biases stay.
        after = (params, buffers, with_part(state.opt_state, changed))
        before = (state.params, state.buffers, state.opt_state)
        params, buffers, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        after = TrainState(params, buffers, opt_state, state.step + 1, state.skipped + ~finite)
        metrics = found | balance_metrics(load_LE, buffers, loaded_layers(cfg))
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
