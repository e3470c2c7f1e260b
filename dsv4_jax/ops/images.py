# SPDX-License-Identifier: Apache-2.0
"""Images packed one after another: where their patches and cells lie, and attention inside each image.

Letters: n lines of `image_grids`, P patches, N patches of all devices, C cells (squares of patches that become
one token), H heads, K head width; within a block T queries and U keys. All of it is local to one device.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.mesh import varying

_LOWEST = -1e30  # below every logit, and finite: differences of it are no NaN


class Patches(NamedTuple):
    """Where every patch of a group lies.

    Attributes:
        row_P, column_P: its place in its image.
        start_P, end_P: its image has the patches from start to before end; 0 and 0 for padding.
    """

    row_P: jax.Array
    column_P: jax.Array
    start_P: jax.Array
    end_P: jax.Array


class Cells(NamedTuple):
    """Where every cell of a group comes from and goes to.

    Attributes:
        patch_Crr: its patches, by their row and column in the cell; P where the image has ended.
        row_C: row of the batch, -1 for padding.
        position_C: position in that row.
    """

    patch_Crr: jax.Array
    row_C: jax.Array
    position_C: jax.Array


class _Places(NamedTuple):
    line: jax.Array
    row: jax.Array
    column: jax.Array
    real: jax.Array


def _places(rows_n: jax.Array, columns_n: jax.Array, size: int) -> _Places:
    """Grid, row and column of the first `size` places of grids that follow one another in reading order.

    The last grid must be empty: it stands for what comes after all others.
    """
    counts = rows_n * columns_n
    ends = jnp.cumsum(counts)
    number = jnp.arange(size)
    line = jnp.minimum(jnp.searchsorted(ends, number, side="right"), len(counts) - 1)
    inside, width = number - (ends - counts)[line], jnp.maximum(columns_n[line], 1)
    return _Places(line, inside // width, inside % width, number < ends[-1])


def image_tables(grids_n4: jax.Array, n_patches: int, n_cells: int, r: int) -> tuple[Patches, Cells]:
    """Tables of one group of images (V4.1 section 2.1.1).

    Args:
        grids_n4: int [n, 4]: row, start position, patch rows and columns of each image; lines without
            patch rows are padding.
        n_patches: patches of the group, padding included.
        n_cells: at least as many as its images have; see `max_cells`.
        r: patches of a cell's side.
    """
    grids = jnp.concatenate([grids_n4, jnp.zeros_like(grids_n4, shape=(1, 4))])
    batch_row, start, rows, columns = jnp.where(grids[:, 2:3] > 0, grids, 0).T
    first = jnp.cumsum(rows * columns) - rows * columns

    at = _places(rows, columns, n_patches)
    end = jnp.minimum(first + rows * columns, n_patches)
    spans = (jnp.where(at.real, x[at.line], 0) for x in (first, end))
    patches = Patches(at.row, at.column, *spans)

    cell_columns = -(-columns // r)
    at = _places(-(-rows // r), cell_columns, n_cells)
    line = at.line[:, None, None]
    y = at.row[:, None, None] * r + jnp.arange(r)[:, None]
    x = at.column[:, None, None] * r + jnp.arange(r)
    exists = at.real[:, None, None] & (y < rows[line]) & (x < columns[line])
    patch = jnp.where(exists, first[line] + y * columns[line] + x, n_patches)
    # A start delimiter comes before the cells, a newline after each of their rows.
    position = start[at.line] + 1 + at.row * (cell_columns[at.line] + 1) + at.column
    return patches, Cells(patch, jnp.where(at.real, batch_row[at.line], -1), position)


def max_cells(n_patches: int, n_images: int, r: int) -> int:
    """Cells that images of `n_patches` in all can have at most.

    An image of h x w patches has ceil(h / r) ceil(w / r) cells, at most one for each patch, and at most
    (h w + r - 1) / r: a strip one patch wide has the most.
    """
    return min(n_patches, (n_patches + n_images * (r - 1)) // r)


def attend_images(
    q_PHK: jax.Array, k_NHK: jax.Array, v_NHK: jax.Array, start_P: jax.Array, end_P: jax.Array, block: int
) -> jax.Array:
    """Attention [P, H, K] of P patches to those of all N from `start` to before `end`; zero if there are none.

    `block` queries meet `block` keys at a time, and only blocks of keys that some query of the block
    sees, so that the work is that of each image alone and memory grows linearly with P. The backward
    pass computes the weights again from the logits' normalisers.
    """
    if not len(q_PHK):
        return q_PHK

    def blocks(x: jax.Array) -> jax.Array:
        n_blocks = -(-len(x) // block)
        size = -(-len(x) // n_blocks)
        x = jnp.pad(x, [(0, n_blocks * size - len(x))] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(n_blocks, size, *x.shape[1:])

    o_bTHK = _attend(*map(blocks, (q_PHK, k_NHK, v_NHK, start_P, end_P)))
    return o_bTHK.reshape(-1, *q_PHK.shape[1:])[: len(q_PHK)]


def _block_range(start_T: jax.Array, end_T: jax.Array, U: int) -> tuple[jax.Array, jax.Array]:
    """First and last + 1 block, of U keys each, that a block of queries sees."""
    first = jnp.where(start_T < end_T, start_T, jnp.iinfo(start_T.dtype).max).min()
    return first // U, (end_T.max() + U - 1) // U


def _logits(q_THK: jax.Array, k_UHK: jax.Array, start_T: jax.Array, end_T: jax.Array, j: jax.Array) -> jax.Array:
    """Logits [H, T, U] with block j of the keys, -inf for keys of other images."""
    u = j * len(k_UHK) + jnp.arange(len(k_UHK))
    seen_TU = (u >= start_T[:, None]) & (u < end_T[:, None])
    x = jnp.einsum("thk,uhk->htu", q_THK, k_UHK, preferred_element_type=jnp.float32)
    return jnp.where(seen_TU, x * q_THK.shape[-1] ** -0.5, -jnp.inf)


@jax.custom_vjp
def _attend(q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT):
    """`attend_images` on blocks of queries and blocks of keys."""
    return _attend_forward(q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT)[0]


def _attend_forward(q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT):
    (_, T, H, K), U = q_bTHK.shape, k_bUHK.shape[1]

    def one(xs):
        q_THK, start_T, end_T = xs

        def step(j, carry):
            top_HT, total_HT, o_HTK = carry
            x_HTU = _logits(q_THK, k_bUHK[j], start_T, end_T, j)
            new_HT = jnp.maximum(top_HT, x_HTU.max(-1))
            p_HTU, kept_HT = jnp.exp(x_HTU - new_HT[..., None]), jnp.exp(top_HT - new_HT)
            v_UHK = v_bUHK[j]
            pv = jnp.einsum("htu,uhk->htk", p_HTU.astype(v_UHK.dtype), v_UHK, preferred_element_type=jnp.float32)
            return new_HT, total_HT * kept_HT + p_HTU.sum(-1), o_HTK * kept_HT[..., None] + pv

        nothing = (jnp.full((H, T), _LOWEST), jnp.zeros((H, T)), jnp.zeros((H, T, K)))
        nothing = tuple(varying(x, q_THK, start_T) for x in nothing)
        top_HT, total_HT, o_HTK = jax.lax.fori_loop(*_block_range(start_T, end_T, U), step, nothing)
        total_HT = jnp.where(total_HT > 0, total_HT, 1.0)
        return jnp.moveaxis(o_HTK / total_HT[..., None], 0, 1).astype(q_THK.dtype), top_HT + jnp.log(total_HT)

    o_bTHK, normaliser_bHT = jax.lax.map(one, (q_bTHK, start_bT, end_bT))
    o_bTHK, normaliser_bHT = checkpoint_name((o_bTHK, normaliser_bHT), "product")
    return o_bTHK, (q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT, o_bTHK, normaliser_bHT)


def _attend_backward(residuals, do_bTHK):
    q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT, o_bTHK, normaliser_bHT = residuals
    U = k_bUHK.shape[1]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one(carry, xs):
        q_THK, start_T, end_T, o_THK, normaliser_HT, do_THK = xs
        # sum_u p_u dp_u, which the softmax's gradient subtracts from every dp
        mean_HT = dot("thk,thk->ht", do_THK.astype(jnp.float32), o_THK.astype(jnp.float32))

        def step(j, carry):
            dq_THK, dk_bUHK, dv_bUHK = carry
            k_UHK, v_UHK = k_bUHK[j], v_bUHK[j]
            p_HTU = jnp.exp(_logits(q_THK, k_UHK, start_T, end_T, j) - normaliser_HT[..., None])
            dp_HTU = dot("thk,uhk->htu", do_THK, v_UHK)
            dx_HTU = p_HTU * (dp_HTU - mean_HT[..., None]) * q_THK.shape[-1] ** -0.5
            p_HTU, dx_HTU = p_HTU.astype(q_THK.dtype), dx_HTU.astype(q_THK.dtype)
            dq_THK += dot("htu,uhk->thk", dx_HTU, k_UHK)
            dk_bUHK = dk_bUHK.at[j].add(dot("htu,thk->uhk", dx_HTU, q_THK))
            return dq_THK, dk_bUHK, dv_bUHK.at[j].add(dot("htu,thk->uhk", p_HTU, do_THK))

        dq_THK = varying(jnp.zeros(q_THK.shape), q_THK, start_T)
        dq_THK, *carry = jax.lax.fori_loop(*_block_range(start_T, end_T, U), step, (dq_THK, *carry))
        return tuple(carry), dq_THK

    zeros = varying(jnp.zeros(k_bUHK.shape), q_bTHK, start_bT)
    xs = (q_bTHK, start_bT, end_bT, o_bTHK, normaliser_bHT, do_bTHK)
    (dk_bUHK, dv_bUHK), dq_bTHK = jax.lax.scan(one, (zeros, zeros), xs)
    return *(x.astype(q_bTHK.dtype) for x in (dq_bTHK, dk_bUHK, dv_bUHK)), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def attend_images_reference(
    q_PHK: jax.Array, k_NHK: jax.Array, v_NHK: jax.Array, start_P: jax.Array, end_P: jax.Array
) -> jax.Array:
    """What `attend_images` computes, from a whole [P, N] mask: the oracle of the tests."""
    n = jnp.arange(len(k_NHK))
    seen_PN = (n >= start_P[:, None]) & (n < end_P[:, None])
    logits = jnp.einsum("phk,nhk->hpn", q_PHK, k_NHK) * q_PHK.shape[-1] ** -0.5
    some = seen_PN.any(1)[:, None]
    p_HPN = jax.nn.softmax(jnp.where(seen_PN, logits, jnp.where(some, -jnp.inf, 0.0)), axis=-1)
    return jnp.einsum("hpn,nhk->phk", jnp.where(seen_PN, p_HPN, 0.0), v_NHK)
