# SPDX-License-Identifier: Apache-2.0
"""The planner that cuts a layer list into scans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.model.config import LayerSpec
from dsv4_jax.model.scan_groups import ScanGroup, find_scan_groups

FLASH = [0, 0] + [4, 128] * 20 + [4]
PRO = [128, 128] + [4, 128] * 29 + [4]
V41 = ["window"] * 2 + (["full"] + ["reuse"] * 5) * 3


def cost(groups) -> tuple[int, int]:
    """Compiled layer bodies, then scans."""
    return sum(g.period for g in groups), len(groups)


def check(layers: list, groups: tuple[ScanGroup, ...]):
    """Groups tile the list in order, each layer once, and a position of a period is one kind of layer."""
    order = [g.start + r * g.period + j for g in groups for r in range(g.repeats) for j in range(g.period)]
    assert order == list(range(len(layers)))
    for g in groups:
        assert g.period > 0 and g.repeats > 0
        for j in range(g.period):
            assert list(g.layers(j)) == [g.start + j + r * g.period for r in range(g.repeats)]
            assert len({layers[i] for i in g.layers(j)}) == 1


PUBLISHED = [
    (FLASH, (4, 3), 20),  # [0] x 2, [4], [128, 4] x 20
    (PRO, (3, 2), 30),  # [128], [128, 4] x 30
    (V41, (7, 2), 3),
]


@pytest.mark.parametrize("layers, want, repeats", PUBLISHED, ids=["flash", "pro", "v4.1"])
def test_published_lists(layers: list, want: tuple[int, int], repeats: int):
    groups = find_scan_groups(layers)
    check(layers, groups)
    assert cost(groups) == want
    assert max(g.repeats for g in groups) == repeats


def test_hashed_layers_are_other_layers():
    layers = [LayerSpec({0: "window", 4: "csa"}.get(r, "hca"), r, hashed=i < 3) for i, r in enumerate(FLASH)]
    groups = find_scan_groups(layers)
    check(layers, groups)
    assert cost(groups)[0] == 4  # window hash, csa hash, and the pair of hca and csa with learned routing


def cheapest(layers: list) -> tuple[int, int]:
    """By trying every cut."""
    if not layers:
        return 0, 0
    costs = []
    for period in range(1, len(layers) + 1):
        for repeats in range(1, len(layers) // period + 1):
            if layers[: period * repeats] == layers[:period] * repeats:
                bodies, groups = cheapest(layers[period * repeats :])
                costs.append((bodies + period, groups + 1))
    return min(costs)


@given(st.lists(st.sampled_from("abc"), max_size=10))
def test_any_list(layers: list):
    groups = find_scan_groups(layers)
    check(layers, groups)
    assert cost(groups) == cheapest(layers)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=3), st.integers(2, 30))
def test_depth_costs_nothing(period: list, repeats: int):
    """However often a period repeats, no more bodies are compiled than it has."""
    assert cost(find_scan_groups(period * repeats))[0] <= len(period)
