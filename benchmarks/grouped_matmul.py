# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product: blocked against ragged_dot, forward and with both gradients.

python benchmarks/grouped_matmul.py
"""

import jax
import jax.numpy as jnp
from timing import fastest

from dsv4_jax.ops.grouped_matmul import grouped_matmul


def main() -> None:
    print(f"{jax.default_backend()}, jax {jax.__version__}; seconds, and blocked as a multiple of ragged's speed")
    for rows, width, groups in ((4096, 512, 8), (4096, 512, 64), (8192, 128, 16)):
        key = jax.random.key(0)
        x = jax.random.normal(key, (rows, width))
        w = jax.random.normal(key, (groups, width, width))
        sizes = jnp.full(groups, rows // groups)

        def both(impl, x=x, w=w, sizes=sizes):
            forward = jax.jit(lambda x, w: grouped_matmul(x, w, sizes, impl))
            gradient = jax.jit(jax.grad(lambda x, w: (grouped_matmul(x, w, sizes, impl) ** 2).sum(), (0, 1)))
            return lambda: forward(x, w), lambda: gradient(x, w)

        blocked, ragged = both("blocked"), both("ragged")
        for what, i in (("forward", 0), ("gradient", 1)):
            t = fastest({"blocked": blocked[i], "ragged": ragged[i]}, repeats=3)
            ratio = t["ragged"] / t["blocked"]
            print(
                f"{rows} x {width} x {width}, {groups:2} groups, {what:8}  blocked {t['blocked']:.4f}  "
                f"ragged {t['ragged']:.4f}  {ratio:.1f}x"
            )


if __name__ == "__main__":
    main()
