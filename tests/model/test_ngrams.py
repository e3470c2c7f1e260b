# SPDX-License-Identifier: Apache-2.0
"""Rows of n-grams against Python's integers, the published constants and the golden rows; on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st
from support import golden_weights
from test_engram import B, S, config

import dsv4_jax as ds
from dsv4_jax.mesh import act_spec, make_mesh, row_spec
from dsv4_jax.model.engram import compute_engram_rows, compute_hashing, make_token_map_buffer
from dsv4_jax.model.params import Params
from dsv4_jax.ops.documents import find_documents
from dsv4_jax.ops.ngrams import hash_ngrams, make_hashing, multiply, remainder

REAL = dict(layers=(1, 14), longest=4, heads=8, start=16000000, vocab=99092)


def test_constants_of_the_published_model():
    at = make_hashing(**REAL)
    assert at.rows == (384006168, 384016682)
    assert at.multipliers_LG.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert at.primes_LC.shape == (2, 24)
    assert at.primes_LC[:, [0, -1]].tolist() == [[16000057, 16000463], [16000477, 16000889]]
    assert at.primes_LC[0, 1] == 16000079 and (np.diff(at.primes_LC.reshape(-1)) > 0).all()
    np.testing.assert_array_equal(at.offsets_LC[:, 0], 0)
    np.testing.assert_array_equal(at.offsets_LC[:, 1:], np.cumsum(at.primes_LC, 1)[:, :-1])


def test_primes_start_with_the_first_one():
    at = make_hashing((0, 3), 3, 2, 0, 10)
    assert at.primes_LC.tolist() == [[2, 3, 5, 7], [11, 13, 17, 19]]
    assert at.offsets_LC.tolist() == [[0, 2, 5, 10], [0, 11, 24, 41]]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(1, 2**31 - 1))
@example(2**32 - 1, 2**63 - 1, 2**31 - 1)
@example(2**32 - 1, 2**32 - 1, 1)
@example(99091, 2 * 46539438283890 + 1, 16000889)
def test_arithmetic_in_halves_is_that_of_integers(x, m, p):
    high, low = multiply(jnp.uint32(x)[None], np.array([m], np.uint64))
    assert (int(high[0]) << 32) + int(low[0]) == x * m % 2**64
    assert int(remainder((high, low), np.array([p], np.int32))[0]) == x * m % 2**64 % p


def rows_by_hand(at, numbers, pad, live, segments):
    """One token at a time, in Python's integers."""
    L, G = at.multipliers_LG.shape
    found = np.zeros((*numbers.shape, L, at.primes_LC.shape[1]), np.int64)
    for b, p, layer in np.ndindex(*numbers.shape, L):
        hashed, row, dead = 0, [], False
        for k in range(G):
            dead |= p < k or segments[b, p - k] != segments[b, p] or not live[b, p - k]
            hashed ^= int(pad if dead else numbers[b, p - k]) * int(at.multipliers_LG[layer, k])
            heads = at.primes_LC.shape[1] // (G - 1)
            row += [hashed % int(prime) for prime in at.primes_LC[layer, (k - 1) * heads : k * heads]] if k else []
        found[b, p, layer] = np.array(row) + at.offsets_LC[layer]
    return found


@functools.cache
def compiled(**constants):
    at = make_hashing(**constants)
    find = lambda numbers, pad, live, segments: hash_ngrams(at, numbers, pad, live, find_documents(segments))
    return at, jax.jit(find)


def packed(r, lengths, padding=0):
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.concatenate([segments, np.zeros(padding, int)])


@given(st.integers(0, 10**6))
def test_rows_are_those_of_integers(seed):
    """Documents of any length, padding, images, and numbers up to the last one, whose products are the largest."""
    at, find = compiled(**REAL)
    r = np.random.default_rng(seed)
    segments = np.sort(r.integers(0, 5, (2, S)), axis=1)[:, :: r.choice([-1, 1])]
    live = (segments > 0) & (r.random((2, S)) < 0.8)
    numbers = np.where(r.random((2, S)) < 0.3, 99091, r.integers(0, 99092, (2, S))).astype(np.int32)
    got = find(numbers, 17, live, segments)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, rows_by_hand(at, numbers, 17, live, segments))


def test_packed_documents_have_the_rows_they_have_alone():
    _, find = compiled(**REAL)
    r = np.random.default_rng(0)
    lengths = [1, 2, 3, 1, 7, 4]
    segments, numbers = packed(r, lengths, 3)[None], r.integers(0, 99092, (1, 21)).astype(np.int32)
    live = r.random((1, 21)) < 0.8
    together = np.asarray(find(numbers, 5, live & (segments > 0), segments))
    for number, (end, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True), 1):
        where = slice(end - length, end)
        assert (segments[0, where] == number).all()
        alone = find(numbers[:, where], 5, live[:, where], np.ones((1, length), int))
        np.testing.assert_array_equal(together[:, where], alone)


def test_looking_back_ends_at_the_first_token_that_is_no_text():
    """What lies behind an image is not seen, though it is text; the image's own tokens are padding."""
    at, find = compiled(**REAL)
    numbers, segments = np.arange(10, 18, dtype=np.int32)[None], np.ones((1, 8), int)
    live = np.array([[True, True, True, False, True, True, True, True]])
    got = np.asarray(find(numbers, 5, live, segments))[0]
    seen = np.array([[13, 5, 5, 5], [14, 5, 5, 5], [15, 14, 5, 5], [16, 15, 14, 5], [17, 16, 15, 14]])
    seen[0, 0] = 5
    for p, tokens in enumerate(seen, 3):
        for n in (2, 3, 4):
            products = [int(t) * int(m) for t, m in zip(tokens[:n], at.multipliers_LG[0], strict=False)]
            hashed = functools.reduce(int.__xor__, products)
            for head in range(8):
                column = (n - 2) * 8 + head
                want = hashed % int(at.primes_LC[0, column]) + int(at.offsets_LC[0, column])
                assert got[p, 0, column] == want


def test_a_token_alone():
    at, find = compiled(**REAL)
    numbers, one = np.array([[99091]], np.int32), np.ones((1, 1), int)
    got = find(numbers, 3, one > 0, one)
    np.testing.assert_array_equal(got, rows_by_hand(at, numbers, 3, one > 0, one))


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The golden model's configuration with its token map, and its description and arrays."""
    spec, fields, arrays = golden_weights.read("v41_tiny")
    path = tmp_path_factory.mktemp("map") / "half.npy"
    np.save(path, np.arange(spec["vocab_size"]) // 2)
    cfg = dataclasses.replace(ds.model_config_from_official(fields), engram_token_map=str(path))
    return cfg, spec, arrays


def test_golden_rows(golden):
    cfg, spec, arrays = golden
    at, types = compute_hashing(cfg), arrays["token_types"]
    assert at.multipliers_LG.tolist() == spec["engram_multipliers"]
    assert at.primes_LC.reshape(2, 3, 2).tolist() == spec["engram_primes"]
    assert (types >= 0).any()
    docs = find_documents(jnp.ones(types.shape, int))
    numbers = make_token_map_buffer(cfg, Params(nnx.Rngs(0), 0.02))
    find = jax.jit(functools.partial(compute_engram_rows, cfg))
    got = find(numbers, jnp.asarray(arrays["ids"]), jnp.asarray(types < 0), docs)
    np.testing.assert_array_equal(got, arrays["engram_rows"])


def test_rows_of_text_on_any_mesh():
    cfg = config(engram_max_ngram_size=4)
    r = np.random.default_rng(0)
    ids, segments = r.integers(0, 64, (B, S)), np.sort(r.integers(0, 4, (B, S)))
    text = (segments > 0) & (r.random((B, S)) < 0.9)
    want = rows_by_hand(compute_hashing(cfg), ids, 2, text, segments)
    for shape in [(2, 2, 2), (1, 1, 8)]:
        with jax.set_mesh(make_mesh(*shape)):

            @jax.jit
            def find(ids, text, segments):
                numbers = make_token_map_buffer(cfg, Params(nnx.Rngs(0), 0.02))
                borders = jax.shard_map(find_documents, in_specs=row_spec(2), out_specs=row_spec(2))
                return compute_engram_rows(cfg, numbers, ids, text, borders(jax.reshard(segments, row_spec(2))))

            got = np.asarray(find(*(jax.device_put(a, act_spec(2)) for a in (ids, text, segments))))
        np.testing.assert_array_equal(got, want)


def test_sizes_that_do_not_fit():
    rows = compute_hashing(config()).rows
    assert compute_hashing(config(engram_num_embeddings=rows)).rows == rows
    with pytest.raises(ds.ConfigError, match=r"model\.engram_num_embeddings = \(408, 5\) must be \(408, 480\)"):
        compute_hashing(config(engram_num_embeddings=(408, 5)))
    with pytest.raises(ds.ConfigError, match=r"model\.engram_vocab_size = 600000000 .* must be below 2\^31"):
        compute_hashing(config(engram_vocab_size=600000000))
