# SPDX-License-Identifier: Apache-2.0
"""Attention core: all entries under a mask against each query's own gathered, and memory by length.

    python benchmarks/attention.py

Prints time and temporary memory of one CSA layer's core with its gradient. GATHER_COST in
`dsv4_jax/ops/attention.py` is read off the first table: the M / k at which gathering starts to win.
"""

import jax
import jax.numpy as jnp
from timing import fastest

from dsv4_jax.ops.attention import Index, attend
from dsv4_jax.ops.documents import find_documents, find_windows

H, K, I, J, RATIO, WINDOW = 8, 64, 16, 32, 4, 128


def compiled(S: int, topk: int, select: str):
    at = find_windows(find_documents(jnp.ones((1, S), jnp.int32)), RATIO)
    first = jnp.zeros((1, S), jnp.int32)
    M = S // RATIO
    shapes = [(1, S, H, K), (1, S, K), (H,), (1, M, K), (1, S, I, J), (1, S, I), (1, M, J)]
    arrays = [
        jax.random.normal(key, shape) for key, shape in zip(jax.random.split(jax.random.key(0), 7), shapes, strict=True)
    ]

    def loss(q, kv, sink, entries, index_q, index_w, index_k):
        index = Index(index_q, index_w, index_k, topk)
        out = attend(
            q, kv, sink, first, window=WINDOW, entries_BMK=entries, windows=at, index=index, block=128, select=select
        )
        return (out.o_BSHK**2).sum() + out.kl_BS.sum()

    program = jax.jit(jax.grad(loss, tuple(range(7)))).lower(*arrays).compile()
    return program, lambda: program(*arrays)


def main() -> None:
    print(f"{jax.default_backend()}, jax {jax.__version__}; H {H}, K {K}, ratio {RATIO}, window {WINDOW}")
    for S, topk in ((2048, 128), (2048, 32), (4096, 64), (4096, 32), (8192, 64)):
        masked, gathered = compiled(S, topk, "masked"), compiled(S, topk, "gathered")
        t = fastest({"masked": masked[1], "gathered": gathered[1]}, repeats=2)
        print(
            f"S {S:5}  entries {S // RATIO:5}  k {topk:4}  M/k {S // RATIO // topk:3}  masked {t['masked']:.3f} s  "
            f"gathered {t['gathered']:.3f} s  gathered is {t['masked'] / t['gathered']:.2f}x as fast"
        )
    for select in ("masked", "gathered"):
        sizes = {S: compiled(S, 64, select)[0].memory_analysis().temp_size_in_bytes / 2**20 for S in (2048, 4096, 8192)}
        print(f"temporary MiB, {select}: " + ", ".join(f"S {S}: {m:.0f}" for S, m in sizes.items()))


if __name__ == "__main__":
    main()
