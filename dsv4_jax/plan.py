# SPDX-License-Identifier: Apache-2.0
"""Describe a run before it starts: its stages, model, optimizer and memory, and its step compiled for absent TPUs."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from dsv4_jax.config import Config, MeshConfig
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import abstract_batch
from dsv4_jax.mesh import AXES, abstract_mesh
from dsv4_jax.model.config import LayerSpec
from dsv4_jax.model.counts import operations_per_token
from dsv4_jax.ops import attention, grouped_matmul, indexer
from dsv4_jax.roofline import Program, chip_of
from dsv4_jax.section import ConfigError
from dsv4_jax.train import describe
from dsv4_jax.train.checks import trace_functions
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.programs import POLICY
from dsv4_jax.train.state import abstract_state
from dsv4_jax.train.step import make_train_step


def plan(config: Config, number: int = 1, topology: str | None = None) -> Iterator[str]:
    """Describe a run and one of its stages, line by line; nothing needs a device.

    Args:
        config: the run.
        number: which stage to describe, from 1.
        topology: a TPU slice such as `v5p:2x2x1` to compile the stage's step for, too.

    Raises:
        ConfigError: if there is no such stage or slice, or the slice does not fit the mesh.
    """
    if not 1 <= number <= len(config.resolved_stages):
        raise ConfigError(f"--stage {number}: the run has {len(config.resolved_stages)} stages, numbered from 1")
    config.check_steps()
    stage = config.resolved_stages[number - 1]
    cfg = stage.cfg
    trace_functions(config)
    devices = slice_devices(topology, cfg.mesh) if topology else None
    if config.stages:
        yield from (*describe.describe_stages(config), "", f"Stage {number}, {stage.declared.name}:")
    with abstract_mesh(cfg.mesh.data, cfg.mesh.expert, cfg.mesh.context):
        optimizer, parameters = describe.describe_optimizer(cfg)
        matrices, attention = operations_per_token(cfg.model, cfg.data.seq_len)
        yield from describe.describe_model(cfg.model)
        yield f"operations  {matrices:.3g} a token in matrices, {attention:.3g} in attention, forward and backward"
        yield describe.describe_cache(cfg.model)
        yield from (describe.describe_objective(objective_of(cfg).weights), optimizer, "", parameters, "")
        yield from describe.describe_placement(config, stage)
        yield from describe.describe_activations(cfg)
    if devices is not None:
        yield from ("", *compile_for(config, stage, devices))


def slice_devices(topology: str, sizes: MeshConfig) -> np.ndarray:
    """Return the devices of a TPU slice such as `v5p:2x2x1`, in the order of a mesh [data, expert, context].

    Raises:
        ConfigError: if there is no TPU compiler or no such slice, or its devices are not the mesh's.
    """
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"no TPU slice {topology!r} to compile for: {why}; the compiler comes with pip install 'dsv4_jax[tpu]'"
        ) from error
    shape = dataclasses.astuple(sizes)
    if math.prod(shape) != len(devices):
        raise ConfigError(
            f"{topology} has {len(devices)} devices, but mesh.data x mesh.expert x mesh.context = "
            f"{' x '.join(map(str, shape))} = {math.prod(shape)}"
        )
    return np.array(devices).reshape(shape)


def compile_step(run: Config, stage: ResolvedStage, devices: np.ndarray) -> Any:
    """Compile the training step of a stage for TPUs [data, expert, context] that need not exist.

    Raises:
        ConfigError: if the devices have too little memory for it.
    """
    cfg, mesh = stage.cfg, jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        batch = abstract_batch(cfg, cfg.data.batch_size)
        step = jax.jit(make_train_step(cfg, stage.clock), donate_argnums=0, compiler_options=POLICY.repeated)
        lowered = step.trace(abstract_state(run), batch).lower(lowering_platforms=("tpu",))
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the step does not fit in the memory of {devices.size} x {devices.flat[0].device_kind}: {error}; more "
            "devices, a smaller data.batch_size, a larger train.accumulate or model.remat = 'full' need less"
        ) from error


def count_operations(cfg: Config) -> tuple[float, float]:
    """Count the operations of a step on each device: of the model, and with what `model.remat` computes again.

    The forward pass and twice that for the backward pass. `full` repeats the forward pass, `save_block_outputs` the
    attention.
    """
    tokens = cfg.data.batch_size * cfg.data.seq_len / math.prod(dataclasses.astuple(cfg.mesh))
    matrices, attention = (tokens * count for count in operations_per_token(cfg.model, cfg.data.seq_len))
    again = {"full": (matrices + attention) / 3, "save_block_outputs": attention / 3, "none": 0.0}[cfg.model.remat]
    return matrices + attention, matrices + attention + again


def explain_paths(cfg: Config) -> list[str]:
    """Describe the paths of experts, attention and indexer on the devices that we trace for, a line for each choice."""
    model, S = cfg.model, cfg.data.seq_len
    lines = [f"experts     {grouped_matmul.explain_choice(model.expert_matmul)}"]
    block = min(model.attention_block, S // cfg.mesh.context)
    queries = jax.ShapeDtypeStruct((1, block, model.index_n_heads, model.index_head_dim), model.compute_dtype)
    for mode, ratio in dict.fromkeys((spec.mode, spec.ratio) for spec in model.layer_specs if spec.ratio):
        M = S // ratio
        k = min(model.index_topk, M) if mode != "hca" and model.attention == "sparse" else 0
        lines.append(f"attention   {mode}/{ratio}: {attention.explain_choice(M, k, model.select)}")
        if LayerSpec(mode, ratio).indexed and model.attention != "dense":
            lines.append(f"indexer     {mode}/{ratio}: {indexer.explain_choice(M, k, queries)}")
    return lines


def compile_for(run: Config, stage: ResolvedStage, devices: np.ndarray) -> list[str]:
    """Compile the training step of a stage for devices that need not exist; describe it, a line for each property."""
    program, kind = compile_step(run, stage, devices), devices.flat[0].device_kind
    memory, costs, chip = program.memory_analysis(), Program(program.as_text()).costs(), chip_of(kind)
    model, computed = count_operations(stage.cfg)
    with jax.set_mesh(jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * 3)):
        paths = explain_paths(stage.cfg)
    lines = [f"compiled    for {devices.size} x {kind}", *paths]
    if memory is not None:
        held, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        lines.append(f"memory      {held:,} bytes of state and batch and {temporary:,} temporary, per device")
    counted = f"{costs.operations:.3g} a step and device in products, {computed:.3g} by the model's sizes"
    lines.append(f"operations  {counted}")
    for name in sorted(costs.count):
        sent = f"{costs.count[name]:,.0f} {name}, {costs.wire[name]:,.0f} bytes sent by a device"
        hidden = costs.hidden.get(name, 0.0) / costs.wire[name] if costs.wire[name] else 1.0
        lines.append(f"collective  {sent}, {hidden:.0%} of them beside other work")
    if chip:
        times = costs.times(chip)
        bound = max(times, key=times.__getitem__)
        parts = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times.items())
        share = model / chip.operations / times[bound]
        lines.append(f"roofline    {parts} a step at least: bound by {bound}, {share:.0%} model utilisation at most")
    if costs.unknown_loops:
        lines.append(f"loops       {costs.unknown_loops:.0f} counted once: rounds of exchanges, as with an even load")
    return lines
