# SPDX-License-Identifier: Apache-2.0
"""Find the documents and compression windows of packed rows: integer tables, made once per batch.

A document is a run of equal, non-zero `segment_ids`. All layers share the tables [B, ...]. Attention decides
by comparing their row positions what each query sees.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Documents(NamedTuple):
    """Locate the document of each position.

    Attributes:
        first_BS: row position of the first token of each token's document; S for padding, so that
            padding sees nothing and nothing sees it.
        position_BS: position inside the document; 0 for padding.
        last_BS: whether the token is the last of its document.
    """

    first_BS: jax.Array
    position_BS: jax.Array
    last_BS: jax.Array


class Windows(NamedTuple):
    """Locate the compression windows of one ratio m: M = S // m slots per row.

    Windows follow one another from each document's first token. The incomplete tail of a document has no
    window. Unused slots come last, with `end` = S.

    Attributes:
        start_BM: row position of the window's first token.
        end_BM: row position of its last token; queries see the entry from this position on.
        index_BM: number of the window inside its document.
    """

    start_BM: jax.Array
    end_BM: jax.Array
    index_BM: jax.Array


def find_documents(segment_ids: jax.Array) -> Documents:
    """Find the documents of `segment_ids` [B, S], where 0 is padding."""
    B, S = segment_ids.shape
    t = jnp.broadcast_to(jnp.arange(S), (B, S))
    border = jnp.ones((B, 1), bool)
    starts = jnp.concatenate([border, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    real = segment_ids != 0
    first = jax.lax.cummax(jnp.where(starts, t, 0), axis=1)
    last = jnp.concatenate([starts[:, 1:], border], axis=1) & real
    return Documents(jnp.where(real, first, S), jnp.where(real, t - first, 0), last)


def find_windows(docs: Documents, ratio: int) -> Windows:
    """Find the windows of `ratio` tokens of every document (section 2.3)."""
    B, S = docs.first_BS.shape
    real = docs.first_BS < S
    ends = real & (docs.position_BS % ratio == ratio - 1)
    t = jnp.broadcast_to(jnp.arange(S), (B, S))
    end = jnp.sort(jnp.where(ends, t, S), axis=1)[:, : S // ratio]
    position = jnp.take_along_axis(docs.position_BS, jnp.minimum(end, S - 1), axis=1)
    return Windows(end - ratio + 1, end, position // ratio)


def shift_ids(ids: jax.Array, docs: Documents) -> jax.Array:
    """Shift `ids` [B, S] to the next token of the same document; the last token gets the document's first."""
    S = ids.shape[1]
    wrapped = jnp.take_along_axis(ids, jnp.minimum(docs.first_BS, S - 1), axis=1)
    return jnp.where(docs.last_BS, wrapped, jnp.roll(ids, -1, axis=1))


def compress(kv_BSC: jax.Array, gate_BSC: jax.Array, ape_mC: jax.Array, windows: Windows, overlap: bool) -> jax.Array:
    """Pool every window into one entry: fp32 [B, M, K], before norm and RoPE (section 2.3).

    Each channel has its own softmax over the slots of its window, with logits gate + ape. Without `overlap`
    C = K and the slots are the window's tokens. With `overlap` C = 2K: the window's own tokens are read in the
    last K channels, those of the document's window before in the first K.
    """
    m, C = ape_mC.shape
    K = C // 2 if overlap else C

    def slots(first_BM: jax.Array, channels: slice, valid_BM: jax.Array):
        """Read values and logits of the m tokens from `first` on, [B, M, m, K]; 0 and -inf if not valid."""
        t = first_BM[..., None] + jnp.arange(m)
        t = jnp.where(valid_BM[..., None], t, kv_BSC.shape[1])  # out of range reads the fill value

        def take(x: jax.Array, fill: float) -> jax.Array:
            def row(x_SK: jax.Array, t_Mm: jax.Array) -> jax.Array:
                return x_SK.at[t_Mm].get(mode="fill", fill_value=fill, unique_indices=True)

            return jax.vmap(row)(x[..., channels].astype(jnp.float32), t)

        return take(kv_BSC, 0.0), take(gate_BSC, -jnp.inf) + ape_mC[:, channels]

    used = windows.end_BM < kv_BSC.shape[1]
    value, logit = slots(windows.start_BM, slice(C - K, C), used)
    if overlap:
        value_before, logit_before = slots(windows.start_BM - m, slice(0, K), used & (windows.index_BM > 0))
        value = jnp.concatenate([value_before, value], axis=2)
        logit = jnp.concatenate([logit_before, logit], axis=2)
    logit = jnp.where(used[..., None, None], logit, 0.0)  # an unused slot must not softmax over nothing
    return jnp.einsum("bmjk,bmjk->bmk", jax.nn.softmax(logit, axis=2), value)
