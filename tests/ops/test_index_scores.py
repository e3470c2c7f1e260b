# SPDX-License-Identifier: Apache-2.0
"""Scores of the lightning indexer: tile by tile as all at once, only those of tiles that a query may select from, and a
backward pass that reads the selected alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.mesh import make_mesh
from dsv4_jax.ops import indexer
from dsv4_jax.ops.attention import Index, attend
from dsv4_jax.ops.documents import find_documents, find_windows
from dsv4_jax.ops.indexer import count_tile, index_scores, indexer_loss, score_allowed, select_entries

B, T, I, J = 2, 5, 3, 8


def normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    r = np.random.RandomState(0)
    return [jnp.asarray(r.standard_normal(shape), jnp.float32) for shape in shapes]


def plain_scores(q_BTIJ, w_BTI, k_BMJ):
    """Section 2.3.1 with all heads' scores [B, T, I, M] at once."""
    hit = jnp.maximum(jnp.einsum("btij,bmj->btim", q_BTIJ, k_BMJ), 0)
    return jnp.einsum("bti,btim->btm", w_BTI, hit) / math.sqrt(I * J)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Tiles of 4 entries."""
    monkeypatch.setattr(indexer, "TILE", 4)
    monkeypatch.setattr(indexer, "CPU_SCORES", 1)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("M", [1, 4, 7, 8, 11])
def test_tiles_give_what_all_at_once_gives(M: int):
    *x, weight = normal((B, T, I, J), (B, T, I), (B, M, J), (B, T, M))
    (got, back), (want, back_plain) = jax.vjp(index_scores, *x), jax.vjp(plain_scores, *x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for grad, expected in zip(back(weight), back_plain(weight), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("M", [1, 4, 7, 8, 14])
@pytest.mark.parametrize("allowed", ["all", "none", "the last", "the middle", "every fifth"])
def test_tiles_without_an_allowed_entry_are_skipped(M: int, allowed: str):
    m = np.arange(M)
    of = {"all": m >= 0, "none": m < 0, "the last": m == M - 1, "the middle": m == M // 2, "every fifth": m % 5 == 0}
    allowed_BTM = np.zeros((B, T, M), bool)
    allowed_BTM[1, 2] = of[allowed]
    *x, weight = normal((B, T, I, J), (B, T, I), (B, M, J), (B, T, M))
    got, back = jax.vjp(lambda *x: score_allowed(*x, jnp.asarray(allowed_BTM)), *x)
    np.testing.assert_allclose(np.where(allowed_BTM, got, 0), np.where(allowed_BTM, plain_scores(*x), 0), atol=1e-6)
    if M > 4:  # the last tile begins at M - 4
        starts = {min(i // 4 * 4, M - 4) for i in np.flatnonzero(of[allowed])}
        scored = np.array([any(start <= i < start + 4 for start in starts) for i in m])
        assert (np.isfinite(got) == scored).all()
    assert not any(grad.any() for grad in back(weight))


@pytest.mark.usefixtures("small_tiles")
def test_each_device_scores_the_tiles_that_its_queries_need():
    """Along `context` every device has a chunk of the queries and all entries: the later the chunk, the more tiles."""
    S, M = 8, 32
    q, w, keys = normal((B, S, I, J), (B, S, I), (B, M, J))
    allowed = np.broadcast_to(np.arange(M) <= 4 * np.arange(S)[:, None], (B, S, M))
    tokens, rows = jax.P(("data", "expert"), "context"), jax.P(("data", "expert"))
    with jax.set_mesh(make_mesh(1, 1, 8)):
        score = jax.shard_map(score_allowed, in_specs=(tokens, tokens, rows, tokens), out_specs=tokens)
        x = [
            jax.device_put(x, spec)
            for x, spec in zip((q, w, keys, allowed), (tokens, tokens, rows, tokens), strict=True)
        ]
        got = np.asarray(jax.jit(score)(*x))
        grad = jax.jit(jax.grad(lambda q: jnp.where(x[3], score(q, *x[1:]), 0).sum()))(x[0])
    np.testing.assert_allclose(np.where(allowed, got, 0), np.where(allowed, plain_scores(q, w, keys), 0), atol=1e-6)
    assert np.isfinite(got).sum((0, 2)).tolist() == [B * 4 * (t + 1) for t in range(S)]
    assert not np.asarray(grad).any()


@pytest.mark.parametrize("platform, tile", [("cpu", 128), ("tpu", 4096)])
def test_the_heads_scores_of_a_tile_are_bounded(platform: str, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(indexer, "on_cpu", lambda: platform == "cpu")
    assert count_tile(jnp.zeros((1, 128, 64, J))) == tile
    assert count_tile(jnp.zeros((1, 1, 64, J))) == {"cpu": 4096, "tpu": 2**19}[platform]
    assert count_tile(jnp.zeros((1, 1000, 64, J))) % 128 == 0


def test_selected_entries_have_the_gradient_of_all():
    """The loss over k scores computed from the k keys has the gradient of the one that takes them out of all scores."""
    M, k = 11, 3
    q, w, keys, logits = normal((B, T, I, J), (B, T, I), (B, M, J), (B, T, 2, k))
    p = jax.nn.softmax(logits)
    topk = select_entries(plain_scores(q, w, keys), jnp.ones((B, T, M), bool).at[0, 0, 2:].set(False), k)
    pick, allowed = jnp.maximum(topk, 0), topk >= 0

    def of_chosen(q, w, keys):
        return indexer_loss(p, index_scores(q, w, jax.vmap(lambda x, i: x[i])(keys, pick)), allowed).sum()

    def of_all(q, w, keys):
        return indexer_loss(p, jnp.take_along_axis(plain_scores(q, w, keys), pick, axis=2), allowed).sum()

    for got, want in zip(*(jax.grad(f, (0, 1, 2))(q, w, keys) for f in (of_chosen, of_all)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def shapes(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of all arrays that a program makes."""
    found = set()
    for eqn in jaxpr.eqns:
        found |= {var.aval.shape for var in eqn.outvars}
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= shapes(inner)
    return found


@pytest.mark.parametrize("topk", [0, 3], ids=["warm-up", "sparse"])
@pytest.mark.parametrize("pool", [None, (2, 2)])
def test_no_array_has_all_scores_of_all_heads(topk: int, pool: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch):
    """No [T, I, M] in either pass. In the backward pass of selected entries not even one score for every entry."""
    monkeypatch.setattr(indexer, "TILE", 32)
    monkeypatch.setattr(indexer, "CPU_SCORES", 1)
    S, M, block, heads, H, K = 256, 128, 11, 5, 2, 4
    first, windows = jnp.zeros((1, S), int), find_windows(find_documents(jnp.ones((1, S), int)), S // M)
    x = normal((1, S, H, K), (1, S, K), (H,), (1, M, K), (1, S, heads, J), (1, S, heads), (1, M, J))

    def loss(q, kv, sink, entries, *index):
        options = dict(window=4, entries_BMK=entries, windows=windows, block=block)
        out = attend(q, kv, sink, first, index=Index(*index, topk, pool if topk else None), **options)
        return out.o_BSHK.sum() + out.kl_BS.sum()

    _, back = jax.vjp(loss, *x)
    forward, backward = shapes(jax.make_jaxpr(loss)(*x).jaxpr), shapes(jax.make_jaxpr(back)(jnp.ones(())).jaxpr)
    assert not [shape for shape in forward | backward if {block, heads, M} <= set(shape)]
    scored = {block, heads, topk or 32}  # the heads' scores that are made: of a tile, or of the selected entries
    assert [shape for shape in backward if scored <= set(shape)]
    assert bool([shape for shape in backward if {block, M} <= set(shape)]) == (topk == 0)
