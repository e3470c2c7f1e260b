# SPDX-License-Identifier: Apache-2.0
"""Compile one layer of routed experts of DeepSeek-V4-Flash for TPU slices that need not exist; report memory and time.

JAX_PLATFORMS=cpu python benchmarks/experts.py v5p:2x2x4 v5p:4x4x4

Needs libtpu. The time is the sum of the compiler's estimates of all operations; loop bodies count once, which is right
for an even load. The compiler estimates neither kernels nor the wire time of an exchange. The roofline time of the
kernels (grouped products) of an even load is a figure of its own.
"""

import functools
import math
import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from dsv4_jax.mesh import AXES, BATCH
from dsv4_jax.ops.experts import Experts, Kernels, apply_experts
from dsv4_jax.ops.shards import ParamShards
from dsv4_jax.train.programs import POLICY

TOKENS, D, F, EXPERTS, CHOICES = 4096, 4096, 2048, 256, 6  # of a device; sizes of configs/v4_flash.py
HERTZ = 1.75e9  # clock of v5p, in which the estimates count
# One v5p: bf16 operations and bytes from memory, a second.
PEAK, BANDWIDTH = 459e12, 2.765e12
# Rows of an even load in bf16: x, gate, up, hidden and y.
ACTIVATIONS = TOKENS * CHOICES * (2 * D + 3 * F) * 2


def compile_layer(topology: str, waves: int = 1, gradient: bool = True, exchange: str = "ragged") -> Any:
    """Compile the layer, or the gradient of its inputs and kernels, with all devices along `expert`."""
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
        return traced.lower(lowering_platforms=("tpu",)).compile(compiler_options=POLICY.repeated)


def list_estimates(program: str) -> list[tuple[int, str]]:
    """List the estimated cycles and the text of all operations of a compiled program, the longest first.

    An operation that the compiler cannot estimate has the largest int64; it is left out.
    """
    found = [(int(m[1]), line.strip()) for line in program.splitlines() if (m := re.search(r'cycles":"(\d+)"', line))]
    return sorted(((cycles, line) for cycles, line in found if cycles < 1 << 50), reverse=True)


def kernel_seconds(devices: int, gradient: bool) -> float:
    """Compute the roofline time of the grouped products of an even load on one v5p, in seconds.

    The bytes are those that the kernels move with the tiles that `ops/grouped_pallas.py` chooses. Rows are read twice,
    for two tiles of columns. In a gradient of the weights, which are tiles of 1024 x 1024, the rows of D are read
    twice and those of F four times.
    """
    rows, w = TOKENS * CHOICES, EXPERTS // devices * D * F
    up, down = 2 * (2 * rows * D + rows * F + w), 2 * (2 * rows * F + rows * D + w)
    outer = 2 * (2 * rows * D + 4 * rows * F) + 2 * 4 * w  # the fp32 sum is read and written
    dx = down + 2 * rows * D  # the second product adds to the first
    moved = [up, up, down] + [up, down, dx, outer, outer, outer] * gradient
    return sum(max(2 * rows * D * F / PEAK, size / BANDWIDTH) for size in moved)


def measure(topology: str, waves: int = 1, exchange: str = "ragged") -> list[dict[str, Any]]:
    """Measure the forward pass and the gradient of the layer."""
    rows = []
    for gradient in (False, True):
        compiled = compile_layer(topology, waves, gradient, exchange)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        kinds = Counter(re.findall(r" (ragged-all-to-all(?:-start)?|ragged-all-to-all-done|all-gather)\(", text))
        rows.append(
            {
                "topology": topology,
                "exchange": exchange,
                "waves": waves,
                "pass": "gradient" if gradient else "forward",
                "temporary_bytes": memory.temp_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes,
                "activation_bytes": ACTIVATIONS,
                "seconds": sum(cycles for cycles, _ in list_estimates(text)) / HERTZ,
                "kernel_seconds": kernel_seconds(math.prod(map(int, topology.split(":")[1].split("x"))), gradient),
                "collectives": dict(kinds),
            }
        )
    return rows


def main() -> None:
    """Print a line for each topology, number of waves and pass."""
    for topology in sys.argv[1:] or ["v5p:2x2x4"]:
        for waves in (1, 4):
            for row in measure(topology, waves):
                print(
                    f"{topology} waves {waves} {row['pass']:8} temporary {row['temporary_bytes'] / 1e9:.2f} GB = "
                    f"{row['temporary_bytes'] / row['activation_bytes']:.1f} x activations, "
                    f"estimate {row['seconds'] * 1e3:.1f} ms + kernels {row['kernel_seconds'] * 1e3:.1f} ms  "
                    f"{row['collectives']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
