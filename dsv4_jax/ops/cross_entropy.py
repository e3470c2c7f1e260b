# SPDX-License-Identifier: Apache-2.0
"""Compute the cross-entropy from hidden states and head, without the whole [B, S, V] array of logits."""

import functools

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import BATCH, act_spec, varying


def head_logits(h: jax.Array, head_DV: jax.Array) -> jax.Array:
    """Compute the logits [..., V] of hidden states h [..., D], fp32."""
    return jnp.einsum("...d,dv->...v", h.astype(jnp.float32), head_DV.astype(jnp.float32), precision="highest")


@jax.custom_vjp
def _product(h_BCD: jax.Array, head_DV: jax.Array) -> jax.Array:
    """Compute `head_logits`, with a gradient of the head that is laid out as the head.

    JAX would make its transpose, in a form that takes the CPU three times as long.
    """
    return head_logits(h_BCD, head_DV)


def _forward(h_BCD, head_DV):
    return _product(h_BCD, head_DV), (h_BCD, head_DV)


def _backward(residuals, dy_BCV):
    h_BCD, head_DV = residuals
    dh_BCD = jnp.einsum("bcv,dv->bcd", dy_BCV, head_DV.astype(jnp.float32), precision="highest")
    dhead_DV = jnp.einsum("bcd,bcv->dv", h_BCD.astype(jnp.float32), dy_BCV, precision="highest")
    return dh_BCD.astype(h_BCD.dtype), dhead_DV.astype(head_DV.dtype)


_product.defvjp(_forward, _backward)


def cross_entropy(h_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, chunk: int = 1024) -> jax.Array:
    """Sum the cross-entropies, in nats, over all targets that are not negative: an fp32 scalar.

    Logits exist for `chunk` positions of each row at a time and are computed again in the backward pass.
    """
    head_DV = jax.reshard(head_DV, jax.P(None, None))
    targets_BS = jax.reshard(targets_BS, act_spec(2))

    @functools.partial(
        jax.shard_map,
        in_specs=(jax.P(BATCH, "context"), jax.P(), jax.P(BATCH, "context")),
        out_specs=jax.P(BATCH, "context"),
    )
    def local(h_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array) -> jax.Array:
        # Chunks of C positions: hidden states [B, n, C, D] and targets [B, n, C], -1 in the padding.
        B, S = targets_BS.shape
        C = min(chunk, S)
        n = -(-S // C)
        pad = n * C - S
        head_DV = varying(head_DV, h_BSD)  # so that its gradient is added up over devices once, not in every chunk
        h = jnp.pad(h_BSD, ((0, 0), (0, pad), (0, 0))).reshape(B, n, C, -1)
        target = jnp.pad(targets_BS, ((0, 0), (0, pad)), constant_values=-1).reshape(B, n, C)

        @jax.checkpoint
        def one(xs):
            h_BCD, target_BC = xs
            logits = _product(h_BCD, head_DV)
            picked = jnp.take_along_axis(logits, jnp.maximum(target_BC, 0)[..., None], axis=-1)[..., 0]
            return jnp.where(target_BC >= 0, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)

        losses = jax.lax.map(one, (jnp.moveaxis(h, 1, 0), jnp.moveaxis(target, 1, 0)))
        return jnp.moveaxis(losses, 0, 1).reshape(B, n * C)[:, :S]

    return local(h_BSD, head_DV, targets_BS).sum()
