# SPDX-License-Identifier: Apache-2.0
"""Cut a list of layers into groups of a repeating period, so that each group is one scan."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class ScanGroup(NamedTuple):
    """Layers of one scan, which runs `period` layer bodies `repeats` times.

    Attributes:
        start: number of the first layer.
        period: layers in one repeat.
        repeats: how often they come one after another.
    """

    start: int
    period: int
    repeats: int

    def layers(self, position: int) -> range:
        """Return the numbers of the layers at `position` of the period."""
        return range(self.start + position, self.start + self.period * self.repeats, self.period)


def find_scan_groups(layers: Sequence[Hashable]) -> tuple[ScanGroup, ...]:
    """Find the groups that compile the fewest layer bodies, and among those the fewest groups.

    A group costs its period, since its repeats share one compiled body. The search is exact: dynamic programming
    from the last layer to the first, with at most L^3 / 2 comparisons for L layers.
    """
    layers, n = tuple(layers), len(layers)
    # best[i] = (bodies, number of groups, groups) of the layers from i on.
    best: list[tuple[int, int, tuple[ScanGroup, ...]]] = [(0, 0, ())] * (n + 1)
    for start in range(n - 1, -1, -1):
        options = []
        for period in range(1, n - start + 1):
            repeats = 1
            while True:
                end = start + period * repeats
                bodies, groups, rest = best[end]
                options.append((bodies + period, groups + 1, (ScanGroup(start, period, repeats), *rest)))
                if layers[end : end + period] != layers[start : start + period]:
                    break
                repeats += 1
        best[start] = min(options, key=lambda o: o[:2])
    return best[0][2]
