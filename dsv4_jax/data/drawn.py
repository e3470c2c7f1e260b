# SPDX-License-Identifier: Apache-2.0
"""Make documents for learning to read: a picture of a line of text in a fixed font, followed by its characters.

Nothing is downloaded or stored: the font comes with Pillow, the lines come from any source of texts, and a picture is
drawn when its row is made. Every character is drawn black on white in a cell of 12 x 12 pixels. Every picture is as
wide as the longest possible line. So with the byte tokenizer all pictures take the same positions, and the distance
from a character's cell to its token does not depend on the length of the line.
"""

import functools
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dsv4_jax.data.images import layout_of
from dsv4_jax.data.interleaved import Document, interleave
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.data.vision_layout import VisionLayout

PREFIX = "drawn:"  # the path of such a source is this prefix and the path of its texts
SHORTEST, LONGEST = 8, 16  # limits of a line in characters: a shorter line is left out, a longer one is cut
CELL = 12  # side of the square cell of a character, in pixels
GLYPH = 6  # width of a character, in pixels
SIZE = LONGEST * CELL, CELL  # width and height of a picture, in pixels


@functools.cache
def _load_font() -> ImageFont.ImageFont:
    """Load Pillow's built-in bitmap font once."""
    return ImageFont.load_default_imagefont()


def draw(line: str) -> Image.Image:
    """Draw a line of at most `LONGEST` characters of printable ASCII, as an RGB image of `SIZE` pixels."""
    picture = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(picture)
    for i, character in enumerate(line):
        pen.text((i * CELL + (CELL - GLYPH) // 2, 0), character, fill="black", font=_load_font())
    return picture


def lines(text: str) -> list[str]:
    """Choose the lines of a text to draw: printable ASCII, stripped, cut to `LONGEST`, without repetitions."""
    stripped = (line.strip()[:LONGEST].rstrip() for line in text.splitlines())
    chosen = (line for line in stripped if len(line) >= SHORTEST and line.isascii() and line.isprintable())
    return list(dict.fromkeys(chosen))


class Drawn:
    """Make documents from the lines of texts."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionLayout):
        # All pictures have one size, so that all documents begin with the same ids and have the same spans.
        nothing = np.zeros(0, np.int32)
        self._tokenizer = tokenizer
        self._start = interleave([nothing, nothing], [layout_of(*SIZE, vision)], vision.image_token_id)

    def documents(self, text: str) -> Iterator[Document]:
        """Yield a document for each line of a text that is drawn."""
        chosen, (start, spans) = lines(text), self._start
        for line, ids in zip(chosen, self._tokenizer.encode(chosen), strict=True):
            yield Document(np.concatenate([start, ids]), spans, [line])
