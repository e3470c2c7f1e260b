# SPDX-License-Identifier: Apache-2.0
"""The detector of spikes: what triggers it and, as important, what does not."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.config import SpikesConfig
from dsv4_jax.train.spikes import Recent, excess, spike

CFG = SpikesConfig(window=64)


def seen(values, cfg=CFG, norms=None):
    """Numbers of the steps that are spikes, and what is remembered."""
    recent = Recent()
    norms = [1.0] * len(values) if norms is None else norms
    found = [i for i, (x, n) in enumerate(zip(values, norms, strict=True)) if spike(cfg, recent, x, n)]
    return found, recent


def test_excess_by_hand():
    """Median 3, distances from it 2 1 0 1 97: their median is 1."""
    far, median = excess(10.0, [1, 2, 3, 4, 100], least=0.1)
    assert median == 3 and far == pytest.approx(7 / 1.4826)
    assert excess(10.0, [3, 3, 3], least=0.5) == (14.0, 3)


@pytest.mark.parametrize("seed", range(5))
def test_ordinary_noise_is_no_spike(seed):
    """A falling loss with the noise of small batches; norms that vary by half; also heavier tails than normal."""
    rng = np.random.default_rng(seed)
    t = np.arange(3000)
    loss = 2 + 4 * np.exp(-t / 200) + 0.1 * rng.standard_t(8, t.size)
    norms = np.exp(0.4 * rng.normal(size=t.size)) / (1 + t / 500)
    assert seen(loss, norms=norms)[0] == []
    assert seen(np.full(500, 0.5) + 1e-7 * rng.normal(size=500))[0] == []  # hardly any noise at all


def test_a_spike_of_either_kind_is_found_at_once():
    rng = np.random.default_rng(0)
    loss, norms = 3 + 0.05 * rng.normal(size=200), np.exp(0.2 * rng.normal(size=200))
    assert seen(np.where(np.arange(200) == 150, 4.5, loss), norms=norms)[0] == [150]
    assert seen(loss, norms=np.where(np.arange(200) == 150, 30.0, norms))[0] == [150]
    off = dataclasses.replace(CFG, grad_norm=0.0)
    assert seen(loss, off, np.where(np.arange(200) == 150, 30.0, norms))[0] == []


def test_a_spread_of_nothing_counts_as_a_little():
    """A hundredth of the loss; a tenth of the norm's logarithm."""
    assert seen([0.5] * 64 + [0.54])[0] == [] and seen([0.5] * 64 + [0.56])[0] == [64]
    assert seen([0.5] * 65, norms=[1.0] * 64 + [2.6])[0] == [] and seen([0.5] * 65, norms=[1.0] * 64 + [2.8])[0] == [64]


def test_there_is_no_spike_before_enough_is_known():
    assert seen([3.0] * 15 + [99.0])[0] == [] and seen([3.0] * 16 + [99.0])[0] == [16]


def test_steps_in_a_row():
    cfg = dataclasses.replace(CFG, steps=3)
    assert seen([3.0] * 30 + [9.0, 9.0, 3.0, 9.0, 9.0, 9.0, 9.0], cfg)[0] == [35, 36]


def test_a_lasting_change_becomes_the_rule():
    found, recent = seen([3.0] * 64 + [9.0] * 64)
    assert found and max(found) < 64 + 40 and len(recent.losses) == 64


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=80), st.integers(1, 79))
def test_what_is_remembered_is_all_that_counts(values, cut):
    """From JSON and back in the middle: the same spikes."""
    whole, _ = seen(values)
    first, recent = seen(values[:cut])
    again = Recent(**dataclasses.asdict(recent))
    later = [cut + i for i, x in enumerate(values[cut:]) if spike(CFG, again, x, 1.0)]
    assert first + later == whole


def test_a_gradient_of_zero_is_no_error():
    assert seen([1.0] * 40, norms=[0.0] * 40)[0] == [] and math.isfinite(seen([1.0] * 40, norms=[0.0] * 40)[1].norms[0])
