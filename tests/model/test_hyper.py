# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections against the equations in float64."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.model import hyper
from dsv4_jax.model.hyper import Mix

B, S, N, D = 2, 3, 4, 8
CFG = types.SimpleNamespace(hc_mult=N, norm_eps=1e-6, hc_eps=1e-6, hc_sinkhorn_iters=20)
RUN = jax.jit(hyper.sinkhorn, static_argnums=(1, 2))


def sinkhorn_by_loops(z: np.ndarray, iterations: int, eps: float, after_softmax: bool = True) -> np.ndarray:
    """Section 5, item 4: softmax over k plus eps, then columns, rows, columns, ... for one matrix."""
    c = np.exp(z - z.max(1, keepdims=True))
    c = c / c.sum(1, keepdims=True) + (eps if after_softmax else 0)
    for i in range(iterations):
        if i:
            c = c / (c.sum(1, keepdims=True) + eps)
        c = c / (c.sum(0, keepdims=True) + eps)
    return c


def logits(scale: float) -> np.ndarray:
    return scale * np.random.RandomState(0).standard_normal((B, S, N, N))


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("iterations, eps", [(20, 1e-6), (1, 1e-2), (3, 1e-2)])
def test_sinkhorn_matches_the_equations(scale: float, iterations: int, eps: float):
    """A large eps and few iterations show where each eps stands; rows first, columns last."""
    z = logits(scale)
    want = np.array([[sinkhorn_by_loops(m, iterations, eps) for m in row] for row in z])
    got = RUN(jnp.asarray(z, jnp.float32), iterations, eps)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-7)
    if iterations < 20:  # variants that differ less than rounding at 20 iterations and 1e-6
        no_eps = np.array([[sinkhorn_by_loops(m, iterations, 0.0) for m in row] for row in z])
        late_eps = np.array([[sinkhorn_by_loops(m, iterations, eps, after_softmax=False) for m in row] for row in z])
        swapped = np.array([[sinkhorn_by_loops(m.T, iterations, eps).T for m in row] for row in z])
        assert min(np.abs(got - other).max() for other in (no_eps, late_eps, swapped)) > 1e-4


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_sinkhorn_stays_finite(scale: float):
    """Columns sum to one to the last digits; gradients are finite whatever the logits."""
    z = jnp.asarray(logits(scale), jnp.float32)
    c = RUN(z, 20, 1e-6)
    np.testing.assert_allclose(c.sum(-2), 1, rtol=0, atol=2e-6)
    assert (np.asarray(c) >= 0).all()
    r = np.random.RandomState(1).standard_normal(z.shape)
    grad = jax.jit(jax.grad(lambda z: (hyper.sinkhorn(z, 20, 1e-6) * r).sum()))(z)
    assert np.isfinite(grad).all()


def test_sinkhorn_gradient_matches_finite_differences():
    z, r = logits(1.0), np.random.RandomState(1).standard_normal((2, N, N))
    grad = jax.jit(jax.grad(lambda z: (hyper.sinkhorn(z, 20, 1e-6) * r[0]).sum()))(jnp.asarray(z[0, 0], jnp.float32))

    def f(e: float) -> float:
        return (sinkhorn_by_loops(z[0, 0] + e * r[1], 20, 1e-6) * r[0]).sum()

    np.testing.assert_allclose((grad * r[1]).sum(), (f(1e-5) - f(-1e-5)) / 2e-5, rtol=1e-4)


def plain_sinkhorn(z: jax.Array, iterations: int, eps: float) -> jax.Array:
    """The normalisations one after another, for JAX to differentiate."""
    c = jax.nn.softmax(z, axis=-1) + eps
    for i in range(iterations):
        c = c / (c.sum(-1, keepdims=True) + eps) if i else c
        c = c / (c.sum(-2, keepdims=True) + eps)
    return c


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("iterations, eps", [(20, 1e-6), (1, 1e-2), (2, 1e-2), (7, 0.3)])
def test_sinkhorn_gradient_is_that_of_jax(scale: float, iterations: int, eps: float):
    z, r = f32(logits(scale), np.random.RandomState(1).standard_normal((B, S, N, N)))
    got, want = (
        jax.jit(jax.grad(lambda z, f=f: (f(z, iterations, eps) * r).sum()))(z) for f in (hyper.sinkhorn, plain_sinkhorn)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("dtype, within", [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_gradients_of_collapse_and_expand_are_those_of_jax(dtype: str, within: float):
    arrays = f32(*(np.random.RandomState(4).standard_normal(s) for s in ((B, S, N), (B, S, N), (B, S, N, N))))
    x, y, r = (a.astype(dtype) for a in f32(*np.random.RandomState(5).standard_normal((3, B, S, N, D))))

    def plain(x, y, mix):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        u = jnp.einsum("bsj,bsjd->bsd", mix.pre_BSN, x).astype(dtype)
        out = jnp.einsum("bsjk,bsjd->bskd", mix.comb_BSNN, x) + mix.post_BSN[..., None] * y[:, :, None]
        return u, out.astype(dtype)

    def ours(x, y, mix):
        return hyper.collapse(x, mix.pre_BSN), hyper.expand(y, x, mix)

    def gradient(f):
        loss = lambda *a: sum(
            (out.astype(jnp.float32) * w).sum() for out, w in zip(f(*a), (r[:, :, 0], r), strict=True)
        )
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, y[:, :, 0], Mix(*arrays))

    for got, want in zip(jax.tree.leaves(gradient(ours)), jax.tree.leaves(gradient(plain)), strict=True):
        assert got.dtype == want.dtype
        got, want = (np.asarray(a, np.float32) for a in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=within * np.abs(want).max())


def connection(outputs: int, scales: int) -> tuple[np.ndarray, ...]:
    """Streams, fn, base and scale, all random."""
    r = np.random.RandomState(2)
    return tuple(r.standard_normal(s) for s in ((B, S, N, D), (N * D, outputs), (outputs,), (scales,)))


def f32(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_mix_matches_the_equations():
    """Items 1 to 4: flattened streams, normalised; rows 0-3 pre, 4-7 post, 8 + 4j + k comb."""
    x, fn, base, scale = connection(2 * N + N * N, 3)
    got = jax.jit(lambda *a: hyper.compute_mix(*a, CFG))(*f32(x, fn, base, scale))
    for b in range(B):
        for s in range(S):
            f = x[b, s].reshape(-1)
            m = f @ fn / np.sqrt((f**2).mean() + 1e-6)
            pre = sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
            post = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
            z = np.array([[m[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k] for k in range(4)] for j in range(4)])
            exact = Mix(pre, post, sinkhorn_by_loops(z, 20, 1e-6))
            for name, a, want in zip(Mix._fields, got, exact, strict=True):
                np.testing.assert_allclose(a[b, s], want, rtol=0, atol=3e-6, err_msg=name)


def test_collapse_and_expand_match_the_equations():
    """Items 5 and 6: stream k gets post_k y + sum_j comb_jk x_j, so comb is applied transposed."""
    x, y = connection(1, 1)[0], np.random.RandomState(3).standard_normal((B, S, D))
    pre, post, comb = (np.random.RandomState(4).standard_normal(s) for s in ((B, S, N), (B, S, N), (B, S, N, N)))
    x32, y32, pre32, post32, comb32 = f32(x, y, pre, post, comb)
    np.testing.assert_allclose(hyper.collapse(x32, pre32), (pre[..., None] * x).sum(2), rtol=0, atol=1e-5)
    want = np.zeros_like(x)
    for k in range(N):
        want[:, :, k] = post[..., k, None] * y + sum(comb[..., j, k, None] * x[:, :, j] for j in range(N))
    np.testing.assert_allclose(hyper.expand(y32, x32, Mix(pre32, post32, comb32)), want, rtol=0, atol=1e-5)


def test_head_collapse_matches_the_equations():
    """Section 5, exit: sigmoid gates plus eps, not normalised to sum one."""
    x, fn, base, scale = connection(N, 1)
    got = hyper.collapse_head(*f32(x, fn, base, scale), CFG)
    f = x.reshape(B, S, -1)
    pre = sigmoid(f @ fn / np.sqrt((f**2).mean(-1, keepdims=True) + 1e-6) * scale + base) + 1e-6
    np.testing.assert_allclose(got, (pre[..., None] * x).sum(2), rtol=0, atol=2e-5)


def test_bf16_streams_get_fp32_gates():
    """The gates of bf16 streams are those of the same numbers in fp32; streams stay bf16."""
    x, *weights = f32(*connection(2 * N + N * N, 3))
    x = x.astype(jnp.bfloat16)
    low, full = hyper.compute_mix(x, *weights, CFG), hyper.compute_mix(x.astype(jnp.float32), *weights, CFG)
    for a, b in zip(low, full, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert hyper.collapse(x, low.pre_BSN).dtype == jnp.bfloat16
    assert hyper.expand(x[:, :, 0], x, low).dtype == jnp.bfloat16
