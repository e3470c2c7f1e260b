# SPDX-License-Identifier: Apache-2.0
"""Draw tokens from logits, each row by its own rule and with its own random numbers.

Letters: B rows, V token ids, m tokens of a row, n drafted tokens of a row, m = n + 1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import BATCH, row_spec


class Rule(NamedTuple):
    """The rule by which each row draws its tokens, [B] each.

    Attributes:
        temperature_B: divides the logits; 0 takes the likeliest token.
        top_k_B: draw from the k likeliest tokens; 0: from all.
        top_p_B: draw from the likeliest tokens that together have this probability.
        min_p_B: draw from tokens whose probability is at least this share of that of the likeliest.
        seed_B: seed of the random numbers.
    """

    temperature_B: Any
    top_k_B: Any
    top_p_B: Any
    min_p_B: Any
    seed_B: Any


def over_rows(run: Callable[..., Any], rows: Any, *others: Any) -> Any:
    """Run a function of arrays [B, ...], and of others that are whole on every device, for each device's rows."""
    split = jax.tree.map(lambda x: jax.reshard(jnp.asarray(x), row_spec(jnp.ndim(x))), rows)
    in_specs = (*[jax.P(BATCH)] * len(split), *[jax.P()] * len(others))
    return jax.shard_map(run, in_specs=in_specs, out_specs=jax.P(BATCH))(*split, *others)


def apply_rule(rule: Rule, logits: jax.Array) -> jax.Array:
    """Compute the logarithms of the probabilities that tokens are drawn with, fp32; -inf for those left out.

    Args:
        rule: rules of the rows.
        logits: [B, V], or [B, m, V] for several tokens of each row.
    """
    if logits.ndim == 3:
        m, flat = logits.shape[1], logits.reshape(-1, logits.shape[-1])
        return apply_rule(Rule(*(jnp.repeat(x, m) for x in rule)), flat).reshape(logits.shape)
    logits_BV = logits
    temperature, top_k, top_p, min_p = (x[:, None] for x in rule[:4])
    scaled = logits_BV / jnp.where(temperature > 0, temperature, 1.0)

    def limit(x: jax.Array) -> jax.Array:
        """Leave out what top-k does, then what top-p does; equal logits count by lower id."""
        order = jnp.argsort(-x, axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1)
        x = jnp.where((top_k > 0) & (rank >= top_k), -jnp.inf, x)
        p = jnp.take_along_axis(jax.nn.softmax(x, axis=-1), order, axis=-1)
        likelier = jnp.cumsum(p, axis=-1) - p  # probability of all likelier tokens
        # Rounded sums can reach 1 before the last token. A row without a limit must stay as it is beside others.
        return jnp.where((jnp.take_along_axis(likelier, rank, axis=-1) < top_p) | (top_p >= 1), x, -jnp.inf)

    # Sorting a whole vocabulary is the dearest part: only if a row asks for it.
    limited = jax.lax.cond(((top_k > 0) | (top_p < 1)).any(), limit, lambda x: x, scaled)
    limited = jnp.where(scaled < scaled.max(-1, keepdims=True) + jnp.log(min_p), -jnp.inf, limited)
    likeliest = jnp.where(jnp.arange(logits_BV.shape[-1]) == logits_BV.argmax(-1)[:, None], 0.0, -jnp.inf)
    return jnp.where(temperature > 0, jax.nn.log_softmax(limited, axis=-1), likeliest)


def draw(log_p_BV: jax.Array, seed_B: jax.Array, position_B: jax.Array) -> jax.Array:
    """Draw a token for each row, int32 [B]. The random numbers follow from the row's seed and the token's position."""

    def one(log_p_V: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), log_p_V.shape)
        return jnp.argmax(log_p_V + noise).astype(jnp.int32)

    return jax.vmap(one)(log_p_BV, seed_B, position_B)


def accept(key: jax.Array, drafts_n: jax.Array, q_nV: jax.Array, p_mV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accept drafts by rejection sampling; return what is kept, 1s then 0s [n], and replacements [n + 1].

    A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)). The first that is not kept is replaced by a
    draw from max(p - q, 0), normalised. So the tokens are distributed as if drawn from p. If all n are kept, entry n
    is one more token from p. Where p is 1 for one token, that is the token that is kept or put in place.

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
