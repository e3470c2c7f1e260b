# SPDX-License-Identifier: Apache-2.0
"""Locate the patches and cells of images that are packed one after another, and attend inside each image.

Letters: n lines of `image_grids`, P patches, N patches of all devices, C cells (squares of r x r patches that
become one token), H heads, K head width; within a block T queries and U keys. All of it is local to one device.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.mesh import varying

_LOWEST = -1e30  # below every logit, and finite, so that the difference of two is not NaN


class Patches(NamedTuple):
    """Locate every patch of a group of images.

    Attributes:
        row_P, column_P: place of the patch in its image, in patches.
        start_P, end_P: first patch of its image, and one past its last; 0 and 0 for padding.
    """

    row_P: jax.Array
    column_P: jax.Array
    start_P: jax.Array
    end_P: jax.Array


class Cells(NamedTuple):
    """Map every cell of a group of images from its patches to its token.

    Attributes:
        patch_Crr: numbers of its patches, by row and column in the cell; P past the edges of the image.
        row_C: row of the batch that holds its token, -1 for padding.
        position_C: position of its token in that row.
    """

    patch_Crr: jax.Array
    row_C: jax.Array
    position_C: jax.Array


class _Places(NamedTuple):
    """Give each place its grid (`line`), its row and column there, and whether it is `real`."""

    line: jax.Array
    row: jax.Array
    column: jax.Array
    real: jax.Array


def _places(rows_n: jax.Array, columns_n: jax.Array, size: int) -> _Places:
    """Locate the first `size` places of grids of `rows_n` x `columns_n` that follow one another in reading order.

    The last grid must be empty: places after all others get its number.
    """
    counts = rows_n * columns_n
    ends = jnp.cumsum(counts)
    number = jnp.arange(size)
    line = jnp.minimum(jnp.searchsorted(ends, number, side="right"), len(counts) - 1)
    inside, width = number - (ends - counts)[line], jnp.maximum(columns_n[line], 1)
    return _Places(line, inside // width, inside % width, number < ends[-1])


def make_image_tables(grids_n4: jax.Array, n_patches: int, n_cells: int, r: int) -> tuple[Patches, Cells]:
    """Make the tables of one group of images (V4.1 section 2.1.1).

    Args:
        grids_n4: int [n, 4]: row, start position, patch rows and patch columns of each image. Lines without
            patch rows are padding.
        n_patches: number of patches of the group, padding included.
        n_cells: length of the table of cells, at least their number; see `max_cells`.
        r: side of a cell in patches.
    """
    grids = jnp.concatenate([grids_n4, jnp.zeros_like(grids_n4, shape=(1, 4))])
    batch_row, start, rows, columns = jnp.where(grids[:, 2:3] > 0, grids, 0).T
    first = jnp.cumsum(rows * columns) - rows * columns  # first patch of each image

    # Patches: a grid for each image.
    places = _places(rows, columns, n_patches)
    end = jnp.minimum(first + rows * columns, n_patches)
    spans = (jnp.where(places.real, x[places.line], 0) for x in (first, end))
    patches = Patches(places.row, places.column, *spans)

    # Cells: a grid of ceil(rows / r) x ceil(columns / r) for each image; patch [C, r, r] of the cell at (row, column).
    cell_columns = -(-columns // r)
    places = _places(-(-rows // r), cell_columns, n_cells)
    line = places.line[:, None, None]
    y = places.row[:, None, None] * r + jnp.arange(r)[:, None]
    x = places.column[:, None, None] * r + jnp.arange(r)
    exists = places.real[:, None, None] & (y < rows[line]) & (x < columns[line])
    patch = jnp.where(exists, first[line] + y * columns[line] + x, n_patches)
    # A start delimiter comes before the cells, a newline after each of their rows.
    position = start[places.line] + 1 + places.row * (cell_columns[places.line] + 1) + places.column
    return patches, Cells(patch, jnp.where(places.real, batch_row[places.line], -1), position)


def max_cells(n_patches: int, n_images: int, r: int) -> int:
    """Return the largest number of cells that `n_images` images of `n_patches` patches together can have.

    An image of h x w patches has ceil(h / r) ceil(w / r) cells. That is at most h w and at most
    (h w + r - 1) / r, which a strip one patch wide reaches.
    """
    return min(n_patches, (n_patches + n_images * (r - 1)) // r)


def attend_images(
    q_PHK: jax.Array, k_NHK: jax.Array, v_NHK: jax.Array, start_P: jax.Array, end_P: jax.Array, block: int
) -> jax.Array:
    """Attend from each of P patches to the patches `start` to `end` - 1 of N: [P, H, K], zero if there are none.

    `block` queries meet `block` keys at a time, and only blocks of keys that some of the queries see. So the
    work is that of each image alone, and memory grows linearly with P. The backward pass computes the weights
    again from the logits' normalisers.
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
    """Return the first block of U keys that a block of queries sees, and one past the last."""
    first = jnp.where(start_T < end_T, start_T, jnp.iinfo(start_T.dtype).max).min()
    return first // U, (end_T.max() + U - 1) // U


def _logits(q_THK: jax.Array, k_UHK: jax.Array, start_T: jax.Array, end_T: jax.Array, j: jax.Array) -> jax.Array:
    """Compute the logits [H, T, U] with block j of the keys, -inf for keys of other images."""
    u = j * len(k_UHK) + jnp.arange(len(k_UHK))
    seen_TU = (u >= start_T[:, None]) & (u < end_T[:, None])
    x = jnp.einsum("thk,uhk->htu", q_THK, k_UHK, preferred_element_type=jnp.float32)
    return jnp.where(seen_TU, x * q_THK.shape[-1] ** -0.5, -jnp.inf)


@jax.custom_vjp
def _attend(q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT):
    """Compute `attend_images` on blocks of queries and blocks of keys."""
    return _attend_forward(q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT)[0]


def _attend_forward(q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT):
    (_, T, H, K), U = q_bTHK.shape, k_bUHK.shape[1]

    def one(xs):
        q_THK, start_T, end_T = xs

        # Online softmax: `total` and `o` are sums of exp(logit - top), scaled down whenever `top` rises.
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
        total_HT = jnp.where(total_HT > 0, total_HT, 1.0)  # padding sees no key and gets 0
        return jnp.moveaxis(o_HTK / total_HT[..., None], 0, 1).astype(q_THK.dtype), top_HT + jnp.log(total_HT)

    o_bTHK, normaliser_bHT = jax.lax.map(one, (q_bTHK, start_bT, end_bT))
    # `model.remat = "save_block_outputs"` keeps what has this name: then only the weights are computed again.
    o_bTHK, normaliser_bHT = checkpoint_name((o_bTHK, normaliser_bHT), "product")
    return o_bTHK, (q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT, o_bTHK, normaliser_bHT)


def _attend_backward(residuals, do_bTHK):
    q_bTHK, k_bUHK, v_bUHK, start_bT, end_bT, o_bTHK, normaliser_bHT = residuals
    U = k_bUHK.shape[1]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one(carry, xs):
        q_THK, start_T, end_T, o_THK, normaliser_HT, do_THK = xs
        # sum_u p_u dp_u = do . o, which the gradient of the softmax subtracts from every dp.
        mean_HT = dot("thk,thk->ht", do_THK.astype(jnp.float32), o_THK.astype(jnp.float32))

        def step(j, carry):
            dq_THK, dk_bUHK, dv_bUHK = carry
            # The weights again, then the gradients of weights, logits, queries, keys and values of this pair of blocks.
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
    """Compute what `attend_images` does from a whole [P, N] mask, for the tests."""
    n = jnp.arange(len(k_NHK))
    seen_PN = (n >= start_P[:, None]) & (n < end_P[:, None])
    logits = jnp.einsum("phk,nhk->hpn", q_PHK, k_NHK) * q_PHK.shape[-1] ** -0.5
    some = seen_PN.any(1)[:, None]
    p_HPN = jax.nn.softmax(jnp.where(seen_PN, logits, jnp.where(some, -jnp.inf, 0.0)), axis=-1)
    return jnp.einsum("hpn,nhk->phk", jnp.where(seen_PN, p_HPN, 0.0), v_NHK)
