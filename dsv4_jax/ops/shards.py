# SPDX-License-Identifier: Apache-2.0
"""Parameters that every device stores a part of (ZeRO-3), used whole inside `shard_map`."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

Reduction = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a parameter lies over the devices and how its gradients are added up over them.

    Attributes:
        axis: the parameter's axis that is split.
        over: the mesh axes that it is split over; none if all devices have all of it.
        reduction: type in which partial gradients travel over them. bfloat16 rounds them
            stochastically and adds them up in fp32 where they arrive (section 3.4.1).
    """

    axis: int = 0
    over: tuple[str, ...] = ()
    reduction: Reduction = "float32"

    def whole(self, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """All of the parameter, from the part that this device stores."""
        w = w.astype(dtype)
        return jax.lax.all_gather(w, self.over, axis=self.axis, tiled=True) if self.over else w

    def total(self, dw: jax.Array, w: jax.Array) -> jax.Array:
        """The gradient of the stored part `w` from this device's share `dw`, fp32, of the whole's."""
        if self.over and self.reduction == "bfloat16":
            parts = jnp.stack(jnp.split(dw, jax.lax.axis_size(self.over), self.axis))
            received = jax.lax.all_to_all(stochastic_bfloat16(parts), self.over, 0, 0)
            dw = received.astype(jnp.float32).sum(0)
        elif self.over:
            dw = jax.lax.psum_scatter(dw, self.over, scatter_dimension=self.axis, tiled=True)
        differs = lambda a: jax.typeof(a).manual_axis_type.varying
        return jax.lax.psum(dw, tuple(sorted(differs(dw) - differs(w))))


WHOLE = Shards()


def stochastic_bfloat16(x: jax.Array) -> jax.Array:
    """x in bfloat16, up or down at random so that its mean is x; fp32 in.

    The draws follow from x itself: a step that is repeated rounds in the same way.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(jax.random.key(bits.sum(dtype=jnp.uint32)), x.shape, jnp.uint16)
    up = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), up, x).astype(jnp.bfloat16)
