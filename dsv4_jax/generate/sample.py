# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt with tokens drawn from the model."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.data.batch import HostBatch
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.generate.speculate import Speculated, speculate
from dsv4_jax.mesh import BATCH, ensure_mesh
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.model.token_types import TEXT
from dsv4_jax.ops.cross_entropy import head_logits


def sample(
    model: DeepSeek,
    tokenizer: Tokenizer,
    prompt: str,
    n: int,
    seed: int,
    temperature: float = 0.8,
    draft: bool = False,
    past_end: bool = False,
) -> tuple[str, Speculated | None]:
    """Return the text of at most `n` tokens after `prompt`, which starts a document.

    The whole row is computed again for every token: right for a look at a small model.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        draft: propose tokens with the draft blocks, and return their statistics beside the text.
        past_end: return all `n` tokens, each document on a line of its own. False: stop where the model ends the
            document.
    """
    (start,), border = tokenizer.encode([prompt]), tokenizer.border
    with ensure_mesh():
        multiple = jax.sharding.get_abstract_mesh().shape["context"]
    length = 1 + len(start) + n
    ids = np.zeros((1, length + -length % multiple), np.int32)
    ids[0, : 1 + len(start)] = [border, *start]
    first, speculated = jnp.int32(1 + len(start)), None
    if draft:
        speculated = speculate(model, jnp.asarray(ids[0]), first, seed, temperature, greedy=temperature == 0)
        out = np.asarray(speculated.ids_S)
    else:
        out = np.asarray(_continue(model, jnp.asarray(ids), first, seed, temperature))[0]
    out = out[1 + len(start) : length]
    ends = np.flatnonzero((out == border) | (out >= tokenizer.size))
    parts = np.split(out, ends)  # every part but the first begins with what ends the one before
    texts = [tokenizer.decode(parts[0]), *(tokenizer.decode(part[1:]) for part in parts[1:])]
    return ("\n".join(filter(None, texts)) if past_end else texts[0]), speculated


def held_out_prompt(batches: Iterable[HostBatch], tokenizer: Tokenizer, most: int = 48) -> str:
    """Return the start of the longest document in the first batch that has one without images, or "" without any.

    It has `most` tokens, or half of the document if that is less, so that the model has something to continue.
    """
    best: np.ndarray = np.zeros(0, np.int32)
    for batch in batches:
        types = batch.get("token_types", np.full_like(batch["ids"], TEXT))
        for row in zip(batch["ids"], batch["segment_ids"], types, strict=True):
            borders = np.flatnonzero(np.diff(row[1])) + 1
            for ids, segments, kinds in zip(*(np.split(x, borders) for x in row), strict=True):
                whole = segments[0] and ids[0] == tokenizer.border and (kinds == TEXT).all()
                best = ids if whole and len(ids) > len(best) else best
        if len(best):
            break
    return tokenizer.decode(best[1 : 1 + min(most, len(best) // 2)])


@jax.jit
def _continue(model: DeepSeek, ids: jax.Array, first: jax.Array, seed: jax.Array, temperature: jax.Array) -> jax.Array:
    """Fill ids [1, L] from position `first` on, one token a pass; later positions do not change earlier ones."""
    key = jax.random.key(seed)
    sizes = jax.sharding.get_abstract_mesh().shape
    rows = math.prod(sizes[axis] for axis in BATCH)  # equal rows, one for each device

    def step(t: jax.Array, ids: jax.Array) -> jax.Array:
        h = model.hidden(Inputs(jnp.tile(ids, (rows, 1))), with_mtp=False).h
        h = jax.lax.dynamic_slice_in_dim(jax.reshard(h, jax.P()), t - 1, 1, axis=1)[0, 0]
        logits = head_logits(h, whole(model.head))
        noise = jax.random.gumbel(jax.random.fold_in(key, t), logits.shape)
        token = jnp.argmax(logits + temperature * noise)
        return jax.lax.dynamic_update_slice(ids, token.astype(ids.dtype)[None, None], (0, t))

    return jax.lax.fori_loop(first, ids.shape[1], step, ids)
