# SPDX-License-Identifier: Apache-2.0
"""Timing shared by the benchmarks: both sides in one process, interleaved, the fastest of several runs."""

import time
from collections.abc import Callable
from typing import Any

import jax


def fastest(sides: dict[str, Callable[[], Any]], repeats: int = 5) -> dict[str, float]:
    """Seconds of the fastest run of each side; the sides take turns, after one run to warm up."""
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(side())
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    return best
