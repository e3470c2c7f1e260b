# SPDX-License-Identifier: Apache-2.0
"""Write the metrics of a run: metrics.jsonl, and the same scalars to loggers."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4_jax.train.loggers import Logger
from dsv4_jax.train.metric_names import current_name


def drop_lines_after(run_dir: Path, step: int, rollbacks: int) -> Path:
    """Drop the lines of `metrics.jsonl` after a step, and return its path.

    A line belongs to a course of the run, between two rollbacks. The lines of earlier courses stay, also those of
    later steps.

    Args:
        run_dir: folder of the run.
        step: the last step to keep of the course.
        rollbacks: number of rollbacks before the course.
    """

    def place(line: dict[str, Any]) -> tuple[int, int]:
        line = {current_name(name): value for name, value in line.items()}
        return line.get("train/rollbacks", 0), line["step"]

    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
    while kept and place(json.loads(kept[-1])) > (rollbacks, step):
        kept.pop()
    _replace(path, kept)
    return path


def _replace(path: Path, lines: list[str]) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(lines))
    new.replace(path)


def _finite(scalars: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in scalars.items()}


class MetricsWriter:
    """Append one JSON object per step to `metrics.jsonl`, and pass the same scalars to the loggers."""

    def __init__(self, run_dir: Path | None, step: int, rollbacks: int = 0, loggers: Sequence[Logger] = ()):
        """Open the files of a run that continues after `step`; drop the lines after it, which a kill may have left.

        Args:
            run_dir: folder of the run; without one nothing is written, as in processes after the first.
            step: steps done.
            rollbacks: how often the run went back before.
            loggers: closed with the file.
        """
        self._file, self._loggers = None, loggers
        if run_dir is None:
            return
        self._file = drop_lines_after(run_dir, step, rollbacks).open("a")

    def write(self, scalars: dict[str, float]) -> None:
        """Write the scalars of one step, with its number as `step`. A value that is not finite becomes null."""
        if self._file is None:
            return
        finite = _finite(scalars)
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.write(finite)

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Add scalars to the line of a step, the last one so far; without that line they go to the loggers alone."""
        if self._file is None:
            return
        path, finite = Path(self._file.name), _finite(scalars)
        lines = path.read_text().splitlines(keepends=True)
        if lines and json.loads(lines[-1])["step"] == step:
            self._file.close()
            lines[-1] = json.dumps(json.loads(lines[-1]) | finite) + "\n"
            _replace(path, lines)
            self._file = path.open("a")
        for logger in self._loggers:
            logger.write({"step": step} | finite)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            with contextlib.ExitStack() as stack:  # closes all, also if one fails
                stack.enter_context(self._file)
                for logger in self._loggers:
                    stack.callback(logger.close)
