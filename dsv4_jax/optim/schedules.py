# SPDX-License-Identifier: Apache-2.0
"""Schedule batch size, length and learning rate by tokens, exact to the token; and the published recipes.

Token counts exceed 2^31 after about thirty steps of the published batches, so they are Python integers.
Jitted functions see only the step number and fractions of a phase.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """Change a whole number, such as a batch size or a sequence length, at token counts.

    Attributes:
        changes: pairs (tokens seen, value from this count on), the first at 0, ascending.

    Raises:
        ValueError: for other counts, or values that are not positive.
    """

    changes: tuple[tuple[int, int], ...]

    def __post_init__(self):
        starts = [start for start, _ in self.changes]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or min(v for _, v in self.changes) < 1:
            raise ValueError(f"changes must ascend from 0 tokens, with positive values; found {self.changes}")

    def __call__(self, tokens: int) -> int:
        """Return the value after `tokens` tokens."""
        return self.changes[bisect.bisect_right(self.changes, tokens, key=lambda change: change[0]) - 1][1]


@dataclasses.dataclass(frozen=True)
class Clock:
    """Convert between steps and tokens, for a batch size that changes at token counts.

    A step's batch has the size that applies when the step begins. So a change takes effect at the first step
    that begins at or after its count. Without a batch size one step is one token: schedules then count steps.

    Attributes:
        batch: tokens per step, for the steps after the last of `done`.
        done: (steps, tokens) of the steps that are done, as `until` lists them. They keep their tokens, whatever
            `batch` is now.
    """

    batch: Stepwise = Stepwise(((0, 1),))
    done: tuple[tuple[int, int], ...] = ((0, 0),)

    @functools.cached_property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """List (first step, tokens seen before it, tokens per step) of every range of steps of one size."""
        ranges: list[tuple[int, int, int]] = []

        def change(step: int, tokens: int, size: int) -> None:
            if ranges and ranges[-1][0] == step:
                ranges.pop()  # changed again before a step began
            # Equal sizes are merged, so that a resumed run has the ranges, and the floats, of an uninterrupted one.
            if not ranges or ranges[-1][2] != size:
                ranges.append((step, tokens, size))

        # First the steps that are done, then those that follow with the present batch.
        for (step, tokens), (later, more) in itertools.pairwise(self.done):
            change(step, tokens, (more - tokens) // (later - step))
        now = self.done[-1]
        change(*now, self.batch(now[1]))
        for start, size in self.batch.changes:
            if start > now[1]:
                step, tokens, before = ranges[-1]
                steps = -(-(start - tokens) // before)
                change(step + max(steps, 0), tokens + max(steps, 0) * before, size)
        return tuple(ranges)

    def until(self, step: int) -> tuple[tuple[int, int], ...]:
        """List (steps, tokens) at 0, at every change of the batch before `step`, and at `step`."""
        return (*((first, seen) for first, seen, _ in self.segments if first < step), (step, self.tokens(step)))

    def tokens(self, step: int) -> int:
        """Count the tokens of the first `step` steps."""
        first, seen, size = self.segments[bisect.bisect_right(self.segments, step, key=lambda s: s[0]) - 1]
        return seen + (step - first) * size

    def steps(self, tokens: int) -> int:
        """Return the smallest number of steps that have at least `tokens` tokens together."""
        later = [segment for segment in self.segments if segment[1] <= tokens]
        first, seen, size = later[-1]
        return first - (-(tokens - seen) // size)


def trapezoid(
    peak: float, end: float, warmup_steps: int, decay_from: int, decay_to: int, clock: Clock = Clock()
) -> optax.Schedule:
    """Make a schedule: linear warm-up, constant at `peak`, cosine from `peak` to `end`, constant at `end`.

    The rate of a step depends on the tokens seen at its end: the first of `warmup_steps` steps has
    peak / warmup_steps, and a step that ends at `decay_to` has `end`.

    Args:
        peak: highest value.
        end: last value.
        warmup_steps: length of the warm-up in steps.
        decay_from: tokens at which the cosine begins; with the default clock, steps.
        decay_to: tokens at which the cosine ends; with the default clock, steps.
        clock: converts steps to tokens.

    Returns:
        Function of the number of steps done before. It returns a double precision float for a Python int, and
        fp32 for a traced array.

    Raises:
        ValueError: if the cosine ends before it begins, or a count is negative.
    """
    if not 0 <= decay_from <= decay_to or warmup_steps < 0:
        raise ValueError(
            "expected 0 <= decay_from <= decay_to and warmup_steps >= 0; "
            f"found {decay_from=}, {decay_to=}, {warmup_steps=}"
        )
    length = max(decay_to - decay_from, 1)
    first = [step for step, _, _ in clock.segments]
    start = [(seen - decay_from) / length for _, seen, _ in clock.segments]  # rounded once, from exact integers
    slope = [size / length for _, _, size in clock.segments]

    def schedule(step: Any) -> Any:
        host = isinstance(step, int)
        xp: Any = np if host else jnp
        number = (lambda x: np.asarray(x, np.float64)) if host else (lambda x: jnp.asarray(x, jnp.float32))
        # The step belongs to the last segment that begins at or before it.
        segment = xp.searchsorted(xp.asarray(first), step, side="right") - 1
        done = number(step + 1 - xp.asarray(first)[segment])  # steps of the segment when this one ends
        progress = number(start)[segment] + number(slope)[segment] * done
        cosine = 0.5 * (1 + xp.cos(math.pi * xp.clip(progress, 0, 1)))
        rate = xp.minimum(number(step + 1) / max(warmup_steps, 1), 1) * (end + (peak - end) * cosine)
        return float(rate) if host else rate

    return schedule


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Describe a pre-training run in tokens.

    Attributes:
        tokens: tokens of the whole run.
        batch: tokens per step.
        length: positions per row.
        peak: highest learning rate.
        end: last learning rate.
        warmup_steps: length of the linear warm-up in steps.
        decay: tokens at which the cosine begins and ends.
        chosen: which of these numbers are our choice, as the reports do not state them.
    """

    tokens: int
    batch: Stepwise
    length: Stepwise
    peak: float
    end: float
    warmup_steps: int
    decay: tuple[int, int]
    chosen: tuple[str, ...] = ()

    @functools.cached_property
    def clock(self) -> Clock:
        """Convert between steps and tokens."""
        return Clock(self.batch)

    @property
    def steps(self) -> int:
        """Count the steps of the whole run."""
        return self.clock.steps(self.tokens)

    @property
    def learning_rate(self) -> optax.Schedule:
        """Make the schedule of the learning rate, a function of the steps done before."""
        return trapezoid(self.peak, self.end, self.warmup_steps, *self.decay, self.clock)


_T, _B = 10**12, 10**9

DEEPSEEK_V4_FLASH = Recipe(
    tokens=32 * _T,
    batch=Stepwise(tuple((k * 80 * _B, (k + 1) * 3 * 2**22) for k in range(6))),
    length=Stepwise(((0, 4096), (_T // 2, 16384), (_T, 65536), (30 * _T, 2**20))),
    peak=2.7e-4,
    end=2.7e-5,
    warmup_steps=2000,
    decay=(26 * _T, 32 * _T),
    chosen=("ramp of the batch size", "where lengths change, except 64K at 1T", "where the decay begins"),
)
"""V4-Flash (sections 4.1 and 4.2 of its report)."""

DEEPSEEK_V4_PRO = Recipe(
    tokens=33 * _T,
    batch=Stepwise(tuple((k * 100 * _B, (k + 1) * 9 * 2**21) for k in range(5))),
    length=Stepwise(((0, 4096), (_T, 16384), (2 * _T, 65536), (31 * _T, 2**20))),
    peak=2.0e-4,
    end=2.0e-5,
    warmup_steps=2000,
    decay=(27 * _T, 33 * _T),
    chosen=("ramp of the batch size", "where lengths change", "where the decay begins"),
)
"""V4-Pro (sections 4.1 and 4.2 of its report)."""

DEEPSEEK_V41_FLASH = Recipe(
    tokens=45 * _T,
    batch=Stepwise(((0, 96 * 2**20),)),
    length=Stepwise(((0, 65536), (34 * _T, 2**20))),
    peak=2.6e-4,
    end=2.6e-5,
    warmup_steps=2000,
    decay=(28 * _T, 40 * _T),
)
"""V4.1-Flash (section 4.2 of its report)."""
