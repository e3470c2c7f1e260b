# SPDX-License-Identifier: Apache-2.0
"""What a run keeps beside its arrays: its folder's config.json and events.jsonl, and the history in a checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from dsv4_jax.config import Config
from dsv4_jax.data.packing import START
from dsv4_jax.stages import RUNTIME, Leg
from dsv4_jax.train.spikes import Recent
from dsv4_jax.validate import ConfigError


@dataclasses.dataclass
class History:
    """What decides how a run goes on, beside its arrays: JSON in every checkpoint.

    Attributes:
        tokens: real tokens read.
        stage: number of the stage.
        position: of the next row in its data.
        identity: of that data.
        skip: batches to leave out first.
        recent: what the detector of spikes remembers.
        spikes: how many there were.
        rollbacks: how often the run went back.
        furthest: step of the furthest spike that it went back from.
        tries: how often it went back without getting past that.
        hold: routing is anticipatory in steps up to this one, if `routing.anticipation.mode = auto`.
        routed: for each batch whose experts are chosen already, the steps done when they were.
        routes: shape of each of those choices.
        events: what happened, in order.
    """

    tokens: int = 0
    stage: int = 0
    position: tuple[int, ...] = START
    identity: str = ""
    skip: int = 0
    recent: Recent = dataclasses.field(default_factory=Recent)
    spikes: int = 0
    rollbacks: int = 0
    furthest: int = 0
    tries: int = 0
    hold: int = 0
    routed: list[int] = dataclasses.field(default_factory=list)
    routes: list[int] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, host: dict[str, Any]) -> "History":
        """From what `dataclasses.asdict` made of one; unknown values are left out."""
        found: dict[str, Any] = {f.name: host[f.name] for f in dataclasses.fields(cls) if f.name in host}
        found["recent"] = Recent(**found.get("recent", {}))
        return cls(**found)

    def enter(self, leg: Leg, identity: str) -> None:
        """Begins a stage, or other data, at its beginning."""
        self.stage, self.identity, self.position = leg.number, identity, START
        self.recent, self.routed = Recent(), []


def resolved(cfg: Config) -> dict[str, Any]:
    """The configuration as JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys whose values differ, but for where and how long."""
    found = []
    for name, value in now.items():
        key, old = prefix + name, before.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and key != "data.mixture":
            found += changes(old, value, key + ".")
        elif old != value and key not in ("train.run_dir", "train.steps"):
            found.append(f"{key}: {old!r} before, {value!r} now")
    return found


def claim(cfg: Config, run_dir: Path) -> None:
    """Writes config.json into the run directory, or refuses one that holds another model's run."""
    path = run_dir / "config.json"
    now = resolved(cfg)
    if path.exists():
        before = json.loads(path.read_text())["model"]
        changed = [
            f"model.{key}: {before.get(key)!r} there, {value!r} here"
            for key, value in now["model"].items()
            if before.get(key) != value and key not in RUNTIME
        ]
        if changed:
            raise ConfigError(
                "\n  ".join([f"{run_dir} holds another model's run; choose another train.run_dir or undo", *changed])
            )
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(now, indent=2) + "\n")


def write_events(run_dir: Path, events: list[dict[str, Any]]) -> None:
    """Has events.jsonl hold the events of a run, one JSON object a line."""
    _write(run_dir / "events.jsonl", "".join(json.dumps(event) + "\n" for event in events))


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
