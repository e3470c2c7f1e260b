# SPDX-License-Identifier: Apache-2.0
"""Gather parameters of which every device stores a part (ZeRO-3), and reduce their gradients; in `shard_map`."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

Reduction = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class ParamShards:
    """Describe how a parameter is split over devices and how its gradients are summed over them.

    Attributes:
        axis: the parameter's axis that is split.
        over: mesh axes over which it is split; empty if every device stores all of it.
        reduction: type in which partial gradients are sent. bfloat16 rounds them stochastically and sums
            them in fp32 where they arrive (section 3.4.1).
    """

    axis: int = 0
    over: tuple[str, ...] = ()
    reduction: Reduction = "float32"

    def whole(self, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Gather the whole parameter, in `dtype`, from the part `w` that this device stores."""
        w = w.astype(dtype)
        return jax.lax.all_gather(w, self.over, axis=self.axis, tiled=True) if self.over else w

    def total(self, dw: jax.Array, w: jax.Array) -> jax.Array:
        """Sum the devices' gradients `dw` of the whole parameter, fp32; return that of the stored part `w`."""
        if self.over and self.reduction == "bfloat16":
            parts = jnp.stack(jnp.split(dw, jax.lax.axis_size(self.over), self.axis))
            received = jax.lax.all_to_all(round_to_bfloat16(parts), self.over, 0, 0)
            dw = received.astype(jnp.float32).sum(0)
        elif self.over:
            dw = jax.lax.psum_scatter(dw, self.over, scatter_dimension=self.axis, tiled=True)
        # Devices that store the same part but computed with other rows each have a part of its gradient.
        differs = lambda a: jax.typeof(a).manual_axis_type.varying
        return jax.lax.psum(dw, tuple(sorted(differs(dw) - differs(w))))


WHOLE = ParamShards()


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """Round x (fp32) to bfloat16, up or down at random, so that the expected result is x.

    The seed is made of x itself, so that a repeated step rounds in the same way.
    """
    # Noise in the 16 bits that bfloat16 drops carries into the kept ones in proportion to what is dropped.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(jax.random.key(bits.sum(dtype=jnp.uint32)), x.shape, jnp.uint16)
    up = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), up, x).astype(jnp.bfloat16)
