# SPDX-License-Identifier: Apache-2.0
"""Rotary angles, their rotation, and what the inverse rotation of attention outputs is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden_models import small_config

from dsv4_jax.model.rope import Rotation, compute_frequencies, compute_rotation, rotate
from dsv4_jax.ops.attention import attend

REAL = small_config(head_dim=512, rope_head_dim=64, index_head_dim=128, original_seq_len=65536)


def test_real_frequencies():
    """Values of section 2 at the published sizes: YaRN with base 160000, no amplitude."""
    want = {0: 1, 1: 0.687656045, 14: 5.28685655e-3, 15: 3.63553851e-3, 16: 2.26562493e-3, 20: 2.96977785e-4}
    want |= {24: 1.95312550e-5, 25: 5.37231244e-6, 31: 5.68052940e-7}
    np.testing.assert_allclose(compute_frequencies(REAL, compressed=True)[list(want)], list(want.values()), rtol=5e-7)


@pytest.mark.parametrize("theta, low, high", [(160000.0, 15, 25), (40000.0, 17, 28)])
def test_yarn_ramp(theta: float, low: int, high: int):
    """Kept up to `low`, divided by the factor from `high` on, in between in between."""
    cfg = dataclasses.replace(REAL, compress_rope_theta=theta)
    plain = theta ** (-np.arange(32) / 32)
    share = compute_frequencies(cfg, compressed=True) / plain
    np.testing.assert_allclose(share[: low + 1], 1, rtol=1e-12)
    np.testing.assert_allclose(share[high:], 1 / 16, rtol=1e-12)
    assert ((share[low + 1 : high] < 1) & (share[low + 1 : high] > 1 / 16)).all()
    assert (np.diff(share[low : high + 1]) < 0).all()


@pytest.mark.parametrize("compressed, yarn, theta", [(False, True, 1e4), (False, False, 1e4), (True, False, 1.6e5)])
def test_plain_frequencies(compressed: bool, yarn: bool, theta: float):
    """Layers without compression never use YaRN; the others can do without."""
    cfg = dataclasses.replace(REAL, yarn=yarn)
    np.testing.assert_allclose(compute_frequencies(cfg, compressed), theta ** (-np.arange(32) / 32), rtol=1e-12)


def test_angles_are_exact_up_to_a_million():
    position = np.array([0, 1, 511, 1023, 1024, 4095, 65535, 123456, 1048575])
    for compressed in (False, True):
        freq = compute_frequencies(REAL, compressed)
        at = jax.jit(lambda p, freq=freq: compute_rotation(freq, p))(position)
        assert at.cos.dtype == at.sin.dtype == jnp.float32
        np.testing.assert_allclose(at.cos, np.cos(position[:, None] * freq), rtol=0, atol=1e-6)
        np.testing.assert_allclose(at.sin, np.sin(position[:, None] * freq), rtol=0, atol=1e-6)


def test_interleaved_pairs_of_the_last_channels():
    """[1, 2, 3, 4] at position 1 with base 10000; channels before the last ones stand still."""
    at = compute_rotation(10000.0 ** (-np.arange(0, 4, 2) / 4), jnp.array([1]))
    got = rotate(jnp.array([[7.0, 8.0, 1.0, 2.0, 3.0, 4.0]]), at)[0]
    np.testing.assert_allclose(got, [7, 8, -1.1426, 1.9221, 2.9599, 4.0298], rtol=0, atol=5e-5)
    np.testing.assert_allclose(rotate(got[None], at, inverse=True)[0], [7, 8, 1, 2, 3, 4], rtol=0, atol=1e-6)


def test_bf16_is_rotated_in_fp32():
    x = jnp.asarray(np.random.RandomState(0).standard_normal((3, 8)), jnp.bfloat16)
    at = compute_rotation(compute_frequencies(small_config(), compressed=True), jnp.array([5, 50, 500]))
    got = rotate(x, at)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rotate(x.astype(jnp.float32), at).astype(jnp.bfloat16))


def attention_at(shift: int, inverse: bool) -> np.ndarray:
    """Window attention of random vectors whose positions start at `shift`."""
    r = np.random.RandomState(0)
    q, kv = (jnp.asarray(r.standard_normal(s), jnp.float32) for s in ((1, 20, 2, 16), (1, 20, 16)))
    at = compute_rotation(10000.0 ** (-np.arange(0, 8, 2) / 8), jnp.arange(20)[None] + shift)
    heads = Rotation(at.cos[:, :, None], at.sin[:, :, None])
    out = attend(rotate(q, heads), rotate(kv, at), jnp.zeros(2), jnp.zeros((1, 20), int), window=6).o_BSHK
    return np.asarray(rotate(out, heads, inverse=True) if inverse else out)


def test_attention_does_not_see_absolute_positions():
    """A shift of all positions by 100 changes nothing, thanks to the inverse rotation alone."""
    np.testing.assert_allclose(attention_at(100, True), attention_at(0, True), rtol=0, atol=2e-6)
    assert np.abs(attention_at(100, False) - attention_at(0, False)).max() > 0.1
