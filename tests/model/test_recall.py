# SPDX-License-Identifier: Apache-2.0
"""How much of the attention the indexer's choice covers: by hand, blocked against whole masks, on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from support.golden_models import small_config
from test_attention import CASES, Case, inputs, segments

import dsv4_jax as ds
from dsv4_jax.config import Config, DataConfig, LossConfig, TrainConfig
from dsv4_jax.mesh import BATCH, make_mesh
from dsv4_jax.ops.attention import attend, attend_reference
from dsv4_jax.ops.documents import find_documents, find_windows
from dsv4_jax.ops.indexer import Index
from dsv4_jax.train.evaluate import evaluate, make_eval_step
from dsv4_jax.train.state import TrainState

MASS = np.array([0.1, 0.4, 0.2, 0.3])  # attention of the last of four tokens to their entries, of one token each


@pytest.mark.parametrize("core", [attend, attend_reference])
@pytest.mark.parametrize("topk", [0, 2], ids=["warm-up", "sparse"])
@pytest.mark.parametrize(
    "mass, score, covered",
    [
        (MASS, MASS, [0.4 / 0.7 + 0.2 / 0.7, 0.4 + 0.3]),  # in the order of the attention
        (MASS, 1 - MASS, [0.1 / 0.7 + 0.2 / 0.7, 0.1 + 0.2]),  # in the opposite order
        (np.array([0.5, 1e-9, 0.5, 1e-9]), np.array([0.5, 0, 0.5, 0]), [1.0, 1.0]),  # all there is
    ],
    ids=["right", "wrong", "concentrated"],
)
def test_by_hand(core, topk: int, mass, score, covered):
    """Picks of two: the first two tokens have nothing to choose. The window and the sink take nothing away."""
    ones = jnp.ones((1, 4, 1, 1))
    at = find_windows(find_documents(jnp.ones((1, 4), int)), 1)
    entries, keys = (jnp.asarray(x, jnp.float32).reshape(1, 4, 1) for x in (np.log(mass), score))
    index = Index(ones, ones[..., 0], keys, topk, recall=2)
    kv, sink, first = jnp.full((1, 4, 1), 0.3), jnp.array([-0.7]), jnp.zeros((1, 4), int)
    found = core(ones, kv, sink, first, window=2, entries_BMK=entries, windows=at, index=index).recall_BS3
    want = [[0, 0, 0], [0, 0, 0], [covered[0], 2 / 3, 1], [covered[1], 2 / 4, 1]]
    np.testing.assert_allclose(found[0], want, rtol=1e-5)


@pytest.mark.parametrize("pool", [None, "made", "given"])
@pytest.mark.parametrize("case", ["masked", "gathered", "warm-up", "window over several blocks", "no entries"])
def test_blocked_equals_whole_masks(case: str, pool: str | None):
    """And what attention gives does not depend on whether it is asked."""
    case: Case = CASES[case]
    x, at = inputs(case)
    M = case.S // case.ratio
    given = jnp.arange(3 * case.S * 2).reshape(3, case.S, 2) * 7 % max(M, 1)  # also of entries that are not visible
    pools = {"made": ((2, 2), None), "given": ((2, 2), given)}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(core, recall, x, at):
        index = Index(x["iq"], x["iw"], x["ik"], case.topk, *pools.get(pool, (None, None)), recall)
        options = {"block": case.block, "select": case.select} if core is attend else {}
        arrays = x["q"], x["kv"], x["sink"], at[0]
        return core(*arrays, window=case.window, entries_BMK=x["entries"], windows=at[1], index=index, **options)

    out, ref, unasked = run(attend, 3, x, at), run(attend_reference, 3, x, at), run(attend, 0, x, at)
    for name in ("o_BSHK", "kl_BS", "topk_BSk"):
        jax.tree.map(np.testing.assert_array_equal, getattr(out, name), getattr(unasked, name))
    assert unasked.recall_BS3 is None
    if M == 0:
        assert out.recall_BS3 is ref.recall_BS3 is None
        return
    np.testing.assert_allclose(out.recall_BS3, ref.recall_BS3, atol=1e-6)
    share, chance, one = np.moveaxis(np.asarray(out.recall_BS3), -1, 0)
    visible = visible_entries(segments(case.S), case.ratio)
    np.testing.assert_array_equal(one, visible > 3)
    np.testing.assert_allclose(chance[visible > 3], 3 / visible[visible > 3], rtol=1e-6)
    assert ((share[visible > 3] > 0) | (pool == "given")).all() and (share[visible > 3] < 1).all()


def visible_entries(segments_BS: np.ndarray, ratio: int) -> np.ndarray:
    """How many compressed entries every token sees."""
    found = np.zeros(segments_BS.shape, int)
    for b, row in enumerate(segments_BS):
        for number in set(row) - {0}:
            found[b, row == number] = (np.arange((row == number).sum()) + 1) // ratio
    return found


FIELDS = dict(
    index_topk=2, attention_block=3, remat="none", window_size=7, n_mtp_layers=0, hc_mult=2, hc_sinkhorn_iters=2
)
MODELS = {
    "CSA": small_config(n_layers=2, compress_ratios=(4, 8), **FIELDS),
    "CSA2": small_config(
        n_layers=3, compress_ratios=(2, 2, 2), kv_source_layers=(0,), index_source_layers=(0, 1), hc_single_pass=True,
        candidate_source_layer=0, candidate_topk_blocks=2, candidate_block_size=2, **FIELDS,
    ),
}  # fmt: skip
B, S = 8, 40


def batch():
    r = np.random.default_rng(0)
    segments = np.ones((B, S), np.int32)
    segments[1, 7:], segments[2, 30:], segments[3], segments[4, :5] = 2, 0, 0, 0
    ids = r.integers(0, 64, (B, S)).astype(np.int32)
    return {"ids": ids, "segment_ids": segments, "targets": np.where(segments > 0, ids, -1)}


def evaluated(model, shape, **changes):
    """What evaluation says of two equal batches, on a mesh."""
    model = dataclasses.replace(model, init_std=0.3, **changes)
    cfg = Config(
        model=model, data=DataConfig(seq_len=S, batch_size=B), loss=LossConfig(mtp=0.0), train=TrainConfig(steps=200)
    )
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        make = lambda: nnx.split(ds.DeepSeek(cfg.model, rngs=nnx.Rngs(0)), nnx.Param, ...)[1:]
        state = TrainState(*jax.jit(make)(), (), jnp.zeros((), int), jnp.zeros((), int))
        put = lambda batch: jax.device_put(batch, NamedSharding(mesh, jax.P(BATCH, "context")))
        return evaluate(jax.jit(make_eval_step(cfg)), state, [batch()] * 2, put)


@pytest.mark.parametrize("name, shape", [("CSA", (2, 2, 2)), pytest.param("CSA2", (1, 1, 8), marks=pytest.mark.slow)])
def test_evaluation_on_any_mesh(name: str, shape):
    """The same on one device and on eight, masked and gathered; the choice at random by counting."""
    model = MODELS[name]
    one = evaluated(model, (1, 1, 1), select="masked")
    assert evaluated(model, shape, select="gathered") == pytest.approx(one, rel=1e-5)
    visible = visible_entries(batch()["segment_ids"], model.compress_ratios[0])
    assert one["eval/recall_random"] == pytest.approx((2 / visible[visible > 2]).mean(), rel=1e-5)
    assert 0 < one["eval/recall"] < 1


@pytest.mark.slow
def test_stages():
    """Warm-up tells it too; dense, which leaves the indexer alone, and rows without a choice tell nothing."""
    want = {"eval/loss", "eval/recall", "eval/recall_random"}
    assert evaluated(MODELS["CSA"], (1, 1, 1), attention="warmup").keys() == want
    assert evaluated(MODELS["CSA"], (1, 1, 1), attention="dense").keys() == {"eval/loss"}
    assert evaluated(MODELS["CSA"], (1, 1, 1), index_topk=10).keys() == {"eval/loss"}
