# SPDX-License-Identifier: Apache-2.0
"""Trace the steps that `train.profile_steps` names, for xprof."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


class Profile:
    """Trace a range of steps once, into a folder.

    A context manager around the whole run: the trace is also written if the run ends inside the range, by a signal or
    an exception. `stop` ends it early; it does not start again, so that a rollback neither makes it longer nor
    replaces it.
    """

    def __init__(self, steps: str, folder: Path, say: Callable[[str], None]):
        """Set the trace up.

        Args:
            steps: FIRST:LAST, without LAST itself; empty: no trace.
            folder: where it is written.
            say: prints a line about it.
        """
        self._steps = range(*map(int, steps.split(":"))) if steps else range(0)
        self._folder, self._say = folder, say
        self._first = self._last = 0  # steps of the trace
        self._on = False
        self._result: Any = None

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def before(self, step: int) -> None:
        """Start the trace if `step`, which comes next, is in the range and nothing has been traced yet."""
        if step in self._steps and not self._first:
            jax.profiler.start_trace(str(self._folder))
            self._on, self._first, self._last = True, step, step

    def after(self, step: int, result: Any) -> None:
        """Note that `step` was dispatched and gives the arrays `result`; end the trace with the range's last step."""
        if self._on:
            self._last, self._result = step, result
            if step == self._steps[-1]:
                self.stop()

    def stop(self) -> None:
        """End the trace, if there is one, when the device has finished its last step."""
        if not self._on:
            return
        try:
            jax.block_until_ready(self._result)
        finally:
            self._on, self._result = False, None
            jax.profiler.stop_trace()
        self._say(f"profile     of steps {self._first} to {self._last} is in {self._folder}")
