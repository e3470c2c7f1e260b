# SPDX-License-Identifier: Apache-2.0
"""What a configuration amounts to, in lines of text: layers, parameters, objective, optimizer, placement."""

import collections
import math
from collections.abc import Sequence

import jax
import jax.extend as jex
from flax import nnx

from dsv4_jax import optim
from dsv4_jax.config import Config
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import Batch, abstract_batch, with_engram_rows
from dsv4_jax.mesh import RULES
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.deepseek import trace_structure
from dsv4_jax.optim.groups import count_matrices, list_groups
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.state import (
    abstract_model,
    abstract_state,
    frozen,
    parameter_groups,
    schedule,
    split_trained,
)
from dsv4_jax.train.step import make_loss


def parameter_counts(cfg: ModelConfig) -> tuple[int, int]:
    """Parameters of the model, and how many of them one token of pre-training uses (no array is made).

    Of an Engram's table a token uses a row for each n-gram; it uses no draft blocks of DSpark.
    """
    _, params, _ = nnx.split(trace_structure(cfg), nnx.Param, ...)
    dspark, columns = bool(cfg.dspark_target_layer_ids), (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
    total = used = 0
    for path, variable in nnx.to_flat_state(params):
        shape = dict(zip(variable.axes, variable.get_value().shape, strict=True))
        if "rows" in shape:
            shape["rows"] -= variable.spare
        total += math.prod(shape.values())
        if "rows" in shape:
            shape["rows"] = columns
        if "experts" in shape:
            shape["experts"] = cfg.n_activated_experts
        used += 0 if dspark and path[0] == "mtp" else math.prod(shape.values())
    return total, used


def operations_per_token(cfg: ModelConfig, S: int) -> tuple[float, float]:
    """Floating-point operations of a training step per token, in matrices and in attention, for rows of S.

    Six a parameter that a token uses, but for the embedding's row, and once more for each MTP block's use
    of the head; attention to the window, to the entries that a query sees on average and to those that
    the indexer scores, forward once and backward twice.
    """
    table = cfg.vocab_size * cfg.dim
    mtp = 0 if cfg.dspark_target_layer_ids else cfg.n_mtp_layers  # DSpark is not pre-trained
    matrices = 6.0 * (parameter_counts(cfg)[1] - table + mtp * table)
    attention = 0.0
    drafts = (LayerSpec("window"),) * mtp
    for spec in (*cfg.layer_specs, *drafts):
        seen = S / (2 * spec.ratio) if spec.ratio else 0.0
        if spec.indexed and cfg.attention != "dense":
            attention += 3 * 2 * cfg.index_n_heads * cfg.index_head_dim * seen
        selected = cfg.attention == "sparse" and (spec.indexed or spec.mode == "reuse")
        read = min(seen, cfg.index_topk) if selected else seen
        attention += 3 * 4 * cfg.n_heads * cfg.head_dim * (min(cfg.window_size, S / 2) + read)
    return matrices, attention


def describe_model(cfg: ModelConfig) -> list[str]:
    """Layer plan and parameter counts, a line each."""
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
    return [*lines, f"attention   {cfg.attention}, YaRN {'on' if cfg.yarn else 'off'}"]


_UNITS = (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")


def describe_stages(cfg: Config) -> list[str]:
    """The stages as a table, a line each, and what in it is our choice."""
    count = lambda n: next(f"{n / size:.5g}{letter}" for size, letter in _UNITS if n >= size or size == 1)
    rows = [
        ("stage", "from", "to", "tokens", "steps", "rows x positions", "batch", "learning rate", "attention", "also")
    ]
    shown = {"data.batch_size", "data.seq_len", "optim.learning_rate", "model.attention"}
    for leg in cfg.legs:
        data, optim, chosen = leg.cfg.data, leg.cfg.optim, set(leg.stage.chosen)
        mark = lambda text, *keys, chosen=chosen: text + "*" * bool(chosen & set(keys))
        rate = schedule(optim, leg.cfg.steps, leg.clock)
        rates = [f"{rate(step):.3g}" for step in (leg.first, leg.last - 1)]
        tokens = leg.clock.tokens(leg.first), leg.clock.tokens(leg.last)
        also = [mark(f"{k} = {v!r}", k) for k, v in leg.stage.changes.items() if k not in shown]
        rows.append(
            (
                leg.stage.name,
                count(tokens[0]),
                mark(count(tokens[1]), "until"),
                count(tokens[1] - tokens[0]),
                f"{leg.last - leg.first:,}",
                f"{data.batch_size:,} x {data.seq_len:,}",
                mark(count(data.batch_size * data.seq_len), "data.batch_size"),
                mark(" to ".join(dict.fromkeys(rates)), "optim.learning_rate"),
                leg.cfg.model.attention,
                ", ".join(also),
            )
        )
    some = any(leg.stage.chosen for leg in cfg.legs)
    return [*columns(rows), *["* our choice, where the report of the model is silent"] * some]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def describe_objective(weights: dict[str, float]) -> str:
    """The objective as a sum."""
    return "objective   " + " + ".join(name if w == 1 else f"{w:g} {name}" for name, w in weights.items())


def describe_optimizer(cfg: Config) -> tuple[str, str]:
    """How many parameters each rule moves, in a line; and a table with a line for every parameter."""
    params = nnx.state(abstract_model(cfg), nnx.Param)
    groups = parameter_groups(cfg, params, frozen(cfg))
    sizes: collections.Counter[str] = collections.Counter()
    matrices = 0
    for x, group in zip(jax.tree.leaves(params), list_groups(groups), strict=True):
        sizes[group.rule] += x.size
        matrices += count_matrices(group, x.shape).total()
    moved = [f"{rule} {size:,}" + f" in {matrices:,} matrices" * (rule == "muon") for rule, size in sizes.most_common()]
    return f"optimizer   {cfg.optim.make or cfg.optim.name}: {', '.join(moved)}", optim.describe(
        params, groups, cfg.optim.rms
    )


def describe_placement(cfg: Config, leg: ResolvedStage | None = None) -> list[str]:
    """Where parameters lie on the mesh that is set: a line for all of one shape and spec, and their bytes.

    Bytes of gradients are those of a stage, the first if not said.

    Parameters that a mesh axis would split, if it divided them, are named.
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
    trained, _ = split_trained((leg or cfg.legs[0]).cfg, state.params)
    held = (("parameters", state.params), ("gradients", trained), ("optimizer", state.opt_state))
    return [*lines, "bytes per device: " + ", ".join(f"{name} {_bytes(tree):,}" for name, tree in held)]


def describe_activations(cfg: Config) -> list[str]:
    """Bytes on each device of one part of the batch, and of what is kept for its backward pass, by tracing.

    What a layer needs while it runs comes on top; a compiled step (`topology`) tells that too.
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
