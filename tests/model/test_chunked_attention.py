# SPDX-License-Identifier: Apache-2.0
"""The three functions of attention with a cache between them, as decoding has it, give what training computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.runs import MODEL

from dsv4_jax.mesh import BATCH, QUICK_CPU, act_spec, ensure_mesh, row_spec
from dsv4_jax.model.attention import Attention, count_tail, index_of, make_empty_shared, new_entries, read
from dsv4_jax.model.params import Params
from dsv4_jax.model.rope import compute_frequencies, compute_rotation, rotate
from dsv4_jax.model.tables import make_chunk, make_tables
from dsv4_jax.ops.documents import Windows

B, CHUNKS = 2, (5, 1, 9, 2, 6)
S = sum(CHUNKS)
SIZES = dict(n_layers=1, n_hash_layers=0, n_mtp_layers=0, window_size=6, index_topk=2)
CSA2 = dict(kv_source_layers=(0,), index_source_layers=(0,), candidate_block_size=2, candidate_topk_blocks=1)
CASES = {
    "window": dict(compress_ratios=(0,)),
    "csa": dict(compress_ratios=(4,)),
    "hca": dict(compress_ratios=(8,)),
    "full/2": dict(compress_ratios=(2,), candidate_source_layer=0, **CSA2),
    "full/1": dict(compress_ratios=(1,), **CSA2),
}


def whole_row(layer, x):
    """Outputs and selections of rows of one document, as training computes them."""
    tables = make_tables(layer.cfg, jax.reshard(jnp.ones((B, S), int), row_spec(2)))
    _, out, _ = layer(x, make_empty_shared(layer.cfg, B, S, jnp.float32), tables, jnp.float32)
    return out.o_BSHK, out.topk_BSk


def in_chunks(cfg, projected, weights):
    """The same with a cache: a ring of window keys, the tokens of unfinished windows, entries and index keys."""
    spec, m = cfg.layer_specs[0], cfg.compress_ratios[0]
    freq = compute_frequencies(cfg, compressed=m > 0)
    behind = lambda n: jax.tree.map(lambda a: jnp.zeros((B, n, a.shape[2])), (projected.main, projected.index))
    tail = behind(count_tail(spec)) if m else None
    ring = jnp.zeros((B, cfg.window_size - 1, cfg.head_dim))
    M = S // m if m else 0
    entries, keys = jnp.zeros((B, M, cfg.head_dim)), jnp.zeros((B, M, cfg.index_head_dim))
    outputs, selections, length = [], [], 0
    for T in CHUNKS:
        tokens = jax.tree.map(lambda a, length=length, T=T: a[:, length : length + T], projected)
        place = jnp.broadcast_to(length + jnp.arange(T), (B, T))
        chunk = make_chunk(compute_rotation(freq, place), jnp.full((B, T), -length))
        all_windows = index = None
        if m:
            # The windows whose last token comes in this chunk; `tail` has the tokens before it.
            tokens_with_tail = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), tail, (tokens.main, tokens.index))
            reach = tokens_with_tail[0].value_BSC.shape[1] - T
            number = jnp.broadcast_to(jnp.arange(length // m, (length + T) // m), (B, (length + T) // m - length // m))
            start = number * m - length + reach
            windows = Windows(start, start + m - 1, number)
            made = new_entries(cfg, spec, *tokens_with_tail, weights, windows, compute_rotation(freq, number * m))
            slots = slice(length // m, (length + T) // m)
            entries = entries.at[:, slots].set(made.entries_BmK)
            tail = jax.tree.map(lambda a, T=T: a[:, T:], tokens_with_tail)
            # All entries, also those not made yet, whose windows end after the chunk.
            number = jnp.broadcast_to(jnp.arange(M), (B, M))
            all_windows = Windows(number * m - length, (number + 1) * m - 1 - length, number)
            if made.keys_BmJ is not None:
                keys = keys.at[:, slots].set(made.keys_BmJ)
                index = index_of(cfg, spec, tokens, chunk, keys, None)
        ring = jnp.concatenate([ring, rotate(tokens.kv_BSK, chunk.rotation)], 1)
        out = read(
            cfg, tokens.q_BSHK, ring, weights.sink_H, chunk, entries if m else None, all_windows, index, topk_BSk=None
        )
        ring, length = ring[:, T:], length + T
        outputs.append(out.o_BSHK)
        selections.append(out.topk_BSk)
    topk = None if selections[0] is None else jnp.concatenate(selections, 1)
    return jnp.concatenate(outputs, 1), topk


@pytest.mark.parametrize("name", CASES)
def test_chunks_with_a_cache_give_what_the_row_gives(name: str):
    cfg = dataclasses.replace(MODEL, **SIZES, **CASES[name])
    spec = cfg.layer_specs[0]
    assert spec.mode == name.split("/")[0]
    with ensure_mesh():
        layer = Attention(cfg, Params(nnx.Rngs(0), 0.3), spec)
        x = np.random.RandomState(0).standard_normal((B, S, cfg.dim)).astype(np.float32)
        x = jax.device_put(x, act_spec(3))

        def both(layer, x):
            tokens = jax.P(BATCH, "context")
            chunks = functools.partial(in_chunks, cfg)
            chunks = jax.shard_map(chunks, in_specs=(tokens, jax.P()), out_specs=tokens)
            return whole_row(layer, x), chunks(layer.project(x, jnp.float32), layer.weights())

        (want, picks), (got, chosen) = jax.jit(both, compiler_options=QUICK_CPU)(layer, x)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert (picks is None) == (chosen is None)
    if picks is not None:
        np.testing.assert_array_equal(np.sort(chosen), np.sort(picks))
