# SPDX-License-Identifier: Apache-2.0
"""Ask for the continuation of a prompt: token ids, images, and the rule by which tokens are drawn."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from dsv4_jax.data import images
from dsv4_jax.data.interleaved import interleave
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.token_types import TEXT
from dsv4_jax.section import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how it is to be continued.

    Attributes:
        ids: token ids of the prompt, at least one; a document begins with the tokenizer's border.
        max_tokens: number of tokens to add.
        temperature: divides the logits; 0 takes the likeliest token. At least 1e-4 otherwise, so that fp32 holds them.
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that together have this probability.
        min_p: draw from tokens whose probability is at least this share of that of the likeliest.
        seed: seed of the draws, which follow from it and the token's position.
        stop_ids: ids that end the text.
        stop: strings before which the text ends; the generator then needs a tokenizer.
        token_types: kinds of the prompt's positions, with images (see `Inputs`).
        patches: patches of the images, [P, 3, p, p].
        image_grids: places of the images, [n, 4], in row 0.

    Raises:
        ConfigError: for a value that cannot work, naming it.
    """

    ids: Sequence[int]
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: Collection[int] = ()
    stop: Sequence[str] = ()
    token_types: np.ndarray | None = None
    patches: np.ndarray | None = None
    image_grids: np.ndarray | None = None

    def __post_init__(self) -> None:
        whole = lambda x: isinstance(x, int) and not isinstance(x, bool)
        number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
        cold = number(self.temperature) and (self.temperature == 0 or 1e-4 <= self.temperature < math.inf)
        words = not isinstance(self.stop, str) and all(isinstance(x, str) and x for x in self.stop)
        for name, fits, want in (
            ("ids", len(self.ids) > 0, "at least one token"),
            ("max_tokens", whole(self.max_tokens) and self.max_tokens >= 1, "a whole number of at least 1"),
            ("temperature", cold, "0 (the likeliest token), or a number of at least 1e-4"),
            ("top_k", whole(self.top_k) and self.top_k >= 0, "a whole number, 0 (all) or above"),
            ("top_p", number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", whole(self.seed) and -(2**31) <= self.seed < 2**32, "a whole number of 32 bits"),
            ("stop", words, "a list of strings that are not empty"),
        ):
            if not fits:
                raise ConfigError(f"{name} = {getattr(self, name)!r} must be {want}")


def find_capacity(requests: Iterable[Request]) -> int:
    """Return the room of a cache for requests: a power of two for the longest prompt and, up to 1,024, its text."""
    room = max((len(r.ids) + min(r.max_tokens, 1024) for r in requests), default=1024)
    return 1 << max(6, (room - 1).bit_length())


def make_request(
    prompt: Request | Sequence[int] | str,
    cfg: ModelConfig,
    tokenizer: Tokenizer | None = None,
    image: str = "",
    **options: Any,
) -> Request:
    """Make a request of token ids, or of a text that begins a document; a request stays as it is.

    With a tokenizer, its border and ids that it does not have end the text, unless `options` have `stop_ids`.

    Args:
        prompt: the prompt.
        cfg: the model.
        tokenizer: makes ids of text.
        image: path of an image to put before the text; "": none.
        options: attributes of `Request`.

    Raises:
        ConfigError: for a text without a tokenizer or not in UTF-8, an image that cannot be read, or a model without
            vision that is given one.
    """
    if isinstance(prompt, Request):
        return prompt
    if tokenizer is not None:
        options = {"stop_ids": {tokenizer.border, *range(tokenizer.size, cfg.vocab_size)}} | options
    if not isinstance(prompt, str):
        return Request(ids=prompt, **options)
    if tokenizer is None:
        raise ConfigError("a prompt of text needs a tokenizer")
    try:
        text = tokenizer.encode([prompt])[0]
    except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8 come as half characters
        raise ConfigError(f"a prompt must be UTF-8: {error}") from error
    if not image:
        return Request(ids=[tokenizer.border, *map(int, text)], **options)
    vision = VisionLayout.of(cfg)
    if vision is None:
        raise ConfigError(f"{image}: the model reads no images (model.vision_n_layers = 0)")
    try:
        layout = images.inspect(image, vision)
        patches = images.read(image, vision)
    except (images.ImageError, OSError) as error:
        raise ConfigError(f"{image}: {error}") from error
    ids, spans = interleave([text[:0], text], [layout], vision.image_token_id)
    types = np.full(1 + len(ids), TEXT, np.int32)
    (start, positions, rows, columns), kinds = spans[0], images.token_types(layout.grid)
    types[start : start + positions] = kinds
    grids = np.array([[0, start, rows, columns]], np.int32)
    ids = [tokenizer.border, *map(int, ids)]
    return Request(ids=ids, token_types=types, patches=patches, image_grids=grids, **options)
