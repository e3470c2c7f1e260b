# SPDX-License-Identifier: Apache-2.0
"""Muon against float64, and the laws of its matrix specs."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import optim_reference as ref

from dsv4_jax.optim import MatrixSpec, muon, scale_by_muon, scale_by_orthogonal

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# The faster compiler of the tests (see conftest.py) rounds in another way in every program.
STEADY = {"xla_cpu_use_fusion_emitters": True} if "emitters" in os.environ["XLA_FLAGS"] else None


def direction(x, spec=MatrixSpec(), **options):
    update = lambda x: scale_by_orthogonal(spec, **options).update(x, optax.EmptyState())[0]
    return jax.tree.map(np.asarray, jax.jit(update, compiler_options=STEADY)(x))


def train(tx, params, gradients):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for g in gradients:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("form", [1.0, 0.05])
def test_three_steps_against_float64(form):
    """Stacked, head-wise, fused and plain matrices; both ways to write the momentum."""
    specs = {
        "layers": MatrixSpec(),
        "heads": MatrixSpec(0, 1, output_split=3),
        "fused": MatrixSpec(0, 1, output_split=(4, 10)),
        "grouped": MatrixSpec(0, 1, reduction_split=2),
    }
    params = {"layers": normal(2, 6, 16), "heads": normal(8, 15), "fused": normal(6, 14), "grouped": normal(12, 5)}
    gradients = [jax.tree.map(lambda p: normal(*p.shape), params) for _ in range(3)]
    got, _ = train(muon(0.01, specs), params, gradients)
    cut = {
        "layers": lambda x: list(x),
        "heads": lambda x: np.split(x, 3, 1),
        "fused": lambda x: np.split(x, [4], 1),
        "grouped": lambda x: np.split(x, 2, 0),
    }
    for name, blocks in cut.items():
        histories = zip(*[blocks(g[name]) for g in gradients], strict=True)
        for block, start, history in zip(blocks(np.asarray(got[name])), blocks(params[name]), histories, strict=True):
            np.testing.assert_allclose(block, ref.muon(history, start, momentum_form=form), atol=1e-5)


def test_direction_is_optax_muons_without_momentum():
    x = {"a": normal(12, 20), "b": normal(20, 12)}
    other = optax.contrib.scale_by_muon(
        ns_coeffs=ref.HYBRID, ns_steps=10, beta=0.0, nesterov=False,
        weight_dimension_numbers=jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(0, 1), x),
    )  # fmt: skip
    theirs = other.update(x, other.init(x))[0]
    ours = scale_by_muon(optax.contrib.MuonDimensionNumbers(0, 1), momentum=0.0, rms=1.0).update(
        x, scale_by_muon().init(x)
    )[0]
    for name in x:
        np.testing.assert_allclose(ours[name] / 20**0.5, theirs[name], atol=2e-6)


@pytest.mark.parametrize("layers, heads, n, dim", [(1, 1, 2, 2), (3, 2, 1, 5), (2, 4, 6, 3)])
def test_ways_to_store_the_same_matrices(layers, heads, n, dim):
    """[layers, in, heads * dim], [layers, in, heads, dim], [heads, layers, dim, in]: the same matrices."""
    x = np.random.default_rng(n).normal(size=(layers, n, heads * dim)).astype(np.float32)
    want = direction(x, MatrixSpec(1, 2, output_split=heads))
    split = x.reshape(layers, n, heads, dim)
    np.testing.assert_allclose(direction(split, MatrixSpec(1, 3)).reshape(x.shape), want, atol=1e-6)
    moved = direction(split.transpose(2, 0, 3, 1), MatrixSpec(-1, -2)).transpose(1, 3, 0, 2)
    np.testing.assert_allclose(moved.reshape(x.shape), want, atol=1e-6)
    whole = direction(split, MatrixSpec(1, (2, 3))).reshape(x.shape)
    np.testing.assert_allclose(whole, direction(x), atol=1e-6)
    flat = direction(x.reshape(layers * n, -1), MatrixSpec(0, 1, layers, (dim,) * heads))
    np.testing.assert_allclose(flat.reshape(x.shape), want, atol=1e-6)


def test_leaves_are_matrices_of_their_own():
    """Together or alone, in any order, with zeros beside them: the same update, bit for bit."""
    leaves = {"a": normal(3, 4, 8), "b": normal(8, 4), "c": normal(2, 2, 4, 8), "zero": np.zeros((4, 8), np.float32)}
    together = direction(leaves)
    for name, x in leaves.items():
        np.testing.assert_array_equal(together[name], direction(x), err_msg=name)
    assert not together["zero"].any()
    np.testing.assert_array_equal(direction(leaves["a"][::-1]), direction(leaves["a"])[::-1])


def test_heads_do_not_touch_each_other():
    x = normal(8, 4 * 6)
    y = x.copy()
    y[:, 6:12] *= 100
    spec = MatrixSpec(0, 1, output_split=4)
    a, b = (direction(z, spec).reshape(8, 4, 6) for z in (x, y))
    np.testing.assert_array_equal(a[:, [0, 2, 3]], b[:, [0, 2, 3]])
    np.testing.assert_allclose(a[:, 1], b[:, 1], atol=1e-6)
    order = [2, 0, 3, 1]
    np.testing.assert_array_equal(
        direction(x.reshape(8, 4, 6)[:, order].reshape(8, 24), spec).reshape(8, 4, 6), a[:, order]
    )


def test_one_loud_head_drowns_the_others_only_in_one_matrix():
    """Eight heads read a rank-8 input, one with a hundredfold gradient: what each head's update weighs."""
    x = (normal(64, 8) @ normal(8, 8 * 32)).reshape(64, 8, 32)
    x[:, 0] *= 100
    norms = lambda y: np.linalg.norm(y.reshape(64, 8, 32), axis=(0, 2))
    ratio = lambda n: n.max() / n.min()
    x = x.reshape(64, 256)
    assert ratio(norms(direction(x, MatrixSpec(output_split=8)))) < 1.01
    assert ratio(norms(direction(x))) > 2
    assert ratio(norms(direction(x, coefficients="keller_jordan"))) > 20


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (8, 3, 40, 100)])
def test_root_mean_square(shape):
    """0.18 for full rank, less by the root of the missing rank."""
    assert np.sqrt((direction(normal(*shape)) ** 2).mean()) == pytest.approx(0.18, abs=2e-3)
    if len(shape) == 2:
        low = normal(shape[0], 9) @ normal(9, shape[1])
        assert np.sqrt((direction(low) ** 2).mean()) == pytest.approx(0.18 * (9 / min(shape)) ** 0.5, rel=0.01)


def test_fused_projections_do_not_drown_each_other():
    gate, up = normal(32, 64), 0.01 * normal(32, 64)
    both = direction(np.concatenate([gate, up], 1), MatrixSpec(output_split=2))
    for got, alone in zip(np.split(both, 2, 1), (gate, up), strict=True):
        np.testing.assert_allclose(got, direction(alone), atol=1e-6)


def test_zero_gradients_decay_only():
    params = {"w": np.ones((4, 6), np.float32)}
    got, _ = train(muon(0.1, weight_decay=0.1), params, [jax.tree.map(jnp.zeros_like, params)])
    np.testing.assert_allclose(got["w"], 0.99, rtol=1e-6)
    got, _ = train(muon(0.1, weight_decay=0.1, mask={"w": False}), params, [jax.tree.map(jnp.zeros_like, params)])
    np.testing.assert_array_equal(got["w"], params["w"])


def test_state_is_the_momentum_alone():
    """Nothing of the settings is in it, its type is as asked, and the direction does not change it."""
    params, g = {"w": normal(4, 6).astype(jnp.bfloat16)}, {"w": normal(4, 6)}
    for dtype in (None, jnp.float32, jnp.bfloat16):
        tx = scale_by_muon(momentum_dtype=dtype, coefficients="polar_express")
        state = tx.init(params)
        (trace,) = jax.tree.leaves(state)
        assert trace.dtype == (dtype or jnp.bfloat16) and trace.shape == (4, 6)
        assert jax.tree.structure(state) == jax.tree.structure(scale_by_muon().init(params))
        updates, after = tx.update(g, state)
        assert updates["w"].dtype == jnp.float32
        assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
        np.testing.assert_array_equal(jax.tree.leaves(after)[0], jnp.asarray(g["w"], trace.dtype))


def test_nesterov_is_optional():
    g = [normal(4, 6), normal(4, 6)]
    tx = scale_by_muon(nesterov=False)
    state = tx.init(g[0])
    for x in g:
        got, state = tx.update(x, state)
    want = ref.newton_schulz(0.95 * g[0].astype(np.float64) + g[1]) * 0.18 * 6**0.5
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "spec, message",
    [
        (MatrixSpec(0, 2), "names an axis that shape"),
        (MatrixSpec(0, -2), "twice"),
        (MatrixSpec(0, 1, output_split=4), "does not split the 6 entries"),
        (MatrixSpec(0, 1, (1, 2)), "does not split the 4 entries"),
        ({"a": MatrixSpec(), "b": MatrixSpec()}, "a setting for each of 1 leaves, found 2"),
    ],
)
def test_errors(spec, message):
    with pytest.raises(ValueError, match=message):
        scale_by_orthogonal(spec).update({"w": normal(4, 6)}, optax.EmptyState())


def wrapped():
    """Name, transformation of {w, v}, how many updates of one gradient it takes to act."""
    label = {"w": "muon", "v": "sgd"}
    yield "chain", optax.chain(optax.masked(optax.clip_by_global_norm(1e9), {"w": True, "v": True}), both()), 1
    yield "partition", optax.partition({"muon": muon(0.1), "sgd": optax.sgd(0.1)}, label), 1
    yield "masked", optax.chain(optax.masked(muon(0.1), {"w": True, "v": False}), optax.identity()), 1
    yield "multi_steps", optax.MultiSteps(both(), 2).gradient_transformation(), 2
    yield "apply_if_finite", optax.apply_if_finite(both(), 3), 1
    yield (
        "inject",
        optax.partition({"muon": optax.inject_hyperparams(muon)(lambda count: 0.1), "sgd": optax.sgd(0.1)}, label),
        1,
    )


def both():
    return optax.partition(
        {"muon": muon(0.1, {"w": MatrixSpec(), "v": MatrixSpec()}), "sgd": optax.sgd(0.1)}, {"w": "muon", "v": "sgd"}
    )


@pytest.mark.parametrize("name, tx, steps", [*wrapped()], ids=lambda x: x if isinstance(x, str) else "")
def test_composes(name, tx, steps):
    params, g = {"w": normal(4, 6), "v": normal(5)}, {"w": normal(4, 6), "v": normal(5)}
    want, _ = train(muon(0.1), {"w": params["w"]}, [{"w": g["w"]}])
    state = tx.init(params)
    update = jax.jit(tx.update, donate_argnums=1)
    for _ in range(steps):
        updates, state = update(g, state, params)
    np.testing.assert_allclose(params["w"] + updates["w"], want["w"], atol=1e-6)


def test_settings_may_be_traced():
    """Rate, decay, momentum and size as arrays: one compiled step for a sweep."""
    params, g = {"w": normal(4, 6)}, {"w": normal(4, 6)}

    @jax.jit
    def step(lr, decay, momentum, rms):
        tx = muon(lr, weight_decay=decay, momentum=momentum, rms=rms)
        return tx.update(g, tx.init(params), params)[0]["w"]

    for values in ((0.1, 0.1, 0.95, 0.18), (0.2, 0.0, 0.5, 1.0)):
        lr, decay, momentum, rms = values
        want, _ = train(muon(lr, weight_decay=decay, momentum=momentum, rms=rms), params, [g])
        np.testing.assert_allclose(params["w"] + step(*values), want["w"], atol=1e-6)
