# SPDX-License-Identifier: Apache-2.0
"""What CSA2 adds to attention: pools of candidates, selections from a layer before, bounded replay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.golden_models import ruled_model, small_config
from test_attention import Case, gradients, inputs, segments

from dsv4_jax.model.inputs import Inputs
from dsv4_jax.ops.attention import attend, attend_reference
from dsv4_jax.ops.documents import find_documents, find_windows
from dsv4_jax.ops.indexer import Index, mask_blocks, select_blocks

CASE = Case(topk=3, window=6, block=8)


def pool_by_loops(score_BTM, seg_BS, ratio: int, blocks: int, size: int) -> np.ndarray:
    """Which entries every query may select from, one query, one document, one block at a time."""
    B, S = seg_BS.shape
    pool = np.zeros(score_BTM.shape, bool)
    for b in range(B):
        slot = 0
        for start in (t for t in range(S) if seg_BS[b, t] and (t == 0 or seg_BS[b, t] != seg_BS[b, t - 1])):
            end = next((t for t in range(start, S) if seg_BS[b, t] != seg_BS[b, start]), S)
            n = (end - start) // ratio
            for t in range(start, end):
                visible = (t + 1 - start) // ratio
                score = {j: score_BTM[b, t, slot + j] for j in range(visible)}
                numbers = range(-(-visible // size))
                best = {k: max(score[j] for j in score if j // size == k) for k in numbers}
                if best:
                    best[max(best)] = np.inf
                for k in sorted(best, key=lambda k: (-best[k], k))[:blocks]:
                    pool[b, t, slot + k * size : slot + min((k + 1) * size, n)] = True
            slot += n
    return pool


@pytest.mark.parametrize(("blocks", "size"), [(1, 1), (2, 2), (2, 3), (1, 8), (100, 2)])
def test_pools_are_blocks_of_a_document(blocks: int, size: int):
    seg = segments(37)
    docs = find_documents(jnp.asarray(seg))
    at = find_windows(docs, 2)
    M = at.end_BM.shape[1]
    score = np.random.RandomState(0).standard_normal((3, 37, M)).astype(np.float32)
    t = np.arange(37)[:, None]
    visible = (np.asarray(at.end_BM)[:, None] <= t) & (
        np.asarray(at.start_BM)[:, None] >= np.asarray(docs.first_BS)[..., None]
    )
    found = select_blocks(jnp.asarray(score), jnp.asarray(visible), at, blocks, size)
    got = np.asarray(mask_blocks(found, M, size)) & visible
    np.testing.assert_array_equal(got, pool_by_loops(score, seg, 2, blocks, size) & visible)


def call(core, case, x, at, **options):
    """The attention core on a case's arrays."""
    if core is attend:
        options |= {"block": case.block, "select": case.select}
    arrays = x["q"], x["kv"], x["sink"], at[0]
    return core(*arrays, window=case.window, entries_BMK=x["entries"], windows=at[1], **options)


def with_pool(core, given: bool):
    """The attention core with an indexer that makes a pool of 2 blocks of 2, or selects from a given one."""

    def run(case, x, at):
        M = at[1].end_BM.shape[1]
        pool = jnp.arange(3 * case.S * 2).reshape(3, case.S, 2) * 7 % M if given else None
        return call(core, case, x, at, index=Index(x["iq"], x["iw"], x["ik"], case.topk, (2, 2), pool))

    return run


def from_before(core):
    """The core with a selection made before, and with windows that begin late (bounded replay)."""

    def run(case, x, at):
        first_BS, wins = at
        t = jnp.arange(case.S)[:, None]
        topk = jnp.arange(3 * case.S * 3).reshape(3, case.S, 3) * 5 % wins.end_BM.shape[1]
        near = jnp.maximum(first_BS, jnp.where(jnp.arange(case.S) >= 20, 20, 0))
        visible = (wins.end_BM[:, None] <= t) & (wins.start_BM[:, None] >= first_BS[..., None])
        unique = (topk[..., None] == topk[..., None, :]).sum(-1) == 1
        seen = jnp.take_along_axis(visible, topk, axis=2) & unique
        return call(core, case, x, at, topk_BSk=jnp.where(seen, topk, -1), near_BS=near)

    return run


@pytest.mark.parametrize("select", ["masked", "gathered"])
@pytest.mark.parametrize("make", [lambda c: with_pool(c, False), lambda c: with_pool(c, True), from_before])
def test_blocked_equals_whole_masks(make, select: str):
    case = CASE._replace(select=select)
    x, at = inputs(case)
    (got, out), (want, ref) = (gradients(make(core), case, x, at) for core in (attend, attend_reference))
    for name in ("o_BSHK", "kl_BS"):
        np.testing.assert_allclose(getattr(out, name), getattr(ref, name), rtol=0, atol=1e-5, err_msg=name)
    for name in ("topk_BSk", "candidates_BSc"):
        if getattr(ref, name) is not None:
            np.testing.assert_array_equal(np.sort(getattr(out, name)), np.sort(getattr(ref, name)))
    for name, grad in got.items():
        np.testing.assert_allclose(grad, want[name], rtol=1e-5, atol=1e-5, err_msg=name)


MODEL = small_config(
    n_layers=3, compress_ratios=(2, 2, 2), kv_source_layers=(0,), index_source_layers=(0, 1), n_mtp_layers=0,
    index_topk=3, window_size=4, query_norm=False, hc_single_pass=True, remat="none",
)  # fmt: skip
IDS = np.random.RandomState(0).randint(0, 64, (1, 24))


@pytest.fixture(scope="module")
def stages():
    run = jax.jit(lambda model, starts: model.hidden(Inputs(IDS, replay_starts=starts), collect=["topk"]))
    return {stage: (ruled_model(dataclasses.replace(MODEL, attention=stage)), run) for stage in ("dense", "sparse")}


def test_reuse_reads_the_last_selection(stages):
    """While there are no more entries than picks, sparse is dense; then it differs. Two layers tell a selection."""
    nothing = np.zeros((1, 24), int)
    out = {stage: run(model, nothing) for stage, (model, run) in stages.items()}
    np.testing.assert_allclose(out["sparse"].h[:, :7], out["dense"].h[:, :7], rtol=0, atol=1e-5)
    assert np.abs(out["sparse"].h - out["dense"].h)[:, 8:].max() > 1e-3
    assert [report.collected.topk is not None for report in out["sparse"].layers] == [True, True, False]
    assert [report.indexer > 0 for report in out["sparse"].layers] == [True, True, False]


def test_bounded_replay_cuts_the_windows_of_the_decoder(stages):
    """The start of a document is no cut; a cut changes what comes from it on, and nothing before."""
    model, run = stages["dense"]
    whole, cut = (run(model, np.full((1, 24), start)).h for start in (0, 12))
    np.testing.assert_array_equal(whole[:, :12], cut[:, :12])
    assert np.abs(whole - cut)[:, 12:15].max() > 1e-3


ENGRAM = dict(engram_layer_ids=(0,), engram_vocab_size=50, engram_n_heads=1, engram_head_dim=4)
ONE = dict(n_layers=1, n_mtp_layers=0, window_size=4, remat="none")
CSA2 = dict(kv_source_layers=(0,), index_source_layers=(0,), compress_ratios=(2, 0), hc_single_pass=True)
MIXTURES = {
    "CSA with Engram": ONE | ENGRAM | dict(compress_ratios=(4,)),
    "CSA2, single pass and MTP": ONE | CSA2 | dict(n_mtp_layers=1),
}


@pytest.mark.parametrize("fields", MIXTURES.values(), ids=MIXTURES)
def test_any_mixture_runs(fields: dict):
    """A small step changes the loss as far as the gradient says."""
    graph, params, rest = nnx.split(ruled_model(small_config(**fields)), nnx.Param, ...)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        out = nnx.merge(graph, params, rest)(IDS)
        return -sum(jax.nn.log_softmax(x)[..., 1].mean() for x in (out.logits, out.mtp_logits) if x is not None)

    r = np.random.RandomState(0)
    move = jax.tree.map(lambda p: jax.device_put(0.1 * r.standard_normal(p.shape).astype("f"), p.sharding), params)
    value, grads = loss(params)
    after, _ = loss(jax.tree.map(lambda p, m: p + 1e-3 * m, params, move))
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, m: (g * m).sum(), grads, move)))
    np.testing.assert_allclose((after - value) / 1e-3, slope, rtol=0.05, atol=1e-3)


def test_every_choice_of_v41_matters():
    """And the images' balance bias only where there are images."""
    run = jax.jit(lambda model: model(IDS).logits)
    make = lambda **fields: ruled_model(small_config(**ONE, compress_ratios=(0,), **fields))
    plain = np.asarray(run(make()))
    for change in (dict(hc_single_pass=True), dict(query_norm=False)):
        assert np.abs(run(make(**change)) - plain).max() > 1e-2, change
    model = make(modality_bias=True)
    graph, state = nnx.split(model)
    for path, changes in (("", False), ("bias_vl", False), ("bias", True)):
        turned = [(p, v.replace(-v.get_value()) if p[-1] == path else v) for p, v in nnx.to_flat_state(state)]
        found = run(nnx.merge(graph, nnx.from_flat_state(turned)))
        assert (np.asarray(found) != plain).any() == changes, path
