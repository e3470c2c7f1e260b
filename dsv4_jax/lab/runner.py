# SPDX-License-Identifier: Apache-2.0
"""Run a comparison of optimizers, and continue one that was interrupted.

Every contender is tuned on its own: its learning rates are doubled or halved until the best one has neighbours
on both sides. The other seeds, and the shorter runs with their own decay, then use that rate.
"""

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv4_jax.lab.tasks import Task
from dsv4_jax.optim.schedules import trapezoid
from dsv4_jax.section import ConfigError

CHUNK = 50  # steps per compiled call and per point of a curve
WIDEST = 16  # maximum number of doublings and halvings of the learning rate together


@dataclasses.dataclass(frozen=True)
class Contender:
    """Describe an optimizer to compare.

    Attributes:
        name: name in the results.
        make: makes an optax transformation from a schedule and the parameters.
        rates: learning rates with which the search begins, ascending.
        shorter: lengths, in steps, of additional runs at the best rate, each with its own decay.
    """

    name: str
    make: Callable[[optax.Schedule, Any], optax.GradientTransformation]
    rates: tuple[float, ...]
    shorter: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Lab:
    """Describe a comparison: the same task, steps, schedule and clipping for all contenders.

    Attributes:
        task: the parameters, batches and loss to train with.
        contenders: the optimizers.
        metric: measure of `task.evaluate` by which rates are chosen; lower is better.
        steps: steps per run.
        seeds: seeds of parameters and batches. The rate is chosen with the first.
        warmup: share of the steps in which the rate rises.
        end: final rate of the cosine as a share of the highest.
        clip: largest global norm of the gradient; 0: no clipping.
    """

    task: Task
    contenders: Sequence[Contender]
    metric: str
    steps: int
    seeds: Sequence[int] = (0, 1, 2)
    warmup: float = 0.1
    end: float = 0.1
    clip: float = 1.0

    def __post_init__(self):
        names = [c.name for c in self.contenders]
        if len(set(names)) != len(names):
            raise ConfigError(f"contenders must have different names, found {names}")
        for c in self.contenders:
            if not c.rates or list(c.rates) != sorted(set(c.rates)) or c.rates[0] <= 0:
                raise ConfigError(f"rates of {c.name!r} must be positive and ascending, found {c.rates}")


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """Record a finished run: its settings, final measures, training loss per CHUNK steps, and seconds."""

    contender: str
    rate: float
    seed: int
    steps: int
    measures: dict[str, float | None]
    curve: list[float | None]
    seconds: float

    def score(self, metric: str) -> float:
        """Return the measure, or infinity if the run diverged."""
        value = self.measures[metric]
        return math.inf if value is None else value


class Results:
    """Keep the finished runs of a folder, a line each in `runs.jsonl`, and the best rate of each contender.

    Runs are found by the contender's name. An optimizer that has changed needs another name or folder.

    Raises:
        ConfigError: if the folder holds results of another task or schedule.
    """

    def __init__(self, folder: Path, lab: Lab):
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"task": type(lab.task).__name__, **dataclasses.asdict(lab.task)}
        settings |= {key: getattr(lab, key) for key in ("metric", "warmup", "end", "clip")}
        known = folder / "lab.json"
        if known.exists() and (before := json.loads(known.read_text())) != settings:
            other = sorted(key for key in settings.keys() | before.keys() if settings.get(key) != before.get(key))
            raise ConfigError(f"{folder} holds runs with another {', '.join(other)}; choose another folder with --out")
        known.write_text(json.dumps(settings, indent=1))
        self.path = folder / "runs.jsonl"
        text = self.path.read_text() if self.path.exists() else ""
        *lines, cut = text.split("\n")
        if cut:  # the last stop came in the middle of a line
            self.path.write_text(text.removesuffix(cut))
        self.runs = [FinishedRun(**json.loads(line)) for line in lines]
        self.rates: dict[str, float] = {}

    def find(self, contender: str, rate: float, seed: int, steps: int) -> FinishedRun | None:
        """Find a finished run; None if there is none."""
        wanted = (contender, rate, seed, steps)
        return next((run for run in self.runs if (run.contender, run.rate, run.seed, run.steps) == wanted), None)

    def add(self, run: FinishedRun) -> None:
        """Add a finished run, and write it to the folder."""
        self.runs.append(run)
        with self.path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(run)) + "\n")


def run_lab(lab: Lab, folder: Path, say: Callable[[str], None] = print) -> Results:
    """Run everything of the comparison that is not in the folder yet.

    Args:
        lab: the comparison.
        folder: folder of the results.
        say: called with a line for every new run.

    Raises:
        ConfigError: see `Results`.
    """
    results = Results(folder, lab)
    for contender in lab.contenders:
        train = functools.cache(lambda steps, c=contender: compile_run(lab, c, steps))

        def run(rate: float, seed: int, steps: int, c: Contender = contender, train: Any = train) -> FinishedRun:
            done = results.find(c.name, rate, seed, steps)
            if done is None:
                start = time.monotonic()
                measures, curve = train(steps)(rate, seed)
                done = FinishedRun(c.name, rate, seed, steps, measures, curve, round(time.monotonic() - start, 1))
                results.add(done)
                say(f"{c.name}: rate {rate:g}, seed {seed}, {steps} steps: {done.measures} in {done.seconds} s")
            return done

        score = lambda rate, run=run: run(rate, lab.seeds[0], lab.steps).score(lab.metric)
        rate = results.rates[contender.name] = find_best_rate(contender.rates, score)
        for seed, steps in itertools.product(lab.seeds, (lab.steps, *contender.shorter)):
            run(rate, seed, steps)
    return results


def find_best_rate(rates: Sequence[float], score: Callable[[float], float]) -> float:
    """Find the rate of lowest score; extend the grid by factors of two until the best rate is inside it.

    Raises:
        ConfigError: if no rate is best inside the grid after `WIDEST` rounds of doubling or halving.
    """
    grid = list(rates)
    for _ in range(WIDEST):
        best = min(grid, key=score)
        if best != grid[0] and best != grid[-1]:
            return best
        if best == grid[0]:
            grid.insert(0, best / 2)
        if best == grid[-1]:
            grid.append(best * 2)
    raise ConfigError(f"no best learning rate between {grid[0]:g} and {grid[-1]:g}; start the grid elsewhere")


def compile_run(lab: Lab, contender: Contender, steps: int) -> Callable[[float, int], tuple[dict, list]]:
    """Make a function of rate and seed that trains from start to end; it is compiled once for all rates."""
    shape = trapezoid(1.0, lab.end, round(lab.warmup * steps), round(lab.warmup * steps), steps)

    def optimizer(rate: jax.Array, params: Any) -> optax.GradientTransformation:
        tx = contender.make(lambda count: rate * shape(count), params)
        return optax.chain(optax.clip_by_global_norm(lab.clip), tx) if lab.clip else tx

    def step(tx: optax.GradientTransformation, carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, grads = jax.value_and_grad(lab.task.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @functools.partial(jax.jit, donate_argnums=1)
    def chunk(rate: jax.Array, carry: Any, batches: Any) -> tuple[Any, jax.Array]:
        return jax.lax.scan(functools.partial(step, optimizer(rate, carry[0])), carry, batches)

    start = jax.jit(lambda rate, params: (params, optimizer(rate, params).init(params)))
    evaluate = jax.jit(lab.task.evaluate)

    def run(rate: float, seed: int) -> tuple[dict[str, float | None], list[float | None]]:
        peak, curve = jnp.asarray(rate, jnp.float32), []
        carry = start(peak, lab.task.init(seed))
        for first, count in _cut(steps):
            carry, losses = chunk(peak, carry, lab.task.batches(seed, first, count))
            curve.append(_finite(np.mean(losses)))
            if curve[-1] is None:
                curve += [None] * (len(_cut(steps)) - len(curve))
                break
        measures = {name: _finite(value) for name, value in evaluate(carry[0]).items()}
        return {"last losses": curve[-1], **measures}, curve

    return run


def _cut(steps: int) -> list[tuple[int, int]]:
    """Cut a run into parts of at most CHUNK steps: (first step, number of steps)."""
    return [(first, min(CHUNK, steps - first)) for first in range(0, steps, CHUNK)]


def _finite(x: Any) -> float | None:
    """Convert to a float, or to None if not finite, as JSON has no such numbers."""
    return float(x) if math.isfinite(x) else None
