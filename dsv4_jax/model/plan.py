# SPDX-License-Identifier: Apache-2.0
"""Cuts a list of layers into groups of a repeating period, so that each group is one scan."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Group(NamedTuple):
    """`repeats` times the layers `start`, ..., `start + period - 1`, one after another."""

    start: int
    period: int
    repeats: int

    def layers(self, position: int) -> range:
        """Numbers of the layers at `position` of the period."""
        return range(self.start + position, self.start + self.period * self.repeats, self.period)


def plan(layers: Sequence[Hashable]) -> tuple[Group, ...]:
    """The groups that compile the fewest layer bodies, and of those the fewest groups.

    The cost of a group is its period, since the repeats share one compiled body. Exact, by dynamic
    programming from the end; L^2 (L / 2) comparisons at most.
    """
    layers, n = tuple(layers), len(layers)
    best: list[tuple[int, int, tuple[Group, ...]]] = [(0, 0, ())] * (n + 1)
    for start in range(n - 1, -1, -1):
        options = []
        for period in range(1, n - start + 1):
            repeats = 1
            while True:
                end = start + period * repeats
                bodies, groups, rest = best[end]
                options.append((bodies + period, groups + 1, (Group(start, period, repeats), *rest)))
                if layers[end : end + period] != layers[start : start + period]:
                    break
                repeats += 1
        best[start] = min(options, key=lambda o: o[:2])
    return best[0][2]
