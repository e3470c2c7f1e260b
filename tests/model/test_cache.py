# SPDX-License-Identifier: Apache-2.0
"""Chunks of tokens computed from a cache give what the whole rows give, whatever their lengths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden_models import ruled_model, small_config

from dsv4_jax.model.cache import commit, init_cache
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.ops.cross_entropy import head_logits

CLOSE = dict(rtol=0, atol=5e-5)


@functools.partial(jax.jit, static_argnames="collect")
def extend(model, cache, ids, n, embeddings=None, token_types=None, forced=None, collect=()):
    """Logits of a chunk, those of the MTP block, its layers, and the cache after it."""
    more = dict(embeddings=embeddings, token_types=token_types, forced_experts=forced, collect=collect)
    out, pending = model.extend(cache, ids, n, **more)
    mtp = None if out.mtp is None else head_logits(out.mtp, whole(model.head))
    return head_logits(out.h, whole(model.head)), mtp, out.layers, commit(pending, n)


def decode(model, ids, chunks, lengths=None, capacity=128, **arrays):
    """Logits of rows [B, S] and their MTP logits, zeros where there are none.

    `chunks` are pairs of T and the number of real tokens of each row, at most T; `arrays` are cut like the ids.
    """
    (B, S), V = ids.shape, model.cfg.vocab_size
    lengths = np.full(B, S) if lengths is None else np.asarray(lengths)
    cache, place = init_cache(model.cfg, B, capacity, draft=True), np.zeros(B, int)
    logits, mtp = (np.zeros((B, S, V), np.float32) for _ in range(2))
    for T, wanted in chunks:
        n = np.minimum(wanted, lengths - place)
        cut = lambda x, T=T: np.stack([np.resize(x[b, place[b] : place[b] + T], (T, *x.shape[2:])) if place[b] < S
                                       else np.zeros((T, *x.shape[2:]), x.dtype) for b in range(B)])  # fmt: skip
        part, after, _, cache = extend(model, cache, cut(ids), n, **{k: cut(x) for k, x in arrays.items()})
        for b in range(B):
            logits[b, place[b] : place[b] + n[b]] = part[b, : n[b]]
            if after is not None:
                mtp[b, place[b] : place[b] + n[b]] = after[b, : n[b]]
        place += n
    assert (place == lengths).all() and (np.asarray(cache.length_B) == lengths).all()
    return logits, mtp


def uneven(lengths, T, seed=0):
    """Chunks of up to T tokens, another number in every row, some rows idle, until all rows are done."""
    rng, left, chunks = np.random.RandomState(seed), np.array(lengths), []
    while left.any():
        n = np.minimum(rng.randint(0, T + 1, len(left)), left)
        left = left - n
        chunks.append((T, n))
    return chunks


def even(S, T):
    """Chunks of T tokens in every row; the last may be shorter."""
    return [(T, T)] * -(-S // T)


@pytest.mark.parametrize("T", [1, 7, pytest.param(70, marks=pytest.mark.slow)])
def test_golden_models_decode_what_they_compute(golden, T: int):
    """Also the MTP block, which stands one token behind."""
    if golden.name == "v4_pro_tiny" and T == 1:
        pytest.skip("one of the models is enough")
    logits, mtp = decode(golden.model, golden.ids, even(70, T) if T != 7 else uneven([70, 70], 7))
    np.testing.assert_allclose(logits, golden.arrays["logits"], **CLOSE)
    np.testing.assert_allclose(mtp[:, 1:], golden.arrays["mtp_logits"][:, :-1], **CLOSE)


@pytest.mark.parametrize("T", [7, pytest.param(1, marks=pytest.mark.slow), pytest.param(45, marks=pytest.mark.slow)])
def test_golden_images_decode_across_the_borders_of_chunks(v41, T: int):
    """An image of 10 positions that begins at 5: its embeddings are made once, from the whole prompt."""
    cfg, model, arrays = v41["cfg"], v41["model"], v41["arrays"]
    ids, types = arrays["ids"], arrays["token_types"]
    inputs = Inputs(jnp.asarray(ids), token_types=types, patches=arrays["patches"], image_grids=v41["grids"])
    embeddings = jax.jit(lambda model: model.embed_inputs(inputs.checked(cfg))[0])(model)
    chunks = uneven([45, 45], 7) if T == 7 else even(45, T)
    logits, _ = decode(model, ids, chunks, embeddings=np.asarray(embeddings), token_types=types)
    np.testing.assert_allclose(logits, v41["out"].logits, rtol=0, atol=1e-4)
