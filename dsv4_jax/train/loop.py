# SPDX-License-Identifier: Apache-2.0
"""The inner loop: in every step of a stage fetch a batch, compute, log; evaluate and save when due, stop when asked."""

import dataclasses
import math
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import Batch, HostBatch
from dsv4_jax.data.pipeline import Stream
from dsv4_jax.section import RunError
from dsv4_jax.train.checks import start_warnings
from dsv4_jax.train.console import Display
from dsv4_jax.train.evaluate import evaluate
from dsv4_jax.train.finite import nonfinite_gradient
from dsv4_jax.train.hardware import device_memory
from dsv4_jax.train.metrics import MetricsWriter
from dsv4_jax.train.profile import Profile
from dsv4_jax.train.spikes import spike
from dsv4_jax.train.state import TrainState, abstract_model
from dsv4_jax.train.trainer import Trainer


class SpikeError(Exception):
    """A spike at `step`, from which the run must be rolled back."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Destinations of what the steps of a run write, open while they run.

    Attributes:
        stopped: function of the step that returns the signal to stop by, or 0 (`stop_signals`).
        writer: metrics.jsonl and loggers.
        display: progress on the terminal.
        profile: trace of chosen steps.
    """

    stopped: Callable[[int], int]
    writer: MetricsWriter
    display: Display
    profile: Profile


@dataclasses.dataclass(frozen=True)
class StageInputs:
    """Inputs of the steps of one stage.

    Attributes:
        stage: configuration and first and last step.
        stream: the training batches of this process.
        put: puts a host batch on the devices.
        eval_step: the compiled evaluation.
        utilisation: model FLOP utilisation at one token a second; 0 if unknown.
    """

    stage: ResolvedStage
    stream: Stream
    put: Callable[[HostBatch], Batch]
    eval_step: Callable[..., Any]
    utilisation: float


def route_ahead(trainer: Trainer, inputs: StageInputs, state: TrainState, step: int) -> tuple[Batch, int]:
    """Return the experts of the next batch, if routing is anticipatory, and their age in steps.

    Then the experts of the `delay` batches behind it are chosen. When anticipation begins, all of them are chosen by
    the same parameters, so that the age grows from 0 to `delay`.

    Args:
        trainer: the run.
        inputs: those of the stage.
        state: state after `step` steps.
        step: number of steps done.
    """
    stage, routes, recovery = inputs.stage, trainer.routes, trainer.history.recovery
    settings = stage.cfg.routing.anticipation
    end = min(stage.last, trainer.cfg.steps)
    if settings.mode == "auto":  # on only for some steps after a rollback
        if 0 < recovery.hold == step:
            trainer.record(step, "anticipation", "off again")
        end = min(end, recovery.hold)
    if settings.mode == "off" or not settings.delay or step >= end:
        routes.clear()
        return {}, 0

    # The queue holds the next batch and those up to `delay` steps behind it, none beyond the end.
    while len(routes) <= min(settings.delay, end - 1 - step):
        with trainer.timing.waiting():
            rows = inputs.stream.peek(len(routes))
        batch = inputs.put(rows)
        routes.push(trainer.programs.compiled(stage, "routing", state, batch)(state, batch), step)
    experts, age = routes.pop(step)
    return {"experts": experts}, age


def log_step(
    trainer: Trainer, outputs: Outputs, inputs: StageInputs, metrics: dict[str, Any], more: dict[str, float]
) -> None:
    """Write and show the metrics of a step, once the device has them, and watch for spikes.

    Args:
        trainer: the run.
        outputs: where to.
        inputs: those of the stage.
        metrics: what the step returned, with `step` and `train/lag`; `grad_norms` is taken out.
        more: metrics of its evaluation.

    Raises:
        RunError: after `train.bad_steps` steps in a row that were not finite.
        SpikeError: if the run must be rolled back from this step.
    """
    norms = metrics.pop("grad_norms")
    scalars = {name: np.asarray(value).item() for name, value in metrics.items()}
    step, history, train = scalars["step"], trainer.history, trainer.cfg.train
    progress, recovery, timing, stage = history.progress, history.recovery, trainer.timing, inputs.stage

    # A step that is not finite changed nothing. It is recorded, and is no spike.
    trainer.bad_steps = 0 if scalars.pop("finite") else trainer.bad_steps + 1
    reason = ""
    if trainer.bad_steps:
        text = f"objective {scalars['train/objective']}, gradient norm {scalars['grad_norm']}"
        if place := nonfinite_gradient(abstract_model(stage.cfg), norms):
            text += f"; first gradient not finite: {place}"
        trainer.record(step, "skipped", text)
    elif math.isfinite(scalars["loss"]):
        reason = spike(stage.cfg.spikes, recovery.recent, scalars["loss"], scalars["grad_norm"])
    if reason:
        recovery.spikes += 1
        trainer.record(step, "spike", reason)

    # Add what only the host knows.
    seconds, new = timing.lap(), scalars["tokens"]
    progress.tokens += new
    scalars |= {"tokens": progress.tokens, "tokens_per_s": new / seconds}
    scalars |= {"train/skipped_records": trainer.data[stage.number].skipped, "train/spikes": recovery.spikes}
    scalars |= {"train/rollbacks": recovery.rollbacks} | timing.scalars() | device_memory() | more
    if inputs.utilisation:
        scalars["perf/mfu"] = inputs.utilisation * scalars["tokens_per_s"]
    outputs.writer.write(scalars)
    outputs.display.update(scalars, seconds)

    if trainer.bad_steps >= train.bad_steps:
        raise RunError(
            f"{trainer.bad_steps} steps in a row were not finite, the last one {step}: nothing was learnt in them"
        )
    if reason and stage.cfg.routing.anticipation.mode == "auto":
        raise SpikeError(step)


def evaluate_state(trainer: Trainer, inputs: StageInputs, state: TrainState) -> dict[str, float]:
    """Evaluate on the held-out batches; print and return the metrics."""
    jax.block_until_ready(state)  # the step ends before the evaluation begins
    with trainer.timing.during("evaluate"):
        held_out = trainer.held_out = evaluate(inputs.eval_step, state, trainer.evaluation, inputs.put)
    loss, unit = held_out["eval/loss"], trainer.data[inputs.stage.number].unit
    trainer.console.print(f"step {int(state.step)}: held-out loss {loss:.3f} nats per {unit}")
    return held_out


def run_steps(trainer: Trainer, outputs: Outputs, inputs: StageInputs, state: TrainState) -> TrainState:
    """Make the steps of a stage, up to its end or that of the run.

    Raises:
        RunError, CheckpointError, SpikeError: see `log_step` and `Trainer.save`.
        SystemExit: after a signal or `train.stop_after_minutes`, once the state is saved.
    """
    stage, train, progress = inputs.stage, trainer.cfg.train, trainer.history.progress
    step, last = int(state.step), min(stage.last, trainer.cfg.steps)
    pending: dict[str, Any] | None = None  # metrics of the last step, which the device may still compute
    if progress.evaluation_due:  # a signal stopped the run here
        outputs.writer.add(step, evaluate_state(trainer, inputs, state))
        progress.evaluation_due = False
        if step == trainer.cfg.steps:
            trainer.save(state)  # no step follows whose checkpoint would hold that it is done
    trainer.timing.restart()
    while step < last:
        # Dispatch a step.
        experts, lag = route_ahead(trainer, inputs, state, step)
        with trainer.timing.waiting():
            rows = next(inputs.stream)
        batch = inputs.put(rows) | experts
        progress.position = inputs.stream.position
        train_step = trainer.programs.compiled(stage, "step", state, batch)
        step += 1
        outputs.profile.before(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, metrics = train_step(state, batch)
        outputs.profile.after(step, metrics)
        if step == stage.first + 1:
            first = jax.device_get(metrics)
            for warning in start_warnings(stage.cfg, first, state.buffers, new=step == 1):
                trainer.warn(warning)

        # While it is computed, log the one before: the device never waits for the host.
        if pending is not None:
            log_step(trainer, outputs, inputs, pending, {})
        pending = {"step": step, "train/lag": lag} | metrics
        if failure := trainer.checkpoints.failed():
            trainer.record(step, "save", f"{failure}; the next save is tried all the same")

        # Evaluate, save and stop after this step, if due. Then its own metrics must be logged first.
        late, over = trainer.deadlines.passed(step)
        stop = outputs.stopped(step) or (signal.SIGTERM if over else 0)
        saves = late or step % train.checkpoint_every == 0
        ends = stop or step == trainer.cfg.steps
        due = step == trainer.cfg.steps or step % train.eval_every == 0
        if ends:
            outputs.profile.stop()
        if due or ends or step == last or trainer.bad_steps or saves:
            progress.evaluation_due = bool(due and stop)  # a signal leaves too little time; the next command does it
            held_out = evaluate_state(trainer, inputs, state) if due and not stop else {}
            log_step(trainer, outputs, inputs, pending, held_out)
            pending = None
            if ends or saves:
                trainer.save(state)
        if stop:
            trainer.wait()
            name = "train.stop_after_minutes" if over else signal.Signals(stop).name
            trainer.console.print(f"stopped by {name} at step {step}; the same command continues from there")
            raise SystemExit(128 + stop)
    return state
