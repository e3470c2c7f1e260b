# SPDX-License-Identifier: Apache-2.0
"""Decode speculatively with DSpark: the drafter proposes several tokens, one pass of the model accepts some of them.

The text is distributed as without drafts; greedy text is the same. Every pass computes the whole row again, so this
measures acceptance and is no fast decoder.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import BATCH, act_spec
from dsv4_jax.model.block import Hidden
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.dspark import Anchors, propose
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.ops.cross_entropy import head_logits


class Speculated(NamedTuple):
    """A continued row, and how the drafts fared.

    Attributes:
        ids_S: the row, filled to its end.
        passes: passes of the model, the first one over the prompt included.
        accepted_n: how often the draft of each slot was accepted.
        drafted: drafts made.
    """

    ids_S: jax.Array
    passes: jax.Array
    accepted_n: jax.Array
    drafted: jax.Array


def accept_likeliest(drafts_n: jax.Array, logits_mV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accept drafts as `accept` does, where every token must be the likeliest one."""
    likeliest_m = jnp.argmax(logits_mV, axis=-1)
    return jnp.cumprod(drafts_n == likeliest_m[:-1]), likeliest_m


def accept(key: jax.Array, drafts_n: jax.Array, q_nV: jax.Array, p_mV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accept drafts by rejection sampling; return what is kept, 1s then 0s [n], and replacements [n + 1].

    A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)). The first that is not kept is replaced by a
    draw from max(p - q, 0), normalised. So the tokens are distributed as if drawn from p. If all n are kept, entry n
    is one more token from p.

    Args:
        key: of the draws.
        drafts_n: drafted tokens.
        q_nV: the distributions that they were drawn from.
        p_mV: those that they should have been drawn from, m = n + 1.
    """
    take = lambda x_nV: jnp.take_along_axis(x_nV, drafts_n[:, None], axis=1)[:, 0]
    chance_n = jax.random.uniform(jax.random.fold_in(key, 0), drafts_n.shape)
    kept_n = jnp.cumprod(chance_n * take(q_nV) < take(p_mV[:-1]))
    left_mV = jnp.maximum(p_mV - jnp.pad(q_nV, ((0, 1), (0, 0))), 0.0)
    return kept_n, jax.random.categorical(jax.random.fold_in(key, 1), jnp.log(left_mV))


@functools.partial(jax.jit, static_argnames="greedy")
def speculate(
    model: DeepSeek, ids_S: jax.Array, first: Any, seed: Any, temperature: Any, *, greedy: bool = False
) -> Speculated:
    """Fill ids [S] from position `first` (at least 1) on, given all tokens before it.

    Args:
        model: a model with draft blocks.
        ids_S: token ids.
        first: first position to fill.
        seed: of the draws.
        temperature: divides all logits; not read if `greedy`, which takes the likeliest tokens.
    """
    n, S = model.cfg.dspark_block_size, len(ids_S)
    sizes = jax.sharding.get_abstract_mesh().shape
    rows = math.prod(sizes[axis] for axis in BATCH)  # equal rows, one for each device
    # Anchors are split over `context`, so each of its devices has one; only the first is real.
    anchors = sizes["context"]
    key = jax.random.key(seed)

    def read(ids_S: jax.Array) -> Hidden:
        return model.hidden(Inputs(jnp.tile(ids_S, (rows, 1))), with_mtp=False, collect=["features"])

    def one(x: jax.Array) -> jax.Array:
        """Return the first row, replicated on every device."""
        return jax.reshard(x, jax.P())[0]

    def draft_round(carry: tuple[Any, ...]):
        ids_S, t, out, passes, accepted_n, drafted = carry
        # t is the first empty position: draft n tokens after the anchor at t - 1.
        draw = jax.random.fold_in(key, t)
        token = jnp.broadcast_to(jax.lax.dynamic_index_in_dim(ids_S, t - 1), (rows, anchors))
        position = jnp.broadcast_to(jnp.where(jnp.arange(anchors) == 0, t - 1, -1), (rows, anchors))
        at = Anchors(*(jax.reshard(x, act_spec(2)) for x in (token, position, jnp.zeros_like(position))))
        noise = None if greedy else jax.random.fold_in(draw, 0)
        made = propose(model, model.draft(out, at), at, noise, 1.0 if greedy else temperature)
        drafts_n, q_nV = one(made.token_BAn)[0], one(made.logits_BAnV)[0]
        # Write the drafts into the row, which the last ones may exceed, and read it: p_mV is what the model predicts
        # after the anchor and after each draft.
        ids = jax.lax.dynamic_update_slice_in_dim(jnp.pad(ids_S, (0, n)), drafts_n.astype(ids_S.dtype), t, 0)[:S]
        out = read(ids)
        after_anchor = jax.lax.dynamic_slice_in_dim(jnp.pad(one(out.h), ((0, n), (0, 0))), t - 1, n + 1)
        p_mV = head_logits(after_anchor, whole(model.head))
        if greedy:
            kept_n, instead_m = accept_likeliest(drafts_n, p_mV)
        else:
            p_mV, q_nV = jax.nn.softmax(p_mV / temperature), jax.nn.softmax(q_nV / temperature)
            kept_n, instead_m = accept(jax.random.fold_in(draw, 1), drafts_n, q_nV, p_mV)
        # Keep the accepted drafts, put the replacement after them, and go on behind it.
        room, kept = S - 1 - t, kept_n.sum()
        ids = jnp.where((jnp.arange(S) == t + kept) & (kept <= room), instead_m[kept].astype(ids.dtype), ids)
        return ids, t + jnp.minimum(kept, room) + 1, out, passes + 1, accepted_n + kept_n, drafted + 1

    start = read(ids_S)
    zero = jnp.zeros((), jnp.int32)
    carry = (ids_S, jnp.asarray(first, jnp.int32), start, zero + 1, jnp.zeros(n, jnp.int32), zero)
    ids_S, _, _, passes, accepted_n, drafted = jax.lax.while_loop(lambda carry: carry[1] < S, draft_round, carry)
    return Speculated(ids_S, passes, accepted_n, drafted)
