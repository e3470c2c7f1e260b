# SPDX-License-Identifier: Apache-2.0
"""Bring tokens to their experts and the results back, in rounds through a buffer of fixed size.

A round handles at most SHARE times the rows that an even load gives a device. Skewed loads need more rounds, never
more memory, and no row is dropped. Inside `shard_map`. Letters: T tokens of this device, k experts of a token, E
experts of this device, P devices of the axis `expert`, R rows of a part of a round, b blocks of ALIGN rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import emulated, varying

AXIS = "expert"
# Rows of a round over those of an even load. Memory and the work on empty rows grow with it. A load that exceeds it
# takes another round, whose fixed cost is small.
SHARE = 1.25
ALIGN = 8  # rows of a block; TPUs store 8 rows of a matrix together, so that blocks move without a change of layout

Carry = TypeVar("Carry")


class Buffer(NamedTuple):
    """Hold an array as `receive` takes rows from it, and what `give` returns to them.

    Attributes:
        rows: the array.
        results: sums of the results, fp32; None: results take the place of the rows.
    """

    rows: jax.Array
    results: Any = None


def sort(key_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find the stable order of the keys and its inverse."""
    number = jnp.arange(key_N.size, dtype=jnp.int32)
    _, order = jax.lax.sort((key_N, varying(number, key_N)), num_keys=1)
    _, inverse = jax.lax.sort((order, varying(number, key_N)), num_keys=1)
    return order, inverse


def count_each(key_N: jax.Array, kinds: int) -> jax.Array:
    """Count how often each number below `kinds` occurs, int32 [kinds]."""
    return varying(jnp.zeros(kinds, jnp.int32), key_N).at[key_N].add(1, mode="drop")


def take(a: jax.Array, index: jax.Array, fill: int = 0) -> jax.Array:
    """Take a[index], and `fill` where the index is past the end or negative."""
    return a.at[jnp.where(index < 0, len(a), index)].get(mode="fill", fill_value=fill)


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Make an array of zeros that varies as `like`."""
    return varying(jnp.zeros(shape, dtype), like)


def sum_choices(a_ND: jax.Array, place_Tk: jax.Array) -> jax.Array:
    """Sum for each token its k rows of `a`, fp32 [T, D]; places outside `a` count nothing."""
    total = zeros((len(place_Tk), a_ND.shape[1]), jnp.float32, a_ND)
    for j in range(place_Tk.shape[1]):
        total += take(a_ND, place_Tk[:, j]).astype(jnp.float32)
    return total


def _append_zero(a: jax.Array) -> jax.Array:
    """Append one row of zeros, which padding reads: faster than to select zeros for each row."""
    return jnp.pad(a, ((0, 1), *((0, 0),) * (a.ndim - 1)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["order_N", "place_Tk", "ends_E", "rounds"],
    meta_fields=["room", "gathers"],
)
@dataclasses.dataclass(frozen=True)
class Gathered:
    """Apply this device's experts to the tokens of all devices, or of this one if it has all experts.

    T counts the gathered tokens here.

    Attributes:
        order_N: (token, expert) pairs sorted by expert; those of other devices' experts and of none come last.
        place_Tk: place of each pair in `order_N`.
        ends_E: end of each expert's pairs in `order_N`.
        rounds: number of rounds.
        room: rows of a round.
        gathers: whether the tokens of all devices are gathered.
    """

    order_N: jax.Array
    place_Tk: jax.Array
    ends_E: jax.Array
    rounds: int | jax.Array
    room: int
    gathers: bool
    parts = 1

    @classmethod
    def plan(cls, experts_Tk: jax.Array, own: int, count: int) -> "Gathered":
        """Plan the rounds for this device's `own` experts of `count`; a token's expert `count` is none."""
        gathers = own < count
        if gathers:
            experts_Tk = jax.lax.all_gather(experts_Tk, AXIS, tiled=True) - jax.lax.axis_index(AXIS) * own
        expert_N = experts_Tk.reshape(-1)
        expert_N = jnp.where((expert_N >= 0) & (expert_N < own), expert_N, own)
        order_N, place_N = sort(expert_N)
        ends_E = jnp.cumsum(count_each(expert_N, own))
        room = min(math.ceil(SHARE * expert_N.size * own / count), expert_N.size)
        rounds = 1 if room == expert_N.size else -(-ends_E[-1] // room)
        return cls(order_N, place_N.reshape(experts_Tk.shape), ends_E, rounds, room, gathers)

    def tokens(self, x_TD: jax.Array) -> Buffer:
        """Prepare an array [T, D] for `receive`."""
        x_TD = self._gather(x_TD)
        return Buffer(x_TD, zeros(x_TD.shape, jnp.float32, x_TD))

    def choices(self, a_Tk: jax.Array) -> Buffer:
        """Prepare an array [T, k] for `receive`."""
        a_N = self._gather(a_Tk).reshape(-1)
        return Buffer(a_N, zeros(a_N.shape, jnp.float32, a_N))

    def _gather(self, a: jax.Array) -> jax.Array:
        return jax.lax.all_gather(a, AXIS, tiled=True) if self.gathers else a

    @property
    def rows(self) -> int:
        """Return the number R of rows of a part."""
        return self.room

    @property
    def used(self) -> float:
        """Return the share of a round's rows that an even load fills."""
        return 1.0 if isinstance(self.rounds, int) else 1 / SHARE

    def sizes(self, part: int | jax.Array) -> jax.Array:
        """Count the rows of each expert in a part, int32 [E]."""
        inside = jnp.clip(self.ends_E - part * self.room, 0, self.room)
        return jnp.diff(inside, prepend=0)

    def receive(self, part: int | jax.Array, buffer: Buffer) -> jax.Array:
        """Take a part's rows [R, ...] of a buffer, sorted by expert; those past the last expert are any."""
        row_R = take(self.order_N, part * self.room + jnp.arange(self.room), fill=-1)
        return take(buffer.rows, row_R // (self.order_N.size // len(buffer.rows)))

    def give(self, part: int | jax.Array, a: jax.Array, buffer: Buffer) -> Buffer:
        """Return a part's results `a` [R, ...] to where its rows came from."""
        place_Tk = self.place_Tk - part * self.room
        given = sum_choices(a, place_Tk) if a.ndim == 2 else take(a, place_Tk.reshape(-1))
        return buffer._replace(results=buffer.results + given)

    def sum_tokens(self, buffer: Buffer) -> jax.Array:
        """Sum the results of each token, [T, D], after all rounds."""
        return self._scatter(buffer.results)

    def collect_choices(self, buffer: Buffer) -> jax.Array:
        """Bring the results to their choices, [T, k], after all rounds."""
        return self._scatter(jnp.reshape(buffer.results, self.place_Tk.shape))

    def _scatter(self, a: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(a, AXIS, tiled=True) if self.gathers else a


class Route(NamedTuple):
    """Describe the slices that every device sends to every other, one for each expert: int [from, to, E] each.

    Attributes:
        count: number of blocks.
        source: first of them in the sender's buffer.
        target: first of them in the receiver's buffer.
    """

    count: jax.Array
    source: jax.Array
    target: jax.Array

    def back(self) -> "Route":
        """Make the route on which the same blocks return."""
        return Route(*(a.swapaxes(0, 1) for a in (self.count, self.target, self.source)))


def exchange(x: jax.Array, to: jax.Array, route: Route) -> jax.Array:
    """Send rows along the route; return `to` with the rows that this device receives.

    XLA:CPU has no ragged all-to-all; there all rows are gathered.
    """
    blocks = lambda a: a.reshape(-1, ALIGN, *a.shape[1:])
    y = jax.lax.platform_dependent(blocks(x), blocks(to), route, cpu=_exchange_gathered, default=_exchange_ragged)
    return y.reshape(to.shape)


def _exchange_ragged(x: jax.Array, to: jax.Array, route: Route) -> jax.Array:
    me = jax.lax.axis_index(AXIS)
    sends = (a[me].reshape(-1) for a in (route.source, route.count, route.target))
    return jax.lax.ragged_all_to_all(x, to, *sends, route.count[:, me].reshape(-1), axis_name=AXIS)


def _exchange_gathered(x: jax.Array, to: jax.Array, route: Route) -> jax.Array:
    """Do what `_exchange_ragged` does with the blocks of all devices [P, b, ...]."""
    me = jax.lax.axis_index(AXIS)
    count, source, target = (a[:, me].reshape(-1) for a in route)
    everyones = jax.lax.all_gather(x, AXIS)
    # For each block of the result: the one slice that it is of, and its number there.
    number = jnp.arange(len(to))[:, None] - target
    here = (number >= 0) & (number < count)
    slice_b = here.argmax(1)
    block = jnp.take_along_axis(number, slice_b[:, None], 1)[:, 0] + source[slice_b]
    rows = everyones.at[slice_b // route.count.shape[2], block].get(mode="clip")
    return jnp.where(here.any(1).reshape(-1, *(1,) * (x.ndim - 1)), rows, to)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["row_N", "place_Tk", "count", "source", "target", "rounds"],
    meta_fields=["room", "parts"],
)
@dataclasses.dataclass(frozen=True)
class Sent:
    """Send each (token, expert) pair as a row to the expert's device, and its result back.

    A device's buffer has its pairs sorted by expert. Each expert's rows are padded to whole blocks, N rows in all. The
    results of a round take the place of the rows that it has sent, so that one buffer serves both.

    Attributes:
        row_N: pair in each row of the buffer; T k for padding.
        place_Tk: row of each pair in the buffer; N for pairs of no expert.
        count: number of blocks [from, to, E] of every slice.
        source: first of them in the sender's buffer.
        target: first of them in the order in which the receiver handles them: by expert, then sender.
        rounds: number of rounds, the same on all devices.
        room: blocks of a part of a round.
        parts: parts of a round; the exchange of one can run while another is computed.
    """

    row_N: jax.Array
    place_Tk: jax.Array
    count: jax.Array
    source: jax.Array
    target: jax.Array
    rounds: int | jax.Array
    room: int
    parts: int

    @classmethod
    def plan(cls, experts_Tk: jax.Array, own: int, count: int, parts: int) -> "Sent":
        """Plan the rounds for `own` experts a device of `count`; a token's expert `count` is none."""
        (T, k), P = experts_Tk.shape, count // own
        expert_N = experts_Tk.reshape(-1)
        pairs = expert_N.size
        order, place = sort(expert_N)
        sizes = count_each(expert_N, count)
        blocks = -(-sizes // ALIGN)
        before = lambda a, axis=0: jnp.cumsum(a, axis) - a
        # Experts' first rows among the sorted pairs and in the buffer, where padding follows each expert's rows.
        sorted_at, padded_at = before(sizes), before(blocks) * ALIGN
        rows = -(-(pairs + (ALIGN - 1) * min(count, pairs)) // ALIGN) * ALIGN
        number = jnp.arange(rows)
        expert = jnp.searchsorted(padded_at, number, side="right", method="compare_all") - 1
        within = number - padded_at[expert]
        row_N = jnp.where(within < sizes[expert], take(order, sorted_at[expert] + within), pairs)
        moved = take(padded_at - sorted_at, expert_N)
        place_N = jnp.where(expert_N < count, place + moved, rows)
        # All devices know how many blocks each sends to each.
        everyones = jax.lax.all_gather(blocks, AXIS)
        source = before(everyones, 1).reshape(P, P, own)
        blocks_PPE = everyones.reshape(P, P, own)
        arriving = blocks_PPE.transpose(1, 2, 0).reshape(P, own * P)
        target = before(arriving, 1).reshape(P, own, P).transpose(2, 0, 1)
        # Emulated devices cannot loop over collectives: their buffer has room for all rows, and there is one round.
        most = P * rows if emulated() else min(rows + math.ceil((SHARE - 1) * pairs), P * rows)
        room = -(-most // (ALIGN * parts))
        rounds: int | jax.Array = 1
        if not emulated():
            everyone = tuple(sorted(jax.typeof(experts_Tk).manual_axis_type.varying))
            rounds = jax.lax.pmax(-(-arriving.sum(1).max() // (room * parts)), everyone)
        return cls(row_N, place_N.reshape(T, k), blocks_PPE, source, target, rounds, room, parts)

    def _route(self, part: int | jax.Array) -> Route:
        """Cut from every slice the blocks of a part."""
        first, last = part * self.room, (part + 1) * self.room
        begin, end = (jnp.clip(a, first, last) for a in (self.target, self.target + self.count))
        return Route(end - begin, self.source + begin - self.target, begin - first)

    def tokens(self, x_TD: jax.Array) -> Buffer:
        """Prepare an array [T, D] for `receive`."""
        return Buffer(_append_zero(x_TD)[self.row_N // self.place_Tk.shape[1]])

    def choices(self, a_Tk: jax.Array) -> Buffer:
        """Prepare an array [T, k] for `receive`."""
        return Buffer(_append_zero(a_Tk.reshape(-1))[self.row_N])

    @property
    def rows(self) -> int:
        """Return the number R of rows of a part."""
        return self.room * ALIGN

    @property
    def used(self) -> float:
        """Return the share of a round's rows that an even load fills."""
        return 1.0 if isinstance(self.rounds, int) else self.place_Tk.size / (self.rows * self.parts)

    def sizes(self, part: int | jax.Array) -> jax.Array:
        """Count the rows of each expert in a part, int32 [E]."""
        return self._route(part).count[:, jax.lax.axis_index(AXIS)].sum(0) * ALIGN

    def receive(self, part: int | jax.Array, buffer: Buffer) -> jax.Array:
        """Take a part's rows [R, ...] of a buffer, sorted by expert; those past the last expert are any."""
        x = buffer.rows
        return exchange(x, zeros((self.rows, *x.shape[1:]), x.dtype, x), self._route(part))

    def give(self, part: int | jax.Array, a: jax.Array, buffer: Buffer) -> Buffer:
        """Return a part's results `a` [R, ...] to where its rows came from."""
        return Buffer(exchange(a.astype(buffer.rows.dtype), buffer.rows, self._route(part).back()))

    def sum_tokens(self, buffer: Buffer) -> jax.Array:
        """Sum the results of each token, [T, D], after all rounds."""
        return sum_choices(buffer.rows, self.place_Tk)

    def collect_choices(self, buffer: Buffer) -> jax.Array:
        """Bring the results to their choices, [T, k], after all rounds."""
        return take(buffer.rows, self.place_Tk)


def run_rounds(plan: Gathered | Sent, step: Callable[[int, int | jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Apply step(part, number of the part over all rounds, carry) to all parts, from the last round to the first."""

    def one(turn: int | jax.Array, carry: Carry) -> Carry:
        first = (plan.rounds - 1 - turn) * plan.parts
        for part in range(plan.parts):
            carry = step(part, first + part, carry)
        return carry

    return one(0, carry) if isinstance(plan.rounds, int) else jax.lax.fori_loop(0, plan.rounds, one, carry)
