# SPDX-License-Identifier: Apache-2.0
"""Measure the figures of docs/performance.md, keep them in benchmarks/results.json and write the page's tables.

    python benchmarks/run.py                    # the short form, under ten minutes on two cores; `make bench`
    python benchmarks/run.py cpu --only start   # one suite, or some of its parts
    python benchmarks/run.py steps              # whole training steps of the published models for TPUs: an hour
    python benchmarks/run.py --tables           # measure nothing, write the tables

Suites: `cpu`, training on this machine; `tpu`, layers of the published models compiled for slices that need not exist;
`steps`, their whole training steps; `peers`, the table of what `make bench-peers` measured.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import cpu
import tpu
from results import ROOT, Line, describe_versions, load, save, write_table

SCRIPT = {"cpu": "cpu.py", "tpu": "tpu.py", "steps": "tpu.py"}
PARTS = {"cpu": (*cpu.FIGURES,), "tpu": (*tpu.PARTS,), "steps": (*tpu.STEPS,)}
REACHED = {None: "", True: "reached", False: "not reached"}


def measure(suite: str, name: str, core: int) -> list[Line]:
    """Measure one part of a suite in a process of its own, on one core.

    Raises:
        RuntimeError: if the process fails.
    """
    command = ["taskset", "-c", str(core), sys.executable, str(ROOT / "benchmarks" / SCRIPT[suite]), name]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}  # also beside a TPU's compiler, which has one user
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{suite} {name} failed:\n{done.stderr[-2000:]}")
    lines = [Line(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        print(f"{line.figure}: {line.value:.3g} {line.unit} {REACHED[line.reached]} {line.note}", flush=True)
    return lines


def measure_all(work: list[tuple[str, str]]) -> Iterator[tuple[str, list[Line]]]:
    """Measure parts of the suites: CPU figures on one core; beside them, one at a time, compilations on another."""
    cores = sorted(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(1) as measuring, concurrent.futures.ThreadPoolExecutor(1) as compiling:
        jobs = {}
        for suite, name in work:
            pool, core = (measuring, cores[0]) if suite == "cpu" else (compiling, cores[-1])
            jobs[pool.submit(measure, suite, name, core)] = suite
        for job in concurrent.futures.as_completed(jobs):
            if error := job.exception():
                print(error, file=sys.stderr, flush=True)
            else:
                yield jobs[job], job.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", choices=[*PARTS, []], help="default: cpu tpu")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts of the suites")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    args = parser.parse_args()
    work = [(suite, name) for suite in args.suites or ("cpu", "tpu") for name in PARTS[suite]]
    if unknown := {*args.only} - {name for _, name in work}:
        parser.error(f"no part {', '.join(unknown)} of {', '.join(name for _, name in work)}")
    work = [(suite, name) for suite, name in work if not args.only or name in args.only]
    if importlib.util.find_spec("libtpu") is None and any(suite != "cpu" for suite, _ in work):
        print("left out: programs for TPUs, whose compiler is missing (pip install 'dsv4_jax[tpu]')")
        work = [x for x in work if x[0] == "cpu"]
    for suite, lines in [] if args.tables else measure_all(work):
        versions = describe_versions("jax") if suite == "cpu" else describe_versions("jax", "libtpu")
        save(suite, lines, f"python benchmarks/run.py {suite}", versions)
    for suite in (*PARTS, "peers"):
        if load(suite)[1]:
            write_table(suite)


if __name__ == "__main__":
    main()
