# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of a generator: read a chunk of tokens of every row into the cache, and draw what comes next.

The model comes as its leaves and their tree, since flattening it anew would take longer than calling a program.

Letters: B rows, T tokens of a chunk, D width, V token ids.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.generate.sampling import Rule, apply_rule, draw
from dsv4_jax.mesh import BATCH, row_spec
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
    """What a step draws: the token after the last one of each row, its log-probability, and all experts by layer."""

    token_B: jax.Array
    logprob_B: jax.Array
    experts: list[jax.Array] | None


@functools.partial(jax.jit, static_argnames=("tree", "keep_experts"), donate_argnames="cache")
def read_chunk(
    leaves: list[jax.Array], cache: Cache, chunk: Chunk, *, tree: Any, keep_experts: bool
) -> tuple[Cache, Drawn]:
    """Read a chunk into the cache, and draw the token after it."""
    model: DeepSeek = jax.tree.unflatten(tree, leaves)
    cache = dataclasses.replace(cache, length_B=jax.reshard(jnp.asarray(chunk.length_B), row_spec(1)))
    ids, n_B, embeddings = jnp.asarray(chunk.ids_BT), jnp.asarray(chunk.n_B), None
    if chunk.images_BTD is not None:
        e_BTD = jax.reshard(model.embed_ids(ids, model.cfg.dtype), row_spec(3))
        image_BT1 = jax.reshard(jnp.asarray(chunk.types_BT) != TEXT, row_spec(2))[..., None]
        embeddings = jnp.where(image_BT1, jax.reshard(chunk.images_BTD, row_spec(3)), e_BTD)
    out, pending = model.extend(cache, ids, n_B, embeddings=embeddings, token_types=chunk.types_BT)
    token_B, logprob_B = draw_next(model, out.h, n_B, chunk.length_B + n_B, chunk.rule)
    experts = [replicated(report.experts) for report in out.layers] if keep_experts else None
    return commit(pending, n_B), Drawn(replicated(token_B), replicated(logprob_B), experts)


def draw_next(
    model: DeepSeek, h_BTD: jax.Array, n_B: jax.Array, position_B: jax.Array, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Draw the token after the n-th of each row, to stand at `position`; also return its log-probability."""

    def rows(h_BTD: jax.Array, n_B: jax.Array, position_B: jax.Array, rule: Rule, head: jax.Array):
        h_BD = jnp.take_along_axis(h_BTD, jnp.maximum(n_B - 1, 0)[:, None, None], axis=1)[:, 0]
        logits_BV = head_logits(h_BD, head)
        token_B = draw(apply_rule(rule, logits_BV), rule.seed_B, position_B)
        picked_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV, axis=-1), token_B[:, None], axis=1)[:, 0]
        return token_B, picked_B

    by_row = lambda tree: jax.tree.map(lambda x: jax.reshard(jnp.asarray(x), row_spec(jnp.ndim(x))), tree)
    run = jax.shard_map(rows, in_specs=(*[jax.P(BATCH)] * 4, jax.P()), out_specs=jax.P(BATCH))
    return run(*by_row((h_BTD, n_B, position_B, rule)), whole(model.head))


@functools.partial(jax.jit, static_argnames="tree")
def embed_prompt(leaves: list[jax.Array], ids: Any, types: Any, patches: Any, grids: Any, *, tree: Any) -> jax.Array:
    """Compute the embeddings [S, D] of a prompt with images, whose row is repeated for every row of devices."""
    model: DeepSeek = jax.tree.unflatten(tree, leaves)
    inputs = Inputs(jnp.asarray(ids), token_types=types, patches=patches, image_grids=grids)
    return replicated(model.embed_inputs(inputs.checked(model.cfg))[0])[0].astype(jnp.float32)


def replicated(x: jax.Array) -> jax.Array:
    """Give every device all of an array, so that any process can read it."""
    return jax.reshard(x, jax.P())
