# SPDX-License-Identifier: Apache-2.0
"""Quantise tensors to the 4-bit and 8-bit formats of the published weights and caches, and back.

Every function takes arrays of numpy or of JAX and returns arrays of the same kind. A block of neighbouring numbers
shares a scale. Its numbers are stored as E2M1 (4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign) or E4M3 (8 bits, up to
448), divided by the scale.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Array = Any  # numpy or JAX

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])  # value of each code; bit 3 is the sign
_MOST = {4: 6.0, 8: 448.0}  # largest magnitude, by number of bits


class Format(NamedTuple):
    """Describe how a matrix [..., rows, columns] is quantised.

    Attributes:
        bits: 4 (E2M1, two columns in a byte, the even one in the low half) or 8 (E4M3).
        rows: rows of a block.
        columns: columns of a block.
        scale: type of the scales [..., ceil(R / rows), ceil(C / columns)]. `e8m0`: powers of two, stored as a byte b
            for 2^(b - 127). `f32`: fp32. `e4m3`: E4M3.
    """

    bits: Literal[4, 8]
    rows: int
    columns: int
    scale: Literal["e8m0", "f32", "e4m3"] = "e8m0"


FP4 = Format(4, 1, 32)  # routed experts [out, in], and index queries and keys
FP8_128 = Format(8, 128, 128)  # other matrices of V4
FP8_32 = Format(8, 32, 32)  # other matrices of V4.1
ROWS_32 = Format(8, 1, 32)  # Engram tables, and window keys of V4.1
ROWS_64 = Format(8, 1, 64)  # window keys and entries of V4, without the channels that RoPE rotates
ENTRIES = Format(4, 1, 16, "e4m3")  # compressed entries of V4.1


def pow2ceil(x: Array) -> Array:
    """Return the exponent byte b, int32, of the smallest power of two 2^(b - 127) >= x, for fp32 x >= 2^-126.

    The bits of x give it exactly. A logarithm would not: XLA's on CPU is one too large at some powers of two.
    """
    return (_view(x, np.int32) + 0x7FFFFF) >> 23


def exp2(byte: Array) -> Array:
    """Return the power of two 2^(byte - 127), fp32, of an exponent byte; 255 gives NaN."""
    byte = byte.astype(np.int32)
    xp = _namespace(byte)
    # Byte 0 is 2^-127, which is denormal: its only bit is the highest of the mantissa.
    bits = xp.where(byte == 0, 1 << 22, byte << 23)
    return xp.where(byte == 255, np.float32(np.nan), _view(bits.astype(np.int32), np.float32))


def to_e2m1(x: Array) -> Array:
    """Round fp32 to E2M1 codes 0 to 15, uint8: ties to the even code, above 6 to 6; the sign of zero stays."""
    xp, size = _namespace(x), abs(x)
    # Count the borders between neighbours below x. A tie at a border is rounded up to codes 2, 4 and 6.
    code = sum((size > border).astype(np.uint8) for border in (0.25, 1.25, 2.5, 5.0))
    code = code + sum((size >= border).astype(np.uint8) for border in (0.75, 1.75, 3.5))
    return code | (xp.signbit(x).astype(np.uint8) << 3)


def from_e2m1(code: Array) -> Array:
    """Return the values, fp32, of E2M1 codes."""
    return _namespace(code).asarray(_E2M1)[code]


def to_e4m3(x: Array) -> Array:
    """Round fp32 to E4M3, ties to even, above 448 to 448; a cast alone would give NaN there."""
    return _namespace(x).clip(x, -448.0, 448.0).astype(ml_dtypes.float8_e4m3fn)


def pack(code: Array) -> Array:
    """Store two E2M1 codes [..., n] in a byte, uint8 [..., ceil(n / 2)]: the even one in the low half."""
    if code.shape[-1] % 2:
        code = _namespace(code).pad(code, [(0, 0)] * (code.ndim - 1) + [(0, 1)])
    return code[..., ::2] | (code[..., 1::2] << 4)


def unpack(byte: Array, columns: int) -> Array:
    """Return the E2M1 codes [..., columns] that `pack` has stored."""
    both = _namespace(byte).stack([byte & 15, byte >> 4], -1)
    return both.reshape(*byte.shape[:-1], -1)[..., :columns]


def quantize(x: Array, form: Format) -> tuple[Array, Array]:
    """Quantise fp32 [..., R, C].

    Returns:
        The stored numbers: E4M3 [..., R, C], or bytes of two E2M1 codes, uint8 [..., R, ceil(C / 2)]; and the scales
        in the type of `form.scale`, with uint8 for `e8m0`.
    """
    xp, (R, C) = _namespace(x), x.shape[-2:]
    # amax: largest magnitude of each block; blocks at the edges may be cut.
    pad = [(0, 0)] * (x.ndim - 2) + [(0, -R % form.rows), (0, -C % form.columns)]
    blocks = xp.pad(abs(x), pad).reshape(*x.shape[:-2], -(-R // form.rows), form.rows, -1, form.columns)
    scale = _find_scale(blocks.max((-3, -1)), form)
    scale = to_e4m3(scale) if form.scale == "e4m3" else scale
    scaled = x / scales_of(scale, form, range(R), range(C))
    return (pack(to_e2m1(scaled)) if form.bits == 4 else to_e4m3(scaled)), scale


def _find_scale(amax: Array, form: Format) -> Array:
    """Return the scale that maps the largest magnitude of a block to that of the format: a byte for `e8m0`, else fp32.

    Floors, which keep it normal, are those of the papers.
    """
    most = np.float32(_MOST[form.bits])
    small = most * np.float32(2.0**-9 if form.scale == "e4m3" else 2.0**-126)
    scale = _namespace(amax).maximum(amax, np.float32(1e-4) if form.bits == 8 else small) / most
    return pow2ceil(scale).astype(np.uint8) if form.scale == "e8m0" else scale


def scales_of(scale: Array, form: Format, rows: range, columns: range) -> Array:
    """Return the scale, fp32, of every number of a range of rows and columns; `scale` is as stored for the whole."""
    value = exp2(scale) if form.scale == "e8m0" else scale.astype(np.float32)
    row, column = np.arange(rows.start, rows.stop) // form.rows, np.arange(columns.start, columns.stop) // form.columns
    return value[..., row, :][..., column]


def dequantize(stored: Array, scale: Array, form: Format, columns: int) -> Array:
    """Return fp32 [..., R, columns] of what `quantize` returns."""
    value = from_e2m1(unpack(stored, columns)) if form.bits == 4 else stored.astype(np.float32)
    return value * scales_of(scale, form, range(value.shape[-2]), range(columns))


def fake_quantize(x: jax.Array, form: Format) -> jax.Array:
    """Replace [..., R, C] by what its quantised form holds, in x's type; the gradient passes unchanged.

    Equal to `dequantize` of `quantize` to the last bit. It rounds by arithmetic: a table lookup would be slow on an
    accelerator, and XLA may drop a conversion to a narrower type and back.
    """
    return _fake(x, form)


def fake_bfloat16(x: jax.Array) -> jax.Array:
    """Round x to bfloat16, in x's type; the gradient passes unchanged."""
    return _fake(x, None)


def _fake_value(x: jax.Array, form: Format | None) -> jax.Array:
    if form is None:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    *lead, R, C = x.shape
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(lead) + [(0, -R % form.rows), (0, -C % form.columns)])
    down, across = padded.shape[-2] // form.rows, padded.shape[-1] // form.columns
    blocks = padded.reshape(*lead, down, form.rows, across, form.columns)
    scale = _find_scale(abs(blocks).max((-3, -1), keepdims=True), form)
    scale = exp2(scale) if form.scale == "e8m0" else _round(scale, 8) if form.scale == "e4m3" else scale
    value = _round(blocks / scale, form.bits) * scale
    return value.reshape(padded.shape)[..., :R, :C].astype(x.dtype)


def _round(x: jax.Array, bits: int) -> jax.Array:
    """Round fp32 to the numbers of E2M1 (4 bits) or E4M3 (8 bits), ties to even, the largest above it."""
    mantissa, smallest = {4: (1, 1.0), 8: (3, 2.0**-6)}[bits]  # bits of it, and the smallest normal number
    step = smallest * 2.0**-mantissa  # between numbers below that
    x = jnp.clip(x, -_MOST[bits], _MOST[bits])
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa)
    return jnp.where(abs(x) < smallest, jnp.round(x / step) * step, normal)


_fake = jax.custom_jvp(_fake_value, nondiff_argnums=(1,))
_fake.defjvp(lambda form, primals, tangents: (_fake(*primals, form), tangents[0]))


def fp4_to_fp8(
    stored: np.ndarray, scale: np.ndarray, columns: int, form: Format = FP8_128
) -> tuple[np.ndarray, np.ndarray]:
    """Convert `FP4` to `FP8_128` or `FP8_32` without any error: E4M3 [R, columns] and scale bytes of the blocks.

    The scale of a block is its largest FP4 scale / 2^6. A number in E4M3 is then its E2M1 value times a power of two
    between 2^6 and 2^-8, all of which E4M3 has.

    Raises:
        ValueError: if the scales of a block's numbers span more than 2^14; the message names the block.
    """
    value = from_e2m1(unpack(stored, columns))
    R, across = value.shape[0], form.columns // FP4.columns  # FP4 blocks side by side in a block of FP8
    pad = [(0, -R % form.rows), (0, -scale.shape[1] % across)]
    top = np.pad(scale, pad).reshape(-(-R // form.rows), form.rows, -1, across).max((1, 3)).astype(np.int32)
    block = np.maximum(top - 6, 0)
    offset = np.repeat(scale.astype(np.int32), FP4.columns, 1)[:, :columns]
    offset = offset - np.repeat(np.repeat(block, form.rows, 0), form.columns, 1)[:R, :columns]
    scaled = value * exp2(offset + 127)
    exact = to_e4m3(scaled)
    if (wrong := exact.astype(np.float32) != scaled).any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"the block of rows {row // form.rows * form.rows} and columns {column // form.columns * form.columns} on "
            "has FP4 scales that span more than 2^14, which FP8 cannot hold exactly"
        )
    return exact, block.astype(np.uint8)


def _namespace(x: Array) -> Any:
    return np if isinstance(x, (np.ndarray, np.generic)) else jnp


def _view(x: Array, dtype: Any) -> Array:
    return x.view(dtype) if isinstance(x, np.ndarray) else jax.lax.bitcast_convert_type(x, dtype)
