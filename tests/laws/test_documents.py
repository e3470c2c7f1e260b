# SPDX-License-Identifier: Apache-2.0
"""The law of packing: a packed row gives exactly what its documents give alone.

The model has a window of 8 and ratios of 4 and 16, so the documents below are shorter than, equal to
and longer than each of them. Every token id occurs once, so the gradient of a row of the embedding is
the gradient of one place.
"""

import numpy as np
import pytest
from support.golden_models import Golden, Losses, Run

LENGTHS = (1, 3, 4, 5, 7, 15, 16, 17, 40)
PADDING = 1000  # ids from here on stand for "padding of that many tokens" in the layouts below
_ids = np.random.RandomState(0).permutation(256)
DOCUMENTS = dict(zip(LENGTHS, np.split(_ids[: sum(LENGTHS)], np.cumsum(LENGTHS)[:-1]), strict=True))
SPARE = _ids[sum(LENGTHS) :]  # ids of no document, used for padding

LAYOUTS = {
    "falling, padding right": ([40, 17, 7, 5, PADDING + 1], [16, 15, 4, 3, 1, PADDING + 31]),
    "rising, padding between": (
        [PADDING + 2, 1, 3, 4, PADDING + 3, 16, 40, PADDING + 1],
        [17, PADDING + 9, 5, 7, 15, PADDING + 17],
    ),
    "padding left": ([PADDING + 13, 15, 1, 17, 3, 5, 16], [PADDING + 19, 7, 4, 40]),
}


def pack(layout) -> tuple[np.ndarray, np.ndarray, dict[int, tuple[int, slice]]]:
    """ids and segment_ids [2, 70], and where each document lies."""
    ids, segments, places = np.zeros((2, 70), int), np.zeros((2, 70), int), {}
    spare = iter(np.resize(SPARE, 1000))
    for row, parts in enumerate(layout):
        start, number = 0, 0
        for part in parts:
            if part > PADDING:
                length = part - PADDING
                ids[row, start : start + length] = [next(spare) for _ in range(length)]
            else:
                length, number = part, number + 1
                ids[row, start : start + length] = DOCUMENTS[part]
                segments[row, start : start + length] = number
                places[part] = row, slice(start, start + length)
            start += length
        assert start == 70, layout
    return ids, segments, places


def objective(ids, segments, only=None, others: float = 1.0) -> Losses:
    """Sums over the real targets of all documents, or of `only`, which is a row and a slice.

    A position counts if its target lies in its document.
    """

    def weight(ahead: int) -> np.ndarray:
        same = (segments == np.roll(segments, -ahead, axis=1)) & (segments > 0)
        same[:, -ahead:] = False
        keep = np.ones_like(same)
        if only is not None:
            keep[:] = False
            keep[only] = True
        return (same & keep).astype(np.float32)

    targets = [np.roll(ids, -ahead, axis=1) for ahead in (1, 2)]
    return Losses(targets[0], weight(1), targets[1], weight(2), others, others)


@pytest.fixture(scope="module")
def alone(flash: Golden) -> dict[int, Run]:
    """Every document in a row of its own, nothing but padding after it and in the other row."""
    runs = {}
    for length in LENGTHS:
        ids, segments, _ = pack(([length, PADDING + 70 - length], [PADDING + 70]))
        runs[length] = flash.run(ids, segments, objective(ids, segments))
    return runs


@pytest.fixture(scope="module", params=LAYOUTS)
def packed(request, flash):
    """A layout's run, and where its documents lie."""
    ids, segments, places = pack(LAYOUTS[request.param])
    return flash.run(ids, segments, objective(ids, segments)), places


def test_values_are_those_of_each_document_alone(packed, alone):
    run, places = packed
    assert set(places) == set(LENGTHS)
    for length, (row, where) in places.items():
        for name in ("logits", "mtp_logits"):
            got, want = getattr(run, name)[row, where], getattr(alone[length], name)[0, :length]
            np.testing.assert_allclose(got, want, rtol=0, atol=3e-5, err_msg=f"{name} of length {length}")
        for i, report in enumerate(run.layers):
            want = alone[length].layers[i].experts[0, :length]
            np.testing.assert_array_equal(report.experts[row, where], want)


def test_gradients_are_the_sum_of_those_alone(packed, alone):
    """Both cross-entropies, the indexer's loss and the balance loss, each a sum over documents."""
    run, _ = packed
    np.testing.assert_allclose(run.loss, sum(a.loss for a in alone.values()), rtol=1e-6)
    for name, got in run.grads.items():
        want = sum(a.grads[name] for a in alone.values())
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max() + 1e-7, err_msg=name)


def test_reports_of_layers_add_up_over_documents(packed, alone):
    """Expert loads, the indexer's loss and the balance loss of every layer; padding counts nowhere."""
    run, _ = packed
    for i, report in enumerate(run.layers):
        assert report.load.sum() == 2 * sum(LENGTHS)
        np.testing.assert_array_equal(report.load, sum(a.layers[i].load for a in alone.values()))
        for name in ("indexer", "balance"):
            got, want = getattr(report, name), sum(getattr(a.layers[i], name) for a in alone.values())
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=f"{name} of layer {i}")
        assert (report.balance == 0) == (i < 2)  # hash layers have nothing to balance
        assert (report.indexer == 0) == (i not in (2, 4))  # the CSA layers


@pytest.mark.parametrize("length", [3, 16, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_gradient_crosses_documents(flash, layout: str, length: int):
    """Exactly zero, to the embeddings of all other documents and of padding."""
    ids, segments, places = pack(LAYOUTS[layout])
    grad = flash.run(ids, segments, objective(ids, segments, only=places[length], others=0.0)).grads["embed.weight"]
    own = DOCUMENTS[length]
    assert (np.abs(grad[own[:-1]]).max(axis=1) > 0).all()  # the last token predicts nothing
    others = np.setdiff1d(np.arange(256), own)
    assert (grad[others] == 0).all()


def test_padding_ids_do_not_matter(flash, alone):
    """Other padding, the same values to the bit; also a row of nothing but padding is finite."""
    ids, segments, _ = pack(LAYOUTS["rising, padding between"])
    losses = objective(ids, segments)
    changed = np.where(segments == 0, (ids + 17) % 256, ids)
    one, two = flash.run(ids, segments, losses), flash.run(changed, segments, losses)
    np.testing.assert_array_equal(one.logits[segments > 0], two.logits[segments > 0])
    for name, grad in one.grads.items():
        np.testing.assert_array_equal(grad, two.grads[name], err_msg=name)
    for run in alone.values():  # row 1 is padding there
        assert np.isfinite(run.logits).all() and np.isfinite(run.mtp_logits).all()
        assert all(np.isfinite(grad).all() for grad in run.grads.values())
