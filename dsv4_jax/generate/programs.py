# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of a generator: read a chunk of tokens of every row into the cache, and draw what comes next.

The model comes as its leaves and their tree, since flattening it anew would take longer than calling a program.

Letters: B rows, T tokens of a chunk, n drafts, m = n + 1, D width, V token ids.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.generate import speculate
from dsv4_jax.generate.sampling import Rule, accept, apply_rule, draw, over_rows
from dsv4_jax.mesh import row_spec
from dsv4_jax.model.block import Hidden
from dsv4_jax.model.cache import Cache, commit
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.model.token_types import TEXT
from dsv4_jax.ops.cross_entropy import head_logits


class Chunk(NamedTuple):
    """What a step reads: tokens, their number, and the tokens before them, of each row.

    Attributes:
        ids_BT: token ids, padded.
        n_B: number of real tokens, 0 for an idle row.
        length_B: tokens in the cache before.
        rule: how each row draws its next token.
        types_BT: kinds of the positions; None without images.
        images_BTD: embeddings at positions of images; None without.
    """

    ids_BT: Any
    n_B: Any
    length_B: Any
    rule: Rule
    types_BT: Any
    images_BTD: Any


class Drawn(NamedTuple):
    """What a step draws after the tokens that it reads.

    Attributes:
        token_Bm: tokens of each row.
        logprob_Bm: logarithms of their probabilities under the model, without temperature and limits.
        kept_B: number of drafts among them that were accepted; one more token is real.
        experts: experts of all tokens that were read, [B, T, k] of each layer; None unless they are kept.
    """

    token_Bm: jax.Array
    logprob_Bm: jax.Array
    kept_B: jax.Array
    experts: list[jax.Array] | None


@functools.partial(jax.jit, static_argnames=("tree", "keep_experts"), donate_argnames="cache")
def read_chunk(
    leaves: list[jax.Array], cache: Cache, chunk: Chunk, *, tree: Any, keep_experts: bool
) -> tuple[Cache, Drawn]:
    """Read a chunk into the cache, and draw the token after it."""
    model, cache = _unpack(leaves, tree, cache, chunk)
    ids, n_B, embeddings = jnp.asarray(chunk.ids_BT), jnp.asarray(chunk.n_B), None
    if chunk.images_BTD is not None:
        e_BTD = jax.reshard(model.embed_ids(ids, model.cfg.dtype), row_spec(3))
        image_BT1 = jax.reshard(jnp.asarray(chunk.types_BT) != TEXT, row_spec(2))[..., None]
        embeddings = jnp.where(image_BT1, jax.reshard(chunk.images_BTD, row_spec(3)), e_BTD)
    out, pending = model.extend(cache, ids, n_B, embeddings=embeddings, token_types=chunk.types_BT)

    def rows(h_BTD: jax.Array, n_B: jax.Array, position_B: jax.Array, rule: Rule, head: jax.Array):
        h_BD = jnp.take_along_axis(h_BTD, jnp.maximum(n_B - 1, 0)[:, None, None], axis=1)[:, 0]
        logits_BV = head_logits(h_BD, head)
        token_B = draw(apply_rule(rule, logits_BV), rule.seed_B, position_B)
        return token_B[:, None], _logprobs(logits_BV[:, None], token_B[:, None]), jnp.zeros_like(token_B)

    drawn = over_rows(rows, (out.h, n_B, chunk.length_B + n_B, chunk.rule), whole(model.head))
    return commit(pending, n_B), _drawn(model, drawn, out, keep_experts)


@functools.partial(jax.jit, static_argnames=("tree", "keep_experts", "width"), donate_argnames="cache")
def read_drafts(
    leaves: list[jax.Array], cache: Cache, chunk: Chunk, *, tree: Any, keep_experts: bool, width: int
) -> tuple[Cache, Drawn]:
    """Draft `width` tokens after the first of the chunk, read all, and keep those that the model accepts.

    The text is distributed as without drafts; text of likeliest tokens is the same.
    """
    model, cache = _unpack(leaves, tree, cache, chunk)
    active_B, token_B = jnp.asarray(chunk.n_B), jnp.asarray(chunk.ids_BT)[:, 0]
    active_B, token_B = (jax.reshard(x, row_spec(1)) for x in (active_B, token_B))
    drafts_Bn, log_q_BnV = speculate.draft(model, cache, token_B, active_B > 0, chunk.rule, width)
    ids_BT = jnp.concatenate([token_B[:, None], drafts_Bn], axis=1)
    ids_BT = jnp.pad(ids_BT, [(0, 0), (0, -(width + 1) % jax.sharding.get_abstract_mesh().shape["context"])])
    out, pending = model.extend(cache, ids_BT, active_B * (width + 1))

    def rows(h_BTD, drafts_Bn, log_q_BnV, length_B, rule: Rule, head: jax.Array):
        logits_BmV = head_logits(h_BTD[:, : width + 1], head)
        log_p_BmV = apply_rule(rule, logits_BmV)

        def row(seed, length, drafts_n, log_q_nV, log_p_mV):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), length), width)
            kept_n, instead_m = accept(key, drafts_n, jnp.exp(log_q_nV), jnp.exp(log_p_mV))
            return kept_n.sum(), jnp.where(jnp.arange(width + 1) < kept_n.sum(), jnp.pad(drafts_n, (0, 1)), instead_m)

        kept_B, token_Bm = jax.vmap(row)(rule.seed_B, length_B, drafts_Bn, log_q_BnV, log_p_BmV)
        return token_Bm, _logprobs(logits_BmV, token_Bm), kept_B

    drawn = over_rows(rows, (out.h, drafts_Bn, log_q_BnV, cache.length_B, chunk.rule), whole(model.head))
    return commit(pending, active_B * (drawn[2] + 1)), _drawn(model, drawn, out, keep_experts)


def _unpack(leaves: list[jax.Array], tree: Any, cache: Cache, chunk: Chunk) -> tuple[DeepSeek, Cache]:
    """Make the model, and a cache with the lengths of the chunk."""
    length_B = jax.reshard(jnp.asarray(chunk.length_B), row_spec(1))
    return jax.tree.unflatten(tree, leaves), dataclasses.replace(cache, length_B=length_B)


def _logprobs(logits_BmV: jax.Array, token_Bm: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits_BmV, axis=-1), token_Bm[..., None], axis=-1)[..., 0]


def _drawn(model: DeepSeek, drawn: tuple[jax.Array, ...], out: Hidden, keep_experts: bool) -> Drawn:
    """Collect results, which any process can read."""
    layers = out.layers[: model.cfg.n_layers]  # without the MTP block
    experts = [report.experts for report in layers] if keep_experts else None
    return jax.tree.map(lambda x: jax.reshard(x, jax.P()), Drawn(*drawn, experts))


@functools.partial(jax.jit, static_argnames="tree")
def embed_prompt(leaves: list[jax.Array], ids: Any, types: Any, patches: Any, grids: Any, *, tree: Any) -> jax.Array:
    """Compute the embeddings [S, D] of a prompt with images, whose row is repeated for every row of devices."""
    model: DeepSeek = jax.tree.unflatten(tree, leaves)
    inputs = Inputs(jnp.asarray(ids), token_types=types, patches=patches, image_grids=grids)
    return jax.reshard(model.embed_inputs(inputs.checked(model.cfg))[0], jax.P())[0].astype(jnp.float32)
