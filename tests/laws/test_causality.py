# SPDX-License-Identifier: Apache-2.0
"""Which token reaches which position: any length, no future, and everything the past should reach."""

import jax
import numpy as np
import pytest
from support.golden_models import ruled_model, small_config

SLOW = pytest.mark.slow  # one compilation each, of what the others have compiled for their lengths


@pytest.mark.parametrize("S", [1, 3, 18, *(pytest.param(S, marks=SLOW) for S in (2, 4, 5, 63))])
def test_any_length_gives_the_first_positions_of_a_longer_row(flash, S: int):
    """Shorter than a ratio, and not a multiple of any; the golden numbers are the longer row."""
    out = flash.forward(flash.model, flash.ids[:, :S])
    np.testing.assert_allclose(out.logits, flash.arrays["logits"][:, :S], rtol=0, atol=1e-4)
    mtp, want = out.mtp_logits[:, : S - 1], flash.arrays["mtp_logits"][:, : S - 1]
    np.testing.assert_allclose(mtp, want, rtol=0, atol=1e-4)  # the last one reads the token that comes next
    assert np.isfinite(out.mtp_logits).all()


@pytest.mark.parametrize("t", [0, 3, 14, 15, 38, 68])
def test_later_tokens_change_nothing(flash, t: int):
    ids = flash.ids.copy()
    ids[:, t + 1 :] = np.random.RandomState(t).randint(0, 256, ids[:, t + 1 :].shape)
    logits = np.asarray(flash.forward(flash.model, ids).logits)
    np.testing.assert_allclose(logits[:, : t + 1], flash.arrays["logits"][:, : t + 1], rtol=0, atol=1e-4)
    assert np.abs(logits[:, t + 1 :] - flash.arrays["logits"][:, t + 1 :]).max() > 0.1


S, WINDOW = 16, 2
SEGMENTS = {
    "one document": [1] * 16,
    "packed": [1] * 5 + [0] + [2] * 9 + [3],
    "padding left": [0, 0, 0] + [1] * 12 + [0],
}


@pytest.fixture(scope="module", params=[4, 3], ids=["csa", "hca"])
def reach(request):
    """Which tokens change each position's logits, in a model of one layer with window 2.

    Row b of a batch has token b changed. The top-k keeps every entry, so selection plays no part.
    """
    cfg = small_config(compress_ratios=(request.param, 0), index_topk=S, window_size=WINDOW)
    model = ruled_model(cfg)
    forward = jax.jit(lambda ids, segment_ids: model(ids, segment_ids))

    def changes(segments: list[int]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.tile(np.random.RandomState(1).randint(0, 32, S), (S, 1))
        rows = np.tile(segments, (S, 1))
        one, two = forward(ids, rows), forward(ids + 32 * np.eye(S, dtype=int), rows)
        main = np.abs(np.asarray(one.logits - two.logits)).max(2).T
        mtp = np.abs(np.asarray(one.mtp_logits - two.mtp_logits)).max(2).T
        for x in (main, mtp):  # nothing between rounding and a real change
            assert ((x < 1e-5) | (x > 1e-4)).all(), np.sort(x.reshape(-1))
        return main > 1e-4, mtp > 1e-4

    return request.param, changes


def expected(ratio: int, segments: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same from the rules: window, entries e < (p + 1) // ratio, CSA entries reach one window back."""
    main, mtp = np.zeros((2, S, S), bool)
    own = [range(*[f(t for t in range(S) if segments[t] == s) for f in (min, max)]) for s in segments]
    for t in (t for t in range(S) if segments[t]):
        first, last = own[t].start, own[t].stop
        main[t, max(first, t - WINDOW + 1) : t + 1] = True
        for e in range((t - first + 1) // ratio):
            back = ratio if ratio == 4 and e else 0
            main[t, first + e * ratio - back : first + (e + 1) * ratio] = True
    for t in (t for t in range(S) if segments[t]):
        first, last = own[t].start, own[t].stop
        for s in range(max(first, t - WINDOW + 1), t + 1):  # the MTP block has a window and no entries
            mtp[t] |= main[s]
            mtp[t, s + 1 if s < last else first] = True
    return main, mtp


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_every_token_reaches_exactly_where_it_should(reach, segments):
    """Both ways: no future, no neighbour, and the last token of a window reacts to all of it."""
    ratio, changes = reach
    real = np.array(segments) > 0
    for name, got, want in zip(("logits", "mtp_logits"), changes(segments), expected(ratio, segments), strict=True):
        np.testing.assert_array_equal(got[real], want[real], err_msg=name)
