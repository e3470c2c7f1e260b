# SPDX-License-Identifier: Apache-2.0
"""Describe a run in lines of text: stages, layers, parameters, objective, optimizer, placement, activations."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.extend as jex
from flax import nnx

from dsv4_jax import optim
from dsv4_jax.config import Config
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import Batch, abstract_batch, with_engram_rows
from dsv4_jax.mesh import BATCH, RULES
from dsv4_jax.model.cache import count_bytes_per_token, init_cache, measure_cache
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.counts import parameter_counts
from dsv4_jax.model.deepseek import trace_structure
from dsv4_jax.optim.groups import count_matrices, list_groups
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.optimizer import frozen_pattern, group_parameters, make_schedule, split_trained
from dsv4_jax.train.state import abstract_model, abstract_state
from dsv4_jax.train.step import make_loss


def describe_model(cfg: ModelConfig) -> list[str]:
    """Describe the layers and the numbers of parameters."""
    model = trace_structure(cfg)
    total, active = parameter_counts(cfg)
    lines = [f"parameters  {total:,}, of which a token uses {active:,}"]
    title = "layers"
    for group in model.scan_groups:
        end = group.start + group.period * group.repeats
        kinds = ", ".join(spec.name for spec in cfg.layer_specs[group.start : group.start + group.period])
        span = f"{group.start}" if end == group.start + 1 else f"{group.start}-{end - 1}"
        lines.append(f"{title:10}  {span:>6}  {group.repeats} x [{kinds}]")
        title = ""
    if cfg.n_mtp_layers:
        kind = f"{cfg.n_mtp_layers} x [DSpark]" if cfg.dspark_target_layer_ids else LayerSpec("window").name
        lines.append(f"{'':10}  {'mtp':>6}  {kind}")
    lines.append(f"attention   {cfg.attention}, YaRN {'on' if cfg.yarn else 'off'}")
    return [*lines, *[f"quantised   {', '.join(cfg.quantize)}"] * bool(cfg.quantize)]


_UNITS = (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")


def describe_stages(cfg: Config) -> list[str]:
    """Describe the stages in a table; values that are our choice are marked."""
    count = lambda n: next(f"{n / size:.5g}{letter}" for size, letter in _UNITS if n >= size or size == 1)
    rows = [
        ("stage", "from", "to", "tokens", "steps", "rows x positions", "batch", "learning rate", "attention", "also")
    ]
    shown = {"data.batch_size", "data.seq_len", "optim.learning_rate", "model.attention"}
    for stage in cfg.resolved_stages:
        data, optim, chosen = stage.cfg.data, stage.cfg.optim, set(stage.declared.chosen)
        mark = lambda text, *keys, chosen=chosen: text + "*" * bool(chosen & set(keys))
        rate = make_schedule(optim, stage.cfg.steps, stage.clock)
        rates = [f"{rate(step):.3g}" for step in (stage.first, stage.last - 1)]
        tokens = stage.clock.tokens(stage.first), stage.clock.tokens(stage.last)
        also = [mark(f"{k} = {v!r}", k) for k, v in stage.declared.changes.items() if k not in shown]
        rows.append(
            (
                stage.declared.name,
                count(tokens[0]),
                mark(count(tokens[1]), "until"),
                count(tokens[1] - tokens[0]),
                f"{stage.last - stage.first:,}",
                f"{data.batch_size:,} x {data.seq_len:,}",
                mark(count(data.batch_size * data.seq_len), "data.batch_size"),
                mark(" to ".join(dict.fromkeys(rates)), "optim.learning_rate"),
                stage.cfg.model.attention,
                ", ".join(also),
            )
        )
    some = any(stage.declared.chosen for stage in cfg.resolved_stages)
    return [*columns(rows), *["* our choice, where the report of the model is silent"] * some]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows of cells; return a line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def describe_objective(weights: dict[str, float]) -> str:
    """Describe the objective as a sum of weighted losses."""
    return "objective   " + " + ".join(name if w == 1 else f"{w:g} {name}" for name, w in weights.items())


def describe_cache(cfg: ModelConfig) -> str:
    """Describe the cache of a text of the model in its sparse stage: bytes for each token, and for the last ones."""
    cfg = dataclasses.replace(cfg, attention="sparse")
    sizes = jax.sharding.get_abstract_mesh().shape
    rows = math.prod(sizes[axis] for axis in BATCH)
    kinds = measure_cache(jax.eval_shape(lambda: init_cache(cfg, rows, 1)))
    fixed = sum(kinds[kind] for kind in ("windows", "unfinished windows", "other")) / rows
    plain, small = (count_bytes_per_token(cfg, quantised=quantised) for quantised in (False, True))
    share = small / (2 * 8 * 128 * 2 * cfg.n_layers)
    tokens = 2**30 / small if small else math.inf
    return (
        f"cache       {plain:,.0f} bytes a token in {cfg.dtype}, and {fixed / 2**20:,.2f} MiB a text; in formats of "
        f"the releases {small:,.2f} bytes ({share:.3%} of 8 heads of 128 in bf16), {tokens:,.0f} tokens in a GiB"
    )


def describe_optimizer(cfg: Config) -> tuple[str, str]:
    """Return a line with the number of parameters that each rule moves, and a table with a line for every parameter."""
    params = nnx.state(abstract_model(cfg), nnx.Param)
    _, left_alone = split_trained(cfg, params)
    groups = group_parameters(cfg, params, frozen_pattern(cfg) if jax.tree.leaves(left_alone) else None)
    sizes: collections.Counter[str] = collections.Counter()
    matrices = 0
    for x, group in zip(jax.tree.leaves(params), list_groups(groups), strict=True):
        sizes[group.rule] += x.size
        matrices += count_matrices(group, x.shape).total()
    moved = [f"{rule} {size:,}" + f" in {matrices:,} matrices" * (rule == "muon") for rule, size in sizes.most_common()]
    return f"optimizer   {cfg.optim.make or cfg.optim.name}: {', '.join(moved)}", optim.describe(
        params, groups, cfg.optim.rms
    )


def describe_placement(cfg: Config, stage: ResolvedStage | None = None) -> list[str]:
    """Describe the placement of parameters on the mesh that is set: a line for all of one shape and spec.

    Parameters that a mesh axis would split if it divided them are named. The bytes of gradients are those of stage
    `stage`, or of the first stage.
    """
    state = abstract_state(cfg)
    sizes = jax.sharding.get_abstract_mesh().shape
    alike: dict[tuple, list[str]] = {}
    whole: dict[str, list[str]] = {}
    for path, v in nnx.to_flat_state(state.params):
        x, name = v.get_value(), str(path[-1])
        key = (x.shape, x.sharding.spec, x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)))
        alike.setdefault(key, []).append(name)
        split = {mesh_axis for s in x.sharding.spec if s for mesh_axis in ((s,) if isinstance(s, str) else s)}
        for axis, size in zip(v.axes, x.shape, strict=True):
            names, count = RULES.get(axis, ()), math.prod(sizes[mesh_axis] for mesh_axis in RULES.get(axis, ()))
            if names and not split.issuperset(names) and size % count:
                why = f"{axis} = {size} is not a multiple of mesh.{' x mesh.'.join(names)} = {count}"
                whole.setdefault(why, []).append(name)
    rows = [("shape", "spec", "bytes per device", "parameters")]
    for (shape, spec, size), names in sorted(alike.items(), key=lambda item: -item[0][2] * len(item[1])):
        count = f"{len(names)} x {size:,}" if len(names) > 1 else f"{size:,}"
        placed = ", ".join("-" if axis is None else str(axis) for axis in spec)
        rows.append((" x ".join(map(str, shape)), placed, count, " ".join(dict.fromkeys(names))))
    lines = columns(rows)
    lines += [f"not fully split: {' '.join(dict.fromkeys(names))} ({why})" for why, names in whole.items()]
    trained, _ = split_trained((stage or cfg.resolved_stages[0]).cfg, state.params)
    held = (("parameters", state.params), ("gradients", trained), ("optimizer", state.opt_state))
    return [*lines, "bytes per device: " + ", ".join(f"{name} {_bytes(tree):,}" for name, tree in held)]


def describe_activations(cfg: Config) -> list[str]:
    """Count the bytes on each device of one part of the batch and of what its forward pass keeps for the backward pass.

    They come from a trace of the loss. What a layer needs while it runs comes on top: compile the step for that
    (`plan --topology`).
    """
    state, batch = abstract_state(cfg), abstract_batch(cfg, cfg.data.batch_size // cfg.train.accumulate)
    objective, given = objective_of(cfg), _bytes(batch)
    loss, batch = make_loss(cfg, objective), with_engram_rows(batch, cfg.model)
    batch = jax.eval_shape(objective.prepare, batch, state.step)

    def residuals(trained: nnx.State, others: nnx.State, buffers: nnx.State, batch: Batch):
        count = objective.denominators(batch)
        return jax.vjp(lambda p: loss(p, others, buffers, batch, count), trained, has_aux=True)[1]

    program = jax.make_jaxpr(residuals)(*split_trained(cfg, state.params), state.buffers, batch).jaxpr
    kept = {v: v.aval for v in program.outvars if not isinstance(v, jex.core.Literal)}
    size = _bytes([x for v, x in kept.items() if v not in program.invars])
    rows, remat = batch["ids"].shape[0], cfg.model.remat
    told = f"activations {size:,} bytes a device kept for the backward pass of that (model.remat = {remat})"
    return [f"batch       {given:,} bytes a device for {rows} rows", told]


def _bytes(tree: object) -> int:
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
