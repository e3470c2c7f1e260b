# SPDX-License-Identifier: Apache-2.0
"""Pooling of windows into entries against loops, with random gates: uniform ones would hide mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.ops.documents import compress, find_documents, find_windows

K = 5
PACKED = [0, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 0]
ROWS = {
    "one window": [1] * 4,
    "tail": [1] * 5,
    "two windows": [1] * 8,
    "shorter than a window": [1] * 3,
    "padding left": [0, 0, 0] + [1] * 9,
    "packed": PACKED,
}


def by_loops(kv, gate, ape, segments: list[int], overlap: bool) -> np.ndarray:
    """Section 3: one softmax per channel over a window's slots; entries of the row in order, float64."""
    m, entries, start = len(ape), [], 0
    for t in range(len(segments)):
        start = start if t and segments[t] == segments[t - 1] else t
        if not segments[t] or (t - start + 1) % m:
            continue
        now, before = range(t - m + 1, t + 1), range(t - 2 * m + 1, t - m + 1)
        slots = [(kv[s, -K:], gate[s, -K:] + ape[j, -K:]) for j, s in enumerate(now)]
        if overlap and t - start >= m:
            slots += [(kv[s, :K], gate[s, :K] + ape[j, :K]) for j, s in enumerate(before)]
        value, weight = np.array([v for v, _ in slots]), np.exp([g for _, g in slots])
        entries.append((weight * value).sum(0) / weight.sum(0))
    return np.array(entries).reshape(-1, K)


@functools.partial(jax.jit, static_argnums=4)
def pool(kv, gate, ape, segment_ids, overlap: bool):
    return compress(kv, gate, ape, find_windows(find_documents(segment_ids), len(ape)), overlap)


def inputs(S: int, m: int, overlap: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    r, C = np.random.RandomState(S), K * (1 + overlap)
    return tuple(jnp.asarray(2 * r.standard_normal(s), jnp.float32) for s in ((1, S, C), (1, S, C), (m, C)))


@pytest.mark.parametrize("m, overlap", [(4, True), (4, False), (3, False)], ids=["csa", "hca/4", "hca/3"])
@pytest.mark.parametrize("segments", ROWS.values(), ids=ROWS)
def test_entries_match_loops(segments: list[int], m: int, overlap: bool):
    x = inputs(len(segments), m, overlap)
    got = np.asarray(pool(*x, np.array([segments]), overlap))
    kv, gate, ape = (np.asarray(a, np.float64) for a in x)
    want = by_loops(kv[0], gate[0], ape, segments, overlap)
    assert got.shape == (1, len(segments) // m, K)
    np.testing.assert_allclose(got[0, : len(want)], want, rtol=0, atol=2e-6)
    assert np.isfinite(got).all()  # unused slots too


def test_first_window_has_no_previous_half():
    """Entry 0 is blind to the previous half's channels; entry 1 is not."""
    kv, gate, ape = inputs(8, 4, True)
    segments, half = np.ones((1, 8), int), np.arange(2 * K) < K
    one, two = pool(kv, gate, ape, segments, True), pool(kv + half, gate + half, ape + half, segments, True)
    np.testing.assert_array_equal(one[0, 0], two[0, 0])
    assert np.abs(one[0, 1] - two[0, 1]).max() > 0.1


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_finite_and_stay_inside(overlap: bool):
    """Padding, tails and documents shorter than a window get exactly nothing; finite differences agree."""
    kv, gate, ape = inputs(len(PACKED), 4, overlap)
    at = jax.jit(lambda s: find_windows(find_documents(s), 4))(np.array([PACKED]))
    used = (np.asarray(at.end_BM) < len(PACKED))[..., None]
    r = np.where(used, np.random.RandomState(1).standard_normal((1, len(PACKED) // 4, K)), 0)

    grads = jax.jit(jax.grad(lambda x: (pool(*x, np.array([PACKED]), overlap) * r).sum()))((kv, gate, ape))
    in_window = np.zeros(len(PACKED), bool)
    for start, end in zip(at.start_BM[0], at.end_BM[0], strict=True):
        in_window[start : end + 1] |= end < len(PACKED)
    for grad in grads[:2]:
        assert np.isfinite(grad).all()
        np.testing.assert_array_equal(np.abs(grad[0]).max(1) > 0, in_window)
    step = [np.random.RandomState(i).standard_normal(x.shape) for i, x in enumerate((kv, gate, ape))]

    def f(e: float) -> float:
        kv_, gate_, ape_ = (np.asarray(x, np.float64) + e * d for x, d in zip((kv, gate, ape), step, strict=True))
        entries = by_loops(kv_[0], gate_[0], ape_, PACKED, overlap)
        return (entries * r[0, : len(entries)]).sum()

    slope = sum((g * d).sum() for g, d in zip(grads, step, strict=True))
    np.testing.assert_allclose((f(1e-5) - f(-1e-5)) / 2e-5, slope, rtol=1e-4)
