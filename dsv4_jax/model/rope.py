# SPDX-License-Identifier: Apache-2.0
"""Rotate channels by position (RoPE): interleaved pairs at the end of a head, two bases, YaRN, exact angles."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.model.config import ModelConfig

_SPLIT = 1024  # positions are split as 1024 * high + low, so that two small exact tables serve all


class Rotation(NamedTuple):
    """Cosine and sine of the angles of every position, fp32 [..., rope_head_dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def compute_frequencies(cfg: ModelConfig, compressed: bool) -> np.ndarray:
    """Compute the frequency of each channel pair, in radians a position: float64 [rope_head_dim / 2].

    Layers without compression use `rope_theta`. The others use `compress_rope_theta` and, if `cfg.yarn`, YaRN on the
    frequencies (section 2.3; no amplitude factor).
    """
    r = cfg.rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    freq = theta ** (-np.arange(0, r, 2, dtype=np.float64) / r)
    if not (compressed and cfg.yarn):
        return freq

    def channel(rotations: float) -> float:
        """Return the (fractional) channel pair that makes this number of rotations over the original context."""
        return r * math.log(cfg.original_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    # Pairs up to `low` keep their frequency, those from `high` on have it divided by the factor, a ramp lies between.
    low = max(math.floor(channel(cfg.beta_fast)), 0)
    high = min(math.ceil(channel(cfg.beta_slow)), r - 1)
    ramp = np.clip((np.arange(r // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return freq * (1 - ramp) + freq / cfg.rope_factor * ramp


def compute_rotation(freq: np.ndarray, position: jax.Array) -> Rotation:
    """Compute the rotation of integer positions [...], exact to 2e-7 up to 2**20.

    An fp32 product of position and frequency is off by 0.03 rad at a million. Instead two float64 tables, made on the
    host, are combined by the addition theorem.
    """
    steps = np.arange(_SPLIT)[:, None]
    tables = [np.exp(1j * steps * scale * freq) for scale in (1, _SPLIT)]
    (c0, s0), (c1, s1) = (
        (jnp.asarray(t.real, jnp.float32)[i], jnp.asarray(t.imag, jnp.float32)[i])
        for t, i in zip(tables, (position % _SPLIT, position // _SPLIT), strict=True)
    )
    return Rotation(c0 * c1 - s0 * s1, s0 * c1 + c0 * s1)


def rotate(x: jax.Array, rotation: Rotation, inverse: bool = False) -> jax.Array:
    """Rotate channel pairs (2j, 2j+1) of the last channels of x [..., K] by `rotation` [..., rope / 2].

    `inverse` rotates backwards. Attention outputs are rotated back by the query's own angle, so that a value
    contributes with its distance to the query (section 2.3). Computed in fp32, returned in the type of x.
    """
    sin = -rotation.sin if inverse else rotation.sin
    r = 2 * rotation.cos.shape[-1]
    still, turning = x[..., :-r], x[..., -r:].astype(jnp.float32)
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = jnp.stack([even * rotation.cos - odd * sin, even * sin + odd * rotation.cos], axis=-1)
    return jnp.concatenate([still, turned.reshape(turning.shape).astype(x.dtype)], axis=-1)
