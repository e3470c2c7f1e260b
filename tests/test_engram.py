# SPDX-License-Identifier: Apache-2.0
"""Engram: hashes against Python's integers, the published constants and rows, the gate, and any mesh."""

import dataclasses
import functools

import golden_weights
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import small_config
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import dsv4_jax as ds
from dsv4_jax import optim
from dsv4_jax.mesh import AXES, abstract_mesh, act_spec, make_mesh, row_spec
from dsv4_jax.model.engram import Engram, engram_rows, gates, hashing_of, spare_rows, token_map_of
from dsv4_jax.model.params import Params
from dsv4_jax.ops.documents import documents
from dsv4_jax.ops.lookup import lookup
from dsv4_jax.ops.ngrams import hashing, multiply, ngram_rows, remainder

REAL = dict(layers=(1, 14), longest=4, heads=8, start=16000000, vocab=99092)
B, S = 8, 16


def config(**changes):
    """Two Engrams of 2 x 2 tables before layers of windows."""
    fields = dict(
        n_layers=2, compress_ratios=(0, 0), n_mtp_layers=0, norm_eps=1e-20,
        engram_layer_ids=(0, 1), engram_vocab_size=97, engram_max_ngram_size=3, engram_n_heads=2, engram_head_dim=4,
    )  # fmt: skip
    return small_config(**(fields | changes))


# ------------------------------------------------------------------------------------------------- hashes


def test_constants_of_the_published_model():
    at = hashing(**REAL)
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
    at = hashing((0, 3), 3, 2, 0, 10)
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
    at = hashing(**constants)
    find = lambda numbers, pad, live, segments: ngram_rows(at, numbers, pad, live, documents(segments))
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
    at, types = hashing_of(cfg), arrays["token_types"]
    assert at.multipliers_LG.tolist() == spec["engram_multipliers"]
    assert at.primes_LC.reshape(2, 3, 2).tolist() == spec["engram_primes"]
    assert (types >= 0).any()
    docs = documents(jnp.ones(types.shape, int))
    numbers = token_map_of(cfg, Params(nnx.Rngs(0), 0.02))
    find = jax.jit(functools.partial(engram_rows, cfg))
    got = find(numbers, jnp.asarray(arrays["ids"]), jnp.asarray(types < 0), docs)
    np.testing.assert_array_equal(got, arrays["engram_rows"])


def test_golden_shapes(golden):
    cfg, spec, _ = golden
    for number, layer in enumerate(cfg.engram_layer_ids):
        engram = jax.eval_shape(lambda number=number: Engram(cfg, Params(nnx.Rngs(0), 0.02), number))
        shape = lambda name, layer=layer: tuple(spec["tensors"][f"layers.{layer}.engram.{name}"])
        assert engram.embed.shape == shape("embed.weight") and engram.embed.spare == 0
        assert engram.wkv.shape == shape("wkv.weight")[::-1]
        assert engram.q_weight.shape == engram.k_weight.shape == shape("q_weight")


# --------------------------------------------------------------------------------------------------- gate


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
    np.testing.assert_allclose(gates(*arrays, 1e-20), gates_by_hand(x, key, gain, 1e-20), rtol=2e-6)
    grads = jax.jit(jax.grad(lambda *a: (gates(*a, 1e-20) * weight).sum(), (0, 1, 2)))(*arrays)
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
    assert float(gates(x, key, gain, 1e-20)[0, 0, 0]) == 0.5
    for grad in jax.grad(lambda *a: gates(*a, 1e-20).sum(), (0, 1, 2))(x, key, gain):
        np.testing.assert_array_equal(grad, 0)


# ------------------------------------------------------------------------------------------- whole module


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
    x, rows, text = batch(hashing_of(cfg))
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
    x, rows, text = batch(hashing_of(SMALL))
    gate, value = read_by_hand(w, x, rows)
    want = x + np.einsum("bs,bsn,bsd->bsnd", text, gate, value)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(got[~text], x[~text])


def test_gradient_reaches_the_rows_that_text_read(small, large):
    for (grads, dx, _), cfg in ((small[0], SMALL), (large[0], LARGE)):
        _, rows, text = batch(hashing_of(cfg))
        got = np.flatnonzero(np.abs(grads["embed"]).max(1))
        assert got.tolist() == sorted(set(rows[text].reshape(-1).tolist()))
        assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in (*grads.values(), dx))


MESHES = [(2, 2, 2), (1, 1, 8), (8, 1, 1)]


@pytest.mark.parametrize("shape", MESHES)
def test_any_mesh_has_the_numbers_of_one_device(shape, small, large):
    """Rows that the devices do not divide, alone (in no or fewer parts) and with spare ones."""
    for cfg, one in ((SMALL, small), (LARGE, large)):
        (grads, dx, y), _, spec = engram_on(shape, cfg)
        (grads_1, dx_1, y_1), _, _ = one
        rows = hashing_of(cfg).rows[0]
        if cfg is LARGE:
            assert rows % 8 and spec == jax.P(AXES, None)
            np.testing.assert_array_equal(grads["embed"][rows:], 0)
        for name in grads:
            scale = np.abs(grads_1[name]).max()
            np.testing.assert_allclose(grads[name], grads_1[name], rtol=0, atol=1e-5 * scale, err_msg=name)
        np.testing.assert_allclose(y, y_1, rtol=0, atol=1e-4)
        np.testing.assert_allclose(dx, dx_1, rtol=0, atol=1e-5 * np.abs(dx_1).max())


def test_rows_of_text_on_any_mesh():
    cfg = config(engram_max_ngram_size=4)
    r = np.random.default_rng(0)
    ids, segments = r.integers(0, 64, (B, S)), np.sort(r.integers(0, 4, (B, S)))
    text = (segments > 0) & (r.random((B, S)) < 0.9)
    want = rows_by_hand(hashing_of(cfg), ids, 2, text, segments)
    for shape in [(2, 2, 2), (1, 1, 8)]:
        with jax.set_mesh(make_mesh(*shape)):

            @jax.jit
            def find(ids, text, segments):
                numbers = token_map_of(cfg, Params(nnx.Rngs(0), 0.02))
                borders = jax.shard_map(documents, in_specs=row_spec(2), out_specs=row_spec(2))
                return engram_rows(cfg, numbers, ids, text, borders(jax.reshard(segments, row_spec(2))))

            got = np.asarray(find(*(jax.device_put(a, act_spec(2)) for a in (ids, text, segments))))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("axes", [AXES, ("data", "context"), ("expert",), ()])
def test_lookup_whatever_the_skew(axes):
    """Rows exactly, and sums in fp32 of gradients in bfloat16: all of one row come to 768."""
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
            y, pull = jax.vjp(lambda t: spread(t, id_BSC), table_RK)
            return y, pull(jnp.ones_like(y))[0]

        for ids in cases:
            y, grad = run(jax.device_put(table, spec), jax.device_put(ids, tokens))
            np.testing.assert_array_equal(np.asarray(y), rounded[ids].reshape(y.shape))
            counts = np.bincount(ids.reshape(-1), minlength=R + 1)[:R]
            assert grad.dtype == jnp.float32
            np.testing.assert_array_equal(grad, np.broadcast_to(counts[:, None], (R, K)))


def test_spare_rows():
    """At most a thousandth, and the real tables can be cut for any number of devices up to thousands."""
    for rows in (384006168, 384016682):
        assert (rows + spare_rows(rows)) % 12288 == 0
    assert [spare_rows(n) for n in (630, 2999, 3000, 3001, 24001)] == [0, 0, 0, 2, 23]
    for rows in range(1, 10**5, 997):
        assert 0 <= spare_rows(rows) * 1000 <= rows


def test_the_published_table_on_512_devices():
    cfg = config(
        vocab_size=129280, engram_layer_ids=(1,), engram_vocab_size=16000000, engram_max_ngram_size=4,
        engram_n_heads=8, engram_head_dim=256, engram_compressed_vocab_size=99092,
    )  # fmt: skip
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), abstract_mesh(16, 8, 4):
        engram = jax.eval_shape(lambda: Engram(cfg, Params(nnx.Rngs(0), 0.02, layers=1), 0))
    assert engram.embed.get_value().sharding.shard_shape(engram.embed.shape) == (1, 384012288 // 512, 256)


# -------------------------------------------------------------------------- official names and optimizer


class Layer(nnx.Module):
    def __init__(self, cfg, make, number):
        self.engram = Engram(cfg, make, number)


class Memories(nnx.Module):
    """Engrams where the model has them, and its token map."""

    def __init__(self, cfg):
        self.cfg = cfg
        make = lambda layers: Params(nnx.Rngs(0), 0.02, layers)
        self.groups = nnx.List([nnx.List([Layer(cfg, make(1), i)]) for i in range(2)])
        self.engram_token_map = token_map_of(cfg, make(0))

    def layers_of(self, path):
        return range(path[1], path[1] + 1)


def test_official_tensors_have_no_spare_rows_and_no_token_map():
    model = Memories(LARGE)
    rows = hashing_of(LARGE).rows
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


# ---------------------------------------------------------------------------------------------- token map


def numbers(**changes):
    found = token_map_of(config(**changes), Params(nnx.Rngs(0), 0.02))
    return None if found is None else np.asarray(found[...])


def test_identity():
    np.testing.assert_array_equal(numbers(), np.arange(64))
    np.testing.assert_array_equal(numbers(engram_compressed_vocab_size=64), np.arange(64))
    assert numbers(engram_layer_ids=()) is None
    cfg = config(engram_compressed_vocab_size=40)  # as an official configuration without its tokenizer
    assert numbers(engram_compressed_vocab_size=40) is None
    zeros = jnp.zeros((1, 4), int)
    with pytest.raises(ValueError, match=r"model\.engram_token_map = 'identity' .* 64 .* = 40"):
        engram_rows(cfg, None, zeros, zeros == 0, documents(zeros + 1))


TEXTS = [
    ("pad", 0), ("A", 1), ("a", 1), (" a", 1), ("  A ", 1), ("\u00e1", 1), ("a\u0301", 1), ("\uff21", 1), ("b", 2),
    (" ", 3), ("   ", 3), ("\n", 3), ("\t\r\n", 3), ("\u3000", 3), ("\ufb01", 4), ("FI", 4), ("f i", 5), ("f \n I", 5),
    ("\u0301", 6), ("\u0300", 7), ("\u00c9", 8), ("e", 8), (b"\xc3", 9), (b"\xa9", 10), (b"\xe4\xb8", 11), ("<A>", 12),
    ("<a>", 12), ("\u4e2d", 13),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer.json of those texts; the last three are added tokens, one of them special."""
    library = pytest.importorskip("tokenizers")
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in visible}  # of bytes, as byte-level tokenizers write them
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in visible)}
    spell = lambda text: "".join(letters[b] for b in (text if isinstance(text, bytes) else text.encode()))
    vocabulary = {spell(text): i for i, (text, _) in enumerate(TEXTS[:-3])}
    found = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
    found.decoder = library.decoders.ByteLevel()
    found.add_special_tokens(["<A>"])
    found.add_tokens(["<a>", "\u4e2d"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    found.save(str(path))
    return str(path)


def test_tokens_are_compared_without_case_accents_and_spaces(tokenizer):
    got = numbers(engram_token_map=tokenizer, engram_compressed_vocab_size=14, engram_pad_id=8)
    assert got.tolist() == [number for _, number in TEXTS] + [2] * (64 - len(TEXTS))
    assert got.dtype == np.int32


def test_token_maps_that_do_not_fit(tokenizer, tmp_path, monkeypatch):
    def refused(pattern, **changes):
        with pytest.raises(ds.ConfigError, match=pattern):
            numbers(**changes)

    refused("gives 14 numbers, .* = 99 stands for 99", engram_token_map=tokenizer, engram_compressed_vocab_size=99)
    refused("gives 14 numbers, .* = 0 stands for 64", engram_token_map=tokenizer)
    refused("has 28 tokens, expected .* vocab_size = 20", engram_token_map=tokenizer, vocab_size=20)
    refused("has 28 tokens, expected more than engram_pad_id = 28", engram_token_map=tokenizer, engram_pad_id=28)
    (tmp_path / "other.json").write_text("{}")
    refused("is no tokenizer.json", engram_token_map=str(tmp_path / "other.json"))
    refused("is no tokenizer.json", engram_token_map=str(tmp_path / "absent.json"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r"needs a library: pip install 'dsv4_jax\[text\]'", engram_token_map=tokenizer)

    path = str(tmp_path / "map.npy")
    refused("is no array", engram_token_map=path)
    for found, pattern in (
        (np.zeros(63, int), r"integers \[64\].*found int64\[63\]"),
        (np.zeros(64), r"found float64\[64\]"),
        (np.zeros((64, 1), int), r"found int64\[64, 1\]"),
        (np.arange(64) - 1, "numbers from 0 to 63; found -1 to 62"),
        (np.arange(64) + 1, "numbers from 0 to 63; found 1 to 64"),
        (np.array([None] * 64), "is no array"),
    ):
        np.save(path, found)
        refused(pattern, engram_token_map=path)
    np.save(path, np.arange(64, dtype=np.uint8) // 2)
    refused("numbers from 0 to 30; found 0 to 31", engram_token_map=path, engram_compressed_vocab_size=31)
    assert numbers(engram_token_map=path).tolist() == [i // 2 for i in range(64)]


def test_sizes_that_do_not_fit():
    assert hashing_of(config(engram_num_embeddings=hashing_of(SMALL).rows)).rows == hashing_of(SMALL).rows
    with pytest.raises(ds.ConfigError, match=r"model\.engram_num_embeddings = \(408, 5\) must be \(408, 480\)"):
        hashing_of(config(engram_num_embeddings=(408, 5)))
    with pytest.raises(ds.ConfigError, match=r"model\.engram_vocab_size = 600000000 .* must be below 2\^31"):
        hashing_of(config(engram_vocab_size=600000000))
