# SPDX-License-Identifier: Apache-2.0
"""Pictures of text, to be read: each document is a line drawn in a fixed font, followed by its characters.

Nothing is stored or downloaded: the font comes with Pillow, the lines from any source of texts, and a picture is
drawn when its row is made. Every character stands in a cell of 12 x 12 pixels, black on white, and every picture is as
wide as the longest line: the text follows its characters at one distance.
"""

import functools
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dsv4_jax.data.images import layout_of
from dsv4_jax.data.interleaved import Document, interleave
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.data.vision_layout import VisionLayout

PREFIX = "drawn:"  # of the path of such a source; what follows is the path of the texts
SHORTEST, LONGEST = 8, 16  # characters of a line; what is longer is cut
CELL = 12  # pixels of a character's square
GLYPH = 6  # pixels of its width
SIZE = LONGEST * CELL, CELL  # width and height of a picture


@functools.cache
def _font() -> ImageFont.ImageFont:
    return ImageFont.load_default_imagefont()


def draw(line: str) -> Image.Image:
    """The picture of a line of printable ASCII."""
    picture = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(picture)
    for i, character in enumerate(line):
        pen.text((i * CELL + (CELL - GLYPH) // 2, 0), character, fill="black", font=_font())
    return picture


def lines(text: str) -> list[str]:
    """The lines of a text that are drawn: printable ASCII, each once, without the space around them."""
    found = (line.strip()[:LONGEST].rstrip() for line in text.splitlines())
    found = (line for line in found if len(line) >= SHORTEST and line.isascii() and line.isprintable())
    return list(dict.fromkeys(found))


class Drawn:
    """Makes documents of lines."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionLayout):
        nothing = np.zeros(0, np.int32)
        self._tokenizer = tokenizer
        self._start = interleave([nothing, nothing], [layout_of(*SIZE, vision)], vision.image_token_id)

    def documents(self, text: str) -> Iterator[Document]:
        """The documents that a text's lines make."""
        chosen, (start, spans) = lines(text), self._start
        for line, ids in zip(chosen, self._tokenizer.encode(chosen), strict=True):
            yield Document(np.concatenate([start, ids]), spans, [line])
