# SPDX-License-Identifier: Apache-2.0
"""Experts spread over devices, by gathering and by sending, against every expert on every token; sums of gradients."""

import functools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from dsv4_jax.mesh import BATCH, make_mesh, varying
from dsv4_jax.ops.exchange import ALIGN, SHARE, Route, Sent, exchange
from dsv4_jax.ops.experts import Experts, Kernels, apply_experts
from dsv4_jax.ops.shards import ParamShards, round_to_bfloat16

B, S, D, F, E, k = 8, 6, 8, 4, 16, 3
LIMIT = 5.0
SPLIT = ("data", "context")
SPECS = Kernels(jax.P("expert", SPLIT), jax.P("expert", SPLIT), jax.P("expert", None, SPLIT))
TOKENS = jax.P(BATCH, "context")


@functools.cache
def runner(shape, exchange, waves, reduction="float32", remat=False, dtype=jnp.float32, whole=False, loops=False):
    """Gradients (inputs, weights, kernels), output and number of clamped ones on a mesh: one function of arrays.

    `whole`: every device has all experts, as where the axis does not divide them. `loops`: in as many rounds as it
    takes, as on real devices.
    """
    mesh = make_mesh(*shape)
    shards = tuple(ParamShards(axis, SPLIT, reduction) for axis in (1, 1, 2))
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
        with jax.set_mesh(mesh), mock.patch("dsv4_jax.ops.exchange.emulated", lambda: not loops):
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


@jax.jit
def reference(x, weights, kernels, experts, real, out):
    """Compute what `runner` does: every token through every expert, times the token's weight for it."""

    def loss(x, weights, kernels):
        share = (jax.nn.one_hot(experts, E) * (weights * real[..., None])[..., None]).sum(2)
        chosen = (jax.nn.one_hot(experts, E) * real[..., None, None]).sum(2)
        gate, up = (jnp.einsum("bsd,edf->bsef", x, w, precision="highest") for w in (kernels.w1, kernels.w3))
        hit = (((gate > LIMIT) | (jnp.abs(up) > LIMIT)) * chosen[..., None]).sum()
        hidden = jax.nn.silu(jnp.minimum(gate, LIMIT)) * jnp.clip(up, -LIMIT, LIMIT)
        y = jnp.einsum("bsef,efd,bse->bsd", hidden, kernels.w2, share, precision="highest")
        return (y * out).sum() + hit, (y, hit)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, kernels)


def loads():
    """Make inputs for even and skewed loads and for padding."""
    r = np.random.default_rng(1)
    some, none = r.random((B, S)) < 0.5, np.zeros((B, S), bool)
    even = np.arange(B * S * k).reshape(B, S, k) % E
    one = np.stack([np.full((B, S), 5), *np.moveaxis(6 + picks(r, E - 6)[..., :2], -1, 0)], -1)
    return {
        "even": inputs(even),
        "random": inputs(picks(r)),
        "all to one expert": inputs(one),
        "all to one device": inputs(picks(r, k)),
        "five experts and padding": inputs(picks(r, 5), some),
        "the last experts, one position": inputs(E - 1 - picks(r, k), np.zeros((B, S), bool) | (np.arange(S) == 5)),
        "only padding": inputs(picks(r), none),
    }


FORMS = {
    "one device": runner((1, 1, 1), "gather", 1),
    "all have all": runner((2, 2, 2), "gather", 1, whole=True),
    "gather, two": runner((2, 2, 2), "gather", 1),
    "gather, rounds": runner((2, 4, 1), "gather", 1),
    "gather, eight, rounds": runner((1, 8, 1), "gather", 1, remat=True),
    "send, two": runner((2, 2, 2), "ragged", 2),
    "send, three waves": runner((1, 4, 2), "ragged", 3),
    "send, rounds": runner((1, 8, 1), "ragged", 1, loops=True),
    "send, rounds of two waves": runner((1, 8, 1), "ragged", 2, loops=True),
    "send, rounds of four waves": runner((2, 4, 1), "ragged", 4, loops=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_exchange_equals_every_expert_on_every_token(form):
    for name, case in loads().items():
        got, want = FORMS[form](*case), jax.device_get(reference(*case))
        same(got, want)
        assert got[1][1] == want[1][1] == clamped(*case), name
        used = np.bincount(case[3][case[4]].reshape(-1), minlength=E) > 0
        for dw in got[0][2]:  # a gradient exactly where an expert got a token
            np.testing.assert_array_equal(np.abs(dw).max((1, 2)) > 0, used)


@pytest.mark.parametrize("exchange", ["gather", "ragged"])
def test_products_in_bfloat16(exchange):
    x, *others = loads()["random"]
    case = x / 16, *others  # far from the limit, where rounding could change what is clamped
    got = runner((1, 8, 1), exchange, 1, dtype=jnp.bfloat16)(*case)
    (dx, dweights, dkernels), (y, _) = jax.device_get(reference(*case))
    same((got[0], got[1][0]), ((dx, dweights, dkernels), y), 0.02)


def plan_rounds(experts, devices, waves):
    """Plan the rounds of tokens [P, T, k] as real devices do; return their number and the rows of a round."""
    found = []

    def plan(experts):
        rounds = Sent.plan(experts[0], E // devices, E, waves)
        found.append(rounds.rows * waves)
        return jnp.reshape(rounds.rounds, 1)

    tokens = jax.P("expert")
    with jax.set_mesh(make_mesh(1, devices, 1)), mock.patch("dsv4_jax.ops.exchange.emulated", lambda: False):
        experts = jax.device_put(np.asarray(experts, np.int32), tokens)
        rounds = jax.device_get(jax.jit(jax.shard_map(plan, in_specs=tokens, out_specs=tokens))(experts))
    assert len(set(rounds.tolist())) == 1  # the same on all devices
    return int(rounds[0]), found[0]


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_rounds_follow_the_load(devices, waves):
    """One round up to SHARE times an even load; more for more skew. Rows of a round do not depend on the devices."""
    T, r = 512, np.random.default_rng(2)
    share, padding = T * k, (ALIGN - 1) * E
    random = np.argsort(r.random((devices, T, E)))[..., :k]
    for experts, load in ((random, share), (np.full((devices, T, k), 3), devices * share)):
        rounds, rows = plan_rounds(experts, devices, waves)
        assert SHARE * share <= rows <= SHARE * share + padding + ALIGN * waves
        assert rounds == -(-load // rows)
    assert plan_rounds(np.full((devices, T, k), E), devices, waves)[0] == 0  # only padding


@functools.cache
def gradient_text(devices: int) -> str:
    """Lower the gradient of the layer for TPUs; return its text."""
    T, width, inner, experts = 128, 64, 8, 64
    how = Experts(experts, LIMIT, "ragged", 2, "ragged", (ParamShards(),) * 3)
    mesh, owned = make_mesh(1, devices, 1), jax.P("expert")

    def loss(x, weights, kernels, experts, real):
        specs = TOKENS, TOKENS, TOKENS, TOKENS, owned
        f = jax.shard_map(functools.partial(apply_experts, how), in_specs=specs, out_specs=(TOKENS, jax.P()))
        return (f(x, experts, weights, real, kernels)[0] ** 2).sum()

    def array(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    up, down = array(owned, experts, width, inner), array(owned, experts, inner, width)
    x, weights = (array(TOKENS, devices, T, n) for n in (width, k))
    chosen, real = array(TOKENS, devices, T, k, dtype=jnp.int32), array(TOKENS, devices, T, dtype=jnp.bool)
    with jax.set_mesh(mesh), mock.patch("dsv4_jax.ops.exchange.emulated", lambda: False):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, weights, Kernels(up, up, down), chosen, real)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_all_to_all" in text
    return text


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_no_array_grows_with_the_devices(devices):
    """No array has more rows than a round: those of SHARE times an even load and of padding."""
    room, tokens = SHARE * 128 * k + (ALIGN - 1) * 64 + 2 * ALIGN, devices * 128  # the text has all devices' tokens
    shapes = re.findall(r"tensor<((?:\d+x)+)", gradient_text(devices))
    assert max(math.prod(map(int, dims[:-1].split("x"))) for dims in shapes) <= max(room, tokens) * 64


def test_results_take_the_place_of_the_rows_that_were_sent():
    """The rounds carry one buffer forward, and two backward: that of x, which becomes its gradient, and that of dy."""
    loops = re.findall(r"stablehlo\.while\(.*\) : (.*)", gradient_text(2))
    rows = 128 * k + (ALIGN - 1) * 64
    assert [loop.count(f"tensor<{rows}x64xf32>") for loop in loops if f"tensor<{rows}x64xf32>" in loop] == [1, 2]


@given(st.integers(0, 10**6), st.integers(k, E), st.floats(0, 1))
def test_any_routing(seed: int, among: int, share: float):
    r = np.random.default_rng(seed)
    case = inputs(r.permutation(E)[picks(r, among)], r.random((B, S)) < share, seed)
    got = runner((1, 8, 1), "ragged", 2, loops=True)(*case)
    same(got, reference(*case))
    assert got[1][1] == clamped(*case)


@pytest.mark.parametrize("loops", [False, True])
def test_what_the_backward_pass_keeps_changes_nothing(loops):
    """The first round's products are kept, later ones computed again: here all tokens come to one device of eight."""
    case = inputs(picks(np.random.default_rng(2), k))
    got = runner((1, 8, 1), "ragged", 1, remat=True, loops=loops)(*case)
    same(got, reference(*case))
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
    """Slices of a route arrive in order of their experts and senders, and return to their places; others stay."""
    mesh, P, slices, N, r = make_mesh(1, 8, 1), 8, 2, 12, np.random.default_rng(4)
    count = r.integers(0, 2, (P, P, slices)) * (r.random((P, P, slices)) < 0.7)
    count[2] = 0
    before = lambda a: np.cumsum(a) - a
    source = np.stack([before(sent.reshape(-1)).reshape(sent.shape) for sent in count])
    target = np.stack([before(count[:, to].T.reshape(-1)).reshape(slices, P).T for to in range(P)], 1)
    route = Route(*(a.astype(np.int32) for a in (count, source, target)))
    x = r.normal(size=(P, N * ALIGN, 3)).astype(np.float32)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(jax.P("expert"), jax.P()), out_specs=jax.P("expert"))
    def there_and_back(x, route):
        there = exchange(x[0], varying(jnp.full((P * slices * ALIGN, 3), 7.0), x), route)
        return there[None], exchange(there, varying(jnp.full((N * ALIGN, 3), 8.0), x), route.back())[None]

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, jax.P("expert")))
        there, back = jax.device_get(jax.jit(there_and_back)(placed, route))
    blocks = lambda a: a.reshape(-1, ALIGN, 3)
    for me in range(P):
        rows = [blocks(x[s])[source[s, me, e] :][: count[s, me, e]] for e in range(slices) for s in range(P)]
        rows = np.concatenate(rows)
        np.testing.assert_array_equal(blocks(there[me])[: len(rows)], rows)
        assert (blocks(there[me])[len(rows) :] == 7).all()
        sent = count[me].sum() * ALIGN
        np.testing.assert_array_equal(back[me, :sent], x[me, :sent])
        assert (back[me, sent:] == 8).all()
