# SPDX-License-Identifier: Apache-2.0
"""Exchange what attention needs of positions that other devices of the `context` axis hold; inside `shard_map`.

A device holds a chunk of S positions of every row. It receives the positions just left of its chunk from its
neighbours and makes the compressed entries whose windows end in the chunk. All entries are then gathered in
the order of the row. With one device along the axis nothing is exchanged.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.ops.documents import Windows

AXIS = "context"


def chunk_start(S: int) -> jax.Array | int:
    """Return the row position of the first token of this device's chunk of S positions."""
    return jax.lax.axis_index(AXIS) * S if jax.lax.axis_size(AXIS) > 1 else 0


def cut_chunk(tree: Any, S: int) -> Any:
    """Cut this device's chunk of S positions out of tables [B, whole row, ...]."""
    if jax.lax.axis_size(AXIS) == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, chunk_start(S), S, axis=1), tree)


def prepend_left(tree: Any, n: int) -> Any:
    """Prepend to chunks [B, S, ...] the `n` positions left of them, at most those of the other devices.

    They come from every neighbour that they span. Positions before the row's first are zeros.
    """
    return jax.tree.map(lambda x: _prepend_left(x, n), tree)


def _prepend_left(x: jax.Array, n: int) -> jax.Array:
    """Prepend the positions of one array; `ppermute` fills devices that receive nothing with zeros."""
    S, devices = x.shape[1], jax.lax.axis_size(AXIS)
    parts = [x]
    # The device `hop` places to the left sends the last `width` positions of its chunk.
    for hop in range(1, min(-(-n // S), devices - 1) + 1):
        width = min(S, n - (hop - 1) * S)
        right = [(device, device + hop) for device in range(devices - hop)]
        parts.insert(0, jax.lax.ppermute(x[:, S - width :], AXIS, right))
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else x


def count_slots(S: int, ratio: int) -> int:
    """Return the number of slots for the windows that end in a chunk of S positions.

    A chunk may have one window more than it has whole ones, as a window that ends in it may begin left of it.
    """
    return S // ratio if jax.sharding.get_abstract_mesh().shape[AXIS] == 1 else -(-S // ratio)


def take_own_windows(windows: Windows, ratio: int, S: int, before: int) -> tuple[Windows, jax.Array | None]:
    """Take the windows that end in this device's chunk, and their numbers in the row: [B, `count_slots`] each.

    Positions count from `before` tokens left of the chunk, as `prepend_left` returns them. Unused slots
    have `end` = `before` + S, as `compress` expects. With one device these are all windows, and None for the
    numbers.
    """
    if jax.lax.axis_size(AXIS) == 1:
        return windows, None
    first, origin = chunk_start(S), chunk_start(S) - before  # row positions of the chunk and of what stands left of it
    # Windows are sorted by their ends, so this device's follow those that end before its chunk.
    number_BM = (windows.end_BM < first).sum(1, keepdims=True) + jnp.arange(count_slots(S, ratio))
    start, end, index = (take_slots(x, number_BM) for x in windows)
    # A slot is unused if its window ends in a later chunk or the row has no window of that number.
    used = (number_BM < windows.end_BM.shape[1]) & (end < first + S)
    return Windows(start - origin, jnp.where(used, end - origin, before + S), index), number_BM


def take_slots(x_BM: jax.Array, number_Bm: jax.Array | None) -> jax.Array:
    """Take the slots of a table [B, M, ...] by number, zeros where M has no such slot; all slots for None."""
    if number_Bm is None:
        return x_BM
    return jax.vmap(lambda x, i: x.at[i].get(mode="fill", fill_value=0))(x_BM, number_Bm)


def gather_entries(x_BmK: jax.Array, windows: Windows, S: int) -> jax.Array:
    """Gather all entries [B, M, K] of the rows, in the order of `windows`, from the `m` slots of each device."""
    m, devices = x_BmK.shape[1], jax.lax.axis_size(AXIS)
    if devices == 1:
        return x_BmK
    everyones = jax.lax.all_gather(x_BmK, AXIS, axis=1, tiled=True)  # [B, devices * m, K], with unused slots between
    # The device in whose chunk a window ends made its entry. Unused slots of the row give a device past the last.
    device_BM = windows.end_BM // S
    # Its slot there counts from the number of that device's first window.
    first_BM = jax.vmap(jnp.searchsorted)(windows.end_BM, device_BM * S)
    slot_BM = device_BM * m + jnp.arange(windows.end_BM.shape[1]) - first_BM
    return take_slots(everyones, jnp.where(device_BM < devices, slot_BM, devices * m))
