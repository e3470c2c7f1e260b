# SPDX-License-Identifier: Apache-2.0
"""A run from its start to its end: set up, resume or fork, run the stages, roll back, evaluate and sample."""

import contextlib
import dataclasses
import functools
import math
import traceback
from typing import Any

import jax
from flax import nnx
from rich.console import Console

from dsv4_jax.config import Config
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import put_batch
from dsv4_jax.data.packing import Position
from dsv4_jax.data.remote import is_address
from dsv4_jax.generate.sample import held_out_pictures, held_out_prompt, sample
from dsv4_jax.mesh import start_devices, use_mesh
from dsv4_jax.model.token_map import make_token_map
from dsv4_jax.section import ConfigError, RunError
from dsv4_jax.train.anticipation import route_shape
from dsv4_jax.train.checkpoint import Checkpoints, load_model, parse_source
from dsv4_jax.train.checks import find_functions, trace_functions
from dsv4_jax.train.console import Display, SafeConsole, printable
from dsv4_jax.train.deadlines import Deadlines
from dsv4_jax.train.describe import (
    describe_model,
    describe_objective,
    describe_optimizer,
    describe_placement,
    describe_stages,
)
from dsv4_jax.train.evaluate import unigram_entropy
from dsv4_jax.train.feed import Data, check_same_data, counted_rows, read_data, streams
from dsv4_jax.train.fork import find_origin
from dsv4_jax.train.hardware import utilisation_per_rate
from dsv4_jax.train.history import steps_done
from dsv4_jax.train.loggers import make_loggers
from dsv4_jax.train.loop import Outputs, SpikeError, StageInputs, run_steps
from dsv4_jax.train.metrics import MetricsWriter
from dsv4_jax.train.mirror import Mirror, work_folder
from dsv4_jax.train.objectives import objective_of
from dsv4_jax.train.optimizer import decay_start, split_trained
from dsv4_jax.train.processes import check_shared, of_first
from dsv4_jax.train.profile import Profile
from dsv4_jax.train.programs import use_compile_cache
from dsv4_jax.train.run_dir import RunLock, changes, check_model, rate_change, write_config
from dsv4_jax.train.signals import stop_signals
from dsv4_jax.train.state import TrainState, abstract_model
from dsv4_jax.train.timing import Timing
from dsv4_jax.train.trainer import Trainer
from dsv4_jax.weights.checkpoint import is_folder, read_model


def run(cfg: Config, console: Console | None = None) -> TrainState:
    """Train to `cfg.steps`, from the newest usable checkpoint of the run directory if there is one.

    Args:
        cfg: the run.
        console: where lines are printed; stdout if absent.

    Returns:
        The state at the end.

    Raises:
        ConfigError: if the data or the run directory does not fit the configuration; before any device work.
        RunError, CheckpointError: if the run cannot continue.
        SystemExit: after SIGTERM or Ctrl-C, once the state has been saved.
    """
    console = console or SafeConsole()
    run_dir, mirror = work_folder(cfg.train.run_dir), None
    lock = RunLock(run_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if is_address(cfg.train.run_dir):
            lock.take()
            # A rollback may need any checkpoint; other runs only the newest.
            keep_every = 0 if cfg.routing.anticipation.mode == "auto" else cfg.train.keep_every
            mirror = stack.enter_context(Mirror(cfg.train.run_dir, console.print, keep_every))
        elif run_dir.exists() and not cfg.train.distributed:
            lock.take()  # before anything else costs time; of several processes the first one is not known yet
        return _run(cfg, console, lock, mirror)


def _run(cfg: Config, console: Console, lock: RunLock, mirror: Mirror | None) -> TrainState:
    # Check everything that needs no device.
    run_dir, timing, deadlines = work_folder(cfg.train.run_dir), Timing(), Deadlines(cfg.train)
    check_model(cfg, run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", cfg.train.keep, cfg.train.keep_every)
    if mirror:
        checkpoints.publish = mirror.publish
    newest = checkpoints.newest()
    origin = find_origin(cfg, newest)
    if origin:
        cfg = cfg.after(steps_done(*origin))
    cfg.check_steps()
    find_functions(cfg)
    data = read_data(cfg)
    if origin:
        check_same_data(cfg, data, *origin, "" if newest else cfg.train.fork_from)
    if cfg.model.engram_layer_ids and make_token_map(cfg.model) is None:
        raise ConfigError(
            f"model.engram_compressed_vocab_size = {cfg.model.engram_compressed_vocab_size} needs "
            "model.engram_token_map: the tokenizer.json or the .npy that gives that size"
        )

    # Start the devices, and describe the stage to come.
    start_devices(cfg.train.cpu_devices, cfg.train.distributed, cfg.train.deterministic)
    use_compile_cache(cfg.train.compile_cache)
    with checkpoints:
        stage = cfg.stage_at(origin[0] if origin else 0)
        use_mesh(*dataclasses.astuple(stage.cfg.mesh))
        if jax.process_index():  # the first process prints and writes for all
            console = Console(quiet=True)
        for part in cfg.resolved_stages:
            split_trained(part.cfg, nnx.state(abstract_model(part.cfg), nnx.Param))  # each trains something
        trace_functions(cfg)
        lock.take_first()  # makes the folder, which a wrong configuration does not
        check_shared(run_dir)
        objective, (optimizer, _) = describe_objective(objective_of(stage.cfg).weights), describe_optimizer(stage.cfg)
        for line in [*describe_model(stage.cfg.model), objective, optimizer, data[stage.number].line]:
            console.print(line)
        if cfg.stages:
            console.print(*describe_stages(cfg), sep="\n")
        if jax.sharding.get_abstract_mesh().size > 1:
            console.print(*describe_placement(cfg, stage), sep="\n")

        # Train.
        trainer = Trainer(cfg, data, checkpoints, console, timing, deadlines)
        state = start(trainer)
        cfg = trainer.cfg
        write_config(cfg, run_dir)
        if int(state.step) >= cfg.steps and not trainer.history.progress.evaluation_due:
            console.print("the run is finished; raise train.steps to continue it")
            return state
        state = train(trainer, state)
    _report(trainer, state, data[-1])
    return state


def start(trainer: Trainer) -> TrainState:
    """Return the state of the newest usable checkpoint, of the one to fork from, or of a new run."""
    cfg, console, source = trainer.cfg, trainer.console, trainer.cfg.train.fork_from
    if found := trainer.restore():
        console.print(f"resumed     {cfg.train.run_dir} at step {int(found[0].step)}")
        _print_changes(trainer, *found)
        return found[0]
    if source:
        found = trainer.restore(source=source)
        assert found is not None  # `find_origin` has looked
        state, before = found
        trainer.history.progress.evaluation_due = False  # the line that lacks it is in the other run
        trainer.record(int(state.step), "fork", f"from {source}")
        _print_changes(trainer, state, before)
        trainer.save(state)  # from here on the run does not need the other one
        return state
    state = trainer.programs.initial_state(cfg)
    if cfg.train.init_from:
        weights, _ = parse_source(cfg.train.init_from)
        if is_folder(weights):
            model = read_model(weights, cfg.model)
        else:
            model = load_model(cfg, cfg.train.init_from)
        _, params, buffers = nnx.split(model, nnx.Param, ...)
        state = dataclasses.replace(state, params=params, buffers=buffers)
        console.print(f"parameters  from {cfg.train.init_from}")
    return state


def _print_changes(trainer: Trainer, state: TrainState, before: dict[str, Any]) -> None:
    """Print how the configuration differs from `before`, with which the state was saved."""
    cfg = trainer.cfg
    try:
        lines = changes(before, cfg) + rate_change(before, cfg, int(state.step), int(state.skipped))
    except ConfigError as error:  # of another version, accepted since the model and the arrays fit
        lines = [f"unknown: the configuration in the checkpoint cannot be read: {error}"]
    for line in lines:
        trainer.console.print(f"changed     {line}")


def train(trainer: Trainer, state: TrainState) -> TrainState:
    """Run the stages up to `cfg.steps`, with rollbacks."""
    cfg, step = trainer.cfg, int(state.step)
    trainer.checkpoints.before = decay_start(cfg.optim, cfg.steps, cfg.resolved_stages[0].clock)
    own_dir = work_folder(cfg.train.run_dir) if jax.process_index() == 0 else None
    loggers = make_loggers(cfg, own_dir, step) if own_dir else []
    with (
        stop_signals() as stopped,
        MetricsWriter(own_dir, step, trainer.history.recovery.rollbacks, loggers) as writer,
        Display(trainer.console, cfg.steps, step) as display,
        Profile(cfg.train.profile_steps, work_folder(cfg.train.run_dir) / "profile", trainer.console.print) as profile,
    ):
        outputs = Outputs(stopped, writer, display, profile)
        if cfg.routing.anticipation.mode == "auto" and trainer.checkpoints.latest() is None:
            trainer.save(state)  # so that there is something to go back to
        while step < trainer.cfg.steps or trainer.history.progress.evaluation_due:
            # An evaluation that is still due belongs to the stage of the last step, which may be over.
            stage = trainer.cfg.stage_at(step - trainer.history.progress.evaluation_due)
            spiked = 0
            try:
                state = run_stage(trainer, outputs, stage, state)
            except SpikeError as error:
                spiked = error.step
                # The frames below hold the state. A device may have no room for another one beside it.
                traceback.clear_frames(error.__traceback__)
            if spiked:
                profile.stop()
                state = roll_back(trainer, spiked)
            step = int(state.step)
        trainer.wait()  # while signals are caught, so that none of them ends the last save
    trainer.console.print(trainer.timing.line())
    return state


def run_stage(trainer: Trainer, outputs: Outputs, stage: ResolvedStage, state: TrainState) -> TrainState:
    """Run a stage, from wherever the run is in it, until it or the run ends."""
    cfg, data = stage.cfg, trainer.data[stage.number]
    if tuple(jax.sharding.get_abstract_mesh().shape.values()) != dataclasses.astuple(cfg.mesh):
        # The state moves to another mesh through a checkpoint, as it would in a restart.
        trainer.save(state)
        trainer.wait()
        for array in jax.tree.leaves(state):
            array.delete()  # there may be no room for two states
        found = trainer.restore()
        assert found is not None
        state = found[0]

    # Enter the stage, unless the run is inside it already.
    history, progress = trainer.history, trainer.history.progress
    if (progress.stage, progress.identity) != (stage.number, data.identity):
        if progress.identity and progress.stage == stage.number:
            trainer.warn("this is other data than at the checkpoint: it starts at its beginning (train.new_data)")
        if trainer.cfg.stages:
            keys = [f"{key} = {value!r}" for key, value in stage.declared.changes.items()]
            text = ", ".join([f"{stage.declared.name} up to step {stage.last}", *keys])
            trainer.record(int(state.step), "stage", text)
        history.enter(stage, data.identity)
        trainer.routes.clear()

    with streams(cfg, data, Position(*progress.position)) as (stream, trainer.evaluation):
        for _ in range(history.recovery.skip):
            next(stream)
        history.recovery.skip = 0
        put = functools.partial(put_batch, own=stream.own, rows=cfg.data.batch_size)
        example = put(trainer.evaluation[0])
        if trainer.routes and trainer.routes.shape != route_shape(cfg.model, example):
            trainer.warn("the batches are others than at the checkpoint: anticipatory routing starts again")
            trainer.routes.clear()
        eval_step = trainer.programs.compiled(stage, "evaluation", state, example)
        return run_steps(trainer, outputs, StageInputs(stage, stream, put, eval_step, utilisation_per_rate(cfg)), state)


def roll_back(trainer: Trainer, step: int) -> TrainState:
    """Go back to before a spike at `step`, with arrays, data and history, and save the run as it continues there.

    Raises:
        RunError: after `spikes.limit` rollbacks at this spike, or if there is no checkpoint to go back to.
    """
    cfg, now = trainer.cfg.stage_at(step - 1).cfg, trainer.history
    now.recovery.tries = now.recovery.tries + 1 if step <= now.recovery.furthest else 1
    if now.recovery.tries > cfg.spikes.limit:
        raise RunError(
            f"the run went back {cfg.spikes.limit} times from the spike at step {now.recovery.furthest} and never got "
            "past it: skip its batches (spikes.skip), go back further (spikes.margin) or lower the learning rate"
        )

    # Restore arrays and history; delete the later checkpoints, which are of a course that ends here.
    first = step - cfg.spikes.steps + 1
    found = trainer.restore(before=max(first - cfg.spikes.margin, 1))
    if found is None:
        raise RunError(f"there is no checkpoint to go back to before the spike at step {step}: lower spikes.margin")
    state, target = found[0], int(found[0].step)
    trainer.checkpoints.drop_after(target)
    trainer.timing.took_back(target)

    # Of the history, keep what is about the whole run and not about the restored step.
    history, recovery = trainer.history, trainer.history.recovery
    history.events = now.events
    recovery.spikes, recovery.tries = now.recovery.spikes, now.recovery.tries
    recovery.rollbacks = now.recovery.rollbacks + 1
    recovery.furthest = max(step, now.recovery.furthest)
    history.progress.evaluation_due = False  # it has been made since

    # Go on differently: leave batches out, or turn anticipatory routing on for a while.
    recovery.skip += step - target if cfg.spikes.skip < 0 else cfg.spikes.skip
    text = f"to step {target}"
    if recovery.skip:
        text += f", leaving out {recovery.skip} batches"
    if hold := cfg.routing.anticipation.hold:
        recovery.hold = step + hold
        text += f", with anticipatory routing up to step {step + hold}"
    trainer.record(step, "rollback", text)
    trainer.bad_steps = 0
    trainer.routes.clear()
    trainer.save(state)
    return state


def _report(trainer: Trainer, state: TrainState, data: Data) -> None:
    """Print the held-out loss, beside what it should be compared with; record a sample."""
    cfg, console, held_out, evaluation = trainer.cfg, trainer.console, trainer.held_out, trainer.evaluation
    per = f"nats per {data.unit}"
    rows = counted_rows(cfg.stage_at(cfg.steps - 1).cfg.data.batch_size, jax.process_index())
    unigram, loss = unigram_entropy(evaluation, rows, cfg.model.vocab_size), held_out["eval/loss"]
    console.print(f"held-out loss     {loss:.3f} {per} ({loss / math.log(2):.3f} bits)")
    if "eval/loss_image" in held_out:
        right, wrong = held_out["eval/loss_image"], held_out["eval/loss_wrong_image"]
        console.print(f"after an image    {right:.3f} {per}, {wrong:.3f} if it is another one of the same size")
    console.print(f"unigram entropy   {unigram:.3f} {per} ({unigram / math.log(2):.3f} bits)")
    if cfg.train.sample_tokens:
        model = nnx.merge(nnx.graphdef(abstract_model(cfg)), state.params, state.buffers)
        # Processes have different rows.
        prompt = of_first(held_out_prompt(evaluation, data.tokenizer))
        pictures = of_first(held_out_pictures(evaluation, data.tokenizer))
        tokens, seed = cfg.train.sample_tokens, cfg.train.seed
        text, read = sample(model, data.tokenizer, prompt, tokens, seed, pictures=pictures)
        after = f"after {prompt!r} of the held-out text:" if prompt else "of the model:"
        trainer.record(int(state.step), "sample", printable(f"{after}\n{text}"))
        for picture, text in zip(pictures, read, strict=True):
            line = f"{text!r} in a held-out picture of {picture['written']!r}"
            trainer.record(int(state.step), "read", printable(line))
