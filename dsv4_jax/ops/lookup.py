# SPDX-License-Identifier: Apache-2.0
"""Look up rows of a table that is split over devices by rows: every id is sent to the owner of its row.

Inside `shard_map`. Ids are exchanged in rounds through a fixed-size buffer per pair of devices: skewed ids need
more rounds, never more memory. On emulated devices the buffer holds all ids and there is one round. Letters: N
ids of this device, R rows that it owns, K width, P devices, C size of the buffer.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import emulated, varying

Axes = tuple[str, ...]


def lookup(table_RK: jax.Array, ids_N: jax.Array, axes: Axes, dtype: jnp.dtype) -> jax.Array:
    """Look up rows [N, K], in `dtype`, of a table whose rows are split over the mesh `axes`, in their order.

    An id past the end reads zeros, has no gradient and is sent nowhere. The gradient of the device's own rows
    is one dense array, as large as the rows. Gradients of a row that was read several times, also by other
    devices, are summed in fp32.
    """
    if not axes or jax.lax.axis_size(axes) == 1:
        return _own(table_RK, ids_N, dtype)
    return _exchanged(table_RK, ids_N, axes, dtype)


def _own(table_RK: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Read this device's rows by number, zeros past the last."""
    return table_RK.at[ids].get(mode="fill", fill_value=0).astype(dtype)


class _Requests(NamedTuple):
    """Sort this device's ids by the owners of their rows.

    Attributes:
        order_N: places of the ids, sorted by owner.
        row_N: row of each id at its owner, by the id's place.
        first_P: start of each owner's ids in `order_N`.
        count_P: number of each owner's ids.
        room: ids that one device sends another in a round, at most.
        rows: rows of an owner.
        axes: the devices' mesh axes.
    """

    order_N: jax.Array
    row_N: jax.Array
    first_P: jax.Array
    count_P: jax.Array
    room: int
    rows: int
    axes: Axes

    def round(self, i: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the places [P, C] of the ids sent in round `i` (N: none) and the rows [P, C] that others request."""
        number_C = i * self.room + jnp.arange(self.room)
        used_PC = number_C < self.count_P[:, None]
        N = self.order_N.size
        place_PC = self.order_N.at[jnp.where(used_PC, self.first_P[:, None] + number_C, N)].get(
            mode="fill", fill_value=N
        )
        row_PC = self.row_N.at[place_PC].get(mode="fill", fill_value=self.rows)
        return place_PC, self.swap(row_PC)

    def swap(self, x_PC: jax.Array) -> jax.Array:
        """Send the p-th part to device p; return the parts that the devices send to this one."""
        return jax.lax.all_to_all(x_PC, self.axes, 0, 0, tiled=True)


def _requests(ids_N: jax.Array, rows: int, axes: Axes) -> _Requests:
    """Sort ids by owner; those past the end belong to no owner and come last."""
    P, N = jax.lax.axis_size(axes), ids_N.size
    owner_N, row_N = jnp.divmod(ids_N, rows)
    count_P = varying(jnp.zeros(P, jnp.int32), ids_N).at[owner_N].add(1, mode="drop")
    room = N if emulated() else -(-2 * N // P)  # one round unless an owner gets more than twice an even share
    first_P = jnp.cumsum(count_P) - count_P
    return _Requests(jnp.argsort(owner_N), row_N, first_P, count_P, room, rows, axes)


def _loop(requests: _Requests, step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `step` to x and every round's places and rows, on all devices as often as the fullest buffer needs."""
    one = lambda i, x: step(x, *requests.round(i))
    if requests.room >= requests.order_N.size:
        return one(0, x)
    everyone = tuple(jax.typeof(requests.count_P).manual_axis_type.varying)
    rounds = jax.lax.pmax(-(-requests.count_P.max() // requests.room), everyone)
    return jax.lax.fori_loop(0, rounds, one, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchanged(table_RK: jax.Array, ids_N: jax.Array, axes: Axes, dtype: jnp.dtype) -> jax.Array:
    """Look up rows of all devices; the gradient of a row is sent back to its owner by the same rounds."""
    requests = _requests(ids_N, len(table_RK), axes)

    # A round: owners read the rows that are requested and send them back to the places of their ids.
    def step(y_NK: jax.Array, place_PC: jax.Array, row_PC: jax.Array) -> jax.Array:
        return y_NK.at[place_PC].set(requests.swap(_own(table_RK, row_PC, dtype)), mode="drop")

    y_NK = jnp.zeros((ids_N.size, table_RK.shape[1]), dtype)
    return _loop(requests, step, varying(y_NK, ids_N, table_RK))


def _forward(table_RK, ids_N, axes, dtype):
    return _exchanged(table_RK, ids_N, axes, dtype), (table_RK, ids_N)


def _backward(axes, dtype, residuals, dy_NK):
    table_RK, ids_N = residuals
    requests = _requests(ids_N, len(table_RK), axes)

    # A round: owners receive the gradients [P, C, K] of the rows that were requested and add them to their own.
    def step(d_RK: jax.Array, place_PC: jax.Array, row_PC: jax.Array) -> jax.Array:
        dy_PCK = requests.swap(dy_NK.at[place_PC].get(mode="fill", fill_value=0))
        return d_RK.at[row_PC].add(dy_PCK.astype(jnp.float32), mode="drop")

    d_RK = _loop(requests, step, varying(jnp.zeros(table_RK.shape, jnp.float32), dy_NK, table_RK))
    # Devices that share the table's rows but not the ids each have a part of the gradient.
    differs = lambda a: jax.typeof(a).manual_axis_type.varying
    return jax.lax.psum(d_RK, tuple(sorted(differs(d_RK) - differs(table_RK)))).astype(table_RK.dtype), None


_exchanged.defvjp(_forward, _backward)
