# SPDX-License-Identifier: Apache-2.0
"""Chunks of a sequence on eight devices: what they take from the left, and the entries that they share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.mesh import make_mesh
from dsv4_jax.ops.context import cut_chunk, gather_entries, prepend_left, take_own_windows
from dsv4_jax.ops.documents import compress, find_documents, find_windows

RNG = np.random.default_rng(0)
ROWS = jax.P(("data", "expert"))
TOKENS = jax.P(("data", "expert"), "context")


def segments(S):
    """Rows of one document, of documents of every length from 1 on, of padding around one, of nothing."""
    rows = np.zeros((4, S), np.int32)
    rows[0] = 1
    ends = np.cumsum(np.arange(1, S))
    rows[1] = np.searchsorted(ends, np.arange(S), side="right") + 1
    rows[2, S // 3 : S - 2] = 5
    return rows


@pytest.mark.parametrize("n", [0, 1, 5, 6, 13, 39, 100])
def test_what_is_left_of_a_chunk(n):
    """Positions from as many neighbours as it takes, zeros left of the row; and the gradient comes back."""
    x = RNG.normal(size=(2, 40, 3)).astype(np.float32)
    with jax.set_mesh(make_mesh(1, 1, 8)):
        take = jax.shard_map(lambda x: prepend_left(x, n)[:, None], in_specs=TOKENS, out_specs=TOKENS)
        got = np.asarray(jax.jit(take)(jax.device_put(x, TOKENS)))
        weight = jax.device_put(RNG.normal(size=got.shape).astype(np.float32), TOKENS)
        grad = jax.jit(jax.grad(lambda x: (take(x) * weight).sum()))(jax.device_put(x, TOKENS))
    left = min(n, 35)
    padded = np.pad(x, ((0, 0), (left, 0), (0, 0)))
    want = np.stack([padded[:, 5 * d : 5 * d + left + 5] for d in range(8)], 1)
    np.testing.assert_array_equal(got, want)
    back = np.zeros_like(padded)
    for d in range(8):
        back[:, 5 * d : 5 * d + left + 5] += np.asarray(weight)[:, d]
    np.testing.assert_allclose(grad, back[:, left:], atol=1e-5)


@pytest.mark.parametrize("ratio, overlap", [(4, True), (8, False), (1, False), (3, True)])
@pytest.mark.parametrize("context, S", [(8, 40), (4, 36), (2, 8), (8, 8)])
def test_entries_of_all_chunks_are_those_of_the_row(ratio, overlap, context, S):
    """Pooled where their windows end, in the order of the row; chunks shorter than ratio and overlap."""
    kv, gate = RNG.normal(size=(2, 4, S, 6)).astype(np.float32)
    ape = RNG.normal(size=(ratio, 6)).astype(np.float32)
    reach = (2 if overlap else 1) * ratio - 1

    def run(mesh):
        with jax.set_mesh(mesh):
            at = jax.jit(lambda s: find_windows(find_documents(s), ratio))(segments(S))

            @functools.partial(jax.shard_map, in_specs=(TOKENS, TOKENS, jax.P(), ROWS), out_specs=TOKENS)
            def entries(kv, gate, ape, at):
                own, _ = take_own_windows(at, ratio, kv.shape[1], prepend_left(kv, reach).shape[1] - kv.shape[1])
                pooled = compress(prepend_left(kv, reach), prepend_left(gate, reach), ape, own, overlap)
                return gather_entries(pooled, at, kv.shape[1])[:, None]

            place = lambda x, spec: jax.device_put(x, spec)
            at = jax.tree.map(lambda x: place(np.asarray(x), ROWS), at)
            args = (place(kv, TOKENS), place(gate, TOKENS))

            def total(kv, gate, ape):
                y = entries(kv, gate, ape, at)
                weight = jnp.cos(jnp.arange(y.shape[2] * y.shape[3], dtype=jnp.float32)).reshape(y.shape[2:])
                used = (at.end_BM < S)[:, None, :, None]
                return (jnp.where(used, y, 0) * weight).sum() / y.shape[1], jnp.where(used, y, 0)

            grads, y = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*args, place(ape, jax.P()))
            return jax.device_get((y, grads))

    (want, grads_1), (got, grads) = run(make_mesh()), run(make_mesh(1, 1, context))
    for d in range(context):
        np.testing.assert_allclose(got[:, d], want[:, 0], atol=1e-6)
    for g, g_1 in zip(grads, grads_1, strict=True):
        np.testing.assert_allclose(g, g_1, atol=1e-5)


def test_chunks_of_tables():
    x = RNG.normal(size=(2, 16, 3)).astype(np.float32)
    with jax.set_mesh(make_mesh(1, 2, 4)):
        cut = jax.shard_map(lambda x: cut_chunk({"x": x}, 4)["x"], in_specs=ROWS, out_specs=TOKENS)
        np.testing.assert_array_equal(jax.jit(cut)(jax.device_put(x, ROWS)), x)
