# SPDX-License-Identifier: Apache-2.0
"""Schedules in tokens: the published values, exact counts, and the same inside and outside of jit."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT

import dsv4_jax as ds
from dsv4_jax.optim.schedules import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    DEEPSEEK_V41_FLASH,
    Clock,
    Stepwise,
    trapezoid,
)
from dsv4_jax.train.optimizer import frozen_pattern, make_schedule

T = 10**12


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), min_size=1, max_size=5), st.integers(0, 40))
def test_steps_that_are_done_keep_their_tokens(parts, stop):
    """Whatever the batch was before and is now; and a run that stops and goes on has the clock of one that does not."""
    starts = [0, *itertools.accumulate(length for length, _ in parts)]
    batch = Stepwise(tuple(zip(starts, (size for _, size in parts), strict=False)))
    clock, seen = Clock(), 0
    for size in (3, 5, 2):
        before = [clock.tokens(step) for step in range(stop + seen + 1)]
        clock, seen = Clock(Stepwise(((0, size),)), clock.until(stop + seen)), stop + seen
        assert [clock.tokens(step) for step in range(seen + 1)] == before
        assert clock.tokens(seen + 7) == before[-1] + 7 * size and clock.steps(clock.tokens(seen + 7)) == seen + 7
    assert Clock(batch, Clock(batch).until(stop)).segments == Clock(batch).segments
    mixed = Clock(batch, Clock(Stepwise(((0, 7),))).until(stop))
    for step in range(stop, stop + 60):
        assert mixed.tokens(step + 1) - mixed.tokens(step) == batch(mixed.tokens(step))
    assert Clock(batch, mixed.until(stop + 9)).segments == mixed.segments


def test_v41_recipe():
    """Section 4.2: 2000 steps of warm-up, constant to 28T, cosine from 28T to 40T, constant to 45T."""
    recipe, rate = DEEPSEEK_V41_FLASH, DEEPSEEK_V41_FLASH.learning_rate
    at = recipe.clock.steps
    assert [at(n * T) for n in (28, 34, 40, 45)] == [278156, 337760, 397365, 447035] and recipe.steps == 447035
    assert [rate(t) for t in (0, 999, 1999, 2000)] == pytest.approx([1.3e-7, 1.3e-4, 2.6e-4, 2.6e-4], rel=1e-12)
    values = {28: 2.6e-4, 31: 2.2573e-4, 34: 1.43e-4, 37: 6.0269e-5, 40: 2.6e-5, 45: 2.6e-5}
    for trillion, value in values.items():
        assert rate(at(trillion * T) - 1) == pytest.approx(value, rel=2e-5)
    assert [recipe.length(n) for n in (0, 34 * T - 1, 34 * T)] == [65536, 65536, 2**20]
    assert all(size % length == 0 for _, size in recipe.batch.changes for _, length in recipe.length.changes)


@pytest.mark.parametrize("recipe", [DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, DEEPSEEK_V41_FLASH])
def test_recipes_inside_jit(recipe):
    """Step numbers in int32 and fp32 rates lose nothing that matters, to the last step."""
    steps = np.unique([*range(3), *np.geomspace(1, recipe.steps - 1, 60).astype(int), recipe.steps - 1])
    want = [recipe.learning_rate(int(step)) for step in steps]
    got = jax.jit(jax.vmap(recipe.learning_rate))(jnp.asarray(steps, jnp.int32))
    np.testing.assert_allclose(got, want, rtol=3e-6)
    assert want[-1] == pytest.approx(recipe.end, rel=1e-9) and max(want) == recipe.peak
    last = recipe.clock.tokens(recipe.steps - 1)
    assert last < recipe.tokens <= last + recipe.batch(last)


@given(st.lists(st.tuples(st.integers(1, 10**13), st.integers(1, 10**9)), max_size=4), st.integers(1, 10**9), st.data())
def test_clock_counts_every_token(later, first, data):
    """Against adding up one step after another, wherever the batch size changes."""
    starts = sorted({start for start, _ in later})
    batch = Stepwise(((0, first), *((start, size) for start, (_, size) in zip(starts, later, strict=False))))
    clock = Clock(batch)
    step = data.draw(st.integers(0, 10**6))
    seen = clock.tokens(step)
    assert clock.tokens(step + 1) - seen == batch(seen)
    assert clock.steps(seen) == step and clock.steps(seen + 1) == step + 1
    tokens = data.draw(st.integers(0, 10**14))
    steps = clock.steps(tokens)
    assert clock.tokens(steps) >= tokens and (steps == 0 or clock.tokens(steps - 1) < tokens)


def test_tokens_past_int32():
    clock = Clock(Stepwise(((0, 100_663_296),)))
    assert clock.tokens(30) == 3_019_898_880 and clock.tokens(447_035) == 45_000_016_527_360


def test_trapezoid_in_steps():
    """Without a batch size a token is a step; the first step is not wasted on a rate of 0."""
    rate = trapezoid(1.0, 0.1, 4, 90, 100)
    assert [rate(t) for t in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert [rate(89), rate(94), rate(99), rate(500)] == pytest.approx([1, 0.55, 0.1, 0.1])
    assert trapezoid(1.0, 0.1, 0, 0, 0)(0) == pytest.approx(0.1)


@pytest.mark.parametrize("changes", [(), ((1, 2),), ((0, 2), (0, 3)), ((0, 2), (5, 0)), ((0, 1), (5, 2), (3, 2))])
def test_refuses(changes):
    with pytest.raises(ValueError, match="ascend from 0"):
        Stepwise(changes)
    with pytest.raises(ValueError, match="decay_from <= decay_to"):
        trapezoid(1.0, 0.1, 4, 100, 90)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("v4_flash", DEEPSEEK_V4_FLASH), ("v4_pro", DEEPSEEK_V4_PRO), ("v41_flash", DEEPSEEK_V41_FLASH)],
)
def test_the_published_runs_as_stages(name, recipe):
    """Their stages have the recipe's batch, length and rate at any token count, and end where it does."""
    stages = ds.load_config(ROOT / "configs" / f"{name}.py").resolved_stages
    assert stages[-1].last == stages[0].cfg.steps and stages[-1].declared.until == recipe.tokens
    for stage in stages:
        data, rate = stage.cfg.data, make_schedule(stage.cfg.optim, stage.cfg.steps, stage.clock)
        for step in (stage.first, (stage.first + stage.last) // 2, stage.last - 1):
            seen = stage.clock.tokens(step)
            assert (data.batch_size * data.seq_len, data.seq_len) == (recipe.batch(seen), recipe.length(seen))
            assert stage.clock.tokens(step) == recipe.clock.tokens(step)
            if stage.cfg.model.attention != "warmup":
                assert rate(step) == pytest.approx(recipe.learning_rate(step), rel=1e-12)
    modes = {"sparse"} if name == "v41_flash" else {"dense", "warmup", "sparse"}
    assert {stage.cfg.model.attention for stage in stages} == modes


def test_the_published_runs_change_where_the_reports_say():
    """V4: dense for the first 1T tokens of Flash, MTP weight 0.1 from the decay on; V4.1: the vision tower's thaw."""
    flash, v41 = (ds.load_config(ROOT / "configs" / f"{name}.py").resolved_stages for name in ("v4_flash", "v41_flash"))
    assert {stage.cfg.model.attention for stage in flash if stage.declared.until <= T} == {"dense"}
    assert {stage.cfg.data.seq_len for stage in flash if stage.cfg.model.attention != "dense"} == {65536, 2**20}
    decay = DEEPSEEK_V4_FLASH.decay[0]
    assert {stage.cfg.loss.mtp for stage in flash if stage.clock.tokens(stage.first) >= decay} == {0.1}
    assert {stage.cfg.loss.mtp for stage in flash if stage.clock.tokens(stage.first) < decay} == {0.3}
    names = ["vision.norm", "vision.layers.0.attn.wq.weight", "aligner.w1.weight", "embed"]
    held = lambda stage: [name for name in names if re.search(frozen_pattern(stage.cfg), name)]
    assert [held(stage) for stage in v41] == [[names[1]], [], []]
