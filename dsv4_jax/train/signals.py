# SPDX-License-Identifier: Apache-2.0
"""Stop a run by SIGTERM or SIGINT (Ctrl-C), after it has saved its state."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


@contextlib.contextmanager
def stop_signals() -> Generator[Callable[[int], int]]:
    """Catch SIGTERM and SIGINT; yield a function to call after each step, with its number.

    It returns the number of the first signal received, or 0. Further SIGTERMs change nothing, because schedulers send
    several; only a second SIGINT raises KeyboardInterrupt. Several processes stop after the same step, whichever of
    them received the signal; if any received SIGINT, all return SIGINT. A signal that comes after the last call is
    delivered again at the end.
    """
    first = interrupts = 0
    reported = False  # whether `stopped` has returned the signal

    def handle(number: int, frame: Any) -> None:
        nonlocal first, interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt
        first = first or number
        if several:
            # jax.distributed handles SIGTERM itself and passes it on to all processes; SIGINT takes the same way.
            signal.raise_signal(signal.SIGTERM)

    def stopped(step: int) -> int:
        nonlocal reported
        if not several:
            reported = bool(first)
            return first
        if not multihost_utils.reached_preemption_sync_point(step):
            return 0
        reported = True
        interrupted = multihost_utils.process_allgather(np.int32(first == signal.SIGINT))
        return signal.SIGINT if np.any(interrupted) else signal.SIGTERM

    several = jax.process_count() > 1
    numbers = [signal.SIGINT] if several else [signal.SIGTERM, signal.SIGINT]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python lets only the main thread set handlers
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if first and not reported:
        signal.raise_signal(first)
