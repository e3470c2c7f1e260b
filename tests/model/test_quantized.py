# SPDX-License-Identifier: Apache-2.0
"""Quantisation-aware training: attention and experts read what files and caches hold; the gradient passes unchanged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.golden_models import computed_as, forward, ruled_model, small_config

import dsv4_jax as ds
from dsv4_jax.mesh import BATCH, make_mesh
from dsv4_jax.model import attention, quantized
from dsv4_jax.model.cache import commit, init_cache
from dsv4_jax.model.place import LayerCache
from dsv4_jax.ops import experts
from dsv4_jax.ops import quantize as q
from dsv4_jax.ops.experts import Experts, Kernels, apply_experts
from dsv4_jax.ops.indexer import index_scores
from dsv4_jax.ops.shards import ParamShards
from dsv4_jax.train.describe import describe_model

SWITCHES = ("experts", "index", "window", "entries")
# Widths that blocks do not divide: 8-bit blocks of 64 channels and a rest, 4-bit ones of 32 and of 16.
SIZES = dict(dim=40, moe_inter_dim=36, head_dim=84, rope_head_dim=4, index_head_dim=64, window_size=5, hc_mult=2)
SIZES |= dict(hc_sinkhorn_iters=2, n_mtp_layers=0, n_layers=2)
CONFIGS = {
    "v4": small_config(**SIZES, compress_ratios=(4, 8)),
    "v41": small_config(
        **SIZES, compress_ratios=(2, 2), kv_source_layers=(0,), index_source_layers=(0, 1), hc_single_pass=True,
        query_norm=False,
    ),
}  # fmt: skip
FORMS = {
    "v4": {"window": q.ROWS_64, "entries": q.ROWS_64, "index": q.FP4},
    "v41": {"window": q.ROWS_32, "entries": q.ENTRIES, "index": q.FP4},
}
IDS = np.random.default_rng(0).integers(0, 64, (2, 37)).astype(np.int32)


def rounded(x, form):
    return q.dequantize(*q.quantize(np.asarray(x, np.float32), form), form, x.shape[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_reads_what_caches_hold(monkeypatch, name):
    """Keys, entries, index queries and index keys are values of their formats exactly, if their switch is on."""
    cfg, read = CONFIGS[name], []
    attend = attention.attend

    def spy(q_BSHK, kv_BSK, *args, entries_BMK=None, index=None, **rest):
        asked = (None, None) if index is None else (index.q_BSIJ, index.k_BMJ)
        jax.debug.callback(lambda *arrays: read.append(arrays), kv_BSK, entries_BMK, *asked)
        return attend(q_BSHK, kv_BSK, *args, entries_BMK=entries_BMK, index=index, **rest)

    monkeypatch.setattr(attention, "attend", spy)
    still = slice(0, None if name == "v41" else -cfg.rope_head_dim)
    forms = FORMS[name]
    model = ruled_model(cfg)
    for on in (("window", "index"), ("entries",)):
        read.clear()
        jax.block_until_ready(forward()(computed_as(model, quantize=on), IDS))
        jax.effects_barrier()
        assert len(read) >= cfg.n_layers
        exact = {key: [] for key in forms}
        for arrays in read:
            for key, x in zip(("window", "entries", "index", "index"), arrays, strict=True):
                if x is not None:
                    part = x if key == "index" else x[..., still]
                    same = np.array_equal(rounded(part, forms[key]), part)
                    if key != "index" and name == "v4":
                        turning = np.asarray(x[..., -cfg.rope_head_dim :])
                        same = same and np.array_equal(turning.astype(jnp.bfloat16).astype(np.float32), turning)
                    exact[key].append(same)
        assert all(exact.values())
        assert {key for key, each in exact.items() if all(each)} == set(on)
        assert {key for key, each in exact.items() if any(each)} == set(on)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_holds_values_of_its_formats(name):
    """So that generation computes with what training has seen, and could store it in so many bits."""
    cfg = CONFIGS[name]
    model, rows = computed_as(ruled_model(cfg), quantize=SWITCHES), np.full(2, 37)
    run = jax.jit(lambda model, cache, ids: commit(model.extend(cache, ids, rows)[1], rows))
    layers = run(model, init_cache(cfg, 2, 64), IDS).layers
    held = {"window": [], "entries": [], "index": []}
    for layer in jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, LayerCache)):
        held["window"].append(layer.recent.window_BUK)
        if layer.entries is not None:
            held["entries"].append(layer.entries.entries_BmK)
            held["index"].append(layer.entries.keys_BmJ)
    for key, form in FORMS[name].items():
        for x in (np.asarray(x) for x in held[key] if x is not None):
            x = x if key == "index" or name == "v41" else x[..., : -cfg.rope_head_dim]
            assert np.abs(x).max() > 0.1
            np.testing.assert_array_equal(rounded(x, form), x)
    assert all(any(x is not None for x in arrays) for arrays in held.values())


@pytest.mark.parametrize("width", [40, 128], ids=["parts that cut blocks", "whole blocks"])
def test_experts_compute_with_published_weights_and_train_the_master_copy(width):
    """Output and gradients are those of the rounded weights, to the last bit, however devices share the weights."""
    (B, S, D, F, E, k), split, rng = (4, 6, width, 36, 4, 2), ("data", "context"), np.random.default_rng(0)
    x, out = (rng.standard_normal((B, S, D)).astype(np.float32) for _ in range(2))
    chosen = np.argsort(rng.random((B, S, E)))[..., :k].astype(np.int32)
    weights, real = rng.random((B, S, k)).astype(np.float32), rng.random((B, S)) < 0.9
    kernels = Kernels(*(rng.standard_normal(s).astype(np.float32) for s in ((E, D, F), (E, D, F), (E, F, D))))
    published = Kernels(*(rounded(w.swapaxes(1, 2), q.FP4).swapaxes(1, 2) for w in kernels))
    tokens, mesh = jax.P(BATCH, "context"), make_mesh(2, 2, 2)
    specs = Kernels(jax.P("expert", split), jax.P("expert", split), jax.P("expert", None, split))
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))

    def run(kernels, on):
        shards = tuple(ParamShards(axis, split) for axis in (1, 1, 2))
        apply = functools.partial(apply_experts, Experts(E, 5.0, "gather", 1, "blocked", shards, on))
        apply = jax.shard_map(apply, in_specs=(*[tokens] * 4, specs), out_specs=(tokens, jax.P()))

        def loss(x, kernels):
            y = apply(x, place(chosen, tokens), place(weights, tokens), place(real, tokens), kernels)[0]
            return (y * out).sum(), y

        with jax.set_mesh(mesh):
            return jax.device_get(
                jax.jit(jax.grad(loss, (0, 1), has_aux=True))(place(x, tokens), jax.tree.map(place, kernels, specs))
            )

    rounds, without = run(kernels, True), run(published, False)
    for one, two in zip(jax.tree.leaves(rounds), jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(one, two)
    assert np.abs(run(kernels, False)[1] - rounds[1]).max() > 0.1


@pytest.mark.parametrize("switch", SWITCHES)
def test_without_a_switch_nothing_is_rounded(monkeypatch, switch):
    """The program without switches has no rounding, and each switch adds some."""
    cfg = CONFIGS["v4"]

    def program(on):
        make = lambda: ds.DeepSeek(dataclasses.replace(cfg, quantize=on), rngs=nnx.Rngs(0))
        graph, state = nnx.split(jax.eval_shape(make))
        return jax.jit(lambda state: nnx.merge(graph, state)(IDS).logits).lower(state).as_text()

    def refuse(*_):
        raise AssertionError("rounds without a switch")

    with_switch = program((switch,))
    for module in (experts, quantized):
        monkeypatch.setattr(module, "fake_quantize", refuse)
    monkeypatch.setattr(quantized, "fake_bfloat16", refuse)
    without = program(())
    assert "reduce_precision" in with_switch and "reduce_precision" not in without


def test_hadamard():
    H = quantized.hadamard(128) / np.sqrt(128)
    np.testing.assert_allclose(H @ H.T, np.eye(128), atol=1e-15)
    assert H[0, 0] == pytest.approx(0.0883883, abs=1e-7)
    np.testing.assert_array_equal(quantized.hadamard(4), [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])


def test_mixing_leaves_scores_alone(monkeypatch):
    monkeypatch.setattr(quantized, "fake_quantize", lambda x, form: x)
    cfg = dataclasses.replace(CONFIGS["v4"], quantize=("index",))
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 5, 16, 128), (2, 9, 128)))
    w = jnp.asarray(rng.standard_normal((2, 5, 16)), jnp.float32)
    mixed = [quantized.quantize_index(cfg, x) for x in (query, key)]
    assert np.abs(mixed[0] - query).max() > 1
    np.testing.assert_allclose(index_scores(mixed[0], w, mixed[1]), index_scores(query, w, key), atol=1e-5)
    v41 = dataclasses.replace(CONFIGS["v41"], quantize=("index",))
    assert quantized.quantize_index(v41, query) is query


def test_the_description_names_what_is_rounded():
    cfg = CONFIGS["v4"]
    assert "quantised   experts, entries" in describe_model(dataclasses.replace(cfg, quantize=("experts", "entries")))
    assert not any("quantised" in line for line in describe_model(cfg))


def test_a_width_without_a_hadamard_matrix_is_refused():
    with pytest.raises(ds.ConfigError, match="index_head_dim = 48 must be a power of two"):
        small_config(index_head_dim=48, quantize=("index",))
    small_config(index_head_dim=48, quantize=("experts", "window"))
    with pytest.raises(ds.ConfigError, match="quantize"):
        small_config(quantize=("expert",))
