# SPDX-License-Identifier: Apache-2.0
"""Engram: the gate, the module against float64, its table on any mesh, official names and optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from support import golden_weights
from support.golden_models import small_config

import dsv4_jax as ds
from dsv4_jax import optim
from dsv4_jax.mesh import AXES, abstract_mesh, act_spec, make_mesh
from dsv4_jax.model.engram import Engram, compute_gates, compute_hashing, count_spare_rows, make_token_map_buffer
from dsv4_jax.model.params import Params
from dsv4_jax.ops.lookup import lookup

B, S = 8, 16


def config(**changes):
    """Two Engrams of 2 x 2 tables before layers of windows."""
    fields = dict(
        n_layers=2, compress_ratios=(0, 0), n_mtp_layers=0, norm_eps=1e-20,
        engram_layer_ids=(0, 1), engram_vocab_size=97, engram_max_ngram_size=3, engram_n_heads=2, engram_head_dim=4,
    )  # fmt: skip
    return small_config(**(fields | changes))


def gates_by_hand(x, key, gain, eps):
    norm = lambda a: a / np.sqrt((a * a).mean(-1, keepdims=True) + eps)
    dot = (norm(x) * norm(key) * gain).sum(-1) / np.sqrt(x.shape[-1])
    return 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6))))


def test_gate_and_its_gradient():
    """Against float64 and its differences; where q k is almost 0 there is no slope."""
    r = np.random.default_rng(0)
    x, key, gain = r.normal(size=(2, 3, 4, 8)), r.normal(size=(2, 3, 4, 8)), 1 + 0.1 * r.normal(size=(4, 8))
    x[0, 0] *= 1e-4
    key[0, 1] *= 1e3
    key[1, 0, :, :2] = [1e-9, 0]
    x[1, 0, :, 2:] = 0
    x[1, 0, :, 0], x[1, 0, :, 1] = 0, 1  # streams and keys at right angles
    weight = r.normal(size=(2, 3, 4))
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, key, gain)]
    np.testing.assert_allclose(compute_gates(*arrays, 1e-20), gates_by_hand(x, key, gain, 1e-20), rtol=2e-6)
    grads = jax.jit(jax.grad(lambda *a: (compute_gates(*a, 1e-20) * weight).sum(), (0, 1, 2)))(*arrays)
    for i, grad in enumerate(grads):
        change = [np.zeros_like(a) for a in (x, key, gain)]
        change[i] = r.normal(size=grad.shape) * np.abs((x, key, gain)[i])
        at = lambda e, change=change: (
            gates_by_hand(*(a + e * d for a, d in zip((x, key, gain), change, strict=True)), 1e-20) * weight
        ).sum()
        np.testing.assert_allclose(
            (np.asarray(grad, np.float64) * change[i]).sum(), (at(1e-6) - at(-1e-6)) / 2e-6, rtol=1e-4
        )
        assert np.isfinite(grad).all()
    assert (np.asarray(grads[0])[1, 0] == 0).all()


@pytest.mark.parametrize("zero", ["key", "stream", "both"])
def test_gate_of_nothing(zero):
    """With an epsilon of 1e-20 the norm of zeros is divided by 1e-10: a half, and a finite gradient."""
    x = jnp.ones((1, 1, 1, 8)) * (zero == "key")
    key = jnp.ones((1, 1, 1, 8)) * (zero == "stream")
    gain = jnp.ones((1, 8))
    assert float(compute_gates(x, key, gain, 1e-20)[0, 0, 0]) == 0.5
    for grad in jax.grad(lambda *a: compute_gates(*a, 1e-20).sum(), (0, 1, 2))(x, key, gain):
        np.testing.assert_array_equal(grad, 0)


def batch(at, seed=0, N=4, D=16):
    """Streams, rows of the first Engram, some of them often, and text with some gaps."""
    r = np.random.default_rng(seed)
    rows = at.offsets_LC[0] + r.integers(0, np.where(r.random((B, S, 1)) < 0.5, 3, at.primes_LC[0]))
    text = r.random((B, S)) < 0.8
    text[0] = False
    return r.normal(size=(B, S, N, D)).astype(np.float32), rows.astype(np.int32), text


def filled(engram, seed=1):
    """Values of which none is zero or one."""
    r = np.random.default_rng(seed)
    return {name: r.normal(size=v.shape).astype(np.float32) for name, v in sorted(nnx.to_pure_dict(engram).items())}


def read_by_hand(w, x, rows):
    """Gate and value in float64."""
    w = {name: v.astype(np.float64) for name, v in w.items()}
    key, value = np.split(w["embed"][rows].reshape(B, S, -1) @ w["wkv"], [64], axis=-1)
    gain = w["q_weight"] * w["k_weight"]
    return gates_by_hand(x.astype(np.float64), key.reshape(B, S, 4, 16), gain, 1e-20), value


def engram_on(shape, cfg, dtype=jnp.float32):
    """Output and gradients of a random linear function: streams, and parameters by name.

    The function leaves gates near a half out, since the root's slope makes much of their rounding.
    """
    x, rows, text = batch(compute_hashing(cfg))
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: Engram(cfg, Params(nnx.Rngs(0), 0.02), 0))
        put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
        state = nnx.state(shapes)
        values = filled(state)
        for name, v in state.items():
            v.set_value(put(values[name], v.get_value().sharding.spec))
        engram = nnx.merge(nnx.graphdef(shapes), state)
        steady = np.abs(read_by_hand(values, x, rows)[0] - 0.5) > 0.05
        out = (np.random.default_rng(2).normal(size=x.shape) * steady[..., None]).astype(np.float32)
        tokens = put(x, act_spec(4)), put(rows, act_spec(3)), put(text, act_spec(2)), put(out, act_spec(4))

        @jax.jit
        def run(engram, x, rows, text, out):
            def loss(engram, x):
                y = jax.checkpoint(lambda e, x: e(x, rows, text, dtype))(engram, x)
                return (y * out).sum(), y

            return jax.grad(loss, (0, 1), has_aux=True)(engram, x)

        (grads, dx), y = run(engram, *tokens)
        for g, v in zip(jax.tree.leaves(grads), jax.tree.leaves(engram), strict=True):
            assert g.sharding.spec == v.sharding.spec
        return jax.device_get((nnx.to_pure_dict(nnx.state(grads)), dx, y)), values, engram.embed[...].sharding.spec


SMALL = config()
LARGE = config(engram_vocab_size=6000)  # more than 24,000 rows


@pytest.fixture(scope="module")
def small():
    return engram_on((1, 1, 1), SMALL)


@pytest.fixture(scope="module")
def large():
    return engram_on((1, 1, 1), LARGE)


def test_output_is_the_formula(small):
    (_, _, got), w, _ = small
    x, rows, text = batch(compute_hashing(SMALL))
    gate, value = read_by_hand(w, x, rows)
    want = x + np.einsum("bs,bsn,bsd->bsnd", text, gate, value)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(got[~text], x[~text])


def test_gradient_reaches_the_rows_that_text_read(small, large):
    for (grads, dx, _), cfg in ((small[0], SMALL), (large[0], LARGE)):
        _, rows, text = batch(compute_hashing(cfg))
        got = np.flatnonzero(np.abs(grads["embed"]).max(1))
        assert got.tolist() == sorted(set(rows[text].reshape(-1).tolist()))
        assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in (*grads.values(), dx))


MESHES = [(2, 2, 2), (1, 1, 8)]


@pytest.mark.parametrize("shape", MESHES)
def test_any_mesh_has_the_numbers_of_one_device(shape, small, large):
    """Rows that the devices do not divide, alone (in no or fewer parts) and with spare ones."""
    for cfg, one in ((SMALL, small), (LARGE, large)):
        (grads, dx, y), _, spec = engram_on(shape, cfg)
        (grads_1, dx_1, y_1), _, _ = one
        rows = compute_hashing(cfg).rows[0]
        if cfg is LARGE:
            assert rows % 8 and spec == jax.P(AXES, None)
            np.testing.assert_array_equal(grads["embed"][rows:], 0)
        for name in grads:
            scale = np.abs(grads_1[name]).max()
            np.testing.assert_allclose(grads[name], grads_1[name], rtol=0, atol=1e-5 * scale, err_msg=name)
        np.testing.assert_allclose(y, y_1, rtol=0, atol=1e-4)
        np.testing.assert_allclose(dx, dx_1, rtol=0, atol=1e-5 * np.abs(dx_1).max())


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("axes", [AXES, ("data", "context"), ("expert",), ()])
def test_lookup_whatever_the_skew(axes, rounds, monkeypatch):
    """Rows exactly, and sums in fp32 of gradients in bfloat16: all of one row come to 768.

    In as many rounds as it takes, as where there is less room than for all ids.
    """
    monkeypatch.setattr("dsv4_jax.ops.lookup.emulated", lambda: not rounds)
    r, R, K, tokens = np.random.default_rng(0), 24, 3, act_spec(3)
    shape = (B, S, 6)
    cases = r.integers(0, R + 1, shape), r.integers(0, 3, shape), np.full(shape, R - 1), np.full(shape, R)
    table = r.normal(size=(R, K)).astype(np.float32)
    rounded = np.append(np.asarray(jnp.asarray(table, jnp.bfloat16)), np.zeros((1, K), jnp.bfloat16), axis=0)
    spec = jax.P(axes or None)
    read = lambda t, i: lookup(t, i.reshape(-1), axes, jnp.bfloat16).reshape(*i.shape[:2], -1)
    with jax.set_mesh(make_mesh(2, 2, 2)):

        @jax.jit
        def run(table_RK, id_BSC):
            spread = jax.shard_map(read, in_specs=(spec, tokens), out_specs=tokens)
            return spread(table_RK, id_BSC)

        @jax.jit  # apart: emulated devices do not bear loops beside each other
        def pull(table_RK, id_BSC):
            return jax.grad(lambda t: run(t, id_BSC).astype(jnp.float32).sum())(table_RK)

        table, *placed = jax.device_put(table, spec), *(jax.device_put(ids, tokens) for ids in cases)
        many = rounds and len(axes) > 1  # two devices have room for all in any case
        assert all(("while[" in str(f.trace(table, placed[0]).jaxpr)) == many for f in (run, pull))
        for ids, id_BSC in zip(cases, placed, strict=True):
            y, grad = run(table, id_BSC), pull(table, id_BSC)
            np.testing.assert_array_equal(np.asarray(y), rounded[ids].reshape(y.shape))
            counts = np.bincount(ids.reshape(-1), minlength=R + 1)[:R]
            assert grad.dtype == jnp.float32
            np.testing.assert_array_equal(grad, np.broadcast_to(counts[:, None], (R, K)))


def test_spare_rows():
    """At most a thousandth, and the real tables can be cut for any number of devices up to thousands."""
    for rows in (384006168, 384016682):
        assert (rows + count_spare_rows(rows)) % 12288 == 0
    assert [count_spare_rows(n) for n in (630, 2999, 3000, 3001, 24001)] == [0, 0, 0, 2, 23]
    for rows in range(1, 10**5, 997):
        assert 0 <= count_spare_rows(rows) * 1000 <= rows


def test_the_published_table_on_512_devices():
    cfg = config(
        vocab_size=129280, engram_layer_ids=(1,), engram_vocab_size=16000000, engram_max_ngram_size=4,
        engram_n_heads=8, engram_head_dim=256, engram_compressed_vocab_size=99092,
    )  # fmt: skip
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), abstract_mesh(16, 8, 4):
        engram = jax.eval_shape(lambda: Engram(cfg, Params(nnx.Rngs(0), 0.02, layers=1), 0))
    assert engram.embed.get_value().sharding.shard_shape(engram.embed.shape) == (1, 384012288 // 512, 256)


def test_golden_shapes():
    spec, fields, _ = golden_weights.read("v41_tiny")
    cfg = ds.model_config_from_official(fields)
    for number, layer in enumerate(cfg.engram_layer_ids):
        engram = jax.eval_shape(lambda number=number: Engram(cfg, Params(nnx.Rngs(0), 0.02), number))
        shape = lambda name, layer=layer: tuple(spec["tensors"][f"layers.{layer}.engram.{name}"])
        assert engram.embed.shape == shape("embed.weight") and engram.embed.spare == 0
        assert engram.wkv.shape == shape("wkv.weight")[::-1]
        assert engram.q_weight.shape == engram.k_weight.shape == shape("q_weight")


class Layer(nnx.Module):
    def __init__(self, cfg, make, number):
        self.engram = Engram(cfg, make, number)


class Memories(nnx.Module):
    """Engrams where the model has them, and its token map."""

    def __init__(self, cfg):
        self.cfg = cfg
        make = lambda layers: Params(nnx.Rngs(0), 0.02, layers)
        self.groups = nnx.List([nnx.List([Layer(cfg, make(1), i)]) for i in range(2)])
        self.engram_token_map = make_token_map_buffer(cfg, make(0))

    def layers_of(self, path):
        return range(path[1], path[1] + 1)


def test_official_tensors_have_no_spare_rows_and_no_token_map():
    model = Memories(LARGE)
    rows = compute_hashing(LARGE).rows
    tensors = ds.to_official(model)
    assert {name: t.shape for name, t in tensors.items()} == {
        f"layers.{i}.engram.{name}": shape
        for i in range(2)
        for name, shape in {
            "embed.weight": (rows[i], 4),
            "wkv.weight": (80, 16),
            "q_weight": (4, 16),
            "k_weight": (4, 16),
        }.items()
    }
    r = np.random.default_rng(0)
    tensors = {name: r.normal(size=t.shape).astype(np.float32) for name, t in tensors.items()}
    ds.load_official(model, tensors)
    for name, t in ds.to_official(model).items():
        np.testing.assert_array_equal(t, tensors[name])
    np.testing.assert_array_equal(model.engram_token_map[...], np.arange(64))
    tensors["layers.0.engram.embed.weight"] = np.zeros((rows[0] + 1, 4))
    with pytest.raises(ValueError, match=r"layers\.0\.engram\.embed\.weight: expected"):
        ds.load_official(model, tensors)


def test_rules_of_the_optimizer():
    """The table balanced and the matrices by Muon, five times as fast; gains by AdamW; only the table has no decay."""
    params = nnx.state(Memories(SMALL), nnx.Param)
    groups = optim.groups.v41_groups(params)
    lines = [line.split() for line in optim.describe(params, groups).splitlines()[1:5]]
    assert [(line[0].rsplit(".", 1)[1], " ".join(line[1:])) for line in lines] == [
        ("embed", "1 x 408 x 4 sinkhorn - 0 5 0.9"),
        ("k_weight", "1 x 4 x 16 adamw - 0.1 1 1"),
        ("q_weight", "1 x 4 x 16 adamw - 0.1 1 1"),
        ("wkv", "1 x 16 x 80 muon 5 of 16 x 16 0.1 5 0.9"),
    ]


def test_only_rows_that_were_read_move(large):
    """One step of the Sinkhorn-balanced update on a split table: spare rows and unread ones stay as they are."""
    (grads, _, _), values, _ = large
    with jax.set_mesh(make_mesh(2, 2, 2)):
        put = lambda a: {"engram": {"embed": jax.device_put(a, jax.P(AXES, None))}}
        rules = [("embed", optim.Role("table", part="engram"))]
        tx = optim.deepseek_v41(0.1, put(values["embed"]), rules)
        update, _ = jax.jit(tx.update)(put(grads["embed"]), tx.init(put(values["embed"])), put(values["embed"]))
        moved = np.asarray(update["engram"]["embed"])
    read = np.abs(grads["embed"]).max(1) > 0
    np.testing.assert_array_equal(np.abs(moved).max(1) > 0, read)
    np.testing.assert_allclose(np.sqrt((moved[read] ** 2).mean(1)), 0.1 * 5 * 0.18, rtol=1e-3)
