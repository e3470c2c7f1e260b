# SPDX-License-Identifier: Apache-2.0
"""Compare training on CPU with the peers' frameworks: tokens per CPU-second and peak memory, on one model.

    make bench-peers                        # installs transformers and torch into .cache/peers, then runs this
    python benchmarks/peers.py --turns 1

Each shape is measured in turn on both sides, a process of its own each time; the fastest of all runs and the largest
memory count. The model stands in `benchmarks/peer.py`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from peer import SHAPES
from results import ROOT, Line, describe_versions, save, write_table

PEERS = ROOT / ".cache" / "peers"
GOALS = {(4, 512): 1.5, (1, 2048): 3.0, (1, 4096): 6.0}


def run_side(side: str, rows: int, length: int, *flags: str) -> dict[str, float]:
    """Measure one side and shape in a process of its own; ours here, a peer with the Python of its environment."""
    python = sys.executable if side == "ours" else str(PEERS / side / "bin" / "python")
    command = [python, str(ROOT / "benchmarks" / "peer.py"), side, str(rows), str(length), *flags]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if side == "ours":
        env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side}, {rows} x {length} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def best(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest rate and memory of several turns, and the loss of the last one."""
    return {name: max(turn[name] for turn in turns) for name in turns[0]} | {"loss": turns[-1]["loss"]}


def compare(shape: tuple[int, int], ours: dict[str, float], theirs: dict[str, float]) -> list[Line]:
    """Return the lines of one shape.

    Raises:
        SystemExit: if the models have different numbers of parameters, or a loss is not near that of equal
            probabilities. Both start there, so another value means that the sides do not run the same model.
    """
    if ours["parameters"] != theirs["parameters"]:
        raise SystemExit(f"{ours['parameters']:,} parameters here, {theirs['parameters']:,} in the peer's model")
    for side in (ours, theirs):
        if not 8 < side["loss"] < 10:
            raise SystemExit(f"a loss of {side['loss']}, expected about 9.0")
    name = f"{shape[0]} x {shape[1]}"
    rates = f"{ours['tokens_per_cpu_s']:.0f} and {theirs['tokens_per_cpu_s']:.0f} tokens per CPU-second"
    sizes = f"{ours['peak_bytes'] / 2**30:.1f} and {theirs['peak_bytes'] / 2**30:.1f} GiB, compiler included"
    ratio = ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"]
    memory = ours["peak_bytes"] / theirs["peak_bytes"]
    goal = 0.25 if shape == (1, 4096) else None
    return [
        Line(f"forward and backward, {name}, over transformers", ratio, "x", GOALS[shape], at_most=False, note=rates),
        Line(f"peak memory, {name}, over transformers", memory, "x", goal, note=sizes),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of a process (default 3)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each side and shape (default 2)")
    args = parser.parse_args()
    python = PEERS / "transformers" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"no environment {Path(*python.parts[-5:-2])}: make bench-peers installs it")
    packages = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('transformers', 'torch')))"
    theirs = subprocess.run([str(python), "-c", packages], capture_output=True, text=True, check=True).stdout
    versions = f"{describe_versions('jax')}; transformers and torch: {' and '.join(theirs.split()[1::2])}"
    for shape in SHAPES:
        measured: dict[str, list[dict[str, float]]] = {"ours": [], "transformers": []}
        for _ in range(args.turns):
            for side, turns in measured.items():
                turns.append(run_side(side, *shape, "--repeats", str(args.repeats)))
        lines = compare(shape, *map(best, measured.values()))
        print(*(f"{line.figure}: {line.value:.3g} ({line.note})" for line in lines), sep="\n", flush=True)
        flags = f' ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""
        save("peers", lines, f"make bench-peers{flags}", versions)
    write_table("peers")


if __name__ == "__main__":
    main()
