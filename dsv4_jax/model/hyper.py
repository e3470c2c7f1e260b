# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: N residual streams, mixed by a doubly stochastic matrix.

All of it in fp32 (section 2.2). A hyper-connection wraps one sublayer, attention or feed-forward: `collapse` makes
the sublayer's input from the streams and `expand` adds its output to them, with the gates of `compute_mix`.

Letters: B rows, S positions, N streams (j in, k out), D width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import Params, whole
from dsv4_jax.optim.roles import MatrixSpec, Role


class Mix(NamedTuple):
    """Gates of one hyper-connection, fp32.

    Attributes:
        pre_BSN: input mix, the weight of each stream in the sublayer's input.
        post_BSN: output gates, the weight of the sublayer's output in each stream.
        comb_BSNN: mixing matrix, the weight of stream j in stream k.
    """

    pre_BSN: jax.Array
    post_BSN: jax.Array
    comb_BSNN: jax.Array


def sinkhorn(z_BSNN: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Scale exp(z) by rows and columns to nearly doubly stochastic matrices [B, S, N, N] (section 2.2).

    There are `iterations` pairs of a row (sum over k) and a column (sum over j) normalisation; the first row
    normalisation is the softmax. The backward pass recomputes them from z, which saves their memory.
    """

    @jax.checkpoint
    def run(z_BSNN: jax.Array) -> jax.Array:
        z = jnp.moveaxis(z_BSNN, (-2, -1), (0, 1))  # tokens last: long vectors instead of 4 x 4 ones
        c = jax.nn.softmax(z, axis=1) + eps
        c = c / (c.sum(0, keepdims=True) + eps)

        def step(_, c: jax.Array) -> jax.Array:
            c = c / (c.sum(1, keepdims=True) + eps)
            return c / (c.sum(0, keepdims=True) + eps)

        return jnp.moveaxis(jax.lax.fori_loop(0, iterations - 1, step, c), (0, 1), (-2, -1))

    return run(z_BSNN)


def make_connection(make: Params, cfg: ModelConfig) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """Make the parameters of one hyper-connection: fn [N*D, 2N + N*N], base [2N + N*N] and scale [3]."""
    n, d = cfg.hc_mult, cfg.dim
    return _make_mixers(make, cfg, n * d, (n, n, n * n))


def make_head(make: Params, cfg: ModelConfig) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """Make the parameters of `collapse_head` (`hc_head`): fn [N*D, N], base [N] and scale [1]."""
    return _make_mixers(make, cfg, cfg.hc_mult * cfg.dim, (cfg.hc_mult,))


def _make_mixers(make: Params, cfg: ModelConfig, width: int, outputs: tuple[int, ...]):
    gates = Role("matrix", MatrixSpec(output_split=outputs))  # one projection for each kind of gate
    fn = make.kernel(("embed", width), ("streams", sum(outputs)), suffix="", role=gates)
    base = make.full(0.0, ("streams", sum(outputs)))
    return fn, base, make.full(cfg.hc_init_scale, ("streams", len(outputs)))


def _project(x_BSND: jax.Array, fn: nnx.Param, eps: float) -> jax.Array:
    """Multiply the RMS-normalised, flattened streams by fn: fp32 [B, S, outputs]."""
    x = x_BSND.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1)) + eps)
    w = whole(fn).reshape(*x.shape[-2:], -1)
    return jnp.einsum("bsnd,ndo->bso", x, w, precision="highest") * norm[..., None]


def compute_mix(x_BSND: jax.Array, fn: nnx.Param, base: nnx.Param, scale: nnx.Param, cfg: ModelConfig) -> Mix:
    """Compute the gates of a hyper-connection from the streams (section 2.2)."""
    n = cfg.hc_mult
    m = _project(x_BSND, fn, cfg.norm_eps)  # [B, S, 2N + N*N]: N input, N output and N*N mixing logits
    s, b = whole(scale), whole(base)
    pre = jax.nn.sigmoid(m[..., :n] * s[0] + b[:n]) + cfg.hc_eps
    post = 2 * jax.nn.sigmoid(m[..., n : 2 * n] * s[1] + b[n : 2 * n])
    z = m[..., 2 * n :] * s[2] + b[2 * n :]
    comb = sinkhorn(z.reshape(*z.shape[:-1], n, n), cfg.hc_sinkhorn_iters, cfg.hc_eps)
    return Mix(pre, post, comb)


def collapse(x_BSND: jax.Array, pre_BSN: jax.Array) -> jax.Array:
    """Compute a sublayer's input [B, S, D], the sum of the streams weighted by `pre`, in x's type."""
    return jnp.einsum("bsn,bsnd->bsd", pre_BSN, x_BSND.astype(jnp.float32)).astype(x_BSND.dtype)


def expand(y_BSD: jax.Array, x_BSND: jax.Array, mix: Mix) -> jax.Array:
    """Compute the streams after a sublayer, post_k y + sum_j comb_jk x_j for stream k, in x's type."""
    streams = [x_BSND[:, :, j].astype(jnp.float32) for j in range(x_BSND.shape[2])]
    # Written out, not as an einsum: N x N products per token cost only memory traffic, and this form fuses.
    kept = [sum(mix.comb_BSNN[..., j, k, None] * x for j, x in enumerate(streams)) for k in range(len(streams))]
    y_BSND = mix.post_BSN[..., None] * y_BSD.astype(jnp.float32)[:, :, None]
    return (jnp.stack(kept, axis=2) + y_BSND).astype(x_BSND.dtype)


def collapse_head(x_BSND: jax.Array, fn: nnx.Param, base: nnx.Param, scale: nnx.Param, cfg: ModelConfig) -> jax.Array:
    """Collapse the streams before the final norm to [B, S, D], by gates of their own (`hc_head`)."""
    m = _project(x_BSND, fn, cfg.norm_eps)
    return collapse(x_BSND, jax.nn.sigmoid(m * whole(scale) + whole(base)) + cfg.hc_eps)
