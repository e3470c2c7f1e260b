# SPDX-License-Identifier: Apache-2.0
"""The training loop: set up, resume, then fetch, step, log, save; at the end evaluate and sample."""

import contextlib
import dataclasses
import functools
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from rich.console import Console

from dsv4_jax.config import Config
from dsv4_jax.data.packing import START, Position
from dsv4_jax.data.pipeline import Batch, Stream
from dsv4_jax.mesh import on_cpu, start_devices, use_mesh
from dsv4_jax.model.token_map import token_map
from dsv4_jax.sample import sample
from dsv4_jax.summary import describe_model, describe_objective, describe_optimizer, describe_placement
from dsv4_jax.train.checkpoint import Checkpoints, load_model
from dsv4_jax.train.checks import start_warnings
from dsv4_jax.train.evaluate import evaluate, make_eval_step, unigram_entropy
from dsv4_jax.train.feed import Data, put_batch, read_data, streams
from dsv4_jax.train.metrics import Display, MetricsWriter
from dsv4_jax.train.state import TrainState, abstract_model, abstract_state, init_state
from dsv4_jax.train.step import make_train_step, objective_weights
from dsv4_jax.validate import ConfigError, RunError

# For a program that runs once XLA's optimisations cost more than they save. On CPU the steps keep some: the tiny
# model's step compiles in 43 s instead of 58 s and runs as fast (docs/results.md).
_RUNS_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_CPU_STEP = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
_RUNTIME = {  # may change in a run
    *("attention", "attention_block", "compute_dtype", "remat", "select", "yarn"),
    *("expert_matmul", "expert_exchange", "expert_waves", "expert_gradients"),
}


def run(cfg: Config, console: Console | None = None) -> None:
    """Trains to `cfg.train.steps`, from the newest usable checkpoint of the run directory if there is one.

    Raises:
        ConfigError: if the text or the run directory does not fit the configuration; before any
            device work.
        RunError, CheckpointError: if the run cannot go on.
        SystemExit: after SIGTERM or Ctrl-C, once the state has been saved.
    """
    console = console or Console(highlight=False, markup=False, soft_wrap=True)
    run_dir = Path(cfg.train.run_dir)
    data = read_data(cfg)
    if cfg.model.engram_layer_ids and token_map(cfg.model) is None:
        raise ConfigError(
            f"model.engram_compressed_vocab_size = {cfg.model.engram_compressed_vocab_size} needs "
            "model.engram_token_map: the tokenizer.json or the .npy that gives so many numbers"
        )
    start_devices(cfg.train.cpu_devices, cfg.train.distributed, cfg.train.deterministic)
    use_mesh(cfg.mesh.data, cfg.mesh.expert, cfg.mesh.context)
    if jax.process_index():  # the first process speaks and writes for all
        console = Console(quiet=True)
    _claim(cfg, run_dir)
    objective, (optimizer, _) = describe_objective(objective_weights(cfg)), describe_optimizer(cfg)
    for line in [*describe_model(cfg.model), objective, optimizer, data.line]:
        console.print(line)
    if jax.sharding.get_abstract_mesh().size > 1:
        console.print(*describe_placement(cfg), sep="\n")

    def warn(text: str) -> None:
        console.print(f"warning: {text}", style="yellow")

    with Checkpoints(run_dir / "checkpoints", cfg.train.keep, cfg.train.keep_every) as checkpoints:
        found = checkpoints.restore(abstract_state(cfg), warn)
        host: dict[str, Any] = {"tokens": 0, "position": START, "identity": data.identity}
        if found is None:
            state = jax.jit(lambda: init_state(cfg), compiler_options=_RUNS_ONCE)()
            if cfg.train.init_from:
                _, params, buffers = nnx.split(load_model(cfg, cfg.train.init_from), nnx.Param, ...)
                state = dataclasses.replace(state, params=params, buffers=buffers)
                console.print(f"parameters  from {cfg.train.init_from}")
        else:
            step, state, host = found
            console.print(f"resumed     {run_dir} at step {step}")
            for line in _changes(host["config"], _resolved(cfg)):
                console.print(f"changed     {line}")
            if host["identity"] != data.identity:
                warn("this is other data than at the checkpoint: it starts at its beginning")
                host["position"] = START
        if int(state.step) >= cfg.train.steps:
            console.print("the run is finished; raise train.steps to continue it")
            return
        with streams(cfg, data, Position(*host["position"])) as (stream, evaluation):
            state, held_out = _loop(cfg, state, host["tokens"], data, stream, evaluation, checkpoints, console)
    _report(cfg, state, held_out, evaluation, data, console)


@contextlib.contextmanager
def _stop_signals() -> Generator[Callable[[int], int]]:
    """A function that tells, after a step, the signal to stop that has come, or 0: SIGTERM or Ctrl-C.

    A second Ctrl-C ends the program at once. Several processes stop at the same step, after SIGTERM to any.
    """
    came = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = number

    def told(step: int) -> int:
        if jax.process_count() > 1:
            return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0
        return came

    if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
        yield told  # jax.distributed has its own handler; other threads may have none
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _loop(
    cfg: Config,
    state: TrainState,
    tokens: int,
    data: Data,
    stream: Stream,
    evaluation: list[Batch],
    checkpoints: Checkpoints,
    console: Console,
) -> tuple[TrainState, dict[str, float]]:
    """Steps until `cfg.train.steps`; returns the last state and its held-out losses."""
    clock = time.monotonic()
    place = functools.partial(put_batch, own=stream.own, rows=cfg.data.batch_size)
    example = place(evaluation[0])
    options = _CPU_STEP if on_cpu() else None
    train_step = jax.jit(make_train_step(cfg), donate_argnums=0, compiler_options=options)
    train_step = train_step.lower(state, example).compile()
    eval_step = jax.jit(make_eval_step(cfg), compiler_options=options).lower(state, example).compile()
    all_finite = jax.jit(_all_finite)
    console.print(f"compiled    in {time.monotonic() - clock:.0f} s")
    bad = 0

    def finished(metrics: dict[str, Any]) -> dict[str, Any]:
        """A step's scalars, once the device has them, with the host's counters."""
        nonlocal clock, tokens, bad
        scalars = {name: np.asarray(value).item() for name, value in metrics.items()}
        bad = 0 if scalars.pop("finite") else bad + 1
        if bad:
            objective, norm = scalars["objective"], scalars["grad_norm"]
            console.print(
                f"warning: step {scalars['step']} is skipped: objective {objective}, gradient norm {norm}",
                style="yellow",
            )
        now, new = time.monotonic(), scalars["tokens"]
        tokens += new
        scalars |= {"tokens": tokens, "tokens_per_s": new / (now - clock), "skipped_records": data.skipped}
        clock = now
        return scalars

    def save(state: TrainState) -> None:
        if not all_finite(state):
            raise RunError(f"the state at step {int(state.step)} is not finite; it is not saved")
        host = {"tokens": tokens, "position": stream.position, "identity": data.identity, "config": _resolved(cfg)}
        checkpoints.save(int(state.step), state, host)

    step, held_out = int(state.step), {"eval_loss": math.nan}
    clock = time.monotonic()
    run_dir, steps = Path(cfg.train.run_dir), cfg.train.steps
    with (
        _stop_signals() as stopped,
        MetricsWriter(run_dir if jax.process_index() == 0 else None, step) as writer,
        Display(console, steps, step) as display,
    ):
        pending: dict[str, Any] | None = None  # the metrics of the last step, which the device still works on
        profiled = range(*map(int, cfg.train.profile_steps.split(":"))) if cfg.train.profile_steps else range(0)
        traced = 0  # the first step of a trace that is being made
        while step < steps:
            batch = place(next(stream))
            step += 1
            if step in profiled and not traced:
                traced = step
                jax.profiler.start_trace(str(run_dir / "profile"))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = train_step(state, batch)
            if step in profiled and step in (profiled[-1], steps):
                jax.block_until_ready(state)
                jax.profiler.stop_trace()
                console.print(f"profile     of steps {traced} to {step} is in {run_dir / 'profile'}")
            norms = metrics.pop("grad_norms")
            if step == 1:
                for warning in start_warnings(cfg, jax.device_get(metrics | {"grad_norms": norms}), state.buffers):
                    console.print(f"warning: {warning}", style="yellow")
            if pending is not None:
                show(finished(pending), writer, display)
            pending = {"step": step} | metrics
            stop = stopped(step)
            last = stop or step == steps
            due = step == steps or step % cfg.train.eval_every == 0
            if due or last or bad or step % cfg.train.checkpoint_every == 0:
                scalars, pending = finished(pending), None
                if due and not stop:
                    held_out = evaluate(eval_step, state, evaluation, place)
                    scalars |= held_out
                    console.print(f"step {step}: held-out loss {held_out['eval_loss']:.3f} nats per {data.unit}")
                show(scalars, writer, display)
                if bad >= cfg.train.bad_steps:
                    raise RunError(
                        f"{bad} steps in a row were not finite, the last one {step}: nothing was learnt in them"
                    )
                if last or step % cfg.train.checkpoint_every == 0:
                    save(state)
                clock = time.monotonic()
            if stop:
                checkpoints.wait()
                console.print(
                    f"stopped by {signal.Signals(stop).name} at step {step}; the same command goes on from there"
                )
                raise SystemExit(128 + stop)
    return state, held_out


def _all_finite(state: TrainState) -> jax.Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def show(scalars: dict[str, Any], writer: MetricsWriter, display: Display) -> None:
    """Writes a finished step and puts it on the screen."""
    writer.write(scalars)
    display.update(scalars)


def _resolved(cfg: Config) -> dict[str, Any]:
    """The configuration as JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Keys whose values differ, but for where and how long."""
    found = []
    for section, values in now.items():
        for key, value in values.items():
            old = before.get(section, {}).get(key)
            if old != value and (section, key) not in (("train", "run_dir"), ("train", "steps")):
                found.append(f"{section}.{key}: {old!r} before, {value!r} now")
    return found


def _claim(cfg: Config, run_dir: Path) -> None:
    """Writes config.json into the run directory, or refuses one that holds another model's run."""
    path = run_dir / "config.json"
    resolved = _resolved(cfg)
    if path.exists():
        before = json.loads(path.read_text())["model"]
        changed = [
            f"model.{key}: {before.get(key)!r} there, {value!r} here"
            for key, value in resolved["model"].items()
            if before.get(key) != value and key not in _RUNTIME
        ]
        if changed:
            raise ConfigError(
                "\n  ".join([f"{run_dir} holds another model's run; choose another train.run_dir or undo", *changed])
            )
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(resolved, indent=2) + "\n")
        new.replace(path)


def _report(
    cfg: Config,
    state: TrainState,
    held_out: dict[str, float],
    evaluation: list[Batch],
    data: Data,
    console: Console,
) -> None:
    per = f"nats per {data.unit}"
    unigram, loss = unigram_entropy(evaluation), held_out["eval_loss"]
    console.print(f"held-out loss     {loss:.3f} {per} ({loss / math.log(2):.3f} bits)")
    if "eval_loss_image" in held_out:
        right, wrong = held_out["eval_loss_image"], held_out["eval_loss_wrong_image"]
        console.print(f"after an image    {right:.3f} {per}, {wrong:.3f} if it is another one of the same size")
    console.print(f"unigram entropy   {unigram:.3f} {per} ({unigram / math.log(2):.3f} bits)")
    if cfg.train.sample_tokens:
        model = nnx.merge(nnx.graphdef(abstract_model(cfg)), state.params, state.buffers)
        prompt = "" if any(cfg.data.paths) else '"""'  # how the standard library's files like to start
        text, _ = sample(model, data.tokenizer, prompt, cfg.train.sample_tokens, cfg.train.seed)
        console.print("sample:")
        console.print(prompt + text)
