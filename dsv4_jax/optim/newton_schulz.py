# SPDX-License-Identifier: Apache-2.0
"""Compute the orthogonal factor of a matrix by a Newton-Schulz iteration (section 2.4 of the V4 report).

With the singular value decomposition X = U S V^T the iteration returns nearly U V^T: every step maps
each singular value s to a s + b s^3 + c s^5 and does not change U and V. All matrices of a stack are
iterated at once, on their smaller side.
"""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import on_cpu

Coefficients = str | Sequence[tuple[float, float, float]]
Precision = Literal["float32", "bfloat16", "bfloat16_storage"]

HYBRID = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
"""Ten steps of DeepSeek-V4: eight raise small singular values, two bring all of them to 1."""

# Eight steps of arXiv 2505.16932, each but the last damped by 1.01 against rounding above 1.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "deepseek_v4": HYBRID,
    "keller_jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar_express": (*((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS), (1.875, -1.25, 0.375)),
}
"""Coefficient sets by name; each triple (a, b, c) is one step."""

_GRAM_STEPS = 4  # Gram steps between restarts: rounding grows by a^2 = 12 a step, 12^5 is too much
_GRAM_ASPECT = 2  # the Gram form costs fewer operations from this ratio of the sides on


def resolve_coefficients(coefficients: Coefficients) -> tuple[tuple[float, float, float], ...]:
    """Return the steps of a set that is given by name or as triples.

    Raises:
        ValueError: for an unknown name, an empty sequence or steps that are not three numbers.
    """
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(f"unknown coefficients {coefficients!r}; there are {', '.join(COEFFICIENTS)}")
        return COEFFICIENTS[coefficients]
    if not coefficients or any(len(step) != 3 for step in coefficients):
        raise ValueError(f"coefficients must be one (a, b, c) a step, at least one; found {coefficients}")
    return tuple(coefficients)


def default_precision() -> Precision:
    """Return the default precision of the matrix products: fp32 on CPU, bf16 operands on accelerators."""
    return "float32" if on_cpu() else "bfloat16"


def newton_schulz(
    x: jax.Array,
    coefficients: Coefficients = HYBRID,
    axes: tuple[int, int] = (-2, -1),
    *,
    precision: Precision | None = None,
    gram: bool = False,
    batch_size: int | None = None,
) -> jax.Array:
    """Compute the orthogonal factor of each matrix of a stack.

    Each matrix is first divided by its Frobenius norm, so that the result does not depend on its scale
    (tested from 1e-30 to 1e30). A zero matrix stays zero. `HYBRID` brings singular values above 2.3e-5 of the
    norm to within 1 % of 1, and multiplies those far below by 7.9e4.

    Args:
        x: real floating, of any rank. Every matrix must be whole on a device; `scale_by_muon` accepts
            sharded ones.
        coefficients: a name of `COEFFICIENTS`, or one (a, b, c) for each step.
        axes: the two axes that make a matrix; all others stack matrices.
        precision: precision of the matrix products, which always accumulate in fp32. "float32" rounds
            nothing; "bfloat16" rounds their operands; "bfloat16_storage" stores the iterate in bf16 as well,
            which fills the null space of a rank-deficient matrix with noise. None: `default_precision()`.
        gram: iterate on the small Gram matrix X X^T where the sides differ by a factor of two or more, with
            a restart every four steps. It takes fewer operations and gives the same result in fp32. It is
            refused with bf16, where it diverges.
        batch_size: matrices iterated at a time, to save memory in large stacks. None: all.

    Returns:
        Array of x's shape and dtype.

    Raises:
        TypeError: if x is not real floating.
        ValueError: for unusable coefficients, axes, precision, or gram with bf16.
    """
    steps = resolve_coefficients(coefficients)
    precision = precision or default_precision()
    if precision not in ("float32", "bfloat16", "bfloat16_storage"):
        raise ValueError(f"precision must be float32, bfloat16 or bfloat16_storage, found {precision!r}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"newton_schulz needs real floating matrices, found {x.dtype}")
    if gram and precision != "float32":
        raise ValueError(f"the Gram form diverges in bf16; use precision='float32' with it, found {precision!r}")
    if x.ndim < 2 or len({axis % x.ndim for axis in axes}) != 2:
        raise ValueError(f"axes must be two different axes of the array, found {axes} for shape {x.shape}")
    wide = x.shape[axes[0]] <= x.shape[axes[1]]
    y = jnp.moveaxis(x, axes if wide else axes[::-1], (-2, -1))  # [..., n, m] with n <= m
    run = _gram if gram and y.shape[-1] >= _GRAM_ASPECT * y.shape[-2] else _standard

    def orthogonal(y: jax.Array) -> jax.Array:
        return run(_normalised(y), steps, precision).astype(x.dtype)

    if batch_size is None or y.ndim == 2:
        y = orthogonal(y)
    else:
        flat = y.reshape(-1, *y.shape[-2:])
        y = jax.lax.map(orthogonal, flat, batch_size=min(batch_size, len(flat)) or None).reshape(y.shape)
    return jnp.moveaxis(y, (-2, -1), axes if wide else axes[::-1])


def _normalised(x: jax.Array) -> jax.Array:
    """Divide matrices by their Frobenius norms, in fp32 or better; zeros stay zeros."""

    def divided(x: jax.Array, norm: jax.Array) -> jax.Array:
        return x / jnp.where(norm == 0, 1, norm)

    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = divided(x, jnp.abs(x).max((-2, -1), keepdims=True))  # first, so that no square over- or underflows
    return divided(x, jnp.sqrt((x * x).sum((-2, -1), keepdims=True)))


def _product(a: jax.Array, b: jax.Array, precision: Precision, transpose_b: bool = False) -> jax.Array:
    """Multiply the matrices of two stacks, summing in fp32 or better."""
    equation = "...ij,...kj->...ik" if transpose_b else "...ij,...jk->...ik"
    if precision == "float32":
        return jnp.einsum(equation, a, b, precision="highest")

    def rounded(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7) for x in (a, b))
        return jnp.einsum(equation, a, b, precision="highest")

    def native(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    # XLA:CPU cannot run some of the bf16 products that it compiles; there the rounded numbers are multiplied in fp32.
    return jax.lax.platform_dependent(a, b, cpu=rounded, default=native)


def _standard(x: jax.Array, steps: Sequence[tuple[float, float, float]], precision: Precision) -> jax.Array:
    """Iterate X <- a X + (b A + c A^2) X with A = X X^T."""
    storage = jnp.bfloat16 if precision == "bfloat16_storage" else x.dtype
    x = x.astype(storage)
    for a, b, c in steps:
        gram = _product(x, x, precision, transpose_b=True)
        polynomial = b * gram + c * _product(gram, gram, precision)
        product = _product(polynomial, x, precision)
        x = (a * x.astype(product.dtype) + product).astype(storage)
    return x


def _gram(x: jax.Array, steps: Sequence[tuple[float, float, float]], precision: Precision) -> jax.Array:
    """Iterate on A = X X^T alone: a step multiplies X by P = a I + b A + c A^2, so A becomes P A P.

    The product of the P of several steps is applied to X once, before a restart from the new X X^T.
    """
    eye = jnp.eye(x.shape[-2], dtype=x.dtype)
    segments = math.ceil(len(steps) / _GRAM_STEPS)
    lengths = [len(steps) // segments + (i < len(steps) % segments) for i in range(segments)]
    for length in lengths:
        segment, steps = steps[:length], steps[length:]
        gram, total = _product(x, x, precision, transpose_b=True), None
        for i, (a, b, c) in enumerate(segment):
            polynomial = a * eye + b * gram + c * _product(gram, gram, precision)
            total = polynomial if total is None else _product(polynomial, total, precision)
            if i + 1 < length:
                gram = _product(polynomial, _product(gram, polynomial, precision), precision)
        assert total is not None
        x = _product(total, x, precision)
    return x
