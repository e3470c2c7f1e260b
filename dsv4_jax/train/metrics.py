# SPDX-License-Identifier: Apache-2.0
"""Write the metrics of a run to metrics.jsonl and to loggers."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4_jax.train.loggers import Logger
from dsv4_jax.train.metric_names import current_name


def drop_lines_after(run_dir: Path, step: int, rollbacks: int) -> Path:
    """Remove the lines of `metrics.jsonl` after a step, and return the path of the file.

    Rollbacks cut a run into courses, in which step numbers repeat. Lines of earlier courses are kept, whatever their
    step. An incomplete last line, which a killed process may leave, is removed.

    Args:
        run_dir: folder of the run.
        step: last step to keep in the current course.
        rollbacks: number of rollbacks before the current course.
    """

    def place(line: dict[str, Any]) -> tuple[int, int]:
        """Return (rollbacks, step) of a line, by which the lines of a file are ordered."""
        line = {current_name(name): value for name, value in line.items()}
        return line.get("train/rollbacks", 0), line["step"]

    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n")]  # without an incomplete one
    while kept and place(json.loads(kept[-1])) > (rollbacks, step):
        kept.pop()
    _replace_lines(path, kept)
    return path


def _replace_lines(path: Path, lines: list[str]) -> None:
    """Replace a file's lines in one step, so that a killed process leaves either the old or the new file."""
    new = path.with_suffix(".new")
    new.write_text("".join(lines))
    new.replace(path)


def _replace_nonfinite(scalars: dict[str, float]) -> dict[str, float | None]:
    """Replace values that are not finite, which JSON cannot hold, by None."""
    return {name: value if math.isfinite(value) else None for name, value in scalars.items()}


class MetricsWriter:
    """Append one JSON object per step to `metrics.jsonl`, and send the same scalars to the loggers.

    As a context manager it closes the file and the loggers.
    """

    def __init__(self, run_dir: Path | None, step: int, rollbacks: int = 0, loggers: Sequence[Logger] = ()):
        """Open `metrics.jsonl` of a run that continues after `step`; remove later lines, which a killed run may leave.

        Args:
            run_dir: folder of the run; None: nothing is written, as in all processes except the first.
            step: number of steps done.
            rollbacks: number of rollbacks so far.
            loggers: loggers that get the same scalars.
        """
        self._file, self._loggers = None, loggers
        if run_dir is None:
            return
        self._file = drop_lines_after(run_dir, step, rollbacks).open("a")

    def write(self, scalars: dict[str, float]) -> None:
        """Write the scalars of one step, which include its number `step`; values that are not finite become null."""
        if self._file is None:
            return
        finite = _replace_nonfinite(scalars)
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.write(finite)

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Add scalars to the last line of the file if it is that of `step`, and send them to the loggers."""
        if self._file is None:
            return
        # Rewrite the file with the longer last line, and open it again to append.
        path, finite = Path(self._file.name), _replace_nonfinite(scalars)
        lines = path.read_text().splitlines(keepends=True)
        if lines and json.loads(lines[-1])["step"] == step:
            self._file.close()
            lines[-1] = json.dumps(json.loads(lines[-1]) | finite) + "\n"
            _replace_lines(path, lines)
            self._file = path.open("a")
        for logger in self._loggers:
            logger.write({"step": step} | finite)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            with contextlib.ExitStack() as stack:  # closes every one, even if another fails to close
                stack.enter_context(self._file)
                for logger in self._loggers:
                    stack.callback(logger.close)
