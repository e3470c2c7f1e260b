# SPDX-License-Identifier: Apache-2.0
"""Routing and experts against dense arithmetic in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden_models import ruled_model, small_config

from dsv4_jax.mesh import act_spec
from dsv4_jax.model.moe import Routing, compute_balance_loss, count_loads, make_hash_table, sqrt_softplus
from dsv4_jax.ops.documents import find_documents
from dsv4_jax.ops.experts import swiglu

B, S, E, k = 2, 9, 4, 2
Z = np.array([-1e4, -2000, -300, -104.5, -103, -88, -50, -20.01, -20, -19.99, -5, -1, 0, 1, 5, 19.99, 20, 88, 1e4])


def test_sqrt_softplus_and_its_gradient_everywhere():
    """Against float64; in fp32 the plain form has a NaN gradient below about -104."""
    soft = np.logaddexp(0, Z)
    low, root = Z < -50, np.exp(np.minimum(Z, 0) / 2)  # here the function is e^(z/2) to all digits
    want = np.where(low, root, np.sqrt(soft))
    slope = np.where(low, root / 2, 1 / (1 + np.exp(-np.maximum(Z, -50))) / (2 * np.where(low, 1, want)))
    z = jnp.asarray(Z, jnp.float32)
    np.testing.assert_allclose(sqrt_softplus(z), want, rtol=3e-6, atol=1e-37)
    grad = jax.vmap(jax.grad(sqrt_softplus))(z)
    np.testing.assert_allclose(grad, slope, rtol=3e-6, atol=1e-37)


POINTS = [((12, 3), 29.99864), ((12, -30), -99.99546), ((5, 11), 49.66536), ((-20, 30), -4.1223e-7)]


@pytest.mark.parametrize("point, value", POINTS)
def test_swiglu_clamps(point, value):
    """The gate from above only, up from both sides, each before the product."""
    np.testing.assert_allclose(swiglu(*jnp.array(point, float), 10.0), value, rtol=1e-5)


def test_swiglu_gradient_is_zero_where_clamped():
    gate, up = jax.vmap(jax.grad(lambda p: swiglu(p[0], p[1], 10.0)))(jnp.array([p for p, _ in POINTS], float)).T
    assert (gate != 0).tolist() == [False, False, True, True]
    assert (up != 0).tolist() == [True, False, False, False]


def test_swiglu_without_limit():
    np.testing.assert_allclose(swiglu(jnp.array(30.0), jnp.array(-40.0), 0.0), -1200, rtol=1e-6)


@given(st.integers(1, 300), st.integers(1, 40), st.data(), st.integers(0, 99))
def test_hash_table(vocab: int, experts: int, data, seed: int):
    """Rows of distinct experts, all equally often up to an unfinished round; the same every time."""
    k = data.draw(st.integers(1, experts))
    table = make_hash_table(vocab, experts, k, seed)
    assert table.shape == (vocab, k) and table.dtype == np.int32
    assert ((table >= 0) & (table < experts)).all()
    assert all(len(set(row)) == k for row in table.tolist())
    counts = np.bincount(table.reshape(-1), minlength=experts)
    assert counts.max() - counts.min() <= k // np.gcd(experts, k)
    np.testing.assert_array_equal(table, make_hash_table(vocab, experts, k, seed))


def test_hash_table_is_the_same_on_every_machine():
    """Pinned: a change here changes the meaning of every saved model's tables."""
    want = [
        [205, 159, 14, 255, 15, 87],
        [210, 160, 194, 83, 186, 157],
        [247, 64, 250, 82, 173, 202],
    ]
    assert make_hash_table(1000, 256, 6, 0)[:3].tolist() == want
    assert (make_hash_table(1000, 256, 6, 0) != make_hash_table(1000, 256, 6, 1)).any()


def test_hash_table_of_the_real_vocabulary():
    """129280 x 256 x 6: no group of neighbouring ids prefers any expert."""
    table = make_hash_table(129280, 256, 6, 0)
    counts = np.bincount(table.reshape(-1), minlength=256)
    assert counts.max() - counts.min() <= 3
    frequent = np.bincount(table[:4096].reshape(-1), minlength=256)
    assert 50 < frequent.min() and frequent.max() < 150  # 96 on average


def swiglu_by_hand(gate, up, limit):
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up


def moe_by_loops(moe, x, real, forced, limit: float, scale: float):
    """Section 6 for one token at a time, float64: output, experts of every token, activations that are clamped."""
    w = jax.tree.map(lambda v: np.asarray(v, np.float64), moe)
    shared, routed = w.shared_experts, w.experts
    y, picks, clamped = np.zeros_like(x), np.zeros((*real.shape, k), int), 0
    beyond = lambda gate, up: ((gate > limit) | (np.abs(up) > limit)).sum() if limit else 0
    for b, t in np.ndindex(real.shape):
        v = x[b, t]
        y[b, t] = swiglu_by_hand(v @ shared.w1[...], v @ shared.w3[...], limit) @ shared.w2[...]
        clamped += real[b, t] * beyond(v @ shared.w1[...], v @ shared.w3[...])
        scores = np.sqrt(np.logaddexp(0, v @ w.gate.weight[...]))
        best = np.argsort(-(scores + w.gate.bias[...]))[:k]
        picks[b, t] = best if forced is None else forced[b, t]
        weights = scores[picks[b, t]] / scores[picks[b, t]].sum() * scale
        for e, weight in zip(picks[b, t], weights, strict=True):
            if real[b, t]:
                gate, up = v @ routed.w1[e], v @ routed.w3[e]
                y[b, t] += weight * swiglu_by_hand(gate, up, limit) @ routed.w2[e]
                clamped += beyond(gate, up)
    return y, picks, clamped


@dataclasses.dataclass
class Layer:
    """A learned MoE with a compiled pass: output, routing, load, number of clamped activations, and gradients.

    They are of a random linear function of the output, plus that number, which must have none.
    """

    limit: float

    def __post_init__(self):
        self.cfg = small_config(swiglu_limit=self.limit)
        self.moe = ruled_model(self.cfg).mtp[0].ffn
        r = np.random.RandomState(0)
        self.x, self.out = r.standard_normal((B, S, 16)), r.standard_normal((B, S, 16))

        @jax.jit
        def run(moe, x, real, forced):
            def loss(moe, x):
                y, routing, clamped = moe(x, jnp.zeros((B, S), int), real, None, forced, jnp.float32)
                return (y * self.out).sum() + clamped, (y, routing, count_loads(routing, real, E), clamped)

            return jax.grad(loss, argnums=(0, 1), has_aux=True)(moe, x)

        self._run = run

    def __call__(self, bias=(0.0,) * E, real=None, forced=None):
        self.moe.gate.bias.set_value(jnp.asarray(bias, jnp.float32))
        place = [np.ones((B, S), bool) if real is None else real, forced]
        place = [None if a is None else jax.reshard(jnp.asarray(a), act_spec(a.ndim)) for a in place]
        return self._run(self.moe, jax.reshard(jnp.asarray(self.x, jnp.float32), act_spec(3)), *place)


@pytest.fixture(scope="module")
def layer():
    return Layer(limit=0.5)


BIASES = {"none": (0.0,) * E, "some": (0.3, -0.2, 0.1, 0.0), "two take all": (9.0, -9.0, 9.0, -9.0)}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_moe_matches_loops(layer, bias):
    """Any skew, no token dropped; the bias moves the choice and not the weights; padding is skipped."""
    real = np.ones((B, S), bool)
    real[0, :2] = real[1, 5] = False
    (grads, dx), (y, routing, load, clamped) = layer(bias, real)
    want, picks, beyond = moe_by_loops(layer.moe, layer.x, real, None, layer.limit, layer.cfg.route_scale)
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(routing.experts_BSk, picks)
    counts = np.bincount(picks[real].reshape(-1), minlength=E)
    assert load.tolist() == counts.tolist() and clamped == beyond > 0
    if bias[0] > 1:
        assert counts.tolist() == [real.sum(), 0, real.sum(), 0]
    for name in ("w1", "w2", "w3"):  # an expert has a gradient if and only if it got a token
        grad = np.asarray(getattr(grads.experts, name)[...])
        np.testing.assert_array_equal(np.abs(grad).max((1, 2)) > 0, counts > 0, err_msg=name)
    assert (np.asarray(grads.gate.bias[...]) == 0).all()
    assert np.abs(grads.gate.weight[...]).max() > 0
    assert np.isfinite(dx).all()


def test_forced_experts_keep_current_weights(layer):
    forced = np.stack([np.random.RandomState(i).permutation(E)[:k] for i in range(B * S)]).reshape(B, S, k)
    (grads, _), (y, routing, _, _) = layer(forced=forced)
    want, *_ = moe_by_loops(layer.moe, layer.x, np.ones((B, S), bool), forced, layer.limit, layer.cfg.route_scale)
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(routing.experts_BSk, forced)
    assert np.abs(grads.gate.weight[...]).max() > 0


def test_moe_gradient_matches_finite_differences(layer):
    """Along a random direction of the input; the choice of experts is held."""
    (_, dx), (_, routing, _, _) = layer()
    picks, d = np.asarray(routing.experts_BSk), np.random.RandomState(5).standard_normal(layer.x.shape)

    def f(e: float) -> float:
        x, real = layer.x + e * d, np.ones((B, S), bool)
        y, *_ = moe_by_loops(layer.moe, x, real, picks, layer.limit, layer.cfg.route_scale)
        return (y * layer.out).sum()

    np.testing.assert_allclose((dx * d).sum(), (f(1e-6) - f(-1e-6)) / 2e-6, rtol=1e-4)


def test_clamp_can_be_off():
    layer = Layer(limit=0.0)
    _, (y, _, _, clamped) = layer()
    want, *_ = moe_by_loops(layer.moe, layer.x, np.ones((B, S), bool), None, 0.0, layer.cfg.route_scale)
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-5)
    assert clamped == 0


def test_balance_loss_is_summed_over_documents():
    """T * sum_e f_e P_e of every document, which is T if all scores are equal; padding counts nowhere."""
    r = np.random.RandomState(0)
    segments = np.array([[0, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 0, 2, 0, 0, 3, 3, 3]])
    scores, experts = r.random_sample((B, S, E)), np.argsort(r.random_sample((B, S, E)))[..., :k]
    want, slope = 0.0, np.zeros_like(scores)
    for b in range(B):
        for document in set(segments[b]) - {0}:
            where = segments[b] == document
            T, s = where.sum(), scores[b, where]
            f = E / (k * T) * np.bincount(experts[b, where].reshape(-1), minlength=E)
            want += T * (f * (s / s.sum(1, keepdims=True)).mean(0)).sum()
            total = s.sum(1, keepdims=True)
            slope[b, where] = f / total - (f * s).sum(1, keepdims=True) / total**2  # f is a constant

    @jax.jit
    def loss(scores, experts, segments):
        shares = scores / scores.sum(-1, keepdims=True)
        routing = Routing(scores, jax.reshard(shares, act_spec(3)), jax.reshard(experts, act_spec(3)), None)
        return compute_balance_loss(routing, find_documents(segments))

    x = jnp.asarray(scores, jnp.float32), jnp.asarray(experts), jnp.asarray(segments)
    np.testing.assert_allclose(loss(*x), want, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(*x), slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss(jnp.ones((B, S, E)), x[1], jnp.ones((B, S), int)), B * S, rtol=1e-6)
