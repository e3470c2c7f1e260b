# SPDX-License-Identifier: Apache-2.0
"""Draft a few tokens of every row, to be checked by one pass of the model (V3 section 2.2, V4.1 section 2.4.3).

Both drafters have the same signature. They read what `extend` and `commit` keep for them in the cache, so a rejected
draft leaves no trace. Letters: B rows, n drafted tokens, m = n + 1, V token ids, A anchors of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dsv4_jax.generate.sampling import Rule, apply_rule, draw, over_rows
from dsv4_jax.mesh import act_spec, row_spec
from dsv4_jax.model.cache import Cache
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.decode import extend_mtp
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.dspark import Anchors, compute_drafts, propose
from dsv4_jax.model.params import whole
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.section import ConfigError

_DRAFTS = 2**30  # positions of the random numbers of drafts, which must not be those of the tokens


def full_width(cfg: ModelConfig) -> int:
    """Return the number of tokens that the draft blocks are trained to draft at a time."""
    return cfg.dspark_block_size if cfg.dspark_target_layer_ids else 1


def check_width(cfg: ModelConfig, n: int) -> None:
    """Check that the model can draft n tokens at a time; 0: it need not.

    Raises:
        ConfigError: if n is negative, the model has no draft blocks, or DSpark drafts fewer.
    """
    if n < 0:
        raise ConfigError(f"draft = {n} must be 0 (none) or above")
    if not n:
        return
    if not cfg.n_mtp_layers:
        raise ConfigError(f"draft = {n}: the model has no draft blocks")
    if cfg.dspark_target_layer_ids and n > cfg.dspark_block_size:
        raise ConfigError(f"draft = {n} must be at most model.dspark_block_size = {cfg.dspark_block_size}")


def draft(
    model: DeepSeek, cache: Cache, token_B: jax.Array, active_B: jax.Array, rule: Rule, n: int
) -> tuple[jax.Array, jax.Array]:
    """Draft the n tokens after `token`, which follows those of the cache.

    Args:
        model: a model with an MTP block or draft blocks.
        cache: a cache made with `draft`.
        token_B: last token of each row.
        active_B: whether the row has one.
        rule: how each row draws its tokens.
        n: number of tokens.

    Returns:
        Drafted tokens [B, n], and the logarithms of the probabilities [B, n, V] that they were drawn with.
    """
    run = _draft_dspark if model.cfg.dspark_target_layer_ids else _draft_mtp
    return run(model, cache, token_B, active_B, rule, n)


def _draft_mtp(
    model: DeepSeek, cache: Cache, token_B: jax.Array, active_B: jax.Array, rule: Rule, n: int
) -> tuple[jax.Array, jax.Array]:
    """Draft with the MTP block, one token after another. After the first it reads its own streams."""
    behind = cache.history.mtp
    assert behind is not None
    recent, kept = behind.recent, behind.recent.window_BUK.shape[2]
    x_BND = behind.streams_RBUND[0, :, 0]
    drafts, chances = [], []
    for i in range(n):
        before = dataclasses.replace(cache, length_B=cache.length_B + i)
        chunk = _as_chunk(token_B), active_B, _as_chunk(x_BND)
        h_BTD, report, tokens = extend_mtp(model, before, recent, *chunk)
        recent = jax.tree.map(lambda a: a[:, :, 1 : 1 + kept], tokens)
        assert report.collected.streams is not None
        x_BND = jax.reshard(report.collected.streams, row_spec(4))[:, 0]
        logits_BV = over_rows(head_logits, (h_BTD,), whole(model.head))[:, 0]
        token_B, log_q_BV = over_rows(_draw, (rule, logits_BV, before.length_B))
        drafts.append(token_B)
        chances.append(log_q_BV)
    return jnp.stack(drafts, axis=1), jnp.stack(chances, axis=1)


def _draft_dspark(
    model: DeepSeek, cache: Cache, token_B: jax.Array, active_B: jax.Array, rule: Rule, n: int
) -> tuple[jax.Array, jax.Array]:
    """Draft with the draft blocks, from an anchor that stands behind the W positions of their context."""
    cfg, W = model.cfg, model.cfg.window_size
    contexts_RBWK = cache.history.drafts_RBUK
    assert contexts_RBWK is not None
    # Anchors are split over `context`, so each of its devices has one; only the first is real.
    one = jnp.arange(jax.sharding.get_abstract_mesh().shape["context"]) == 0
    spread = lambda x_B: jax.reshard(jnp.broadcast_to(x_B[:, None], (len(x_B), len(one))), act_spec(2))
    position_BA = jnp.where(spread(active_B) & one, W, -1)
    anchors = Anchors(spread(token_B), position_BA, spread(W - cache.length_B))
    read = lambda number, _: contexts_RBWK[number]
    made = compute_drafts(model, read, anchors, lambda ids: model.embed_ids(ids, cfg.dtype), cfg.dtype)

    def next_token(logits_BAV: jax.Array, k: jax.Array) -> jax.Array:
        rows = rule, jax.reshard(logits_BAV, row_spec(3))[:, 0], cache.length_B + k
        return spread(over_rows(_draw, rows)[0])

    proposal = propose(model, made, anchors, next_token)
    token_BAn, logits_BAnV = (jax.reshard(x, row_spec(x.ndim)) for x in (proposal.token_BAn, proposal.logits_BAnV))
    return token_BAn[:, 0, :n], over_rows(apply_rule, (rule, logits_BAnV[:, 0, :n]))


def _as_chunk(x_B: jax.Array) -> jax.Array:
    """Make the smallest chunk [B, T, ...] that the mesh allows, whose first token is x [B, ...]."""
    more = jax.sharding.get_abstract_mesh().shape["context"] - 1
    chunk = jnp.pad(x_B[:, None], [(0, 0), (0, more), *[(0, 0)] * (x_B.ndim - 1)])
    return jax.reshard(chunk, act_spec(chunk.ndim))


def _draw(rule: Rule, logits_BV: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw a draft of the token after the next of rows of some length; also return the logarithms of its chances."""
    log_q_BV = apply_rule(rule, logits_BV)
    return draw(log_q_BV, rule.seed_B, length_B + _DRAFTS), log_q_BV
