# SPDX-License-Identifier: Apache-2.0
"""Selection of the largest scores by blocks: the same entries in the same order as a sort of the whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.ops import indexer
from dsv4_jax.ops.indexer import find_largest, select_entries

B, T = 2, 3


@pytest.fixture(scope="module", autouse=True)
def blocks_from_the_start():
    """Blocks for every row of at least twice the selected entries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "LONG", 2)
        yield


def by_sort(score: np.ndarray, visible: np.ndarray, k: int) -> np.ndarray:
    """The visible entries by falling score, then by number."""
    order = np.argsort(np.where(visible, -score, np.inf), axis=-1, kind="stable")[..., :k]
    return np.where(np.take_along_axis(visible, order, -1), order, -1)


SIZES = [(2, 1), (9, 2), (64, 1), (67, 3), (128, 7), (131, 2), (12, 6), (5, 5), (40, 3)]


@settings(max_examples=80)
@given(st.sampled_from(SIZES), st.integers(1, 7), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(0, 99))
def test_the_selected_entries_are_those_of_a_sort(sizes: tuple[int, int], values: int, share: float, seed: int):
    """Few values, -0 among them, so that rows have ties; rows with few visible entries or none."""
    (M, k), r = sizes, np.random.default_rng(seed)
    score = r.choice(np.float32([-0.0, 0.0, 1.0, 1.5, -2.0, -3e38, 3e38])[:values], (B, T, M))
    visible = r.random((B, T, M)) < share
    got = select_entries(jnp.asarray(score), jnp.asarray(visible), k)
    np.testing.assert_array_equal(got, by_sort(score, visible, k))


@pytest.mark.parametrize("M, k", [(1024, 2), (1000, 3), (1023, 1), (256, 100)])
def test_long_rows_give_what_top_k_gives(M: int, k: int):
    """Values and numbers, where most values are equal, where all are -inf, and where none are equal."""
    r = np.random.RandomState(0)
    x = r.standard_normal((B, T, M)).astype(np.float32)
    x[0, 1], x[1, 0, : M // 2], x[1, 1] = np.round(x[0, 1]), -np.inf, -np.inf
    for got, want in zip(find_largest(jnp.asarray(x), k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(got, want)


def test_no_whole_row_is_sorted(monkeypatch: pytest.MonkeyPatch):
    """Of 4096 entries, 8 of them selected, the largest sorted row has 256 values."""
    monkeypatch.setattr(indexer, "LONG", 128)
    jaxpr = jax.make_jaxpr(lambda x: find_largest(x, 8))(jnp.zeros((1, 1, 4096))).jaxpr
    sorted_ = [e.invars[0].aval.shape[-1] for e in jaxpr.eqns if e.primitive.name == "top_k"]
    assert sorted_ == [256, 8 * 16]
