# SPDX-License-Identifier: Apache-2.0
"""The model as a caller sees it: a fresh one, what it returns, forced experts, and what it refuses."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.golden_models import position_losses, ruled_model, small_config

import dsv4_jax as ds
from dsv4_jax.mesh import act_spec, ensure_mesh
from dsv4_jax.model.params import HashTable, RouterBias, linear

IDS = np.random.RandomState(0).randint(0, 64, (2, 9))
RUN = jax.jit(lambda model: model(IDS))
COLLECT = ("streams", "topk", "router_scores")
# hashed, then learned; window layers, since this is not about attention
MIXED = dict(n_layers=3, n_hash_layers=1, n_mtp_layers=0, compress_ratios=(0, 0, 0))


@pytest.fixture(scope="module")
def fresh():
    """A newly made model with a hashed CSA layer and an MTP block."""
    cfg = small_config(n_hash_layers=1, init_std=0.02)
    return jax.jit(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0)))()


def test_initial_values(fresh):
    tensors = ds.to_official(fresh)
    for name, x in tensors.items():
        if name.endswith("norm.weight"):
            assert (x == 1).all(), name
        elif name.endswith(("attn_sink", "ape", "_base", "gate.bias")):
            assert (x == 0).all(), name
        elif name.endswith("_scale"):
            np.testing.assert_array_equal(x, np.float32(0.01), err_msg=name)
        elif name.endswith("tid2eid"):
            assert all(len(set(row)) == 2 for row in x.tolist())
        else:
            assert abs(x.std() / 0.02 - 1) < 6 / np.sqrt(x.size), name
            assert abs(x.mean()) < 6 * 0.02 / np.sqrt(x.size), name
    matrices = {x.tobytes() for x in tensors.values() if x.ndim == 2 and x.std() > 0}
    assert len(matrices) == sum(x.ndim == 2 and x.std() > 0 for x in tensors.values())  # no two are the same draw


def test_first_loss_is_that_of_guessing(fresh):
    out = RUN(fresh)
    loss = position_losses(out.logits[:, :-1], jnp.asarray(IDS)[:, 1:]).mean()
    np.testing.assert_allclose(loss, np.log(64), rtol=0.02)
    assert np.isfinite(out.mtp_logits).all()


def test_no_mesh_is_needed():
    """Without one a 1 x 1 x 1 mesh is used, also inside a traced function. A new thread has none."""
    cfg = small_config(n_mtp_layers=0, compress_ratios=(4,))

    def notebook() -> tuple[ds.Output, dict[str, int]]:
        assert jax.sharding.get_abstract_mesh().empty
        traced = jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0))(IDS))
        with ensure_mesh():
            return traced, dict(jax.sharding.get_abstract_mesh().shape)

    with ThreadPoolExecutor(1) as thread:
        traced, axes = thread.submit(notebook).result()
    assert traced.logits.shape == (2, 9, 64)
    assert axes == {"data": 1, "expert": 1, "context": 1}


def compiled(caplog, run) -> tuple[list[str], Any]:
    """Names of the programs that are compiled while `run` runs, and its result."""
    caplog.clear()
    with jax.log_compiles():
        result = run()
    messages = [r.getMessage() for r in caplog.records]
    return [m.split()[1] for m in messages if m.startswith("Compiling")], result


def test_a_call_outside_jit_compiles_once(mixed, caplog):
    """Operation by operation a small model would compile for minutes, in every call again."""
    model, _ = mixed
    ids = np.tile(np.arange(11), (2, 1))
    programs, out = compiled(caplog, lambda: model(ids))
    assert programs.count("jit(_outputs)") == 1 and len(programs) < 4, programs
    assert compiled(caplog, lambda: model(ids))[0] == []
    np.testing.assert_allclose(out.logits, jax.jit(lambda model: model(ids))(model).logits, rtol=0, atol=1e-5)


def test_making_a_model_outside_jit_compiles_once(caplog):
    """Operation by operation it would be hundreds of programs: twenty seconds for a small model."""
    cfg = small_config(**MIXED, init_std=0.03)
    rngs = nnx.Rngs(0)
    programs, model = compiled(caplog, lambda: ds.DeepSeek(cfg, rngs=rngs))
    assert programs.count("jit(_model_and_rngs)") == 1 and len(programs) < 4, programs
    jitted = jax.jit(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0)))()
    assert nnx.graphdef(model) == nnx.graphdef(jitted)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), nnx.state(model), nnx.state(jitted))
    # The next model from the same generator has other weights.
    programs, other = compiled(caplog, lambda: ds.DeepSeek(cfg, rngs=rngs))
    assert programs == []
    assert (other.head[...] != model.head[...]).any()


def test_buffers_are_not_parameters(fresh):
    """An optimizer over `nnx.Param` sees neither the routing tables nor the balance biases."""
    _, params, biases, tables, rest = nnx.split(fresh, nnx.Param, RouterBias, HashTable, ...)
    assert not jax.tree.leaves(rest)
    assert [t.dtype for t in jax.tree.leaves(tables)] == [jnp.int32]
    assert len(jax.tree.leaves(biases)) == 1  # the MTP block's
    assert all(jnp.issubdtype(p.dtype, jnp.floating) for p in jax.tree.leaves(params))


@pytest.fixture(scope="module")
def mixed():
    model = ruled_model(small_config(**MIXED))
    return model, jax.jit(lambda model, forced: model(IDS, forced_experts=forced))


def test_forcing_the_own_choice_changes_no_bit(mixed):
    model, run = mixed
    out = run(model, None)
    forced = run(model, out.experts)
    np.testing.assert_array_equal(out.logits, forced.logits)


def test_forcing_other_experts_moves_learned_layers_only(mixed):
    """Hash layers keep to their tables, whatever is forced on them."""
    model, run = mixed
    out = run(model, None)
    other = [(e + 1) % 4 for e in out.experts]
    forced = run(model, other)
    np.testing.assert_array_equal(forced.experts[0], out.experts[0])
    np.testing.assert_array_equal(out.experts[0], ds.to_official(model)["layers.0.ffn.gate.tid2eid"][IDS])
    for i in (1, 2):
        np.testing.assert_array_equal(forced.experts[i], other[i])
    assert jnp.abs(forced.logits - out.logits).max() > 0.1


@pytest.fixture(scope="module")
def small():
    """One CSA layer with an MTP block, everything collected."""
    return jax.jit(lambda model: model(IDS, collect=COLLECT))(ruled_model(small_config()))


def test_what_can_be_collected(small):
    assert set(small.collected) == set(COLLECT)
    (streams,), (topk,), (scores,) = (small.collected[name] for name in COLLECT)
    assert streams.shape == (2, 9, 4, 16) and topk.shape == (2, 9, 2) and scores.shape == (2, 9, 4)
    assert (np.asarray(topk) >= 0).sum(2).tolist() == [[min(2, (t + 1) // 4) for t in range(9)]] * 2


def test_bf16_compute_stays_close(small):
    """Streams and products in bf16, logits in fp32 and near those of fp32, the type on CPU."""
    out = RUN(ruled_model(small_config(compute_dtype="bfloat16")))
    assert out.logits.dtype == jnp.float32
    error = np.sqrt(np.square(out.logits - small.logits).mean() / np.square(small.logits).mean())
    assert 1e-4 < error < 0.1


def test_without_an_mtp_block(mixed):
    model, run = mixed
    assert run(model, None).mtp_logits is None
    assert not any(name.startswith("mtp") for name in ds.to_official(model))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(ids=IDS.astype(float)), "ids must be integers"),
        (dict(ids=IDS[0]), "ids must be integers"),
        (dict(ids=IDS, segment_ids=np.ones((2, 8), int)), "segment_ids must be"),
        (dict(ids=IDS, collect=("stream",)), "cannot collect.*stream"),
        (dict(ids=IDS, forced_experts=[np.zeros((2, 9, 2), int)] * 2), "forced_experts must be 3"),
        (dict(ids=IDS, forced_experts=[np.zeros((2, 9, 3), int)] * 3), "forced_experts must be 3"),
    ],
)
def test_wrong_arguments_are_refused(mixed, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        mixed[0](**arguments)


def test_gradients_of_bf16_products_are_summed_in_fp32(fresh):
    """257 ones: bf16 holds 256 and 258. Kernels, kernels in groups, and rows of the embedding."""
    place = lambda *shape: jax.reshard(jnp.ones(shape), act_spec(len(shape)))
    for x, w in ((place(1, 257, 4), jnp.ones((4, 3))), (place(1, 257, 2, 4), jnp.ones((2, 4, 3)))):
        loss = lambda w, x=x: linear(x, nnx.Param(w), jnp.bfloat16).sum(dtype=jnp.float32)
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(w), np.full(w.shape, 257))
    ids = jax.reshard(jnp.full((1, 257), 5), act_spec(2))
    grads = jax.jit(jax.grad(lambda model: model.embed_ids(ids, jnp.bfloat16).sum(dtype=jnp.float32), allow_int=True))(
        fresh
    )
    np.testing.assert_array_equal(grads.embed[...][5], np.full(fresh.cfg.dim, 257))
