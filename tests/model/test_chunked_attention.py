# SPDX-License-Identifier: Apache-2.0
"""Attention of every layer kind, computed in chunks from a cache, gives what it gives for whole rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.runs import MODEL

from dsv4_jax.mesh import act_spec, row_spec
from dsv4_jax.model.attention import Attention, make_empty_shared
from dsv4_jax.model.cache import Pending, commit, init_cache
from dsv4_jax.model.params import Params
from dsv4_jax.model.tables import make_chunk_tables, make_tables

B, S, CAPACITY = 2, 29, 64
SIZES = dict(n_layers=1, n_hash_layers=0, n_mtp_layers=0, window_size=6, index_topk=2)
CSA2 = dict(kv_source_layers=(0,), index_source_layers=(0,), candidate_block_size=2, candidate_topk_blocks=1)
CASES = {
    "window": dict(compress_ratios=(0,)),
    "csa": dict(compress_ratios=(4,)),
    "csa/dense": dict(compress_ratios=(4,), attention="dense"),
    "csa/warmup": dict(compress_ratios=(4,), attention="warmup"),
    "hca": dict(compress_ratios=(8,)),
    "hca/128": dict(compress_ratios=(128,)),
    "full/2": dict(compress_ratios=(2,), candidate_source_layer=0, **CSA2),
    "full/1": dict(compress_ratios=(1,), **CSA2),
}


@functools.partial(jax.jit, static_argnums=2)
def whole_row(layer, x, attention):
    """Outputs and selections of rows of one document, as training computes them; `attention` keys the compilation."""
    rows, length = x.shape[:2]
    tables = make_tables(layer.cfg, jax.reshard(jnp.ones((rows, length), int), row_spec(2)))
    _, out, _, update = layer(x, make_empty_shared(layer.cfg, rows, length, jnp.float32), tables, jnp.float32)
    assert update is None
    return out.o_BSHK, out.topk_BSk


@jax.jit
def next_chunk(layer, x, cache, n):
    """The same for the next tokens of a cache, and the cache after them."""
    (rows, T), cfg = x.shape[:2], layer.cfg
    tables = make_chunk_tables(cfg, cache.length_B, n, T, cache.capacity)
    shared = make_empty_shared(cfg, rows, T, jnp.float32, cache.capacity)
    kept = jax.tree.map(lambda a: a[0], cache.layers[0][0])
    _, out, _, update = layer(x, shared, tables, jnp.float32, kept)
    pending = Pending(cache, [[jax.tree.map(lambda a: a[None], update)]], cache.history)
    return out.o_BSHK, out.topk_BSk, commit(pending, n)


def make(name: str, length: int):
    """A layer, its input, and what it gives for whole rows."""
    cfg = dataclasses.replace(MODEL, **SIZES, **CASES[name])
    assert cfg.layer_specs[0].mode == name.split("/")[0]
    layer = Attention(cfg, Params(nnx.Rngs(0), 0.3), cfg.layer_specs[0])
    x = np.random.RandomState(0).standard_normal((B, length, cfg.dim)).astype(np.float32)
    x = jax.device_put(x, act_spec(3))
    return layer, x, whole_row(layer, x, cfg.attention)


def check(layer, x, want, T: int):
    """Chunks of T tokens, the last one padded, against the whole row."""
    length, cache = x.shape[1], init_cache(layer.cfg, B, max(CAPACITY, x.shape[1] + T))
    outputs, picks = [], []
    for start in range(0, length, T):
        n = min(T, length - start)
        chunk = jnp.pad(x[:, start : start + n], [(0, 0), (0, T - n), (0, 0)])
        o, topk, cache = next_chunk(layer, chunk, cache, jnp.full(B, n))
        outputs.append(np.asarray(o)[:, :n])
        picks.append(None if topk is None else np.asarray(topk)[:, :n])
    np.testing.assert_allclose(np.concatenate(outputs, 1), want[0], rtol=0, atol=2e-6, err_msg=f"chunks of {T}")
    assert (picks[0] is None) == (want[1] is None)
    if want[1] is not None:
        selected = lambda topk: [sorted(set(query) - {-1}) for row in np.asarray(topk) for query in row]
        assert selected(np.concatenate(picks, 1)) == selected(want[1]), T


FAST = (1, 5, 7, S)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"hca/128"}))
def test_chunks_give_what_the_row_gives(name: str):
    layer, x, want = make(name, S)
    for T in FAST:
        check(layer, x, want, T)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"hca/128"}))
def test_chunks_of_every_other_length_too(name: str):
    layer, x, want = make(name, S)
    m = layer.cfg.compress_ratios[0]
    for T in {2, 3, max(m, 1), m + 1, 2 * m + 1, layer.cfg.window_size} - {*FAST}:
        check(layer, x, want, T)


@pytest.mark.parametrize("length", [100, 128, 300])
def test_the_published_ratio_at_every_offset(length: int):
    """100 tokens are shorter than one window, and no entry is made."""
    layer, x, want = make("hca/128", length)
    for T in (1, 37):
        check(layer, x, want, T)
