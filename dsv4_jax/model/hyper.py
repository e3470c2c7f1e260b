# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: N residual streams, mixed by a doubly stochastic matrix.

All of it in fp32 (section 2.2). A hyper-connection wraps one sublayer, attention or feed-forward: `collapse` makes
the sublayer's input from the streams and `expand` adds its output to them, with the gates of `compute_mix`.

Letters: B rows, S positions, N streams (j in, k out), D width.
"""

import functools
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sinkhorn(z_BSNN: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Scale exp(z) by rows and columns to nearly doubly stochastic matrices [B, S, N, N] (section 2.2).

    There are `iterations` pairs of a row (sum over k) and a column (sum over j) normalisation; the first row
    normalisation is the softmax. The normalisations change a factor for each row and each column of the softmax, so
    that N numbers a step are kept for the gradient, not N x N, and are recomputed for it from z.
    """
    p_NN, rows, columns = _scale(z_BSNN, iterations, eps)
    return _tokens_first(rows[-1][:, None] * p_NN * columns[-1])


def _scale(z_BSNN: jax.Array, iterations: int, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute softmax(z) + eps as [N, N, B, S], and the factors of its rows and columns after each pair, [i, N, B, S].

    Tokens are last: long vectors instead of 4 x 4 ones.
    """
    p = jax.nn.softmax(jnp.moveaxis(z_BSNN, (-2, -1), (0, 1)), axis=1) + eps

    def step(factors: tuple[jax.Array, jax.Array], _):
        row, column = factors
        row = row / (row * _sum_columns(p, column) + eps)
        column = column / (column * _sum_rows(p, row) + eps)
        return (row, column), (row, column)

    row = jnp.ones_like(p[0])
    first = row, 1 / (_sum_rows(p, row) + eps)
    _, others = jax.lax.scan(step, first, length=iterations - 1)
    rows, columns = jax.tree.map(lambda f, rest: jnp.concatenate([f[None], rest]), first, others)
    return p, rows, columns


def _sum_rows(a_NN: jax.Array, row: jax.Array) -> jax.Array:
    """Sum the rows j of a [j, k, ...], each times its factor. Written out, since it fuses better than a reduction."""
    return sum((a_NN[j] * row[j] for j in range(1, len(row))), a_NN[0] * row[0])


def _sum_columns(a_NN: jax.Array, column: jax.Array) -> jax.Array:
    """Sum the columns k of a [j, k, ...], each times its factor."""
    return _sum_rows(jnp.swapaxes(a_NN, 0, 1), column)


def _tokens_first(a_NN: jax.Array) -> jax.Array:
    return jnp.moveaxis(a_NN, (0, 1), (-2, -1))


def _sinkhorn_forward(z_BSNN, iterations, eps):
    return sinkhorn(z_BSNN, iterations, eps), z_BSNN


def _sinkhorn_backward(iterations, eps, z_BSNN, dc_BSNN):
    p, rows, columns = _scale(z_BSNN, iterations, eps)
    dc = jnp.moveaxis(dc_BSNN, (-2, -1), (0, 1))
    dcp = dc * p
    dp = rows[-1][:, None] * dc * columns[-1]
    drow, dcolumn = _sum_columns(dcp, columns[-1]), _sum_rows(dcp, rows[-1])

    # f' = f / (f t + eps) with the sum t gives df = df' eps / (f t + eps)^2 and dt = -df' f'^2.
    def undo(before, after, dafter):
        return dafter * eps * (after / before) ** 2, -dafter * after**2

    def step(carry, factors):
        dp, drow, dcolumn = carry
        (row_before, row), (column_before, column) = factors
        dcolumn, dtotal = undo(column_before, column, dcolumn)
        drow += _sum_columns(p, dtotal)
        dp += row[:, None] * dtotal
        drow, dtotal = undo(row_before, row, drow)
        dcolumn += _sum_rows(p, dtotal)
        dp += dtotal[:, None] * column_before
        return (dp, drow, dcolumn), None

    steps = tuple((f[:-1], f[1:]) for f in (rows, columns))
    (dp, _, dcolumn), _ = jax.lax.scan(step, (dp, drow, dcolumn), steps, reverse=True)
    dp -= dcolumn * columns[0] ** 2  # the first column normalisation, of rows with factor 1
    s = p - eps
    return (_tokens_first(s * (dp - (s * dp).sum(1, keepdims=True))),)


sinkhorn.defvjp(_sinkhorn_forward, _sinkhorn_backward)


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
    return _combine(x_BSND, pre_BSN[..., None])[:, :, 0].astype(x_BSND.dtype)


def expand(y_BSD: jax.Array, x_BSND: jax.Array, mix: Mix) -> jax.Array:
    """Compute the streams after a sublayer, post_k y + sum_j comb_jk x_j for stream k, in x's type."""
    y_BSND = _combine(y_BSD[:, :, None], mix.post_BSN[:, :, None])
    return (_combine(x_BSND, mix.comb_BSNN) + y_BSND).astype(x_BSND.dtype)


@jax.custom_vjp
def _combine(x_BSJD: jax.Array, weights_BSJK: jax.Array) -> jax.Array:
    """Compute the sum of the streams j with the weights of each result k: fp32 [B, S, K, D].

    Written out, not as an einsum: so few products a token cost only memory traffic, and this form fuses. The gradient
    of the streams has the same form; JAX would add up padded slices.
    """
    parts = [weights_BSJK[:, :, j, :, None] * x_BSJD[:, :, j, None].astype(jnp.float32) for j in range(x_BSJD.shape[2])]
    return sum(parts[1:], parts[0])


def _combine_forward(x_BSJD, weights_BSJK):
    return _combine(x_BSJD, weights_BSJK), (x_BSJD, weights_BSJK)


def _combine_backward(residuals, dy_BSKD):
    x_BSJD, weights_BSJK = residuals
    # Each result reads all streams of dy: XLA would fuse what makes dy into that, and compute it for every stream.
    dy_BSKD = jax.lax.optimization_barrier(dy_BSKD)
    dx_BSJD = _combine(dy_BSKD, jnp.swapaxes(weights_BSJK, 2, 3)).astype(x_BSJD.dtype)
    dweights_BSJK = jnp.einsum("bsjd,bskd->bsjk", x_BSJD.astype(jnp.float32), dy_BSKD, precision="highest")
    # One of the two may be split over fewer axes than the result.
    return tuple(jax.reshard(d, jax.typeof(a).sharding) for d, a in ((dx_BSJD, x_BSJD), (dweights_BSJK, weights_BSJK)))


_combine.defvjp(_combine_forward, _combine_backward)


def collapse_head(x_BSND: jax.Array, fn: nnx.Param, base: nnx.Param, scale: nnx.Param, cfg: ModelConfig) -> jax.Array:
    """Collapse the streams before the final norm to [B, S, D], by gates of their own (`hc_head`)."""
    m = _project(x_BSND, fn, cfg.norm_eps)
    return collapse(x_BSND, jax.nn.sigmoid(m * whole(scale) + whole(base)) + cfg.hc_eps)
