# SPDX-License-Identifier: Apache-2.0
"""Compare the working tree with another revision: the same seed and steps, losses, time and memory side by side.

    python benchmarks/compare.py main                                    # both tiny configurations, 20 steps
    python benchmarks/compare.py HEAD~3 configs/tiny_v4.py --steps 5 -- --model.attention dense

`make compare BASE=main` runs it too. The base is checked out into a temporary git worktree; each side runs its own
`train.py` on its own configuration file in a process of its own, without the cache of compiled programs. Flags after
`--` go to both sides; `--base-flags` replaces them for the base, where a key has another name there. Exit status 1 if
a loss differs.
"""

import argparse
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CONFIGS = ("configs/tiny_v4.py", "configs/tiny_v41.py")


class Result(NamedTuple):
    """What one side gave.

    Attributes:
        lines: of metrics.jsonl, one dict a step.
        cpu_s: CPU-seconds of the process, all threads.
        compile_s: seconds in which XLA compiled, all programs.
        temporary_bytes: temporary memory on a device of the program that needs most, which is the step.
    """

    lines: list[dict[str, float | None]]
    cpu_s: float
    compile_s: float
    temporary_bytes: int


def train_measured(measures: str, arguments: list[str]) -> None:
    """Run the `train.py` of the working directory and write what JAX reports into the JSON file `measures`.

    Only JAX's own names are used here, so that this works on any revision.
    """
    import jax

    import dsv4_jax

    here = Path.cwd().resolve()
    assert here in Path(dsv4_jax.__file__ or "").resolve().parents, f"{dsv4_jax.__file__} is not of {here}"
    durations, sizes = [0.0], [0]
    compile_program = jax.stages.Lowered.compile

    def compile_and_measure(self, *args, **kwargs):
        compiled = compile_program(self, *args, **kwargs)
        sizes.append(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0))
        return compiled

    def listen(event: str, seconds: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            durations.append(seconds)

    jax.stages.Lowered.compile = compile_and_measure
    jax.monitoring.register_event_duration_secs_listener(listen)
    sys.argv = ["train.py", *arguments]
    try:
        runpy.run_path("train.py", run_name="__main__")
    finally:
        found = {"cpu_s": time.process_time(), "compile_s": sum(durations), "temporary_bytes": max(sizes)}
        Path(measures).write_text(json.dumps(found))


def measure(tree: Path, config: str, steps: int, flags: Sequence[str]) -> Result:
    """Train in a process of its own, in a temporary run directory, with the package of `tree`."""
    with tempfile.TemporaryDirectory() as tmp:
        run, measures = Path(tmp) / "run", Path(tmp) / "measures.json"
        arguments = [config, *flags, "--train.steps", str(steps), "--train.run-dir", str(run)]
        env = os.environ | {"PYTHONPATH": str(tree), "JAX_ENABLE_COMPILATION_CACHE": "false"}
        # -P: the folder of this script does not precede the tree.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--measure", str(measures), *arguments]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"train.py {' '.join(arguments)} failed in {tree}:\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return Result(lines, **json.loads(measures.read_text()))


def curves(lines: list[dict[str, float | None]]) -> dict[str, dict[int, float | None]]:
    """Return the losses and the gradient's norm by name, each by step, whatever prefix a revision gives the names."""
    found: dict[str, dict[int, float | None]] = {}
    for line in lines:
        for key, value in line.items():
            name = re.sub(r"^(train|moe|optim|perf)/", "", key).replace("/", "_")
            if re.fullmatch(r"\w*(loss|grad_norm)", name):
                found.setdefault(name, {})[int(line["step"] or 0)] = value
    return found


def compare_losses(base: Result, here: Result) -> tuple[bool, list[str]]:
    """Return whether all losses are equal bit by bit, and lines that show where they are not."""
    before, after = curves(base.lines), curves(here.lines)
    names = sorted(before.keys() & after.keys())
    if not names:
        raise SystemExit(f"no loss in common: {sorted(before)} before, {sorted(after)} now")
    lines = [f"only {side}: {', '.join(more)}" for side, more in _alone(before, after)]
    worst: dict[str, tuple[float, int]] = {}
    for name in names:
        for step in sorted(before[name].keys() | after[name].keys()):
            difference = _difference(before[name].get(step), after[name].get(step))
            if difference > worst.get(name, (0.0, 0))[0]:
                worst[name] = difference, step
    if not worst:
        return True, [f"losses           bit-equal: {', '.join(names)}", *lines]
    equal = [name for name in names if name not in worst]
    largest = [f"{name} {d:.2g} (step {step})" for name, (d, step) in worst.items()]
    lines += [f"losses           differ; largest relative difference: {', '.join(largest)}"]
    lines += [f"bit-equal        {', '.join(equal)}"] if equal else []
    name = "loss" if "loss" in worst else next(iter(worst))
    steps = sorted(before[name].keys() & after[name].keys())
    shown = sorted({steps[round(i * (len(steps) - 1) / 9)] for i in range(10)})
    lines.append(f"{name:<17}" + "".join(f"{step:>11}" for step in shown))
    for side, curve in (("  base", before), ("  working tree", after)):
        cells = [curve[name][step] for step in shown]
        lines.append(f"{side:<17}" + "".join(f"{math.nan if x is None else x:>11.6g}" for x in cells))
    return False, lines


def _alone(before: dict[str, object], after: dict[str, object]) -> list[tuple[str, list[str]]]:
    sides = (("the base has", before.keys() - after.keys()), ("the working tree has", after.keys() - before.keys()))
    return [(side, sorted(names)) for side, names in sides if names]


def _difference(before: float | None, after: float | None) -> float:
    """Return the relative difference; infinite where only one is there (None: absent or not finite)."""
    if before == after:
        return 0.0
    if before is None or after is None:
        return math.inf
    return abs(after - before) / max(abs(before), abs(after))


def compare_costs(base: Result, here: Result) -> list[str]:
    """Return a line for each cost: the base, the working tree, and their ratio."""
    costs = {
        "CPU-seconds": (base.cpu_s, here.cpu_s, ".1f"),
        "compile seconds": (base.compile_s, here.compile_s, ".1f"),
        "temporary bytes": (base.temporary_bytes, here.temporary_bytes, ",d"),
    }
    ratio = lambda before, after: f"{after / before:.3f}" if before else "-"
    return [f"{name:<17}{a:{form}} -> {b:{form}}, ratio {ratio(a, b)}" for name, (a, b, form) in costs.items()]


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        return train_measured(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description="Compare the working tree with another revision.")
    parser.add_argument("base", help="a git revision")
    parser.add_argument("configs", nargs="*", default=CONFIGS, help="configuration files (default: both tiny ones)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--base-flags", help="flags of the base in place of those after --, in one word")
    own, both = sys.argv[1:], []
    if "--" in own:
        own, both = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    theirs = both if args.base_flags is None else shlex.split(args.base_flags)
    git = ["git", "-C", str(ROOT)]
    all_equal = True
    with tempfile.TemporaryDirectory() as tmp:
        base = Path(tmp) / "base"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(base), args.base], check=True)
        try:
            for config in args.configs or CONFIGS:
                sides = measure(base, config, args.steps, theirs), measure(ROOT, config, args.steps, both)
                equal, lines = compare_losses(*sides)
                all_equal &= equal
                same = (base / config).read_bytes() == (ROOT / config).read_bytes()
                note = "" if same else "; the configuration file has changed"
                print(f"{config}, {args.steps} steps, {args.base} -> working tree{note}")
                print(*lines, *compare_costs(*sides), "", sep="\n", flush=True)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(base)], check=True)
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
