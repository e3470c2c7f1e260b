# SPDX-License-Identifier: Apache-2.0
"""The files of a run directory beside checkpoints and metrics: its lock, config.json and events.jsonl."""

import dataclasses
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv4_jax.config import Config
from dsv4_jax.config.files import config_from_json, read_config, with_new_names
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.model.compute import COMPUTE_KEYS
from dsv4_jax.section import ConfigError, RunError, deferred_rules
from dsv4_jax.train.optimizer import make_schedule


def resolved(cfg: Config) -> dict[str, Any]:
    """Return the configuration as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def changes(before: dict[str, Any], cfg: Config) -> list[str]:
    """List the keys whose values differ from a saved configuration, except `train.run_dir` and `train.steps`."""
    known = resolved(config_from_json(before))
    return _differences(known, resolved(cfg)) + _removed(with_new_names(before), known)


def rate_change(before: dict[str, Any], cfg: Config, step: int, skipped: int) -> list[str]:
    """Compare the learning rate of the next step by a saved configuration and by today's; return a line if they differ.

    Args:
        before: the saved configuration.
        cfg: today's configuration, which continues from the steps done.
        step: number of steps done.
        skipped: number of these that changed nothing, since they were not finite.
    """
    with deferred_rules():
        old_leg, new_leg = (
            part.after(cfg.resolved_stages[0].clock.until(step)).stage_at(step)
            for part in (config_from_json(before), cfg)
        )

    def rate(stage: ResolvedStage, done: int) -> Any:
        return make_schedule(stage.cfg.optim, stage.cfg.steps, stage.clock)(done)

    done = step - skipped
    # A schedule that is counted from the run's end is not defined after it: there its last step counts.
    last = done if old_leg.cfg.optim.decay_tokens else min(done, old_leg.cfg.steps - 1)
    old, new = rate(old_leg, last), rate(new_leg, done)
    return [f"learning rate of step {step + 1}: {old:.3g} before, {new:.3g} now"] if old != new else []


_DICTIONARIES = ("data.mixture", "loss.extra")  # keys whose value is a dict, as that of a section is


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in now.items():
        key, old = prefix + name, before[name]
        if isinstance(value, dict) and key not in _DICTIONARIES:
            found += _differences(old, value, key + ".")
        elif old != value and key not in ("train.run_dir", "train.steps"):
            found.append(f"{key}: {old!r} before, {value!r} now")
    return found


def _removed(before: dict[str, Any], known: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in before.items():
        if name not in known:
            found.append(f"{prefix}{name}: {value!r} before, no key of this version")
        elif isinstance(known[name], dict) and prefix + name not in _DICTIONARIES:
            found += _removed(value, known[name], f"{prefix}{name}.")
    return found


def check_model(cfg: Config, run_dir: Path) -> None:
    """Refuse a run directory whose config.json describes another model; change nothing.

    Raises:
        ConfigError: with the keys that differ.
    """
    path = run_dir / "config.json"
    if not path.exists():
        return
    before, now = resolved(config_from_json(read_config(path)))["model"], resolved(cfg)["model"]
    changed = [
        f"model.{key}: {before[key]!r} there, {value!r} here"
        for key, value in now.items()
        if before[key] != value and key not in COMPUTE_KEYS
    ]
    if changed:
        raise ConfigError(
            "\n  ".join([f"{run_dir} holds another model's run; choose another train.run_dir or undo", *changed])
        )


def write_config(cfg: Config, run_dir: Path) -> None:
    """Write config.json into the run directory. Call it when the checkpoint of a resumed run is known to fit."""
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        _write(run_dir / "config.json", json.dumps(resolved(cfg), indent=2) + "\n")


class RunLock:
    """Keep other processes out of a run directory by a lock on its file `lock`, which names the holder.

    The operating system frees the lock of a process that has ended, in whatever way. Of several processes of a run the
    first holds it.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir / "lock"
        self._file: TextIO | None = None
        self._made = False  # whether the folder is this object's

    def take(self) -> None:
        """Take the lock, unless this object holds it already.

        Raises:
            RunError: at once if another process holds it, with its host and process id, or if the file system cannot
                lock files.
        """
        while self._file is None:
            try:
                self._made = self._made or not self._path.parent.exists()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = self._path.open("a+")
            except OSError as error:
                raise RunError(f"train.run_dir = {str(self._path.parent)!r} cannot be written: {error}") from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                if not isinstance(error, BlockingIOError):
                    raise RunError(
                        f"{self._path} cannot be locked: {error}; put train.run_dir on a file system that locks files"
                    ) from None
                raise RunError(
                    f"{self._path.parent} is in use by {holder}: wait until it has ended, or choose another "
                    "train.run_dir"
                ) from None
            if self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                self._file = file
            else:
                file.close()  # the process that held it has deleted it meanwhile

    def take_first(self) -> None:
        """Take the lock in the first of a run's processes; all of them must call this, and all raise together."""
        refused: RunError | None = None
        try:
            if jax.process_index() == 0:
                self.take()
        except RunError as error:
            refused = error
        if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.bool_(refused is not None)):
            refused = refused or RunError(f"process 0 could not lock {self._path}")
        if refused:
            raise refused

    def release(self) -> None:
        """Free the lock, if this object holds it, and delete its file, and the folder if it made that for nothing."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            if self._made and not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()
            self._file.close()
            self._file = None


def write_events(run_dir: Path, events: list[dict[str, Any]]) -> None:
    """Write events.jsonl anew, with one JSON object per event."""
    _write(run_dir / "events.jsonl", "".join(json.dumps(event) + "\n" for event in events))


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
