# SPDX-License-Identifier: Apache-2.0
"""Speed of decoding with a cache, as ratios of CPU-seconds measured in one process.

    JAX_PLATFORMS=cpu python benchmarks/generate.py

Prints, for the model of `configs/tiny_v4.py`: how much cheaper a token is than computing all 256 of the row; how
the cost of a token grows with the room of the cache, by kind of layer; tokens of a prompt against tokens of a forward
pass, per CPU-second; and tokens of 8 rows against those of one. Set XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
intra_op_parallelism_threads=1 on a machine that does other work too.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax.config.files import load_config
from dsv4_jax.generate.programs import Chunk, read_chunk
from dsv4_jax.generate.sampling import Rule
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.cache import init_cache
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.ops.cross_entropy import head_logits

KINDS = {"window": (0,) * 4, "HCA": (128,) * 4, "CSA": (4,) * 4}


def fastest(sides: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """CPU-seconds of the cheapest call of each side; the sides take turns."""
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(repeats + 1):
        for name, side in sides.items():
            start = time.process_time()
            side()
            if turn:
                best[name] = min(best[name], time.process_time() - start)
    return best


def make(cfg: ModelConfig) -> DeepSeek:
    """A model with the initial values."""
    return DeepSeek(cfg, rngs=nnx.Rngs(0))


def decode(model: DeepSeek, rows: int, T: int, capacity: int, length: int, steps: int = 1) -> Callable[[], Any]:
    """A call that reads `steps` chunks of T tokens after `length` tokens, one after another."""
    leaves, tree = jax.tree.flatten(model)
    rule = Rule(*(np.full(rows, x, kind) for x, kind in zip((0, 0, 1, 0, 0), "fiffI", strict=True)))
    ids, n = np.zeros((rows, T), np.int32), np.full(rows, T, np.int32)
    cache = init_cache(model.cfg, rows, capacity)

    def run() -> None:
        nonlocal cache
        for step in range(steps):
            chunk = Chunk(ids, n, np.full(rows, length + step * T, np.int32), rule, None, None)
            cache, drawn = read_chunk(leaves, cache, chunk, tree=tree, keep_experts=False)
            np.asarray(drawn.token_Bm)

    return run


def forward(model: DeepSeek, S: int, last: bool) -> Callable[[], Any]:
    """A call of the forward pass of training on one row, for the last token's logits or the hidden states."""
    leaves, tree = jax.tree.flatten(model)

    @jax.jit
    def run(leaves: list[jax.Array]) -> jax.Array:
        model = jax.tree.unflatten(tree, leaves)
        h = model.hidden(Inputs(jnp.zeros((1, S), jnp.int32)), with_mtp=False).h
        return head_logits(jax.reshard(h, jax.P())[:, -1], model.head[...]).argmax() if last else h.sum()

    return lambda: np.asarray(run(leaves))


def main() -> None:
    """Print the ratios."""
    ensure_mesh()
    cfg = load_config("configs/tiny_v4.py").model
    model = make(cfg)
    print(f"{jax.default_backend()}, jax {jax.__version__}, configs/tiny_v4.py")
    t = fastest({"again": forward(model, 256, last=True), "cache": decode(model, 1, 1, 256, 200, steps=10)})
    one = t["cache"] / 10
    print(
        f"a token at 256: {one * 1e3:.2f} ms with the cache, {t['again'] / one:.1f}x cheaper than the whole row again"
    )
    for kind, ratios in KINDS.items():
        layers = dataclasses.replace(cfg, n_layers=4, n_hash_layers=0, n_mtp_layers=0, compress_ratios=ratios)
        other = make(layers)
        t = fastest({S: decode(other, 1, 1, S, S - 11, steps=10) for S in (256, 4096, 16384)})
        print(f"{kind:7} a token at 4K {t[4096] / t[256]:.2f}x, at 16K {t[16384] / t[256]:.2f}x that at 256")
    S, T = 2048, 512
    t = fastest({"forward": forward(model, S, last=False), "prompt": decode(model, 1, T, S, 0, steps=S // T)}, 4)
    print(
        f"prompt of {S} in chunks of {T}: {t['forward'] / t['prompt']:.2f} of the forward pass's tokens per CPU-second"
    )
    t = fastest({rows: decode(model, rows, 1, 256, 200, steps=10) for rows in (1, 8)})
    print(f"8 rows: {8 * t[1] / t[8]:.2f}x the tokens per CPU-second of one")


if __name__ == "__main__":
    main()
