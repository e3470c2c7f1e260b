# SPDX-License-Identifier: Apache-2.0
"""The training loop: set up, resume, then in every stage fetch, step, log, save; at the end evaluate and sample."""

import collections
import dataclasses
import functools
import math
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from dsv4_jax.config import Config
from dsv4_jax.config.plugins import resolve
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import Batch, HostBatch, put_batch
from dsv4_jax.data.packing import Position
from dsv4_jax.data.pipeline import Stream
from dsv4_jax.generate.sample import held_out_prompt, sample
from dsv4_jax.mesh import QUICK_CPU, on_cpu, start_devices, use_mesh
from dsv4_jax.model.token_map import make_token_map
from dsv4_jax.section import ConfigError, RunError
from dsv4_jax.summary import (
    describe_model,
    describe_objective,
    describe_optimizer,
    describe_placement,
    describe_stages,
)
from dsv4_jax.terminal import SafeConsole, printable
from dsv4_jax.train.anticipation import abstract_routes, make_route, route_shape
from dsv4_jax.train.checkpoint import Checkpoints, load_model, parse_source
from dsv4_jax.train.checks import start_warnings
from dsv4_jax.train.deadlines import Deadlines
from dsv4_jax.train.evaluate import evaluate, make_eval_step, unigram_entropy
from dsv4_jax.train.feed import Data, check_same_data, counted_rows, read_data, streams
from dsv4_jax.train.fork import find_origin
from dsv4_jax.train.hardware import device_memory, use_compile_cache, utilisation_per_rate
from dsv4_jax.train.loggers import find_loggers, make_loggers
from dsv4_jax.train.metrics import Display, MetricsWriter
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.processes import check_shared, of_first
from dsv4_jax.train.profile import Profile
from dsv4_jax.train.run_dir import (
    History,
    RunLock,
    changes,
    check_model,
    rate_change,
    resolved,
    steps_done,
    write_config,
    write_events,
)
from dsv4_jax.train.signals import stop_signals
from dsv4_jax.train.spikes import spike
from dsv4_jax.train.state import TrainState, abstract_model, abstract_state, decay_start, init_state, split_trained
from dsv4_jax.train.step import make_train_step
from dsv4_jax.train.timing import Timing

# Compiler options for a program that runs once, for which XLA's optimisations cost more than they save.
_RUNS_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_CPU_STEP = QUICK_CPU


def run(cfg: Config, console: Console | None = None) -> TrainState:
    """Trains to `cfg.steps`, from the newest usable checkpoint of the run directory if there is one.

    Returns:
        The state at the end.

    Raises:
        ConfigError: if the text or the run directory does not fit the configuration; before any
            device work.
        RunError, CheckpointError: if the run cannot go on.
        SystemExit: after SIGTERM or Ctrl-C, once the state has been saved.
    """
    console = console or SafeConsole()
    run_dir = Path(cfg.train.run_dir)
    lock = RunLock(run_dir)
    if run_dir.exists() and not cfg.train.distributed:
        lock.take()  # before anything else costs time; of several processes the first one is not known yet
    try:
        return _run(cfg, console, lock)
    finally:
        lock.release()


def _run(cfg: Config, console: Console, lock: RunLock) -> TrainState:
    run_dir, timing, deadlines = Path(cfg.train.run_dir), Timing(), Deadlines(cfg.train)
    check_model(cfg, run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", cfg.train.keep, cfg.train.keep_every)
    newest = checkpoints.newest()
    origin = find_origin(cfg, newest)
    if origin:
        cfg = cfg.after(steps_done(*origin))
    if cfg.optim.make:
        resolve(cfg.optim.make, "optim.make")  # a wrong name ends the command before data and devices
    find_loggers(cfg.train.loggers)
    data = read_data(cfg)
    if origin:
        check_same_data(cfg, data, *origin, "" if newest else cfg.train.fork_from)
    if cfg.model.engram_layer_ids and make_token_map(cfg.model) is None:
        raise ConfigError(
            f"model.engram_compressed_vocab_size = {cfg.model.engram_compressed_vocab_size} needs "
            "model.engram_token_map: the tokenizer.json or the .npy that gives so many numbers"
        )
    start_devices(cfg.train.cpu_devices, cfg.train.distributed, cfg.train.deterministic)
    use_compile_cache(cfg.train.compile_cache)
    with checkpoints:
        leg = cfg.leg(origin[0] if origin else 0)
        use_mesh(*dataclasses.astuple(leg.cfg.mesh))
        if jax.process_index():  # the first process speaks and writes for all
            console = Console(quiet=True)
        for part in cfg.legs:
            split_trained(part.cfg, nnx.state(abstract_model(part.cfg), nnx.Param))  # each trains something
        lock.take_first()  # makes the folder, which a wrong configuration does not
        check_shared(run_dir)
        objective, (optimizer, _) = describe_objective(objective_of(leg.cfg).weights), describe_optimizer(leg.cfg)
        for line in [*describe_model(leg.cfg.model), objective, optimizer, data[leg.number].line]:
            console.print(line)
        if cfg.stages:
            console.print(*describe_stages(cfg), sep="\n")
        if jax.sharding.get_abstract_mesh().size > 1:
            console.print(*describe_placement(cfg, leg), sep="\n")
        trainer = _Trainer(cfg, data, checkpoints, console, timing, deadlines)
        state = trainer.start()
        cfg = trainer.cfg
        write_config(cfg, run_dir)
        if int(state.step) >= cfg.steps:
            console.print("the run is finished; raise train.steps to continue it")
            return state
        state = trainer.train(state)
    _report(cfg, state, trainer.held_out, trainer.evaluation, data[-1], console)
    return state


class _Spike(Exception):
    """A step that the run has to go back from."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


class _Trainer:
    """A run: its configuration, data and checkpoints, and what it knows beside its arrays."""

    def __init__(
        self,
        cfg: Config,
        data: list[Data],
        checkpoints: Checkpoints,
        console: Console,
        timing: Timing,
        deadlines: Deadlines,
    ):
        self.cfg, self.data, self.checkpoints, self.console = cfg, data, checkpoints, console
        self.timing, self.deadlines = timing, deadlines
        self.history = History()
        self.routes: collections.deque[jax.Array] = collections.deque()  # experts of the next batches
        self.programs: dict[tuple[Any, ...], Callable[..., Any]] = {}  # of all stages: a rollback may go back to one
        self.evaluation: list[HostBatch] = []
        self.held_out = {"eval_loss": math.nan}
        self.bad = 0
        self.all_finite = jax.jit(_all_finite)

    def warn(self, text: str) -> None:
        """Says what may be wrong."""
        self.console.print(f"warning: {text}", style="yellow")

    def event(self, step: int, kind: str, text: str) -> None:
        """Notes and says what happened at a step."""
        self.history.events.append({"step": step, "event": kind, "text": text})
        self.console.print(
            f"step {step}: {kind}: {text}", style="yellow" if kind in ("spike", "rollback", "save") else None
        )
        if jax.process_index() == 0:
            write_events(Path(self.cfg.train.run_dir), self.history.events)

    def start(self) -> TrainState:
        """The state of the newest usable checkpoint, of the one to fork from, or that of a new run."""
        cfg, run_dir, source = self.cfg, self.cfg.train.run_dir, self.cfg.train.fork_from
        if found := self.restored():
            self.console.print(f"resumed     {run_dir} at step {int(found[0].step)}")
            self.print_changes(*found)
            return found[0]
        if source:
            found = self.restored(source=source)
            assert found is not None  # `find_origin` has looked
            state, before = found
            self.event(int(state.step), "fork", f"from {source}")
            self.print_changes(state, before)
            self.save(state)  # the run does not need the other one any more
            return state
        state = jax.jit(lambda: init_state(cfg), compiler_options=_RUNS_ONCE)()
        if cfg.train.init_from:
            _, params, buffers = nnx.split(load_model(cfg, cfg.train.init_from), nnx.Param, ...)
            state = dataclasses.replace(state, params=params, buffers=buffers)
            self.console.print(f"parameters  from {cfg.train.init_from}")
        return state

    def print_changes(self, state: TrainState, before: dict[str, Any]) -> None:
        """Print how the configuration differs from `before`, with which the state was saved."""
        try:
            lines = changes(before, self.cfg) + rate_change(before, self.cfg, int(state.step), int(state.skipped))
        except ConfigError as error:  # of another version, accepted since the model and the arrays fit
            lines = [f"unknown: the configuration in the checkpoint cannot be read: {error}"]
        for line in lines:
            self.console.print(f"changed     {line}")

    def restored(self, before: int | None = None, source: str = "") -> tuple[TrainState, dict[str, Any]] | None:
        """Restore the state of a checkpoint and the history; None if there is none to choose.

        Args:
            before: consider only steps before this one.
            source: `RUN` or `RUN@STEP`, another run; this one if empty.

        Returns:
            The state, and the configuration that it was saved with.
        """

        def abstract(step: int, host: dict[str, Any]) -> TrainState:
            use_mesh(*dataclasses.astuple(self.cfg.after(steps_done(step, host)).leg(step).cfg.mesh))
            history = History.of(host)
            routes = abstract_routes(self.cfg.model, len(history.routed), tuple(history.routes))
            return dataclasses.replace(abstract_state(self.cfg), routes=routes)

        with self.timing.during("restore"):
            if source:
                run_dir, at = parse_source(source)
                with Checkpoints(run_dir / "checkpoints", self.cfg.train.keep) as others:
                    found = others.restore(abstract, self.warn, step=at)
            else:
                found = self.checkpoints.restore(abstract, self.warn, before=before)
        if found is None:
            return None
        step, state, host = found
        planned = [leg.planned for leg in self.cfg.legs]
        self.cfg = self.cfg.after(steps_done(step, host))
        if planned != [leg.planned for leg in self.cfg.legs]:
            self.data = read_data(self.cfg)
        check_same_data(self.cfg, self.data, step, host, source)  # `run` has looked at the newest, which may be damaged
        self.history, self.routes = History.of(host), collections.deque(state.routes)
        return dataclasses.replace(state, routes=()), host["config"]

    def save(self, state: TrainState) -> None:
        """Saves the run as it stands."""
        step = int(state.step)
        with self.timing.during("save"):
            if not self.all_finite(state):
                raise RunError(f"the state at step {step} is not finite; it is not saved")
            self.history.clock = list(self.cfg.legs[0].clock.until(step))
            self.history.routes = list(self.routes[0].shape) if self.routes else []
            host = dataclasses.asdict(self.history) | {"config": resolved(self.cfg)}
            self.checkpoints.save(step, dataclasses.replace(state, routes=tuple(self.routes)), host)
        self.timing.saved(step)
        self.deadlines.saved()

    def wait(self) -> None:
        """Wait until the last save is finished and verified."""
        with self.timing.during("save"):
            self.checkpoints.wait()

    def train(self, state: TrainState) -> TrainState:
        """Steps until `cfg.steps`."""
        cfg, step = self.cfg, int(state.step)
        self.checkpoints.before = decay_start(cfg.optim, cfg.steps, cfg.legs[0].clock)
        own_dir = Path(cfg.train.run_dir) if jax.process_index() == 0 else None
        loggers = make_loggers(cfg, own_dir, step) if own_dir else []
        with (
            stop_signals() as self.stopped,
            MetricsWriter(own_dir, step, self.history.rollbacks, loggers) as self.writer,
            Display(self.console, cfg.steps, step) as self.display,
            Profile(cfg.train.profile_steps, Path(cfg.train.run_dir) / "profile", self.console.print) as self.profile,
        ):
            if cfg.routing.anticipation.mode == "auto" and self.checkpoints.latest() is None:
                self.save(state)  # so that there is something to go back to
            while step < self.cfg.steps:
                spiked = 0
                try:
                    state = self.stage(self.cfg.leg(step), state)
                except _Spike as found:
                    spiked = found.step
                    # The frames below hold the state. A device may have no room for another one beside it.
                    traceback.clear_frames(found.__traceback__)
                if spiked:
                    self.profile.stop()
                    state = self.back(spiked)
                step = int(state.step)
            self.wait()  # while signals are caught, so that none of them ends the last save
        self.console.print(self.timing.line())
        return state

    def back(self, step: int) -> TrainState:
        """Goes back to before a spike, all of the run together, and saves it there as it goes on."""
        cfg, now = self.cfg.leg(step - 1).cfg, self.history
        now.tries = now.tries + 1 if step <= now.furthest else 1
        if now.tries > cfg.spikes.limit:
            raise RunError(
                f"the run went back {cfg.spikes.limit} times from the spike at step {now.furthest} and never got past "
                "it: skip its batches (spikes.skip), go back further (spikes.margin) or lower the learning rate"
            )
        first = step - cfg.spikes.steps + 1
        found = self.restored(before=max(first - cfg.spikes.margin, 1))
        if found is None:
            raise RunError(f"there is no checkpoint to go back to before the spike at step {step}: lower spikes.margin")
        state, there, hold = found[0], int(found[0].step), cfg.routing.anticipation.hold
        self.checkpoints.drop_after(there)
        self.timing.took_back(there)
        for name in ("events", "spikes", "tries"):
            setattr(self.history, name, getattr(now, name))
        self.history.rollbacks, self.history.furthest = now.rollbacks + 1, max(step, now.furthest)
        self.history.skip += step - there if cfg.spikes.skip < 0 else cfg.spikes.skip
        told = f"to step {there}"
        if self.history.skip:
            told += f", leaving out {self.history.skip} batches"
        if hold:
            self.history.hold = step + hold
            told += f", with anticipatory routing up to step {step + hold}"
        self.event(step, "rollback", told)
        self.bad = 0
        self.routes.clear()
        self.history.routed = []
        self.save(state)
        return state

    def stage(self, leg: ResolvedStage, state: TrainState) -> TrainState:
        """Steps until the stage or the run ends."""
        cfg, data, history = leg.cfg, self.data[leg.number], self.history
        if tuple(jax.sharding.get_abstract_mesh().shape.values()) != dataclasses.astuple(cfg.mesh):
            self.save(state)  # the state moves to another mesh through a checkpoint, as it would in a restart
            self.wait()
            for array in jax.tree.leaves(state):
                array.delete()  # there may be no room for two states
            found = self.restored()
            assert found is not None
            state, history = found[0], self.history
        if (history.stage, history.identity) != (leg.number, data.identity):
            if history.identity and history.stage == leg.number:
                self.warn("this is other data than at the checkpoint: it starts at its beginning (train.new_data)")
            if self.cfg.stages:
                what = [f"{key} = {value!r}" for key, value in leg.stage.changes.items()]
                self.event(int(state.step), "stage", ", ".join([f"{leg.stage.name} up to step {leg.last}", *what]))
            history.enter(leg, data.identity)
            self.routes.clear()
        with streams(cfg, data, Position(*history.position)) as (stream, self.evaluation):
            for _ in range(history.skip):
                next(stream)
            history.skip = 0
            place = functools.partial(put_batch, own=stream.own, rows=cfg.data.batch_size)
            example = place(self.evaluation[0])
            if self.routes and self.routes[0].shape != route_shape(cfg.model, example):
                self.warn("the batches are others than at the checkpoint: anticipatory routing starts again")
                self.routes.clear()
                history.routed = []
            return self.steps(leg, state, stream, place, self.program(leg, "evaluation", state, example))

    def program(self, leg: ResolvedStage, name: str, state: TrainState, batch: Batch) -> Callable[..., Any]:
        """A function of state and batch, compiled for a stage and for batches like this one."""
        # Of the clock only the steps to come count, which its tokens at the stage's end decide.
        key = leg.number, leg.last, leg.cfg.steps, leg.clock.tokens(leg.last), name, "experts" in batch
        if key not in self.programs:
            options = _CPU_STEP if on_cpu() else None
            if name == "step":
                made = jax.jit(make_train_step(leg.cfg, leg.clock), donate_argnums=0, compiler_options=options)
            else:
                make = {"evaluation": make_eval_step, "routing": make_route}[name]
                made = jax.jit(make(leg.cfg), compiler_options=options)
            with self.timing.during("compile") as seconds:
                self.programs[key] = made.lower(state, batch).compile()
            self.console.print(f"compiled    {name} in {seconds():.0f} s")
        return self.programs[key]

    def ahead(
        self,
        leg: ResolvedStage,
        state: TrainState,
        step: int,
        stream: Stream,
        place: Callable[[HostBatch], Batch],
    ) -> tuple[Batch, int]:
        """The experts of the next batch, if routing is anticipatory, and how many steps ago they were chosen.

        Afterwards those of the `delay` batches behind it are chosen too: when it begins, by the same parameters,
        so that the lag grows from 0 to `delay`.
        """
        settings, history = leg.cfg.routing.anticipation, self.history
        end = min(leg.last, self.cfg.steps)
        if settings.mode == "auto":
            if 0 < history.hold == step:
                self.event(step, "anticipation", "off again")
            end = min(end, history.hold)
        if settings.mode == "off" or not settings.delay or step >= end:
            self.routes.clear()
            history.routed = []
            return {}, 0
        while len(self.routes) <= min(settings.delay, end - 1 - step):
            with self.timing.waiting():
                rows = stream.peek(len(self.routes))
            batch = place(rows)
            self.routes.append(self.program(leg, "routing", state, batch)(state, batch))
            history.routed.append(step)
        return {"experts": self.routes.popleft()}, step - history.routed.pop(0)

    def finish(self, leg: ResolvedStage, metrics: dict[str, Any], more: dict[str, float]) -> None:
        """Writes and shows a step, with what else there is to tell, once the device has its metrics.

        Raises:
            RunError: after too many steps in a row that were not finite.
            _Spike: if the run has to go back from this step.
        """
        scalars = {name: np.asarray(value).item() for name, value in metrics.items()}
        step, history, train = scalars["step"], self.history, self.cfg.train
        self.bad = 0 if scalars.pop("finite") else self.bad + 1
        spiked = ""
        if self.bad:
            told = f"objective {scalars['objective']}, gradient norm {scalars['grad_norm']}"
            self.event(step, "skipped", told)
        elif math.isfinite(scalars["loss"]):
            spiked = spike(leg.cfg.spikes, history.recent, scalars["loss"], scalars["grad_norm"])
        if spiked:
            history.spikes += 1
            self.event(step, "spike", spiked)
        seconds, new = self.timing.lap(), scalars["tokens"]
        history.tokens += new
        scalars |= {"tokens": history.tokens, "tokens_per_s": new / seconds}
        scalars |= {"skipped_records": self.data[leg.number].skipped, "spikes": history.spikes}
        scalars |= {"rollbacks": history.rollbacks} | self.timing.scalars() | device_memory() | more
        if self.utilisation:
            scalars["mfu"] = self.utilisation * scalars["tokens_per_s"]
        self.writer.write(scalars)
        self.display.update(scalars, seconds)
        if self.bad >= train.bad_steps:
            raise RunError(
                f"{self.bad} steps in a row were not finite, the last one {step}: nothing was learnt in them"
            )
        if spiked and leg.cfg.routing.anticipation.mode == "auto":
            raise _Spike(step)

    def steps(
        self,
        leg: ResolvedStage,
        state: TrainState,
        stream: Stream,
        place: Callable[[HostBatch], Batch],
        eval_step: Callable[..., Any],
    ) -> TrainState:
        """The steps of a stage."""
        run, train, step, last = self.cfg, self.cfg.train, int(state.step), min(leg.last, self.cfg.steps)
        pending: dict[str, Any] | None = None  # the metrics of the last step, which the device still works on
        self.utilisation = utilisation_per_rate(leg.cfg)
        self.timing.restart()
        while step < last:
            experts, lag = self.ahead(leg, state, step, stream, place)
            with self.timing.waiting():
                rows = next(stream)
            batch = place(rows) | experts
            self.history.position = stream.position
            train_step = self.program(leg, "step", state, batch)
            step += 1
            self.profile.before(step)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = train_step(state, batch)
            self.profile.after(step, metrics)
            norms = metrics.pop("grad_norms")
            if step == leg.first + 1:
                told = jax.device_get(metrics | {"grad_norms": norms})
                for warning in start_warnings(leg.cfg, told, state.buffers, new=step == 1):
                    self.warn(warning)
            if pending is not None:
                self.finish(leg, pending, {})
            pending = {"step": step, "lag": lag} | metrics
            if failure := self.checkpoints.failed():
                self.event(step, "save", f"{failure}; the next save is tried all the same")
            late, over = self.deadlines.passed(step)
            stop = self.stopped(step) or (signal.SIGTERM if over else 0)
            saves = late or step % train.checkpoint_every == 0
            ends = stop or step == run.steps
            due = step == run.steps or step % train.eval_every == 0
            if ends:
                self.profile.stop()
            if due or ends or step == last or self.bad or saves:
                found = {}
                if due and not stop:
                    jax.block_until_ready(metrics)  # the step ends before the evaluation begins
                    with self.timing.during("evaluate"):
                        found = self.held_out = evaluate(eval_step, state, self.evaluation, place)
                    held_out, unit = found["eval_loss"], self.data[leg.number].unit
                    self.console.print(f"step {step}: held-out loss {held_out:.3f} nats per {unit}")
                self.finish(leg, pending, found)
                pending = None
                if ends or saves:
                    self.save(state)
            if stop:
                self.wait()
                name = "train.stop_after_minutes" if over else signal.Signals(stop).name
                self.console.print(f"stopped by {name} at step {step}; the same command goes on from there")
                raise SystemExit(128 + stop)
        return state


def _all_finite(state: TrainState) -> jax.Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def _report(
    cfg: Config,
    state: TrainState,
    held_out: dict[str, float],
    evaluation: list[HostBatch],
    data: Data,
    console: Console,
) -> None:
    per = f"nats per {data.unit}"
    rows = counted_rows(cfg.leg(cfg.steps - 1).cfg.data.batch_size, jax.process_index())
    unigram, loss = unigram_entropy(evaluation, rows, cfg.model.vocab_size), held_out["eval_loss"]
    console.print(f"held-out loss     {loss:.3f} {per} ({loss / math.log(2):.3f} bits)")
    if "eval_loss_image" in held_out:
        right, wrong = held_out["eval_loss_image"], held_out["eval_loss_wrong_image"]
        console.print(f"after an image    {right:.3f} {per}, {wrong:.3f} if it is another one of the same size")
    console.print(f"unigram entropy   {unigram:.3f} {per} ({unigram / math.log(2):.3f} bits)")
    if cfg.train.sample_tokens:
        model = nnx.merge(nnx.graphdef(abstract_model(cfg)), state.params, state.buffers)
        prompt = of_first(held_out_prompt(evaluation, data.tokenizer))  # processes have different rows
        text, _ = sample(model, data.tokenizer, prompt, cfg.train.sample_tokens, cfg.train.seed, past_end=True)
        console.print(f"sample after {prompt!r} of the held-out text:" if prompt else "sample:")
        console.print(printable(text))
