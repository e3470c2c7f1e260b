# SPDX-License-Identifier: Apache-2.0
"""Evaluation with images: which targets count as read, and which image takes another's place."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.mesh import ensure_mesh, row_spec
from dsv4_jax.ops.documents import documents
from dsv4_jax.train.evaluate import after_image, evaluate, wrong_images


def test_targets_after_an_image_of_their_document():
    segments = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    types = jnp.array([[-1, 0, 1, 3, -1, -1, -1, -1, -1, -1]])
    with ensure_mesh():
        found = after_image(types, jax.reshard(documents(segments).first_BS, row_spec(2)))
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


def test_every_image_becomes_the_next_one_of_its_size():
    batches = [batch([[(1, 2, 1), (2, 2, 2)], [(1, 2, 3)]]), batch([[(2, 2, 4)], [(2, 1, 5), (1, 2, 6)]])]
    swapped = wrong_images(batches)
    want = [batch([[(1, 2, 3), (2, 2, 4)], [(1, 2, 6)]]), batch([[(2, 2, 2)], [(2, 1, 5), (1, 2, 1)]])]
    for got, expected in zip(swapped, want, strict=True):
        np.testing.assert_array_equal(got["patches"], expected["patches"])
    assert batches[0]["patches"][0, 0, 0, 0, 0] == 1  # the batches themselves stay


def test_means_by_kind():
    batches = [batch([[(1, 1, 5)], [(1, 1, 1)]]), batch([[(1, 1, 2)], []])]

    def step(state, b):
        return {"text": (3.0, 2), "image": (float(b["patches"][0].sum()), 3)}

    found = evaluate(step, None, batches, lambda b: b)
    assert found == {"eval_loss": 1.5, "eval_loss_image": 3.5, "eval_loss_wrong_image": (3 + 15) / 6}
    only_images = evaluate(lambda state, b: {"text": (0.0, 0), "image": (4.0, 2)}, None, batches, lambda b: b)
    assert only_images["eval_loss"] == 2.0
    assert evaluate(lambda state, b: {"text": (4.0, 2)}, None, batches, lambda b: b) == {"eval_loss": 2.0}
    no_choice = {"text": (4.0, 2), "recall": (0.0, 0.0), "recall_random": (0.0, 0.0)}
    assert evaluate(lambda state, b: no_choice, None, batches, lambda b: b) == {"eval_loss": 2.0}
