# SPDX-License-Identifier: Apache-2.0
"""Find the first layer whose output or gradient is not finite. See docs/debugging.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax.config import Config
from dsv4_jax.data.batch import Batch, put_batch
from dsv4_jax.data.packing import Position
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.section import ConfigError
from dsv4_jax.train.checkpoint import Checkpoints
from dsv4_jax.train.feed import read_data, streams
from dsv4_jax.train.history import History, steps_done
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.objectives.pretrain import forced_experts
from dsv4_jax.train.optimizer import split_trained
from dsv4_jax.train.step import make_loss
from dsv4_jax.train.step_metrics import compute_gradient_norms


def find_nonfinite(cfg: Config, model: DeepSeek, batch: Batch) -> list[str]:
    """Name the first parameter, the first output, the losses and the first gradient that are not finite.

    It runs a forward and a backward pass of the whole batch on the mesh that is set and changes nothing. Outputs are
    looked at from the embedding to the head, gradients from the head to the embedding: the first one of each is where
    the fault starts.

    Args:
        cfg: the run, or the stage of it that the batch belongs to.
        model: with the parameters before the step.
        batch: arrays as in `data/batch.py`, on the devices.

    Returns:
        A line for each kind of fault; none if all is finite.
    """
    with ensure_mesh():
        faults = {
            "parameter": nonfinite_parameter(model),
            "output": nonfinite_output(model, batch),
            **dict(zip(("losses", "gradient"), _losses_and_gradient(cfg, model, batch), strict=True)),
        }
    return [f"{kind:<9}  {fault}" for kind, fault in faults.items() if fault]


def nonfinite_parameter(model: DeepSeek) -> str:
    """Name the first layer with a parameter that is not finite, and these parameters; empty if there is none."""
    values = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        axes = tuple(i for i, name in enumerate(variable.axes) if name != "layers")
        values[".".join(map(str, path))] = jnp.isfinite(variable.get_value()).all(axes)
    return _first_place(model, {name: np.asarray(finite) for name, finite in values.items()}, from_loss=False)


def nonfinite_output(model: DeepSeek, batch: Batch) -> str:
    """Name the first layer whose output is not finite, with its positions; empty if all outputs are finite."""
    places = ["vision tower", "aligner", *(_place(model, i) for i in range(model.cfg.n_layers)), "MTP block", "head"]
    forced = forced_experts(model.cfg, batch)
    for name, finite in zip(places, _find_finite_positions(model, batch, forced), strict=True):
        bad = np.argwhere(~np.asarray(finite))
        if len(bad):
            where = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "position"), bad[0].tolist(), strict=False))
            return f"{name}, {len(bad)} of {finite.size} positions, the first at {where}"
    return ""


@jax.jit
def _find_finite_positions(model: DeepSeek, batch: Batch, forced: Any) -> list[jax.Array]:
    """Return whether each position of every output is finite, in the order in which the outputs are computed.

    An output that the model or the batch does not have is the scalar True.
    """
    collect = ("vision", "streams") if "patches" in batch else ("streams",)
    inputs = {name: batch[name] for name in Inputs._fields if name in batch}
    out = model(**inputs, forced_experts=forced, collect=collect)
    images = [jnp.isfinite(x).all(-1) for x in out.collected.get("vision", []) if x is not None]
    layers = [jnp.isfinite(x).all((2, 3)) for x in out.collected["streams"] if x is not None]
    mtp = jnp.array(True) if out.mtp_logits is None else jnp.isfinite(out.mtp_logits).all(-1)
    return [*(images or [jnp.array(True)] * 2), *layers, mtp, jnp.isfinite(out.logits).all(-1)]


def nonfinite_gradient(model: DeepSeek, norms: Mapping[str, Any]) -> str:
    """Name the layer nearest to the loss whose gradient is not finite, and its parameters; empty if all are finite.

    Args:
        model: its structure suffices.
        norms: of every gradient by the parameter's path, as `step.compute_gradient_norms` makes them.
    """
    return _first_place(model, {name: np.isfinite(np.asarray(norm)) for name, norm in norms.items()}, from_loss=True)


def next_batch(cfg: Config) -> tuple[Config, Batch]:
    """Read the batch that follows the newest checkpoint of a run, and the configuration of the stage it belongs to.

    Experts that anticipatory routing chose ahead are not part of it.

    Raises:
        ConfigError: if the run has no checkpoint.
    """
    with Checkpoints(Path(cfg.train.run_dir) / "checkpoints", cfg.train.keep) as checkpoints:
        newest = checkpoints.newest()
    if newest is None:
        raise ConfigError(f"train.run_dir = {cfg.train.run_dir!r} holds no checkpoint")
    step, host = newest
    cfg = cfg.after(steps_done(step, host))
    stage, history = cfg.stage_at(step), History.from_host(host)
    data = read_data(cfg)[stage.number]
    progress = history.progress
    if (progress.stage, progress.identity) != (stage.number, data.identity):
        history.enter(stage, data.identity)
    with ensure_mesh(), streams(stage.cfg, data, Position(*progress.position)) as (stream, _):
        for _ in range(history.recovery.skip):
            next(stream)
        return stage.cfg, put_batch(next(stream), stream.own, stage.cfg.data.batch_size)


def _losses_and_gradient(cfg: Config, model: DeepSeek, batch: Batch) -> tuple[str, str]:
    """Name the losses that are not finite, and the first gradient."""
    objective = objective_of(cfg)
    loss = make_loss(cfg, objective)

    @jax.jit
    def check(params: nnx.State, buffers: nnx.State, batch: Batch) -> tuple[dict[str, jax.Array], Any]:
        batch = objective.prepare(batch, jnp.zeros((), jnp.int32))
        trained, others = split_trained(cfg, params)
        gradient = jax.value_and_grad(loss, has_aux=True)
        (_, (losses, _)), grads = gradient(trained, others, buffers, batch, objective.denominators(batch))
        return losses, compute_gradient_norms(grads)

    _, params, buffers = nnx.split(model, nnx.Param, ...)
    losses, norms = jax.device_get(check(params, buffers, batch))
    return ", ".join(x for x in objective.weights if not np.isfinite(losses[x])), nonfinite_gradient(model, norms)


def _first_place(model: DeepSeek, finite: Mapping[str, np.ndarray], from_loss: bool) -> str:
    """Name the layer where the first value is not finite, and the paths of such values in it.

    Args:
        model: its structure suffices.
        finite: whether the values are finite by the parameter's path; one per layer for stacked parameters.
        from_loss: go from the head to the embedding instead of from the embedding to the head.
    """
    blocks, end = model.cfg.n_layers + model.cfg.n_mtp_layers, ("head", "norm", "hc_head")
    found: dict[int, list[str]] = {}
    for name, values in finite.items():
        path = tuple(int(part) if part.isdigit() else part for part in name.split("."))
        layers: Sequence[int] = model.layers_of(path)
        within = ".".join(map(str, path[3 if path[0] == "groups" else 2 :]))
        if not layers:  # before or after all layers
            layers, within, values = [blocks if name.startswith(end) else -1], name, np.all(values, keepdims=True)
        for layer, ok in zip(layers, np.atleast_1d(values), strict=True):
            if not ok:
                found.setdefault(layer, []).append(within)
    if not found:
        return ""
    place = (max if from_loss else min)(found)
    names = found[place]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{_place(model, place)}: {', '.join(names[:4])}{more}"


def _place(model: DeepSeek, layer: int) -> str:
    """Name a layer by its number and kind; -1: the inputs, then the layers, the MTP or draft blocks, and the head."""
    cfg = model.cfg
    if 0 <= layer < cfg.n_layers:
        return f"layer {layer} ({cfg.layer_specs[layer].name})"
    if layer < 0:
        return "inputs"
    return f"mtp block {layer - cfg.n_layers}" if layer < cfg.n_layers + cfg.n_mtp_layers else "head"
