# SPDX-License-Identifier: Apache-2.0
"""Detect spikes of the loss or the gradient norm, by the median and the spread of the steps before."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from dsv4_jax.config import SpikesConfig

NORMAL = 1.4826  # the standard deviation of a normal distribution over its median distance from the median


@dataclasses.dataclass
class Recent:
    """The memory of the detector, saved with the run.

    Attributes:
        losses: losses of the last steps.
        norms: logarithms of the gradient norms of these steps.
        over: number of consecutive steps above the threshold, up to the last one.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    over: int = 0


def excess(x: float, before: Sequence[float], least: float) -> tuple[float, float]:
    """Return how far `x` is above the median of the values before, in spreads, and that median.

    A spread estimates the standard deviation; it counts as `least` at least.
    """
    median = statistics.median(before)
    spread = NORMAL * statistics.median(abs(y - median) for y in before)
    return (x - median) / max(spread, least), median


def spike(cfg: SpikesConfig, recent: Recent, loss: float, norm: float) -> str:
    """Return why a step is a spike, or an empty text if it is none; remember the step.

    Args:
        cfg: thresholds.
        recent: the steps before; the step is added.
        loss: loss of the step, finite.
        norm: gradient norm of the step, finite.
    """
    reasons = []
    log_norm = math.log(max(norm, 1e-30))
    # Compare with the steps before, once there are enough.
    if len(recent.losses) >= max(cfg.window // 4, 1):
        least = 0.01 * abs(statistics.median(recent.losses))
        far, median = excess(loss, recent.losses, max(least, 1e-9))
        if cfg.loss and far > cfg.loss:
            reasons.append(f"loss {loss:.4g}, {far:.0f} spreads above the median {median:.4g}")
        far, median = excess(log_norm, recent.norms, 0.1)
        if cfg.grad_norm and far > cfg.grad_norm:
            reasons.append(f"gradient norm {norm:.3g}, {math.exp(log_norm - median):.3g} times the median")
    # Remember the step, a spiking one too: a loss that stays high is no spike for long.
    for values, x in ((recent.losses, loss), (recent.norms, log_norm)):
        values.append(x)
        del values[: -cfg.window]
    recent.over = recent.over + 1 if reasons else 0
    return ", ".join(reasons) if recent.over >= cfg.steps else ""
