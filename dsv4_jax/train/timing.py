# SPDX-License-Identifier: Apache-2.0
"""Account for the time of a run: steps, and what is not steps."""

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Literal

Activity = Literal["compile", "evaluate", "save", "restore"]


class Timing:
    """Account for the seconds of a process by activity, from when the object was made.

    A step's seconds run from the end of the step before to its own end, on the device, without the activities that
    `during` marks in between. Waiting for data is part of them: it only costs time where the device waits too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._start = self._lap = clock()
        self._aside = 0.0  # seconds of other activities since the last lap
        self._activities: dict[str, float] = dict.fromkeys(("compile", "evaluate", "save", "restore"), 0.0)
        self._steps = self._lost = self._data = 0.0
        self._at: dict[int, float] = {}  # seconds of steps when each checkpoint was saved

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Generator[Callable[[], float]]:
        """Count the seconds inside as an activity, not as a step; yield a function that returns them."""
        begin, seconds = self._clock(), 0.0
        try:
            yield lambda: seconds
        finally:
            seconds = self._clock() - begin
            self._activities[activity] += seconds
            self._aside += seconds

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Count the seconds inside as waiting for data, a part of the step."""
        begin = self._clock()
        try:
            yield
        finally:
            self._data += self._clock() - begin

    def restart(self) -> None:
        """Begin the next step now: the time since the last one counts as neither step nor activity."""
        self._lap, self._aside = self._clock(), 0.0

    def lap(self) -> float:
        """End a step; return its seconds."""
        now = self._clock()
        seconds = now - self._lap - self._aside
        self._lap, self._aside = now, 0.0
        self._steps += seconds
        return seconds

    def saved(self, step: int) -> None:
        """Note the seconds of steps when a checkpoint was saved, for `took_back`."""
        self._at[step] = self._steps - self._lost

    def took_back(self, step: int) -> None:
        """Count the steps after `step`, to which the run was rolled back, as lost."""
        self._lost = self._steps - self._at.get(step, 0.0)  # a checkpoint of an earlier process: nothing is left

    def scalars(self) -> dict[str, float]:
        """Return the seconds so far by activity, and `goodput`: the share of the time spent on steps that were kept."""
        whole = max(self._clock() - self._start, 1e-9)
        seconds = {f"perf/seconds/{name}": x for name, x in self._activities.items()}
        seconds |= {"perf/seconds/data": self._data, "perf/seconds/lost": self._lost}
        return seconds | {"perf/goodput": (self._steps - self._lost) / whole}

    def line(self) -> str:
        """Return a line with the whole time and the share of each activity."""
        whole = max(self._clock() - self._start, 1e-9)
        parts = {"steps": self._steps - self._lost, "lost steps": self._lost} | self._activities
        parts["other"] = whole - sum(parts.values())
        shares = ", ".join(f"{name} {x / whole:.1%}" for name, x in parts.items() if x or name != "lost steps")
        return f"time        {whole:,.0f} s: {shares}; waiting for data {self._data:,.0f} s"
