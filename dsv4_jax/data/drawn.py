# SPDX-License-Identifier: Apache-2.0
"""Pictures of text, to be read: each document is a line drawn in a fixed font, followed by its characters.

Nothing is stored or downloaded: the font comes with Pillow, the lines from any source of texts, and a picture is
drawn when its row is made. Every character fills a cell of 6 x 12 pixels, black on white.
"""

import functools
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dsv4_jax.data.images import plan
from dsv4_jax.data.interleaved import Document, interleave
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.model.config import ModelConfig

PREFIX = "drawn:"  # of the path of such a source; what follows is the path of the texts
SHORTEST, LONGEST = 8, 24  # characters of a line; what is longer is cut
CELL = (6, 12)


@functools.cache
def _font() -> ImageFont.ImageFont:
    return ImageFont.load_default_imagefont()


def size(line: str) -> tuple[int, int]:
    """Width and height of a line's picture in pixels."""
    return CELL[0] * len(line), CELL[1]


def draw(line: str) -> Image.Image:
    """The picture of a line of printable ASCII."""
    picture = Image.new("RGB", size(line), "white")
    ImageDraw.Draw(picture).text((0, 0), line, fill="black", font=_font())
    return picture


def lines(text: str) -> list[str]:
    """The lines of a text that are drawn: printable ASCII, each once, without the space around them."""
    found = (line.strip()[:LONGEST].rstrip() for line in text.splitlines())
    found = (line for line in found if len(line) >= SHORTEST and line.isascii() and line.isprintable())
    return list(dict.fromkeys(found))


class Drawn:
    """Makes documents of lines."""

    def __init__(self, tokenizer: Tokenizer, cfg: ModelConfig):
        self._tokenizer, self._cfg = tokenizer, cfg
        self._starts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # ids and span of a picture of so many characters

    def documents(self, text: str) -> Iterator[Document]:
        """The documents that a text's lines make."""
        chosen, nothing = lines(text), np.zeros(0, np.int32)
        for line, ids in zip(chosen, self._tokenizer.encode(chosen), strict=True):
            if len(line) not in self._starts:
                layout = plan(*size(line), self._cfg)
                self._starts[len(line)] = interleave([nothing, nothing], [layout], self._cfg.image_token_id)
            start, spans = self._starts[len(line)]
            yield Document(np.concatenate([start, ids]), spans, [line])
