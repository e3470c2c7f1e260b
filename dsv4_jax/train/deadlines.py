# SPDX-License-Identifier: Apache-2.0
"""Decide by time when a run saves and when it stops."""

import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv4_jax.config import TrainConfig

EVERY = 10  # steps between two agreements of several processes on the time; each waits for the devices


class Deadlines:
    """Watch `train.checkpoint_minutes` and `train.stop_after_minutes`, from when the object was made."""

    def __init__(self, train: TrainConfig, clock: Callable[[], float] = time.monotonic):
        self._save_s, self._stop_s = 60 * train.checkpoint_minutes, 60 * train.stop_after_minutes
        self._clock = clock
        self._start = self._saved = clock()

    def saved(self) -> None:
        """Start the time to the next save anew."""
        self._saved = self._clock()

    def passed(self, step: int) -> tuple[bool, bool]:
        """Return whether to save and whether to stop after a step.

        Several processes must decide alike: all follow the clock of process 0, every `EVERY` steps.
        """
        now = self._clock()
        save = 0 < self._save_s <= now - self._saved
        stop = 0 < self._stop_s <= now - self._start
        if jax.process_count() > 1 and (self._save_s or self._stop_s):
            if step % EVERY:
                return False, False
            save, stop = map(bool, multihost_utils.broadcast_one_to_all(np.array([save, stop])))
        return save, stop
