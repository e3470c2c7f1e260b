# SPDX-License-Identifier: Apache-2.0
"""The history of a run: the host side of a checkpoint, stored as JSON beside its arrays."""

import dataclasses
from typing import Any

from dsv4_jax.config.files import config_from_json
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.packing import ORIGIN
from dsv4_jax.section import deferred_rules
from dsv4_jax.train.spikes import Recent


@dataclasses.dataclass
class Progress:
    """How far a run has read its data.

    Attributes:
        tokens: real tokens read, without padding.
        stage: number of the current stage, from 0.
        position: position of the next row in the data of that stage.
        identity: identity of that data (`Data.identity`); empty before the first stage.
        clock: (steps, tokens) of the steps done, as `Clock.until` lists them: another batch size changes only the
            steps that follow.
        evaluation_due: whether a signal stopped the run at a step of `train.eval_every`, which is not evaluated yet.
    """

    tokens: int = 0
    stage: int = 0
    position: tuple[int, ...] = ORIGIN
    identity: str = ""
    clock: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    evaluation_due: bool = False


@dataclasses.dataclass
class Recovery:
    """Spikes and rollbacks of a run.

    Attributes:
        recent: memory of the detector of spikes.
        spikes: number of spikes so far.
        rollbacks: number of rollbacks so far.
        furthest: step of the furthest spike that the run was rolled back from.
        tries: number of rollbacks since the run last got past that step.
        hold: last step with anticipatory routing after a rollback, in the mode `auto`.
        skip: number of batches to leave out next.
    """

    recent: Recent = dataclasses.field(default_factory=Recent)
    spikes: int = 0
    rollbacks: int = 0
    furthest: int = 0
    tries: int = 0
    hold: int = 0
    skip: int = 0


@dataclasses.dataclass
class Routes:
    """The batches whose experts are chosen ahead (`RouteQueue`).

    Attributes:
        steps: steps done when the experts of each batch were chosen.
        shape: shape of each choice.
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    shape: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class History:
    """What a run needs to continue, beside its arrays.

    Attributes:
        progress: position in steps, tokens and data.
        recovery: spikes and rollbacks.
        routes: experts chosen ahead.
        events: what happened, in order: dicts of `step`, `event` and `text`.
    """

    progress: Progress = dataclasses.field(default_factory=Progress)
    recovery: Recovery = dataclasses.field(default_factory=Recovery)
    routes: Routes = dataclasses.field(default_factory=Routes)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def from_host(cls, host: dict[str, Any]) -> "History":
        """Make the history of a checkpoint's JSON values.

        Missing values have their defaults, unknown ones are left out. Earlier versions stored all values side by side,
        with the steps of `Routes` as `routed` and the shape as `routes`.
        """
        if "progress" not in host:
            routes = {"steps": host.get("routed", []), "shape": host.get("routes", [])}
            host = {**host, "progress": host, "recovery": host, "routes": routes}
        recovery = host.get("recovery", {})
        recent = _known(Recent, recovery.get("recent", {}))
        return cls(
            progress=_known(Progress, host["progress"]),
            recovery=dataclasses.replace(_known(Recovery, recovery), recent=recent),
            routes=_known(Routes, host.get("routes", {})),
            events=list(host.get("events", [])),
        )

    def enter(self, stage: ResolvedStage, identity: str) -> None:
        """Begin a stage, or other data, at its beginning."""
        self.progress.stage, self.progress.identity, self.progress.position = stage.number, identity, ORIGIN
        self.recovery.recent = Recent()


def steps_done(step: int, host: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return (steps, tokens) of the steps done at a checkpoint, as `Clock.until` lists them.

    A checkpoint of a version that did not store them counted all its steps by its own configuration.

    Args:
        step: number of steps done.
        host: the checkpoint's JSON values.
    """
    if clock := History.from_host(host).progress.clock:
        return tuple((steps, tokens) for steps, tokens in clock)
    with deferred_rules():
        return config_from_json(host["config"]).resolved_stages[0].clock.until(step)


def _known(part: type[Any], values: dict[str, Any]) -> Any:
    """Make a part of the history, without the values that it does not know."""
    return part(**{field.name: values[field.name] for field in dataclasses.fields(part) if field.name in values})
