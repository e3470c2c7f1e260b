# SPDX-License-Identifier: Apache-2.0
"""What the data costs as a corpus or a document grows: planning, tokenising, filling rows, opening files of ids.

    python benchmarks/data.py

Prints CPU time at several sizes and its ratio to that at the smallest. The ratios should be near 1; opening a file of
ids may grow with its documents (20 bytes each are read), not with its tokens, but for the first time.
"""

import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from dsv4_jax.config import DataConfig
from dsv4_jax.data import documents
from dsv4_jax.data.documents import tokenized
from dsv4_jax.data.packing import BLOCK, RowPlan, part
from dsv4_jax.data.pipeline import fill
from dsv4_jax.data.prepare import write_shards
from dsv4_jax.data.sources import Flat, open_source
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
        plan = RowPlan([part(source, np.ones(n, bool), 4096)], [1.0], 4096, 0, repeat=True)
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


def filling(folder: Path) -> None:
    """A block of rows from tokens that were made ahead, by tokens of a document."""
    costs, S, total = {}, 4096, 20_000_000
    for n in (5_000, 1_000_000, 10_000_000):
        file = folder / f"{n}.jsonl"
        file.write_text((json.dumps({"text": "x" * n}) + "\n") * (total // n))
        data, said = DataConfig(path=str(file), prepared=str(folder / "prepared")), Console(file=io.StringIO())
        write_shards(str(file), data, Bytes(), folder / f"ids{n}", total, said)
        source = open_source(str(folder / f"ids{n}"), data, Bytes())
        parts = [part(source, np.ones(len(source.lengths), bool), S)]
        rows = RowPlan(parts, [1.0], S, 0, repeat=True).block(0)[:200]
        costs[n] = seconds(lambda rows=rows, parts=parts: [fill(row, parts, S) for row in rows])
        each, ratio = costs[n] / (len(rows) * S) * 1e6, costs[n] / costs[5_000]
        print(f"fill: documents of {n:,} tokens, {each:.3f} s a million tokens, {ratio:.2f}x")


def opening(folder: Path) -> None:
    """A file of ids, the first time and then from its index, by documents of 1,000 tokens."""
    costs, smallest = {}, 100_000
    for n in (100_000, 400_000):
        file, data = folder / f"{n}.bin", DataConfig(prepared=str(folder / "prepared"))
        ids = np.ones((n, 1000), np.uint16)
        ids[:, -1] = Bytes.border
        ids.tofile(file)
        first = seconds(lambda: open_source(str(file), data, Bytes()), 1)  # noqa: B023
        costs[n] = seconds(lambda: open_source(str(file), data, Bytes()))  # noqa: B023
        print(
            f"open: {ids.nbytes:,} bytes of ids, {first:.3f} s the first time, then {costs[n]:.4f} s, "
            f"{first / costs[n]:.0f} times faster; {costs[n] / costs[smallest]:.2f}x of {smallest:,} documents"
        )


def main() -> None:
    planning()
    for side in (tokenising, filling, opening):
        with tempfile.TemporaryDirectory() as folder:
            side(Path(folder))


if __name__ == "__main__":
    main()
