# SPDX-License-Identifier: Apache-2.0
"""Read what a training run wrote: its metrics, events and configuration."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_jax.section import ConfigError
from dsv4_jax.train.metric_names import current_name

Series = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run, read.

    Attributes:
        name: the run directory's name.
        steps: steps that have a line in metrics.jsonl and were not taken back.
        series: steps and values of every metric, by its name; "step" holds the steps themselves.
        config: the tree of config.json, empty without the file.
        lost: series of each part that a rollback took back. Each starts with the last line that was kept, so that
            its curve meets the other.
        events: step, kind and text of each event.
    """

    name: str
    steps: np.ndarray
    series: Series
    config: dict[str, Any]
    lost: list[Series]
    events: list[tuple[int, str, str]]


def read_run(run_dir: Path) -> Run:
    """Read `metrics.jsonl`, and `events.jsonl` and `config.json` if they are there.

    A line replaces earlier lines of its step and of all later steps, because a rollback or a resume took them back.
    A last line that was cut short is left out. Metrics that an older version wrote get the names of today.

    Raises:
        ConfigError: if there are no metrics or a file cannot be read.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    rows, lost = [], []
    for old in _rows(path):
        row = {current_name(name): value for name, value in old.items()}
        kept = len(rows)
        while kept and rows[kept - 1]["step"] >= row["step"]:
            kept -= 1
        if kept < len(rows):
            lost.append(_lost(rows, kept))
        rows[kept:] = [row]
    if not rows:
        raise ConfigError(f"{path} holds no step yet")
    series = _series(rows)
    events_path, config_path = run_dir / "events.jsonl", run_dir / "config.json"
    events = _rows(events_path) if events_path.is_file() else ()
    events = [(row["step"], str(row.get("event", "")), str(row.get("text", ""))) for row in events]
    config = _parsed(config_path.read_text()) if config_path.is_file() else {}
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path} is not a JSON object")
    return Run(run_dir.resolve().name, series["step"][0], series, config, lost, events)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, each with a step; leave out a last line that was cut short."""
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
        elif number < len(lines):
            raise ConfigError(f"{path}, line {number}: expected a JSON object with a step, found {line[:60]!r}")


def _series(rows: Sequence[dict[str, Any]]) -> Series:
    """Collect steps and values of every name in the rows; NaN where a value is not a number."""
    series = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] if isinstance(row[name], int | float) else np.nan for row in rows if name in row]
        series[name] = (np.array([row["step"] for row in rows if name in row]), np.array(values, float))
    return series


def _lost(rows: Sequence[dict[str, Any]], kept: int) -> Series:
    """Collect the series of the rows after the first `kept`, from one row earlier on, where they have a number."""
    series = _series(rows[max(kept - 1, 0) :])
    return {name: series[name] for name, (_, y) in _series(rows[kept:]).items() if np.isfinite(y).any()}


def _parsed(text: str) -> Any:
    """Parse JSON; return None if `text` is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
