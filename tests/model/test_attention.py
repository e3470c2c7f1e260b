# SPDX-License-Identifier: Apache-2.0
"""The attention core: blocked against whole masks, and against loops over queries, heads and keys."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.ops.attention import Index, attend, attend_reference
from dsv4_jax.ops.documents import find_documents, find_windows

H, K, I, J = 2, 8, 3, 8


class Case(NamedTuple):
    """Sizes of one comparison; `topk` None means no indexer, 0 a warm-up."""

    S: int = 37
    ratio: int = 4
    topk: int | None = None
    window: int = 8
    block: int = 16
    select: Any = "auto"


CASES = {
    "window only": Case(ratio=0),
    "all entries": Case(),
    "warm-up": Case(topk=0),
    "masked": Case(topk=3, select="masked", block=128),
    "gathered": Case(topk=3, select="gathered"),
    "window over several blocks": Case(window=27, block=8, topk=2, select="gathered"),
    "more picks than entries": Case(topk=100, select="gathered"),
    "no entries": Case(S=3, topk=2),
    "one token": Case(S=1, topk=2),
}


def segments(S: int) -> np.ndarray:
    """One document, several with padding around and between, and nothing but padding."""
    packed = ([0] + [1] * 9 + [0] * 2 + [2] * 5 + [3] * 3 + [4] * 16 + [0])[:S]
    return np.array([[1] * S, packed, [0] * S]) if S > 1 else np.array([[1], [1], [0]])


@functools.partial(jax.jit, static_argnums=1)
def tables(segment_ids: jax.Array, ratio: int) -> tuple[jax.Array, Any]:
    docs = find_documents(segment_ids)
    return docs.first_BS, find_windows(docs, ratio) if ratio else None


def inputs(case: Case, seed: int = 0) -> tuple[dict[str, jax.Array], Any]:
    """Everything that has a gradient, and the tables."""
    r = np.random.RandomState(seed)
    at = tables(segments(case.S), case.ratio)
    B, M = 3, case.S // case.ratio if case.ratio else 0
    shapes = {"q": (B, case.S, H, K), "kv": (B, case.S, K), "sink": (H,), "entries": (B, M, K)}
    shapes |= {"iq": (B, case.S, I, J), "iw": (B, case.S, I), "ik": (B, M, J)}
    x = {name: jnp.asarray(r.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    return x, at


def run(core, case: Case, x: dict[str, jax.Array], at: Any, **options: Any):
    first_BS, wins = at
    index = None if case.topk is None else Index(x["iq"], x["iw"], x["ik"], case.topk)
    entries = x["entries"] if case.ratio else None
    options |= dict(window=case.window, entries_BMK=entries, windows=wins, index=index)
    return core(x["q"], x["kv"], x["sink"], first_BS, **options)


def blocked(case: Case, x, at):
    return run(attend, case, x, at, block=case.block, select=case.select)


def reference(case: Case, x, at):
    return run(attend_reference, case, x, at)


def gradients(core, case: Case, x, at, o_weight: float = 1.0, kl_weight: float = 1.0):
    """Gradients of a random linear function of the outputs and of the queries' indexer losses, and the result."""
    return _gradients(core, case, x, at, (o_weight, kl_weight))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(core, case: Case, x, at, weights):
    r = np.random.RandomState(7)
    o_random, kl_random = r.standard_normal((3, case.S, H, K)), 1 + r.random_sample((3, case.S))

    def loss(x):
        out = core(case, x, at)
        return (out.o_BSHK * o_random).sum() * weights[0] + (out.kl_BS * kl_random).sum() * weights[1], out

    return jax.grad(loss, has_aux=True)(x)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocked_equals_whole_masks(case: Case):
    """Outputs, indexer losses, selection, and all gradients; padding gives and gets exactly nothing."""
    x, at = inputs(case)
    (got, out), (want, ref) = gradients(blocked, case, x, at), gradients(reference, case, x, at)
    np.testing.assert_allclose(out.o_BSHK, ref.o_BSHK, rtol=0, atol=1e-5)
    np.testing.assert_allclose(out.kl_BS, ref.kl_BS, rtol=0, atol=1e-5)
    if out.topk_BSk is not None:
        np.testing.assert_array_equal(np.sort(out.topk_BSk), np.sort(ref.topk_BSk))
    padding = segments(case.S) == 0
    assert (np.asarray(out.o_BSHK)[padding] == 0).all() and (np.asarray(out.kl_BS)[padding] == 0).all()
    for name, grad in got.items():
        np.testing.assert_allclose(grad, want[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert np.isfinite(grad).all()
        if name != "sink":
            assert (np.asarray(grad)[2] == 0).all(), f"{name} of a row of padding"
        if name in ("q", "kv", "iq", "iw"):
            assert (np.asarray(grad)[padding] == 0).all(), f"{name} of padding"


def by_loops(case: Case, x: dict[str, jax.Array], row: int) -> tuple[np.ndarray, np.ndarray, list[set[int]]]:
    """Section 2 and 4 of the equations for one query and head at a time, float64."""
    a = {name: np.asarray(v, np.float64)[row] for name, v in x.items() if name != "sink"}
    sink, seg, m = np.asarray(x["sink"], np.float64), segments(case.S)[row], case.ratio
    o, kl, picks = np.zeros((case.S, H, K)), np.zeros(case.S), []
    starts = [t for t in range(case.S) if seg[t] and (t == 0 or seg[t] != seg[t - 1])]
    ends = {s: next((t for t in range(s, case.S) if seg[t] != seg[s]), case.S) for s in starts}
    slots = [(s, s + i * m + m - 1) for s in starts for i in range((ends[s] - s) // m)]  # document, last token
    for t in range(case.S):
        picks.append(set())
        if not seg[t]:
            continue
        first = max(s for s in starts if s <= t)
        near = [a["kv"][s] for s in range(max(first, t - case.window + 1), t + 1)]
        visible = [e for e, (s, end) in enumerate(slots) if s == first and end <= t]
        hit = np.maximum(np.einsum("ij,ej->ei", a["iq"][t], a["ik"]), 0)
        score = {e: hit[e] @ a["iw"][t] / np.sqrt(I * J) for e in visible}
        chosen = sorted(visible, key=lambda e: (-score[e], e))[: case.topk or None]
        picks[-1] = set(chosen)
        attention = np.zeros(len(chosen))
        for h in range(H):
            keys = np.array(near + [a["entries"][e] for e in chosen])
            weight = np.exp(keys @ a["q"][t, h] / np.sqrt(K))
            p = weight / (weight.sum() + np.exp(sink[h]))
            o[t, h] = p @ keys
            attention += p[len(near) :]
        if chosen and case.topk is not None:
            target = attention / attention.sum()
            q = np.exp([score[e] for e in chosen])
            kl[t] = (target * np.log(target / (q / q.sum()))).sum()
    return o, kl, picks


@pytest.mark.parametrize("core", [blocked, reference])
@pytest.mark.parametrize("case", [CASES["gathered"], CASES["warm-up"]], ids=["top-k", "warm-up"])
def test_values_match_loops(case: Case, core):
    x, at = inputs(case)
    _, out = gradients(core, case, x, at)
    for row in range(3):
        o, kl, picks = by_loops(case, x, row)
        np.testing.assert_allclose(out.o_BSHK[row], o, rtol=0, atol=1e-5)
        np.testing.assert_allclose(out.kl_BS[row], kl, rtol=0, atol=1e-5)
        if case.topk:
            assert [set(p) - {-1} for p in np.asarray(out.topk_BSk[row]).tolist()] == picks


@pytest.mark.parametrize("select", ["masked", "gathered"])
def test_every_query_uses_its_own_picks(select: str):
    """The entries with a gradient from query t are as many as min(topk, (t + 1) // m), never a union."""
    case = Case(S=32, topk=2, select=select)
    x, at = inputs(case)
    at = tables(np.ones((3, 32), int), 4)

    @jax.jit
    def used(x):
        _, back = jax.vjp(lambda e: blocked(case, x | {"entries": e}, at).o_BSHK[0].sum((1, 2)), x["entries"])
        return jnp.abs(jax.vmap(lambda seed: back(seed)[0][0])(jnp.eye(32))).max(-1) > 0

    assert used(x).sum(1).tolist() == [min(2, (t + 1) // 4) for t in range(32)]


def test_topk_matters_only_where_it_bites():
    """One and two picks agree as long as (t + 1) // m is at most 1; all picks equal no selection."""
    one, two, every, dense = (
        jax.jit(lambda x, at, case=case: blocked(case, x, at).o_BSHK[0])(*inputs(case))
        for case in (Case(topk=1), Case(topk=2), Case(topk=9), Case(topk=None))
    )
    np.testing.assert_allclose(one[:7], two[:7], rtol=0, atol=1e-6)
    assert (np.abs(one - two)[7:].max((1, 2)) > 1e-2).all()
    np.testing.assert_allclose(every, dense, rtol=0, atol=1e-6)


def test_ties_go_to_the_lowest_entry():
    case = CASES["gathered"]
    x, at = inputs(case)
    _, out = gradients(blocked, case, x | {"ik": jnp.zeros_like(x["ik"])}, at)
    assert np.asarray(out.topk_BSk)[0, -1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("case", ["masked", "gathered", "warm-up"])
def test_the_indexer_learns_from_its_loss_alone(case: str):
    """Its loss moves nothing else (the target is detached); the outputs do not move it."""
    case = CASES[case]
    x, at = inputs(case)
    of_kl, _ = gradients(blocked, case, x, at, o_weight=0.0)
    of_o, _ = gradients(blocked, case, x, at, kl_weight=0.0)
    for name in x:
        indexer = name in ("iq", "iw", "ik")
        assert (np.abs(of_kl[name]).max() > 0) == indexer, name
        assert (np.abs(of_o[name]).max() > 0) == (not indexer), name


def test_sink_takes_its_share():
    """A query of zeros weighs its n keys and exp(sink) alike: o = sum(keys) / (n + e^sink)."""
    case = CASES["window only"]
    x, at = inputs(case)
    out = gradients(blocked, case, x | {"q": jnp.zeros_like(x["q"])}, at)[1].o_BSHK[0]
    for t in range(case.S):
        keys = np.asarray(x["kv"])[0, max(t - case.window + 1, 0) : t + 1]
        for h in range(H):
            want = keys.sum(0) / (len(keys) + np.exp(x["sink"][h]))
            np.testing.assert_allclose(out[t, h], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_peaked_logits_stay_finite(scale: float):
    case = CASES["gathered"]
    x, at = inputs(case)
    grads, out = gradients(blocked, case, {name: v * scale for name, v in x.items()}, at)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((grads, out)))


def _temporary_bytes(S: int, ratio: int, topk: int | None) -> int:
    """Scratch memory of the gradient, compiled and never run."""
    shapes = {"q": (1, S, H, K), "kv": (1, S, K), "sink": (H,), "entries": (1, S // ratio, K)}
    shapes |= {"iq": (1, S, I, J), "iw": (1, S, I), "ik": (1, S // ratio, J)}
    x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    case = Case(S=S, ratio=ratio, topk=topk, block=128, window=128, select="gathered")

    def loss(x, segment_ids):
        out = blocked(case, x, tables(segment_ids, ratio))
        return out.o_BSHK.sum() + out.kl_BS.sum()

    compiled = jax.jit(jax.grad(loss)).lower(x, jax.ShapeDtypeStruct((1, S), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("ratio, topk", [(128, None), (4, 16)], ids=["hca", "csa"])
def test_memory_grows_linearly(ratio: int, topk: int | None):
    """Four times the length takes four times the memory, not sixteen."""
    assert _temporary_bytes(8192, ratio, topk) < 5 * _temporary_bytes(2048, ratio, topk)
