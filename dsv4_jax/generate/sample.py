# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt for a look at the model: the sample at the end of a run."""

from collections.abc import Iterable, Sequence

import numpy as np

from dsv4_jax.data.batch import HostBatch
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.generate import generate
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.token_types import TEXT


def sample(model: DeepSeek, tokenizer: Tokenizer, prompt: str, n: int, seed: int, temperature: float = 0.8) -> str:
    """Return the text of `n` tokens after `prompt`, which starts a document; each document is on a line of its own."""
    ids = [tokenizer.border, *map(int, tokenizer.encode([prompt])[0])]
    tokens = generate(model, [ids], max_tokens=n, seed=seed, temperature=temperature)
    return "\n".join(filter(None, split_documents([token.id for token in tokens], tokenizer)))


def split_documents(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each document; an id that the tokenizer does not have ends one too."""
    array = np.asarray(ids)
    ends = np.flatnonzero((array == tokenizer.border) | (array >= tokenizer.size))
    parts = np.split(array, ends)  # every part but the first begins with what ends the one before
    return [tokenizer.decode(parts[0]), *(tokenizer.decode(part[1:]) for part in parts[1:])]


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
