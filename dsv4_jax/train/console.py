# SPDX-License-Identifier: Apache-2.0
"""Show a run on the terminal: a live progress line, and text that cannot control the terminal."""

import time
import unicodedata
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE = "loss {loss:.3f}  {tokens_per_s:,.0f} tok/s  lr {lr:.1e}"


def printable(text: str) -> str:
    r"""Escape what is not printable: control characters such as ESC, and marks that reorder or hide text.

    Line breaks, tabs and spaces of any width stay. "\x1b" becomes the four characters \, x, 1 and b.
    """
    if text.isprintable():
        return text
    keep = lambda c: c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs"
    return "".join(c if keep(c) else c.encode("unicode_escape").decode() for c in text)


class SafeConsole(Console):
    """A console that escapes what is not printable in all strings that it prints."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `Console` does, with strings escaped."""
        super().print(*(printable(x) if isinstance(x, str) else x for x in objects), **options)


class Display:
    """Show the progress of the steps: a live line on a terminal, a plain line every `every_s` seconds elsewhere."""

    def __init__(self, console: Console, steps: int, done: int, every_s: float = 10.0):
        """Show the progress to `steps` steps, of which `done` are done."""
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
        """Show a finished step.

        Args:
            scalars: its metrics.
            seconds: its duration, without compiling, evaluating and saving, which the remaining time leaves out too.
        """
        line, step, now = LINE.format(**scalars), int(scalars["step"]), time.monotonic()
        self._spent, self._count = self._spent + seconds, self._count + 1
        self._progress.update(self._task, completed=step, line=line)
        if not self._console.is_terminal and (now - self._last > self._every_s or step == self._steps):
            self._last = now
            left = self._spent / self._count * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {line}  ETA {left:.0f} s", highlight=False)
