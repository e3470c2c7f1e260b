# SPDX-License-Identifier: Apache-2.0
"""Compute the next tokens of rows from a cache of those before (`cache.py`), with the layers of training."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import act_spec
from dsv4_jax.model.block import Hidden, LayerReport, Tokens, collapse_streams, start_carry
from dsv4_jax.model.cache import Behind, Cache, Ngrams, Pending, join_history
from dsv4_jax.model.dspark import compute_memory
from dsv4_jax.model.engram import compute_engram_rows
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.mtp import MTP
from dsv4_jax.model.params import rms_norm
from dsv4_jax.model.place import LayerCache, Recent
from dsv4_jax.model.tables import make_chunk_tables


def extend(
    model: Any,
    cache: Cache,
    inputs: Inputs,
    n_B: jax.Array,
    embeddings: jax.Array | None = None,
    collect: Collection[str] = (),
) -> tuple[Hidden, Pending]:
    """Compute `DeepSeek.extend` from checked inputs."""
    cfg, dtype, T = model.cfg, model.cfg.dtype, inputs.ids.shape[1]
    tables = make_chunk_tables(cfg, cache.length_B, n_B, T, cache.capacity)
    real_BT = jax.reshard(tables.docs.first_BS < T, act_spec(2))

    # N-grams reach back into the cache.
    history, engram_rows = cache.history, None
    if history.ngrams is not None:
        text_BT = real_BT if inputs.image is None else real_BT & ~inputs.image
        ngrams = Ngrams(*map(join_history, history.ngrams, (inputs.ids, text_BT)))
        before = ngrams.ids_RBU.shape[2] - T
        docs = tables.docs._replace(position_BS=cache.length_B[:, None] + jnp.arange(-before, T))
        engram_rows = compute_engram_rows(cfg, model.token_map, ngrams.ids_RBU[0], ngrams.text_RBU[0], docs, before)
        history = history._replace(ngrams=ngrams)

    if history.drafts_RBUK is not None:
        collect = {*collect, "features"}
    tokens = Tokens(inputs.ids, tables, real_BT, inputs.image, engram_rows)
    e_BTD = model.embed_ids(inputs.ids, dtype) if embeddings is None else jax.reshard(embeddings, act_spec(3))
    carry = start_carry(cfg, e_BTD.astype(dtype), dtype, cache.capacity)
    carry, layers, updates = model.run_layers(carry, tokens, inputs.forced_experts, collect, cache.layers)

    mtp = None
    if history.mtp is not None:
        streams = join_history(history.mtp.streams_RBUND, carry.x_BSND)
        x_BTND = jax.reshard(streams[0, :, :T], act_spec(4))
        mtp, report, recent = extend_mtp(model, cache, history.mtp.recent, inputs.ids, n_B, x_BTND)
        layers.append(report)
        history = history._replace(mtp=Behind(streams, recent))
    if history.drafts_RBUK is not None:
        memory_BTD = compute_memory(model, layers)
        context_RBTK = jnp.stack([block.context(memory_BTD, tables, dtype) for block in model.mtp])
        history = history._replace(drafts_RBUK=jnp.concatenate([history.drafts_RBUK, context_RBTK], axis=2))
    h_BTD = rms_norm(collapse_streams(model, carry), cfg.norm_eps, model.norm)
    return Hidden(h_BTD, mtp, layers, tables), Pending(cache, updates, history)


def extend_mtp(
    model: Any, cache: Cache, recent: Recent, ids_BT: jax.Array, n_B: jax.Array, x_BTND: jax.Array
) -> tuple[jax.Array, LayerReport, Recent]:
    """Compute the MTP block for tokens that follow those of a cache.

    Args:
        model: the model.
        cache: the tokens before.
        recent: what the block keeps of them.
        ids_BT: the tokens, laid out as `mesh.act_spec`.
        n_B: number of real tokens in each row.
        x_BTND: streams of the token before each.

    Returns:
        Hidden states [B, T, D] for the head, the block's report, and its kept tokens followed by the new ones.
    """
    block, T, dtype = model.mtp[0], ids_BT.shape[1], model.cfg.dtype
    assert isinstance(block, MTP)
    # The block stands at the tokens before. The first token of a row has none: there the block computes padding.
    tables = make_chunk_tables(model.cfg, cache.length_B - 1, n_B, T, cache.capacity)
    behind_BT = cache.length_B[:, None] + jnp.arange(T) > 0
    real_BT = jax.reshard((tables.docs.first_BS < T) & behind_BT, act_spec(2))
    kept = LayerCache(jax.tree.map(lambda a: a[0], recent), None)
    e_BTD = model.embed_ids(ids_BT, dtype)
    h_BTD, report = block.predict(x_BTND, e_BTD, Tokens(ids_BT, tables, real_BT), dtype, kept)
    assert report.update is not None
    return h_BTD, report._replace(update=None), jax.tree.map(lambda a: a[None], report.update.recent)
