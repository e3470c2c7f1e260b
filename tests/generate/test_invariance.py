# SPDX-License-Identifier: Apache-2.0
"""A request gets the same tokens, bit for bit, whatever the other rows of the batch hold."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image
from support.golden_models import ruled_model, small_config

import dsv4_jax as ds
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.generate.programs import read_chunk
from dsv4_jax.generate.request import Request, make_request
from dsv4_jax.generate.sampling import Rule, apply_rule
from dsv4_jax.model.token_types import TEXT

VISION = small_config(
    vocab_size=257, n_layers=2, compress_ratios=(2, 2), n_mtp_layers=0, kv_source_layers=(0,),
    index_source_layers=(0,), hc_single_pass=True, query_norm=False, modality_bias=True, window_size=6,
    hc_sinkhorn_iters=2, remat="none", vision_n_layers=1, vision_dim=16, vision_n_heads=2, vision_inter_dim=16,
    vision_patch_size=2, vision_downsample_ratio=2, vision_min_pixels=1, image_token_id=7,
)  # fmt: skip
MTP = small_config(
    vocab_size=16, compress_ratios=(8, 0), window_size=6, hc_sinkhorn_iters=2, remat="none",
)  # fmt: skip


def first_row(model, requests, **options):
    """Tokens of the first request, without their numbers of requests."""
    tokens = ds.generate(model, requests, rows=2, invariant=True, chunk=5, capacity=64, **options)
    return [(t.id, t.logprob, t.finish) for t in tokens if t.request == 0]


def test_an_image_in_another_row_changes_nothing(tmp_path):
    """Also a request with an image does not depend on whether the other row has one."""
    path, model = tmp_path / "picture.png", ruled_model(VISION)
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (4, 6, 3), np.uint8)).save(path)
    how = dict(max_tokens=6, temperature=1.3, stop_ids=())
    text = make_request("a prompt", VISION, Bytes(), **how)
    picture = make_request("xy", VISION, Bytes(), image=str(path), **how)
    before = read_chunk._cache_size()
    for mine in (text, picture):
        alone = first_row(model, [mine])
        assert len(alone) == 6
        for other in (text, picture):
            assert first_row(model, [mine, other]) == alone
    assert read_chunk._cache_size() - before == 2  # one for prompts, with images or without, and one for tokens
    assert first_row(model, [dataclasses.replace(picture, patches=picture.patches * 0)]) != first_row(model, [picture])


def test_log_probabilities_after_an_image_are_those_of_training(tmp_path):
    """With the image across the border of two chunks, and the experts of generation given back."""
    path, model = tmp_path / "picture.png", ruled_model(VISION)
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (6, 6, 3), np.uint8)).save(path)
    request = make_request("xy", VISION, Bytes(), image=str(path), max_tokens=6, stop_ids=(), seed=2)
    made = list(ds.generate(model, [request], rows=2, invariant=True, chunk=5, capacity=64, keep_experts=True))
    ids = np.array([[*request.ids, *(token.id for token in made)]])[:, :-1]
    types = np.full_like(ids, TEXT)
    types[0, : len(request.ids)] = request.token_types
    assert types[0, 4] != TEXT and types[0, 5] != TEXT
    experts = np.concatenate([token.experts for token in made], axis=1)[:, None]
    inputs = dict(token_types=types, patches=request.patches, image_grids=request.image_grids)
    run = jax.jit(lambda model, ids, inputs, experts: model(ids, **inputs, forced_experts=experts))
    for forced in (None, list(experts)):
        out = run(model, ids, inputs, forced)
        logp = np.asarray(jax.nn.log_softmax(np.asarray(out.logits)[0]))[len(request.ids) - 1 :]
        want = logp[np.arange(6), [token.id for token in made]]
        np.testing.assert_allclose([token.logprob for token in made], want, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(experts, np.stack([np.asarray(x) for x in out.experts]))


def test_a_row_forgets_the_request_before():
    """The same request again, after another one in its row, gets the same tokens, bit for bit."""
    model = ruled_model(MTP)
    mine, other = (Request(ids=ids, max_tokens=9, seed=5) for ids in ([3, 1, 4, 1, 5], [2] * 20))
    tokens = ds.generate(model, [mine, mine, other, mine], rows=1, chunk=5, capacity=64)
    turns = [[] for _ in range(4)]
    for token in tokens:
        turns[token.request].append((token.id, token.logprob))
    assert turns[0] == turns[1] == turns[3] != turns[2]


@pytest.mark.parametrize("draft", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_rules_of_other_rows_change_nothing(draft: int):
    """A rule that sorts the vocabulary, one that does not, and rows that end and begin."""
    model = ruled_model(MTP)
    mine = Request(ids=[3, 1, 4, 1, 5], max_tokens=12, seed=5)
    alone = first_row(model, [mine], draft=draft)
    for rule in (dict(top_k=3), dict(top_p=0.5, min_p=0.1), dict(temperature=0)):
        others = [Request(ids=[9, 2, 6], max_tokens=n, seed=n, **rule) for n in (1, 4, 3)]
        assert first_row(model, [mine, *others], draft=draft) == alone


def test_a_row_without_limits_keeps_every_token_beside_rows_with_limits():
    """The probabilities of these likely tokens add up to 1, in fp32, long before the last token."""
    logits = np.random.RandomState(0).normal(0, 8, (2, 300)).astype(np.float32)
    logits = logits - logits.max(-1, keepdims=True)
    rule = lambda top_k: Rule(*(np.array(x, np.float32) for x in ([1, 1], top_k, [1, 1], [0, 0], [0, 0])))
    alone, beside = (np.asarray(jax.jit(apply_rule)(rule(top_k), logits))[0] for top_k in ([0, 0], [0, 3]))
    np.testing.assert_array_equal(beside, alone)
