# SPDX-License-Identifier: Apache-2.0
"""Compile programs of the published models for TPU slices that need not exist; hold them against the chip's roofline.

    JAX_PLATFORMS=cpu python benchmarks/tpu.py experts_16      # one program: a line of JSON for each figure

`benchmarks/run.py tpu` runs those of SHORT, `benchmarks/run.py steps` the whole steps, a process each: minutes and
several GB of memory. Needs libtpu (`pip install 'dsv4_jax[tpu]'`).
"""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experts import ACTIVATIONS, CHOICES, TOKENS, D, F, compile_layer, split_temporary
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from results import ROOT, Line

import dsv4_jax as ds
from dsv4_jax.config import Config, ModelConfig
from dsv4_jax.mesh import AXES, act_spec, row_spec
from dsv4_jax.model.attention import Attention
from dsv4_jax.model.counts import attention_per_token
from dsv4_jax.model.params import Params, apply_remat
from dsv4_jax.model.tables import make_tables
from dsv4_jax.plan import compile_step, count_operations, slice_devices
from dsv4_jax.roofline import Program, chip_of, needed_memory
from dsv4_jax.train.programs import POLICY

NAMES = {"v4_flash": "V4-Flash", "v4_pro": "V4-Pro", "v41_flash": "V4.1-Flash"}


def describe(name: str, program: Any, kind: str, model: float, computed: float, goal: float | None) -> Iterator[Line]:
    """Describe a compiled program.

    Args:
        name: the program and its slice.
        program: the compiled program.
        kind: JAX's name of the device.
        model: operations of the model on a device.
        computed: the same with what the backward pass computes again.
        goal: for the model utilisation.
    """
    memory, costs, chip = program.memory_analysis(), Program(program.as_text()).costs(), chip_of(kind)
    assert chip is not None, kind
    needed, held = needed_memory(memory), memory.argument_size_in_bytes
    note = f"GiB: {held / 2**30:.1f} of arguments, {(needed - held) / 2**30:.1f} of results and temporary arrays"
    yield Line(f"{name}: memory over the chip's", needed / chip.memory, "x", 1.0, note=note)
    note = f"{costs.operations:.3g} compiled, {computed:.3g} by the sizes"
    yield Line(f"{name}: operations over the model's", costs.operations / computed, "x", 1.15, note=note)
    if costs.wire:
        sent = ", ".join(f"{n:.0f} {kind}" for kind, n in sorted(costs.count.items()))
        note = f"{sent}; {sum(costs.wire.values()) / 1e9:.2f} GB sent"
        yield Line(f"{name}: sent beside work", costs.hidden_share, "of bytes", 1.0, at_most=False, note=note)
    times = costs.times(chip)
    note = ", ".join(f"{part} {seconds * 1e3:.3g} ms" for part, seconds in times.items())
    note += f"; the compiler's estimate {costs.cycles / chip.clock * 1e3:.3g} ms"
    if costs.kernel_operations:
        kernels = max(costs.kernel_operations / chip.operations, costs.kernel_bytes / chip.bandwidth)
        note += f", to which kernels add at least {kernels * 1e3:.3g} ms"
    share = model / chip.operations / max(times.values())
    yield Line(f"{name}: model utilisation by the roofline", share, "", goal, at_most=False, note=note)


def experts(topology: str, gradient: bool = True) -> Iterator[Line]:
    """The routed experts of a layer of V4-Flash or the gradient of inputs and weights, 4,096 tokens a device."""
    program, devices = compile_layer(topology, gradient=gradient)
    chip, passed = devices.flat[0].device_kind, "gradient" if gradient else "forward"
    name = f"V4-Flash experts, {devices.size} {topology.partition(':')[0]}, {passed}"
    rows, weights = split_temporary(program, devices.size)
    note = f"and {weights / ACTIVATIONS:.2f} x of the kernels in bf16; one wave, ragged"
    yield Line(f"{name}: temporary memory of rows over activations", rows / ACTIVATIONS, "x", 3.0, note=note)
    operations = (3 if gradient else 1) * TOKENS * CHOICES * 3 * 2.0 * D * F
    # The text has the products that later rounds compute again; the costliest branch counts.
    computed = operations * 11 / 9 if gradient else operations
    yield from describe(name, program, chip, operations, computed, 0.5)


def attention(mode: str, S: int, topology: str, context: int, config: str = "v4_flash") -> Iterator[Line]:
    """The attention of one layer, gradient of its input and parameters, one row on `context` devices."""
    base = ds.load_config(ROOT / "configs" / f"{config}.py").model
    layer = next(i for i, spec in enumerate(base.layer_specs) if spec.mode == mode)
    one: dict[str, Any] = dict(
        n_layers=1, n_mtp_layers=0, n_hash_layers=0, compress_ratios=(base.compress_ratios[layer],)
    )
    if config == "v41_flash":
        one |= dict(engram_layer_ids=(), engram_num_embeddings=(), dspark_target_layer_ids=(), vision_n_layers=0)
        one |= dict(kv_source_layers=(0,), index_source_layers=(0,), modality_bias=False)
    remat = "full" if S > 4096 else base.remat  # as in the stages of such rows
    cfg = dataclasses.replace(base, attention="sparse", remat=remat, **one)
    program, kind, parameters = compile_attention(cfg, S, topology, context)
    model = S / context * (6.0 * parameters + attention_per_token(cfg, S))
    again = S / context * attention_per_token(cfg, S) / 3
    if cfg.remat == "full":
        again += S / context * 2.0 * parameters
    chips = f"{context} {topology.partition(':')[0]}"
    name = f"{NAMES[config]} {mode}/{cfg.compress_ratios[0]}, {S // 1024}K positions, {chips}"
    yield from describe(name, program, kind, model, model + again, 0.5 if S == 4096 else 0.4)


def compile_attention(cfg: ModelConfig, S: int, topology: str, context: int) -> tuple[Any, str, int]:
    """Compile the gradient of the attention of one layer, rematerialised as in training.

    Returns:
        The program, JAX's name of the device, and the number of parameters.
    """
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    devices = devices.reshape(-1, 1, context)
    mesh = jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):

        def array(shape, dtype, spec):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        x = array((len(devices), S, cfg.dim), jnp.bfloat16, act_spec(3))
        segments = array((len(devices), S), jnp.int32, row_spec(2))

        def pull(layer, x, segments, dy):
            tables = make_tables(cfg, segments)

            def run(layer, x):
                y, attended, *_ = layer(x, {}, tables, jnp.dtype(jnp.bfloat16))
                return y, attended.kl_BS

            (y, kl), back = jax.vjp(apply_remat(run, cfg.remat), layer, x)
            return y, back((dy, jnp.ones_like(kl)))

        make = lambda: Attention(cfg, Params(nnx.Rngs(0), cfg.init_std), cfg.layer_specs[0])
        layer = jax.jit(make).eval_shape()
        lowered = jax.jit(pull).trace(layer, x, segments, x).lower(lowering_platforms=("tpu",))
        parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(layer))
        return lowered.compile(compiler_options=POLICY.repeated), devices.flat[0].device_kind, parameters


def step(config: str, topology: str, goal: float, *flags: str, stage: int = 1) -> Iterator[Line]:
    """The whole training step, all layers and the optimizer, one row a device."""
    run: Config = ds.load_config(ROOT / "configs" / f"{config}.py", [*flags, "--train.accumulate", "1"])
    run = dataclasses.replace(run, stages=(), train=dataclasses.replace(run.train, steps=60000))
    resolved = run.resolved_stages[stage - 1]
    devices = slice_devices(topology, resolved.cfg.mesh)
    program = compile_step(run, resolved, devices)
    name = f"{config} step, {topology}"
    yield from describe(name, program, devices.flat[0].device_kind, *count_operations(resolved.cfg), goal)


PARTS: dict[str, Callable[[], Iterator[Line]]] = {
    "experts_16": functools.partial(experts, "v5p:2x2x4"),
    "experts_16_forward": functools.partial(experts, "v5p:2x2x4", gradient=False),
    "experts_64": functools.partial(experts, "v5p:4x4x4"),
    "experts_64_forward": functools.partial(experts, "v5p:4x4x4", gradient=False),
    "experts_64_v6e": functools.partial(experts, "v6e:8x8"),
    "experts_64_v6e_forward": functools.partial(experts, "v6e:8x8", gradient=False),
    "csa_4k": functools.partial(attention, "csa", 4096, "v5p:2x2x1", 1),
    "hca_4k": functools.partial(attention, "hca", 4096, "v5p:2x2x1", 1),
    "window_4k": functools.partial(attention, "window", 4096, "v5p:2x2x1", 1),
    "csa_64k": functools.partial(attention, "csa", 65536, "v5p:2x2x1", 4),
    "hca_64k": functools.partial(attention, "hca", 65536, "v5p:2x2x1", 4),
    "full_64k": functools.partial(attention, "full", 65536, "v5p:2x2x2", 8, "v41_flash"),
    "csa_1m": functools.partial(attention, "csa", 2**20, "v5p:4x4x4", 64),
    "hca_1m": functools.partial(attention, "hca", 2**20, "v5p:4x4x4", 64),
    "full_1m": functools.partial(attention, "full", 2**20, "v5p:4x4x8", 128, "v41_flash"),
}
STEPS: dict[str, Callable[[], Iterator[Line]]] = {
    "flash_512": functools.partial(step, "v4_flash", "v5p:8x8x8", 0.5, "--data.batch-size", "512"),
}


def main() -> None:
    names, known = sys.argv[1:], PARTS | STEPS
    if not names or not {*names} <= {*known}:
        raise SystemExit(f"usage: python benchmarks/tpu.py PROGRAM ..., of {', '.join(known)}")
    for line in (line for name in names for line in known[name]()):
        print(json.dumps(dataclasses.asdict(line)), flush=True)


if __name__ == "__main__":
    main()
