# SPDX-License-Identifier: Apache-2.0
"""Images as the model takes them: how many pixels, patches and positions one becomes, and its patches.

The sizes follow the preprocessing that is published with DeepSeek-V4.1: an image keeps its shape, small ones are
enlarged and large ones reduced until they fit their positions, and grey borders fill up the last patches.
"""

import io
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from dsv4_jax.config import DataConfig
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.model.token_types import END, IMAGE, NEWLINE, START
from dsv4_jax.section import ConfigError

GREY = (127, 127, 127)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # no format that starts another program
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


class ImageError(ValueError):
    """An image that cannot be used; the message says why."""


class Layout(NamedTuple):
    """What an image becomes.

    Attributes:
        size: width and height in pixels, after it has been resized.
        patches: rows and columns of patches.
        grid: rows and columns of squares of patches, each one position.
    """

    size: tuple[int, int]
    patches: tuple[int, int]
    grid: tuple[int, int]

    @property
    def positions(self) -> int:
        """Positions of the sequence, with START, END and a NEWLINE after every row."""
        return self.grid[0] * (self.grid[1] + 1) + 2


def layout_of(width: int, height: int, vision: VisionLayout) -> Layout:
    """Compute the layout of an image of `width` x `height` pixels."""
    p, square, most = vision.patch_size, vision.patch_size * vision.downsample_ratio, vision.max_n_token
    w, h = float(width), float(height)
    if vision.max_wh_ratio is not None:
        w = min(w, h * vision.max_wh_ratio)
    if w * h < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (w * h))
        w, h = max(1, int(w * scale)), max(1, int(h * scale))
    layout = _layout(math.ceil(w / p), math.ceil(h / p), vision)
    if layout.positions <= most:
        return layout
    # The largest grid of this shape with room for its line ends: columns x (columns x shape + shape) = most - 2.
    shape = h / w
    columns = math.sqrt((most - 2) / shape + 0.25) - 0.5
    rows = columns * shape
    if columns < 1:
        size = square, (most - 2) // 2 * square
    elif rows < 1:
        size = (most - 3) * square, square
    else:
        scale = min(math.floor(columns) * square / w, math.floor(rows) * square / h)
        size = max(1, math.floor(w * scale / p)) * p, max(1, math.floor(h * scale / p)) * p
    return _layout(size[0] // p, size[1] // p, vision)


def _layout(columns: int, rows: int, vision: VisionLayout) -> Layout:
    """Make the layout of `rows` x `columns` patches."""
    p, ratio = vision.patch_size, vision.downsample_ratio
    return Layout((columns * p, rows * p), (rows, columns), (-(-rows // ratio), -(-columns // ratio)))


def token_types(grid: tuple[int, int]) -> np.ndarray:
    """Types of an image's positions, int32 [positions]: START, then each row of IMAGE and NEWLINE, then END."""
    row = [*[IMAGE] * grid[1], NEWLINE]
    return np.array([START, *row * grid[0], END], np.int32)


def opened(image: bytes | str | Path | Image.Image) -> Image.Image:
    """An image whose pixels are decoded.

    Raises:
        ImageError: if it cannot be read, is cut short, or has more pixels than `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    if isinstance(image, Image.Image):
        return image
    try:
        found = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=FORMATS)
        if found.width * found.height > (most := Image.MAX_IMAGE_PIXELS or math.inf):
            raise ImageError(
                f"{found.width} x {found.height} are more than {most:,} pixels (Pillow's MAX_IMAGE_PIXELS)"
            )
        found.load()
    except Image.UnidentifiedImageError:
        raise ImageError(f"no image of a known format ({', '.join(FORMATS)})") from None
    except ImageError:
        raise
    except Exception as error:  # Pillow's readers raise whatever their formats lead to
        raise ImageError(f"{type(error).__name__}: {error}") from error
    return found


def inspect(image: bytes | str | Path, vision: VisionLayout) -> Layout:
    """The layout of an image, which is decoded to see that it can be.

    Raises:
        ImageError: if it cannot, or is so thin that nothing is left of it at its new size.
    """
    width, height = opened(image).size
    layout = layout_of(width, height, vision)
    if min(layout.size[0] / width, layout.size[1] / height) * min(width, height) <= 0.5:
        raise ImageError(f"{width} x {height} is too thin: less than a pixel at {layout.size[0]} x {layout.size[1]}")
    return layout


def read(image: bytes | str | Path | Image.Image, vision: VisionLayout) -> np.ndarray:
    """An image's patches in reading order, float32 [n, 3, p, p] in [-1, 1]: its RGB, resized and bordered in grey.

    Raises:
        ImageError: if it cannot be read.
    """
    picture = opened(image).convert("RGB")
    layout = layout_of(*picture.size, vision)
    pixels = np.asarray(ImageOps.pad(picture, layout.size, color=GREY), np.float32)
    rows, columns = layout.patches
    p = vision.patch_size
    patches = pixels.reshape(rows, p, columns, p, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, p, p)
    return (patches / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


class Budget(NamedTuple):
    """The room for images in a row of a batch.

    Attributes:
        vision: decides what an image becomes.
        patches: most patches of all images of a row.
        images: most images of a row.
    """

    vision: VisionLayout
    patches: int
    images: int


def row_budget(vision: VisionLayout | None, data: DataConfig) -> Budget | None:
    """Compute the room for images in a row; None without vision.

    `data.row_patches = 0`: room for an image of any size, and for a quarter of the row's positions as images.
    `data.row_images = 0`: as many images as those patches hold of the smallest size.

    Raises:
        ConfigError: if no image fits into the positions that the model allows it.
    """
    if vision is None:
        return None
    if vision.max_n_token < 4:
        raise ConfigError(f"model.vision_max_n_token = {vision.max_n_token} must be 4 at least: the smallest image")
    positions = min(data.seq_len, max(vision.max_n_token, data.seq_len // 4))
    patches = data.row_patches or positions * vision.downsample_ratio**2
    smallest = max(1, vision.min_pixels // vision.patch_size**2)
    return Budget(vision, patches, data.row_images or max(1, patches // smallest))
