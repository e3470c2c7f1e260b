# SPDX-License-Identifier: Apache-2.0
"""What the data costs as a corpus or a document grows: planning, tokenising, filling rows, opening files of ids.

    python benchmarks/data.py

Prints CPU time at several sizes and its ratio to that at the smallest. All ratios should be near 1, but for the
first reading of a file of ids, which is written down in an index.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dsv4_jax.config import DataConfig
from dsv4_jax.data import documents
from dsv4_jax.data.documents import tokenized
from dsv4_jax.data.packing import BLOCK, Plan, part
from dsv4_jax.data.sources import Flat
from dsv4_jax.data.tokenizer import Bytes


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds of the fastest of several calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


def planning() -> None:
    """A block of pieces, by documents of the corpus."""
    costs = {}
    for n in (10_000, 100_000, 1_000_000):
        ends = np.arange(1, n + 1) * 500
        source = Flat("", np.zeros(0, np.uint16), ends - 500, ends, np.zeros(n, np.uint32), Bytes.border)
        plan = Plan([part(source, np.ones(n, bool), 4096)], [1.0], 4096, 0, repeat=True)
        plan.block(0)  # shuffles the epoch
        costs[n] = seconds(lambda plan=plan: plan.block(1))
        print(
            f"plan a block: {n:10,} documents {costs[n] / BLOCK * 1e6:7.1f} us a piece, {costs[n] / costs[10_000]:.2f}x"
        )


def tokenising(folder: Path) -> None:
    """Texts of a call, in the first bytes of a corpus and in the rest."""

    class Counting(Bytes):
        calls: list[int] = []  # noqa: RUF012

        def encode(self, texts):
            self.calls.append(len(texts))
            return super().encode(texts)

    file = folder / "a.jsonl"
    file.write_text((json.dumps({"text": "x" * 7000}) + "\n") * (3 * documents._TOGETHER_BYTES // 7000))
    for _ in tokenized(str(file), DataConfig(), Counting()):
        pass
    calls = np.array(Counting.calls[:-1])
    early = np.cumsum(calls) * 7000 < documents._TOGETHER_BYTES
    print(f"tokenise: {calls[early].mean():.0f} texts a call in the first 64 MiB, then {calls[~early].mean():.0f}")


def main() -> None:
    planning()
    with tempfile.TemporaryDirectory() as folder:
        tokenising(Path(folder))


if __name__ == "__main__":
    main()
