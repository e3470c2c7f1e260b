# SPDX-License-Identifier: Apache-2.0
"""Describe a run before it starts: its stages, model, optimizer and memory, and its step compiled for absent TPUs."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType

from dsv4_jax.config import Config, MeshConfig
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import abstract_batch
from dsv4_jax.mesh import AXES, abstract_mesh
from dsv4_jax.model.counts import operations_per_token
from dsv4_jax.ops.grouped_matmul import explain_choice
from dsv4_jax.section import ConfigError
from dsv4_jax.train import describe
from dsv4_jax.train.checks import trace_functions
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.programs import POLICY
from dsv4_jax.train.state import abstract_state
from dsv4_jax.train.step import make_train_step

_COLLECTIVE = re.compile(
    r"= (.*?) (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter|ragged-all-to-all)(?:-start)?\("
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


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
        yield from (describe.describe_objective(objective_of(cfg).weights), optimizer, "", parameters, "")
        yield from describe.describe_placement(config, stage)
        yield from describe.describe_activations(cfg)
    if devices is not None:
        yield from ("", *compile_for(config, stage, devices))


def collectives(program: str) -> list[tuple[str, int, tuple[int, ...]]]:
    """List every collective of a compiled program: its kind, bytes of its result on a device, its largest shape."""
    found = []
    for line in program.splitlines():
        if match := _COLLECTIVE.search(line):
            arrays = [
                (_BYTES.get(kind, 4), tuple(int(n) for n in dims.split(",") if n))
                for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            ]
            size = sum(width * math.prod(shape) for width, shape in arrays)
            found.append((match[2], size, max((shape for _, shape in arrays), key=math.prod)))
    return found


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


def compile_for(run: Config, stage: ResolvedStage, devices: np.ndarray) -> list[str]:
    """Compile the training step of a stage for devices that need not exist; describe it, a line for each property."""
    cfg, mesh = stage.cfg, jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        batch = abstract_batch(cfg, cfg.data.batch_size)
        step = jax.jit(make_train_step(cfg, stage.clock), donate_argnums=0, compiler_options=POLICY.repeated)
        program = step.trace(abstract_state(run), batch).lower(lowering_platforms=("tpu",)).compile()
        product = explain_choice(cfg.model.expert_matmul)
    memory, text = program.memory_analysis(), program.as_text()
    lines = [f"compiled    for {devices.size} x {devices.flat[0].device_kind}", f"experts     {product}"]
    if memory is not None:
        held, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        lines.append(f"memory      {held:,} bytes of state and batch and {temporary:,} temporary, per device")
    flops = (program.cost_analysis() or {}).get("flops")
    if flops:
        lines.append(f"operations  {flops:,.0f} a step and device, loop bodies counted once")
    moved: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for kind, size, _ in collectives(text):
        moved[kind] += size
        count[kind] += 1
    for kind in sorted(count):
        lines.append(f"collective  {count[kind]} {kind}, {moved[kind]:,} bytes a device, loop bodies counted once")
    return lines
