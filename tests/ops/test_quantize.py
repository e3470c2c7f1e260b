# SPDX-License-Identifier: Apache-2.0
"""Quantised formats: every code and every power of two, the papers' values, in numpy and in JAX alike."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.ops import quantize as q

BOTH = pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])


def f32(*values):
    return np.array(values, np.float32)


@BOTH
def test_e2m1_rounds_ties_to_even_and_keeps_the_sign_of_zero(kind):
    x = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.5, 6, 7, 100, -0.25, -0.2, 0.2, 0.26, 0, -0.0)
    code = q.to_e2m1(kind(x))
    np.testing.assert_array_equal(code, [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 7, 8, 8, 0, 1, 0, 8])
    np.testing.assert_array_equal(q.from_e2m1(code)[:10], [0, 1, 1, 2, 2, 4, 4, 6, 6, 6])
    every = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(q.to_e2m1(q.from_e2m1(kind(every))), every)
    dense = np.linspace(-7, 7, 100_001, dtype=np.float32)
    library = dense.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(q.from_e2m1(q.to_e2m1(kind(dense))), library)


@BOTH
def test_powers_of_two_are_exact(kind):
    exponents = np.arange(-126, 128)
    powers = np.ldexp(np.float32(1), exponents)  # np.exp2 is inexact at 127
    np.testing.assert_array_equal(q.pow2ceil(kind(powers)), exponents + 127)
    above = np.nextafter(powers[:-1], np.float32(np.inf))
    np.testing.assert_array_equal(q.pow2ceil(kind(above)), exponents[:-1] + 128)
    np.testing.assert_array_equal(q.exp2(kind(np.arange(1, 255, dtype=np.uint8))), powers)


def test_every_scale_byte():
    values = q.exp2(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(values[:255], np.ldexp(1.0, np.arange(255) - 127).astype(np.float32))
    assert np.isnan(values[255])
    np.testing.assert_array_equal(
        values, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )


@BOTH
@pytest.mark.parametrize(
    "form, amax, scales",
    [
        (
            q.FP4,
            (0, 1, 1.5, 3, 3.0001, 6, 6.0000005, 7, 8, 12, 448),
            (2.0**-126, 0.25, 0.25, 0.5, 1, 1, 2, 2, 2, 2, 128),
        ),
        (
            q.ROWS_64,
            (0, 0.875, 1, 1.75, 3.5, 447.9, 448, 448.1),
            (2.0**-22, 2.0**-9, 2.0**-8, 2.0**-8, 2.0**-7, 1, 1, 2),
        ),
    ],
)
def test_scales_of_blocks(kind, form, amax, scales):
    x = np.zeros((len(amax), form.columns), np.float32)
    x[:, 3] = amax
    np.testing.assert_array_equal(q.exp2(q.quantize(kind(x), form)[1])[:, 0], f32(*scales))


@BOTH
def test_bytes_of_examples(kind):
    i = np.arange(32)
    stored, scale = q.quantize(kind((0.1 * i * (-1.0) ** i).astype(np.float32)[None]), q.FP4)
    assert np.asarray(scale).tolist() == [[127]]
    want = [128, 144, 145, 145, 162, 162, 178, 179, 179, 196, 196, 196, 196, 213, 213, 213]
    assert np.asarray(stored)[0].tolist() == want
    stored, scale = q.quantize(kind(((np.arange(64) - 31.5) * 0.37).astype(np.float32)[None]), q.ROWS_64)
    assert np.asarray(scale).tolist() == [[122]]
    assert np.asarray(stored)[0, :8].view(np.uint8).tolist() == [252, 251, 251, 251, 250, 250, 249, 249]
    assert q.dequantize(stored, scale, q.ROWS_64, 64)[0, :4].tolist() == [-12, -11, -11, -11]
    stored, scale = q.quantize(kind(((np.arange(16) - 7.5) * 0.3).astype(np.float32)[None]), q.ENTRIES)
    assert np.asarray(scale).view(np.uint8).tolist() == [[44]] and float(scale[0, 0]) == 0.375
    assert np.asarray(q.unpack(stored, 16))[0].tolist() == [15, 15, 14, 14, 13, 12, 10, 9, 1, 2, 4, 5, 6, 6, 7, 7]


def test_fp4_becomes_fp8_without_error():
    def convert(scales, codes=range(8)):
        """A matrix with `codes` in every block of 32 columns, scaled by one byte of `scales` each."""
        tiled = np.tile(np.array(codes, np.uint8), (1, 32 // len(codes) * len(scales)))
        return q.fp4_to_fp8(q.pack(tiled), np.array([scales], np.uint8), tiled.shape[1])

    for ratio, want in ((0, [0, 96, 104, 108, 112, 116, 120, 124]), (3, [0, 72, 80, 84, 88, 92, 96, 100])):
        exact, block = convert([127, 127 - ratio])
        assert exact[0, 32:40].view(np.uint8).tolist() == want and block.tolist() == [[121]]
    exact, _ = convert([127, 127 - 14])
    assert exact[0, 32:40].view(np.uint8).tolist() == [0, 1, 2, 3, 4, 6, 8, 12]
    distinct = {
        int(b) for r in range(12) for b in convert([127, 127 - r], np.arange(16, dtype=np.uint8))[0].view(np.uint8).flat
    }
    assert len(distinct) == 60
    with pytest.raises(ValueError, match=r"rows 0 and columns 0 on.*2\^14"):
        convert([127, 127 - 15])
    convert([127, 127 - 15], [0, 8] * 4)  # no number needs the small scale
    convert([127, 127 - 15], [0, 2, 4, 6] * 2)  # nor these: even multiples of the step


@pytest.mark.parametrize("ratio", range(15))
def test_fp4_in_fp8_has_the_same_values(ratio):
    rng = np.random.default_rng(ratio)
    R, C = 131, 224
    stored = q.pack(rng.integers(0, 16, (R, C), np.uint8))
    scale = rng.integers(120 - ratio, 121, (R, C // 32)).astype(np.uint8)
    exact, block = q.fp4_to_fp8(stored, scale, C)
    np.testing.assert_array_equal(q.dequantize(exact, block, q.FP8_128, C), q.dequantize(stored, scale, q.FP4, C))


FORMS = [q.FP4, q.FP8_128, q.FP8_32, q.ROWS_32, q.ROWS_64, q.ENTRIES, q.Format(8, 128, 128, "f32")]


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 140), st.integers(1, 140)),
    seed=st.integers(0, 99),
    power=st.integers(-60, 8),
)
def test_laws_of_every_format(form, shape, seed, power):
    """For any size: a second pass changes no value, numbers are near, and numpy and JAX agree bit by bit."""
    x = (np.random.default_rng(seed).standard_normal(shape) * 2.0**power).astype(np.float32)
    stored, scale = q.quantize(x, form)
    y = q.dequantize(stored, scale, form, shape[-1])
    assert y.shape == x.shape and y.dtype == np.float32
    if form.scale == "e8m0":
        np.testing.assert_array_equal(q.dequantize(*q.quantize(y, form), form, shape[-1]), y)
    # An error is at most half a step at the largest magnitude of the block, whose scale may be twice what is needed.
    amax = np.abs(x).max()
    floor = 1e-4 if form.bits == 8 and form.scale != "e4m3" else 6 * 2.0**-9 if form.scale == "e4m3" else 0
    assert np.abs(y - x).max() <= max(amax, floor) * (1 / 3 if form.bits == 4 else 1 / 14)
    if form.scale != "f32":  # compiled, x / 448 is x times the rounded reciprocal
        theirs, their_scale = jax.jit(q.quantize, static_argnums=1)(x, form)
        np.testing.assert_array_equal(np.asarray(theirs).view(np.uint8), stored.view(np.uint8))
        np.testing.assert_array_equal(their_scale, scale)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fake_quantisation_is_straight_through(form):
    x = jax.random.normal(jax.random.key(0), (70, 70))
    x = x.at[:32, :32].set(0.0)  # a block of zeros stays zeros
    y, pull = jax.vjp(jax.jit(lambda x: q.fake_quantize(x, form)), x)
    np.testing.assert_array_equal(y, q.dequantize(*q.quantize(np.asarray(x), form), form, 70))
    assert (y[:32, :32] == 0).all()
    np.testing.assert_array_equal(pull(2 * x)[0], 2 * x)
    assert q.fake_quantize(x.astype(jnp.bfloat16), form).dtype == jnp.bfloat16
    for empty in ((3, 0), (0, 70), (2, 0, 5)):
        assert q.fake_quantize(jnp.zeros(empty), form).shape == empty
    assert jnp.isnan(q.fake_quantize(x.at[0, 0].set(jnp.nan), form)[0, 0])
    large = q.fake_quantize(x.at[0, 0].set(jnp.inf), form)[0, 0]
    assert large == 6 * 448 if form.scale == "e4m3" else not jnp.isfinite(large)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fake_quantisation_of_every_number_of_16_bits(form):
    """Compiled, with the largest magnitude in every block, so that the scale is 1: what a cast to the type gives."""
    most, dtype = (6.0, ml_dtypes.float4_e2m1fn) if form.bits == 4 else (448.0, ml_dtypes.float8_e4m3fn)
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = x[np.abs(x) <= most]
    x = np.resize(x, (-(-x.size // 127), 127)).copy()
    x[:: form.rows, :: form.columns] = most
    y = jax.jit(lambda x: q.fake_quantize(x, form))(x)
    want = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(np.signbit(y), np.signbit(want))
    exact = jax.jit(q.fake_bfloat16)(x + np.float32(1 / 3))
    np.testing.assert_array_equal(exact, (x + np.float32(1 / 3)).astype(ml_dtypes.bfloat16).astype(np.float32))


def test_entries_are_exact_in_bf16():
    """All 16 codes times all finite positive E4M3 scales."""
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = q.from_e2m1(np.arange(16, dtype=np.uint8))[:, None] * scales
    np.testing.assert_array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float32), values)
