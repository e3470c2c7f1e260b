# SPDX-License-Identifier: Apache-2.0
"""Experts spread over devices, by gathering and by sending, against one device; and how gradients are added up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from dsv4_jax.mesh import BATCH, make_mesh
from dsv4_jax.ops.experts import Experts, Kernels, Route, apply_experts, exchange
from dsv4_jax.ops.shards import ParamShards, round_to_bfloat16

B, S, D, F, E, k = 8, 6, 8, 4, 16, 3
LIMIT = 5.0
SPLIT = ("data", "context")
SPECS = Kernels(jax.P("expert", SPLIT), jax.P("expert", SPLIT), jax.P("expert", None, SPLIT))
TOKENS = jax.P(BATCH, "context")


@functools.cache
def runner(shape, exchange, waves, reduction="float32", remat=False, dtype=jnp.float32, whole=False):
    """Gradients (inputs, weights, kernels), output and number of clamped ones on a mesh: one function of arrays.

    `whole`: every device has all experts, as where the axis does not divide them.
    """
    mesh = make_mesh(*shape)
    shards = [ParamShards(axis, SPLIT, reduction) for axis in (1, 1, 2)]
    specs = Kernels(*(jax.P(None, *spec[1:]) for spec in SPECS)) if whole else SPECS
    how = Experts(E, LIMIT, exchange, waves, "blocked", shards)

    def run(x, weights, kernels, experts, real, out):
        f = functools.partial(apply_experts, how)
        f = jax.shard_map(f, in_specs=(TOKENS, TOKENS, TOKENS, TOKENS, specs), out_specs=(TOKENS, jax.P()))

        def loss(x, weights, kernels):
            y, hit = f(x.astype(dtype), experts, weights, real, kernels)
            return (y * out).sum() + hit, (y, hit)

        if remat:
            loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names("product"))
        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, kernels)

    compiled = jax.jit(run)

    def call(x, weights, kernels, experts, real, out):
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        tokens = [put(a, TOKENS) for a in (x, weights, experts, real, out)]
        with jax.set_mesh(mesh):
            return jax.device_get(compiled(*tokens[:2], jax.tree.map(put, kernels, specs), *tokens[2:]))

    return call


def inputs(experts, real=None, seed=0):
    r = np.random.default_rng(seed)
    kernels = Kernels(*(r.normal(size=s).astype(np.float32) for s in ((E, D, F), (E, D, F), (E, F, D))))
    x, out = (r.normal(size=(B, S, D)).astype(np.float32) for _ in range(2))
    real = np.ones((B, S), bool) if real is None else real
    return x, r.random((B, S, k)).astype(np.float32), kernels, np.asarray(experts, np.int32), real, out


def picks(r, among=E):
    """Distinct experts for every token, among the first few."""
    return np.argsort(r.random((B, S, among)))[..., :k]


def clamped(x, weights, kernels, experts, real, out):
    """Activations of real tokens' experts beyond the limit."""
    count = 0
    for b, t in np.argwhere(real):
        for e in experts[b, t]:
            count += ((x[b, t] @ kernels.w1[e] > LIMIT) | (np.abs(x[b, t] @ kernels.w3[e]) > LIMIT)).sum()
    return count


def same(got, want, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-9))


FORMS = {
    "gather": runner((2, 2, 2), "gather", 1),
    "two waves": runner((2, 2, 2), "ragged", 2),
    "eight devices": runner((1, 8, 1), "ragged", 1),
    "an expert a wave": runner((1, 4, 2), "ragged", 4),
    "all have all": runner((2, 2, 2), "gather", 1, whole=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_exchange_equals_one_device(form):
    """Even and skewed routing, all tokens to the experts of one device, padding, and nothing but padding."""
    r = np.random.default_rng(1)
    run, one = FORMS[form], runner((1, 1, 1), "gather", 1)
    padding = r.random((B, S)) < 0.5
    cases = [inputs(picks(r)), inputs(picks(r, k)), inputs(picks(r, 5), padding), inputs(picks(r), padding & False)]
    cases.append(inputs(E - 1 - picks(r, k), np.arange(B)[:, None] + np.zeros((1, S)) == 5))
    for case in cases:
        got, want = run(*case), one(*case)
        same(got, want)
        assert got[1][1] == want[1][1] == clamped(*case)
        used = np.bincount(case[3][case[4]].reshape(-1), minlength=E) > 0
        for dw in got[0][2]:  # a gradient exactly where an expert got a token
            np.testing.assert_array_equal(np.abs(dw).max((1, 2)) > 0, used)


@given(st.integers(0, 10**6), st.integers(k, E), st.floats(0, 1))
def test_any_routing(seed: int, among: int, share: float):
    r = np.random.default_rng(seed)
    case = inputs(r.permutation(E)[picks(r, among)], r.random((B, S)) < share, seed)
    got = runner((1, 4, 2), "ragged", 4)(*case)
    same(got, runner((1, 1, 1), "gather", 1)(*case))
    assert got[1][1] == clamped(*case)


def test_what_the_backward_pass_keeps_changes_nothing():
    """Room beyond twice an even share is computed again: here all tokens come to one device of eight."""
    case = inputs(picks(np.random.default_rng(2), k))
    got = runner((1, 8, 1), "ragged", 1, remat=True)(*case)
    same(got, runner((1, 1, 1), "gather", 1)(*case))
    assert got[1][1] == clamped(*case) > 0


def test_experts_accumulate_in_fp32_over_devices():
    """Products in bf16 give gradients that are fp32 sums: 48 tokens of 1 and one weight each are counted exactly."""
    case = list(inputs(np.tile(np.arange(k), (B, S, 1))))
    case[0], case[1], case[5] = np.ones((B, S, D)), np.ones((B, S, k)), np.ones((B, S, D))
    case[2] = Kernels(*(np.ones_like(w) for w in case[2]))
    (_, _, got), _ = runner((2, 2, 2), "gather", 1, dtype=jnp.bfloat16)(*case)
    hidden = np.float32(jnp.asarray(LIMIT / (1 + np.exp(-LIMIT)) * LIMIT, jnp.bfloat16))  # of 8, which is clamped
    np.testing.assert_array_equal(got.w2[0], np.full((F, D), B * S * hidden))


def test_stochastic_gradients_are_right_on_average():
    """The bfloat16 reduction differs from fp32 by less than its rounding, without a preference for any side."""
    r = np.random.default_rng(3)
    case = inputs(picks(r, k))
    fp32, bf16 = runner((4, 2, 1), "gather", 1), runner((4, 2, 1), "gather", 1, "bfloat16")
    (_, _, want), _ = fp32(*case)
    (_, _, got), _ = bf16(*case)
    for a, b in zip(got, want, strict=True):
        error = (a - b)[:k] / np.abs(b[:k]).mean()
        assert 1e-5 < np.abs(error).max() < 0.05
        assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size)
    same(bf16(*case), bf16(*case), 0)


def test_stochastic_rounding():
    """Unbiased between neighbours; what bf16 holds, zeros, infinities and NaN stay; signs are symmetrical."""
    x = jnp.concatenate([jnp.full(20000, 1 + 2**-9), jnp.full(20000, -1 - 2**-9)])  # a quarter of a step of 2^-7
    y = np.asarray(jax.jit(round_to_bfloat16)(x), np.float32)
    assert set(np.abs(y)) == {1.0, 1 + 2**-7}
    for half in (y[:20000], -y[20000:]):
        assert (half > 1).mean() == pytest.approx(0.25, abs=0.015)
    exact = jnp.array([0.0, -0.0, 1.5, -3.0, jnp.inf, -jnp.inf, jnp.nan, 2.0**-126])
    np.testing.assert_array_equal(np.asarray(jax.jit(round_to_bfloat16)(exact), np.float32), exact)


def test_exchange_and_back():
    """Rows of a route arrive in order of their senders, and return to their places."""
    mesh, P, N = make_mesh(1, 8, 1), 8, 12
    r = np.random.default_rng(4)
    count = r.integers(0, 3, (P, P)) * (r.random((P, P)) < 0.7)
    count[2] = 0
    count = np.minimum(count, 1) if count.sum(1).max() > N else count
    before = lambda a, axis: np.cumsum(a, axis) - a
    route = Route(*(a.astype(np.int32) for a in (count, before(count, 1), before(count, 0))))
    x = r.normal(size=(P, N, 2)).astype(np.float32)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(jax.P("expert"), jax.P()), out_specs=jax.P("expert"))
    def there_and_back(x, route):
        there = exchange(x[0], P * N, route)
        return there[None], exchange(there, N, route.back())[None]

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, jax.P("expert")))
        there, back = jax.device_get(jax.jit(there_and_back)(placed, route))
    for device in range(P):
        rows = [x[s, before(count, 1)[s, device] :][: count[s, device]] for s in range(P)]
        rows = np.concatenate(rows)
        np.testing.assert_array_equal(there[device, : len(rows)], rows)
        assert (there[device, len(rows) :] == 0).all()
        sent = count[device].sum()
        np.testing.assert_array_equal(back[device, :sent], x[device, :sent])
        assert (back[device, sent:] == 0).all()
