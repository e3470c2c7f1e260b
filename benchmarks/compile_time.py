# SPDX-License-Identifier: Apache-2.0
"""Compile time of the training step with 6 and with 24 layers: scanned layers should cost the same.

python benchmarks/compile_time.py
"""

import dataclasses
import time

import jax

from dsv4_jax.config import Config
from dsv4_jax.config.files import load_config
from dsv4_jax.data.batch import abstract_batch
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.train.state import abstract_state
from dsv4_jax.train.step import make_train_step


def seconds(cfg: Config, compile_too: bool = True) -> tuple[float, float]:
    """Time to trace and lower the step, and time to compile it."""
    batch = abstract_batch(cfg, cfg.data.batch_size)
    start = time.perf_counter()
    lowered = jax.jit(make_train_step(cfg)).lower(abstract_state(cfg), batch)
    middle = time.perf_counter()
    if compile_too:
        lowered.compile()
    return middle - start, time.perf_counter() - middle


def main() -> None:
    ensure_mesh()
    cfg = load_config("configs/tiny_v4.py")
    seconds(cfg, compile_too=False)  # imports and caches of the first trace
    totals = []
    for layers in (6, 24):
        ratios = (0, 0, *(4, 32) * ((layers - 2) // 2), 0)
        deep = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, n_layers=layers, compress_ratios=ratios))
        trace, compile_s = seconds(deep)
        totals.append(trace + compile_s)
        print(f"{layers:2} layers: trace and lower {trace:.1f} s, compile {compile_s:.1f} s")
    print(f"24 layers take {totals[1] / totals[0]:.2f}x the time of 6")


if __name__ == "__main__":
    main()
