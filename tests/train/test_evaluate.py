# SPDX-License-Identifier: Apache-2.0
"""Evaluation with images: which targets count as read, and which image takes another's place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dsv4_jax.mesh import ensure_mesh, row_spec
from dsv4_jax.ops.documents import find_documents
from dsv4_jax.train import feed
from dsv4_jax.train.evaluate import after_image, evaluate, unigram_entropy, wrong_images


def test_targets_after_an_image_of_their_document():
    segments = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    types = jnp.array([[-1, 0, 1, 3, -1, -1, -1, -1, -1, -1]])
    with ensure_mesh():
        found = after_image(types, jax.reshard(find_documents(segments).first_BS, row_spec(2)))
    assert np.asarray(found)[0, :8].tolist() == [False, True, True, True, True, False, False, False]


def batch(images):
    """Rows of images (patch rows, patch columns, number), whose patches all hold the number."""
    P = max(sum(h * w for h, w, _ in row) for row in images)
    grids = np.zeros((len(images), 3, 4), int)
    patches = np.zeros((len(images), P, 3, 1, 1), np.float32)
    for i, row in enumerate(images):
        at = 0
        for k, (h, w, number) in enumerate(row):
            grids[i, k], patches[i, at : at + h * w] = (i, 9 * k, h, w), number
            at += h * w
    return {"image_grids": grids, "patches": patches, "targets": np.zeros((2, 4), int)}


def test_every_image_becomes_the_next_one_of_its_size_in_its_row():
    batches = [batch([[(1, 2, 1), (2, 2, 2)], [(1, 2, 3)]]), batch([[(2, 2, 4)], [(2, 1, 5), (1, 2, 6)]])]
    swapped = wrong_images(batches)
    want = [batch([[(1, 2, 1), (2, 2, 4)], [(1, 2, 6)]]), batch([[(2, 2, 2)], [(2, 1, 5), (1, 2, 3)]])]
    for got, expected in zip(swapped, want, strict=True):
        np.testing.assert_array_equal(got["patches"], expected["patches"])
    assert batches[0]["patches"][0, 0, 0, 0, 0] == 1  # the batches themselves stay


def test_pairs_of_images_do_not_depend_on_who_has_the_rows():
    images = [[(1, 1, 10 * b + r), (1, 2, 10 * b + r + 5)] for b in range(3) for r in range(2)]
    batches = [batch(images[i : i + 2]) for i in (0, 2, 4)]
    together = wrong_images(batches)
    for row in range(2):
        alone = wrong_images([{k: v[row : row + 1] for k, v in b.items()} for b in batches])
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one["patches"][0], all_rows["patches"][row])


def test_every_row_is_counted_by_one_process(monkeypatch):
    class Device:
        def __init__(self, process):
            self.process_index = process

    class Sharding:
        def __init__(self, mesh, spec):
            pass

        def devices_indices_map(self, shape):
            rows = [slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4)]  # data 2 x context 2
            return {Device(process): (index,) for process, index in zip(processes, rows, strict=True)}

    monkeypatch.setattr(feed, "NamedSharding", Sharding)
    for processes, want in (
        ((0, 0, 1, 1), [[0, 1], [0, 1]]),
        ((0, 1, 0, 1), [[0, 1, 2, 3], []]),
        ((0, 1, 1, 2), [[0, 1], [2, 3], []]),  # process 1 has all four rows, and process 0 counts two of them
    ):
        assert [feed.counted_rows(4, process) for process in range(max(processes) + 1)] == want


def test_unigram_entropy_is_over_the_rows_of_all_processes(monkeypatch):
    targets = np.array([[0, 0, 1, 1, -1], [2, 2, 3, 3, -1]])
    assert abs(unigram_entropy([{"targets": targets}], [0, 1], 9) - math.log(4)) < 1e-12
    assert abs(unigram_entropy([{"targets": targets}], [0], 9) - math.log(2)) < 1e-12
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    other = np.bincount([2, 2, 3, 3], minlength=9)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda count: np.stack([count, other]))
    assert abs(unigram_entropy([{"targets": targets[:1]}], [0], 9) - math.log(4)) < 1e-12


def test_means_by_kind():
    batches = [batch([[(1, 1, 5)], [(1, 1, 1)]]) | {"weight": 1}, batch([[(1, 1, 2)], []]) | {"weight": 2}]

    def step(state, b):
        return {"text": (3.0, 2), "image": (float(b["weight"] * b["patches"][0].sum()), 3)}

    found = evaluate(step, None, batches, lambda b: b)
    assert found == {"eval/loss": 1.5, "eval/loss_image": (15 + 12) / 6, "eval/loss_wrong_image": (6 + 30) / 6}
    only_images = evaluate(lambda state, b: {"text": (0.0, 0), "image": (4.0, 2)}, None, batches, lambda b: b)
    assert only_images["eval/loss"] == 2.0
    assert evaluate(lambda state, b: {"text": (4.0, 2)}, None, batches, lambda b: b) == {"eval/loss": 2.0}
    no_choice = {"text": (4.0, 2), "recall": (0.0, 0.0), "recall_random": (0.0, 0.0)}
    assert evaluate(lambda state, b: no_choice, None, batches, lambda b: b) == {"eval/loss": 2.0}
