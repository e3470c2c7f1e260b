# SPDX-License-Identifier: Apache-2.0
"""A run between its steps: everything that lasts from one step to the next, saved in checkpoints and restored."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from dsv4_jax.config import Config
from dsv4_jax.data.batch import HostBatch
from dsv4_jax.mesh import use_mesh
from dsv4_jax.section import RunError
from dsv4_jax.train.anticipation import RouteQueue, abstract_routes
from dsv4_jax.train.checkpoint import Checkpoints, find_checkpoint, parse_source
from dsv4_jax.train.deadlines import Deadlines
from dsv4_jax.train.feed import Data, check_same_data, read_data
from dsv4_jax.train.history import History, steps_done
from dsv4_jax.train.mirror import work_folder
from dsv4_jax.train.programs import Programs
from dsv4_jax.train.run_dir import resolved, write_events
from dsv4_jax.train.state import TrainState, abstract_state
from dsv4_jax.train.timing import Timing


class Trainer:
    """Hold what lasts from one step of a run to the next, beside its `TrainState`; save and restore both.

    Attributes:
        cfg: the run.
        data: what each of its stages reads.
        checkpoints: those of the run directory.
        console: where lines are printed.
        timing: accounts for the time of this process.
        deadlines: the times to save and to stop.
        programs: what has been compiled.
        history: what checkpoints hold beside arrays.
        routes: experts chosen ahead.
        evaluation: the held-out batches of the current stage.
        held_out: metrics of the last evaluation.
        bad_steps: number of steps in a row, up to the last one, that were not finite.
    """

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
        self.programs = Programs(timing, console.print)
        self.history, self.routes = History(), RouteQueue()
        self.evaluation: list[HostBatch] = []
        self.held_out = {"eval/loss": math.nan}
        self.bad_steps = 0
        self._all_finite = jax.jit(_all_finite)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.console.print(f"warning: {text}", style="yellow")

    def record(self, step: int, kind: str, text: str) -> None:
        """Record an event in the history and in events.jsonl, and print it."""
        self.history.events.append({"step": step, "event": kind, "text": text})
        self.console.print(
            f"step {step}: {kind}: {text}", style="yellow" if kind in ("spike", "rollback", "save") else None
        )
        if jax.process_index() == 0:
            write_events(work_folder(self.cfg.train.run_dir), self.history.events)

    def save(self, state: TrainState) -> None:
        """Start to save the run as it is.

        Raises:
            RunError: if the state is not finite.
            CheckpointError: see `Checkpoints.save`.
        """
        step = int(state.step)
        with self.timing.during("save"):
            if not self._all_finite(state):
                raise RunError(f"the state at step {step} is not finite; it is not saved")
            self.history.progress.clock = list(self.cfg.resolved_stages[0].clock.until(step))
            routes, self.history.routes = self.routes.to_state()
            host = dataclasses.asdict(self.history) | {"config": resolved(self.cfg)}
            self.checkpoints.save(step, dataclasses.replace(state, routes=routes), host)
        self.timing.saved(step)
        self.deadlines.saved()

    def wait(self) -> None:
        """Wait until the last save is finished and verified."""
        with self.timing.during("save"):
            self.checkpoints.wait()

    def restore(self, before: int | None = None, source: str = "") -> tuple[TrainState, dict[str, Any]] | None:
        """Restore history, routes and stages from the newest usable checkpoint; None if there is none.

        Args:
            before: consider only steps before this one.
            source: `RUN` or `RUN@STEP`, another run; this one if empty.

        Returns:
            The state, and the configuration that it was saved with.

        Raises:
            ConfigError: if the checkpoint holds another state, or its data is other data.
            CheckpointError: if there are checkpoints to consider and all are damaged.
        """

        def abstract(step: int, host: dict[str, Any]) -> TrainState:
            # The state is read onto the mesh of its stage.
            use_mesh(*dataclasses.astuple(self.cfg.after(steps_done(step, host)).stage_at(step).cfg.mesh))
            routes = abstract_routes(self.cfg.model, History.from_host(host).routes)
            return dataclasses.replace(abstract_state(self.cfg), routes=routes)

        with self.timing.during("restore"):
            if source:
                run_dir, at = parse_source(source)
                with Checkpoints(find_checkpoint(run_dir, at).parent, self.cfg.train.keep) as others:
                    found = others.restore(abstract, self.warn, step=at)
            else:
                found = self.checkpoints.restore(abstract, self.warn, before=before)
        if found is None:
            return None
        step, state, host = found

        # Steps that are done keep their tokens, so the stages may end at other steps than this command's keys give.
        planned = [stage.planned for stage in self.cfg.resolved_stages]
        self.cfg = self.cfg.after(steps_done(step, host))
        if planned != [stage.planned for stage in self.cfg.resolved_stages]:
            self.data = read_data(self.cfg)
        check_same_data(self.cfg, self.data, step, host, source)  # the newest, already checked, may be damaged

        self.history = History.from_host(host)
        self.routes = RouteQueue.from_state(state.routes, self.history.routes)
        return dataclasses.replace(state, routes=()), host["config"]


def _all_finite(state: TrainState) -> jax.Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
