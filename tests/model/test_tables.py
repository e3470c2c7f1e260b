# SPDX-License-Identifier: Apache-2.0
"""Integer tables of packed rows against plain Python loops over random segment ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.ops.documents import find_documents, find_windows, shift_ids

S, RATIOS = 24, (2, 3, 4, 16)


@jax.jit
def _tables(segment_ids, ids):
    docs = find_documents(segment_ids)
    return docs, {m: find_windows(docs, m) for m in RATIOS}, shift_ids(ids, docs)


def runs(segments: list[int]) -> list[range]:
    """Positions of every document: runs of one number that is not 0."""
    found, start = [], 0
    for t in range(1, len(segments) + 1):
        if t == len(segments) or segments[t] != segments[start]:
            if segments[start]:
                found.append(range(start, t))
            start = t
    return found


@st.composite
def rows(draw) -> list[int]:
    """Documents numbered 1, 2, ... of any length with padding anywhere, [S]."""
    row, number = [], 0
    while len(row) < S:
        if draw(st.booleans()):
            number += 1
            row += [number] * draw(st.integers(1, S))
        else:
            row += [0] * draw(st.integers(1, 5))
    return row[:S]


@given(rows())
def test_documents(row):
    docs, _, _ = _tables(np.array([row]), np.zeros((1, S), int))
    first, position, last = [S] * S, [0] * S, [False] * S
    for run in runs(row):
        for t in run:
            first[t], position[t], last[t] = run.start, t - run.start, t == run.stop - 1
    assert docs.first_BS[0].tolist() == first
    assert docs.position_BS[0].tolist() == position
    assert docs.last_BS[0].tolist() == last


@given(rows(), rows())
def test_windows(one, two):
    """Every whole window of every document in order, then unused slots; rows do not mix."""
    _, tables, _ = _tables(np.array([one, two]), np.zeros((2, S), int))
    for m, table in tables.items():
        assert table.end_BM.shape == (2, S // m)
        for b, row in enumerate((one, two)):
            starts = [(i, start, run.stop) for run in runs(row) for i, start in enumerate(run[::m])]
            want = [(start, start + m - 1, i) for i, start, stop in starts if start + m <= stop]
            used = np.asarray(table.end_BM[b]) < S
            got = list(zip(*(np.asarray(x[b])[used].tolist() for x in table), strict=True))
            assert got == want, f"ratio {m}"
            assert used.tolist() == sorted(used.tolist(), reverse=True)


@given(rows())
def test_next_ids(row):
    """The next token of the document; after the last comes the first, as in a rolled single row."""
    ids = np.random.RandomState(1).randint(0, 99, (1, S))
    _, _, following = _tables(np.array([row]), ids)
    for run in runs(row):
        want = np.roll(ids[0, run.start : run.stop], -1)
        np.testing.assert_array_equal(following[0, run.start : run.stop], want)


@pytest.mark.parametrize("m, S, pairs", [(4, 16, 28), (4, 18, 36), (4, 20, 45)])
def test_visible_pairs(m: int, S: int, pairs: int):
    """Entry e is visible to query t iff e < (t + 1) // m: the count is that of neither off-by-one rule."""
    table = jax.jit(lambda s: find_windows(find_documents(s), m))(np.ones((1, S), int))
    visible = np.asarray(table.end_BM)[0][None] <= np.arange(S)[:, None]
    assert visible.sum() == pairs == sum((t + 1) // m for t in range(S))


@pytest.mark.parametrize("S", [1, 2, 3])
def test_rows_shorter_than_a_window_have_no_slots(S: int):
    table = jax.eval_shape(lambda s: find_windows(find_documents(s), 4), jax.ShapeDtypeStruct((2, S), jnp.int32))
    assert table.end_BM.shape == (2, 0)
