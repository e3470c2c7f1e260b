# SPDX-License-Identifier: Apache-2.0
"""Compile one layer of routed experts of DeepSeek-V4-Flash for TPU slices that need not exist; report memory and time.

JAX_PLATFORMS=cpu python benchmarks/experts.py v5p:2x2x4 v5p:4x4x4

Needs libtpu. The time is the sum of the compiler's estimates of all operations; loop bodies count once, which is right
for an even load. The compiler estimates neither kernels (the grouped products) nor the wire time of an exchange. What
the kernels declare gives their roofline time, a figure of its own.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from dsv4_jax.mesh import AXES, BATCH
from dsv4_jax.ops.experts import Experts, Kernels, apply_experts
from dsv4_jax.ops.shards import ParamShards
from dsv4_jax.roofline import Program, chip_of
from dsv4_jax.train.programs import POLICY

TOKENS, D, F, EXPERTS, CHOICES = 4096, 4096, 2048, 256, 6  # of a device; sizes of configs/v4_flash.py
# Rows of an even load in bf16: x, gate, up, hidden and y.
ACTIVATIONS = TOKENS * CHOICES * (2 * D + 3 * F) * 2


def compile_layer(
    topology: str, waves: int = 1, gradient: bool = True, exchange: str = "ragged"
) -> tuple[Any, np.ndarray]:
    """Compile the layer, or the gradient of its inputs and kernels, with all devices along `expert`.

    Returns:
        The program and the devices.
    """
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = jax.sharding.Mesh(devices.reshape(1, -1, 1), AXES, axis_types=(AxisType.Explicit,) * 3)
    tokens, experts = jax.P(BATCH, "context"), jax.P("expert")
    how = Experts(EXPERTS, 10.0, exchange, waves, "auto", (ParamShards(),) * 3)

    def layer(x, weights, kernels, choices, real):
        run = functools.partial(apply_experts, how)
        in_specs = tokens, tokens, tokens, tokens, Kernels(experts, experts, experts)
        run = jax.shard_map(run, in_specs=in_specs, out_specs=(tokens, jax.P()))
        return run(x, choices, weights, real, kernels)

    def pull(x, weights, kernels, choices, real, dy):
        y, back, _ = jax.vjp(lambda *a: layer(*a, choices, real), x, weights, kernels, has_aux=True)
        y, dy = jax.lax.optimization_barrier((y, dy))  # as in training, where the gradient follows from the result
        return y, back(dy)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    x = array((devices.size, TOKENS, D), jnp.bfloat16, tokens)
    weights, choices = (array((devices.size, TOKENS, CHOICES), t, tokens) for t in (jnp.float32, jnp.int32))
    real = array((devices.size, TOKENS), jnp.bool, tokens)
    up, down = (array(s, jnp.float32, experts) for s in ((EXPERTS, D, F), (EXPERTS, F, D)))
    with jax.set_mesh(mesh):
        traced = jax.jit(pull if gradient else layer).trace(
            x, weights, Kernels(up, up, down), choices, real, *([x] if gradient else [])
        )
        lowered = traced.lower(lowering_platforms=("tpu",))
        return lowered.compile(compiler_options=POLICY.repeated), devices


def split_temporary(program: Any, devices: int) -> tuple[int, int]:
    """Return the bytes of a layer's temporary memory that follow the rows, and those that follow the weights.

    The compiler for TPUs counts the arrays that a program returns as temporary. They are left out: gradients, for which
    training has room anyway. The weights' part is a copy of the device's kernels in bf16.
    """
    memory, weights = program.memory_analysis(), 3 * EXPERTS // devices * D * F * 2
    held = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - memory.output_size_in_bytes
    return held - weights, weights


def measure(topology: str, waves: int = 1, exchange: str = "ragged") -> list[dict[str, Any]]:
    """Measure the forward pass and the gradient of the layer."""
    rows = []
    for gradient in (False, True):
        program, devices = compile_layer(topology, waves, gradient, exchange)
        chip, costs = chip_of(devices.flat[0].device_kind), Program(program.as_text()).costs()
        assert chip is not None, devices.flat[0].device_kind
        of_rows, of_weights = split_temporary(program, devices.size)
        rows.append(
            {
                "topology": topology,
                "exchange": exchange,
                "waves": waves,
                "pass": "gradient" if gradient else "forward",
                "rows_bytes": of_rows,
                "weights_bytes": of_weights,
                "output_bytes": program.memory_analysis().output_size_in_bytes,
                "activation_bytes": ACTIVATIONS,
                "seconds": costs.cycles / chip.clock,
                "kernel_seconds": max(costs.kernel_operations / chip.operations, costs.kernel_bytes / chip.bandwidth),
                "collectives": dict(costs.count),
                "hidden_share": costs.hidden_share,
            }
        )
    return rows


def main() -> None:
    """Print a line for each topology, number of waves and pass."""
    for topology in sys.argv[1:] or ["v5p:2x2x4"]:
        for waves in (1, 4):
            for row in measure(topology, waves):
                print(
                    f"{topology} waves {waves} {row['pass']:8} temporary: rows {row['rows_bytes'] / 1e9:.2f} GB = "
                    f"{row['rows_bytes'] / row['activation_bytes']:.2f} x activations, weights "
                    f"{row['weights_bytes'] / 1e9:.2f} GB; estimate {row['seconds'] * 1e3:.1f} ms + kernels "
                    f"{row['kernel_seconds'] * 1e3:.1f} ms; {row['hidden_share']:.0%} sent beside work  "
                    f"{row['collectives']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
