# SPDX-License-Identifier: Apache-2.0
"""Signals that stop a run, once it has saved itself."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def stop_signals() -> Generator[Callable[[int], int]]:
    """A function that tells, after a step, the signal to stop that has come, or 0: SIGTERM or Ctrl-C.

    A second Ctrl-C ends the program at once. Several processes stop at the same step, after SIGTERM to any.
    """
    came = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = number

    def told(step: int) -> int:
        if jax.process_count() > 1:
            return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0
        return came

    if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
        yield told  # jax.distributed has its own handler; other threads may have none
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
