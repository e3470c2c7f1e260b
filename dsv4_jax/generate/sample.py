# SPDX-License-Identifier: Apache-2.0
"""Continue held-out text, and read held-out pictures, for a look at the model: the sample at the end of a run."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dsv4_jax.data.batch import HostBatch
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.generate import generate
from dsv4_jax.generate.request import Request
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.token_types import END, START, TEXT


def sample(
    model: DeepSeek,
    tokenizer: Tokenizer,
    prompt: str,
    n: int,
    seed: int,
    temperature: float = 0.8,
    pictures: Sequence[dict[str, Any]] = (),
) -> tuple[str, list[str]]:
    """Continue a prompt, and read pictures.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompt: text that starts a document.
        n: tokens to add to it; at most as many are read from a picture.
        seed: seed of the draws.
        temperature: see `Request`; pictures are read with the likeliest tokens.
        pictures: those of `held_out_pictures`.

    Returns:
        The text of the n tokens, each document on a line of its own; and what is read from each picture.
    """
    ids = [tokenizer.border, *map(int, tokenizer.encode([prompt])[0])]
    requests = [Request(ids=ids, max_tokens=n, seed=seed, temperature=temperature)]
    for picture in pictures:
        requests.append(
            Request(
                ids=picture["ids"],
                max_tokens=min(n, len(tokenizer.encode([picture["written"]])[0])),
                temperature=0,
                token_types=np.array(picture["token_types"], np.int32),
                patches=np.array(picture["patches"], np.float32),
                image_grids=np.array(picture["image_grids"], np.int32),
            )
        )
    made: list[list[int]] = [[] for _ in requests]
    for token in generate(model, requests, rows=len(requests)):
        made[token.request].append(token.id)
    text, *read = (split_documents(ids, tokenizer) for ids in made)
    return "\n".join(filter(None, text)), [documents[0] for documents in read]


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
        for _, document in _find_documents(batch, tokenizer):
            ids = document["ids"]
            best = ids if (document["token_types"] == TEXT).all() and len(ids) > len(best) else best
        if len(best):
            break
    return tokenizer.decode(best[1 : 1 + min(most, len(best) // 2)])


def held_out_pictures(
    batches: Iterable[HostBatch], tokenizer: Tokenizer, most: int = 3, longest: int = 64
) -> list[dict[str, Any]]:
    """Return documents up to the end of their first picture, as values that JSON can hold.

    Each has `ids`, `token_types`, `patches` and `image_grids` (see `Request`), and `written`: the text after the
    picture, up to the next one, the end of the document, or `longest` tokens.
    """
    found: list[dict[str, Any]] = []
    for batch in batches:
        if "patches" not in batch or len(found) == most:
            break
        for row, document in _find_documents(batch, tokenizer):
            ids, types, first = document["ids"], document["token_types"], document["first"]
            if END not in types or len(found) == most:
                continue
            # The picture's patches follow those of the pictures before it in the row.
            grids = batch["image_grids"][row]
            start, after = first + types.tolist().index(START), types.tolist().index(END) + 1
            number = next(i for i, grid in enumerate(grids) if grid[2] and grid[1] == start)
            sizes = grids[:, 2] * grids[:, 3]
            patches = batch["patches"][row, sizes[:number].sum() :][: sizes[number]]
            # The text after it.
            later = np.flatnonzero(types[after:] != TEXT)
            end = min([after + longest, *(after + later[:1])])
            written = tokenizer.decode(ids[after:end])
            if written.strip():
                arrays = {"ids": ids[:after], "token_types": types[:after], "patches": patches}
                place = [[0, int(start - first), *map(int, grids[number, 2:])]]
                found.append({k: x.tolist() for k, x in arrays.items()} | {"image_grids": place, "written": written})
    return found


def _find_documents(batch: HostBatch, tokenizer: Tokenizer) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the row, and `ids`, `token_types` and `first` position of every document that begins in the batch."""
    types = batch.get("token_types", np.full_like(batch["ids"], TEXT))
    for number, (ids, segments, kinds) in enumerate(zip(batch["ids"], batch["segment_ids"], types, strict=True)):
        firsts = [0, *np.flatnonzero(np.diff(segments)) + 1]
        for first, end in zip(firsts, [*firsts[1:], len(ids)], strict=True):
            if segments[first] and ids[first] == tokenizer.border:
                yield number, {"ids": ids[first:end], "token_types": kinds[first:end], "first": first}
