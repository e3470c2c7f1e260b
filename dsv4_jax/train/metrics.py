# SPDX-License-Identifier: Apache-2.0
"""What a run writes and shows: metrics.jsonl, its loggers, a live progress line."""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsv4_jax.train.loggers import Logger

LINE = "loss {loss:.3f}  {tokens_per_s:,.0f} tok/s  lr {lr:.1e}"


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
        return line.get("rollbacks", 0), line["step"]

    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one
    while kept and place(json.loads(kept[-1])) > (rollbacks, step):
        kept.pop()
    new = path.with_suffix(".new")
    new.write_text("".join(kept))
    new.replace(path)
    return path


class MetricsWriter:
    """Appends one JSON object a step to `metrics.jsonl` and gives the same scalars to the loggers."""

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
        """Writes one step's scalars, of which `step` is one; what is not finite is null."""
        if self._file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.write(finite)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            with contextlib.ExitStack() as stack:  # closes all, also if one fails
                stack.enter_context(self._file)
                for logger in self._loggers:
                    stack.callback(logger.close)


class Display:
    """A live line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, console: Console, steps: int, done: int, every_s: float = 10.0):
        self._console, self._steps, self._every_s, self._last = console, steps, every_s, 0.0
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[line]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, line="compiling")
        self._spent, self._count = 0.0, 0

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def update(self, scalars: dict[str, float], seconds: float) -> None:
        """Shows a finished step, which took so long; compiling, evaluating and saving are not in the time left."""
        line, step, now = LINE.format(**scalars), int(scalars["step"]), time.monotonic()
        self._spent, self._count = self._spent + seconds, self._count + 1
        self._progress.update(self._task, completed=step, line=line)
        if not self._console.is_terminal and (now - self._last > self._every_s or step == self._steps):
            self._last = now
            left = self._spent / self._count * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {line}  ETA {left:.0f} s", highlight=False)
