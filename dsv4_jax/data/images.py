# SPDX-License-Identifier: Apache-2.0
"""Prepare images for the model: compute size, patches and positions of an image, and make its array of patches.

The sizes follow the preprocessing that is published with DeepSeek-V4.1. An image keeps its ratio of width to height. A
small image is enlarged to a minimum area. A large one is reduced until its positions are at most the maximum. Grey
borders fill the last row and column of patches.
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
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # none of these starts another program, as EPS does
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


class ImageError(ValueError):
    """An image that cannot be used; the message gives the reason."""


class Layout(NamedTuple):
    """The sizes of an image as the model reads it.

    Attributes:
        size: width and height after resizing, in pixels.
        patches: number of rows and of columns of patches.
        grid: number of rows and of columns of cells. A cell is a square of patches that shares one position.
    """

    size: tuple[int, int]
    patches: tuple[int, int]
    grid: tuple[int, int]

    @property
    def positions(self) -> int:
        """Count the image's positions in the sequence: its cells, a NEWLINE after every row, START and END."""
        return self.grid[0] * (self.grid[1] + 1) + 2


def layout_of(width: int, height: int, vision: VisionLayout) -> Layout:
    """Compute the layout of an image of `width` x `height` pixels."""
    # Limit the ratio of width to height, then enlarge to the minimum area.
    p, square, most = vision.patch_size, vision.patch_size * vision.downsample_ratio, vision.max_n_token
    w, h = float(width), float(height)
    if vision.max_wh_ratio is not None:
        w = min(w, h * vision.max_wh_ratio)
    if w * h < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (w * h))
        w, h = max(1, int(w * scale)), max(1, int(h * scale))
    layout = _make_layout(math.ceil(w / p), math.ceil(h / p), vision)
    if layout.positions <= most:
        return layout
    # Too many positions: find the largest grid of this shape. With rows = shape x columns, it has
    # rows x (columns + 1) = most - 2 positions besides START and END. That is a quadratic equation for `columns`.
    shape = h / w
    columns = math.sqrt((most - 2) / shape + 0.25) - 0.5
    rows = columns * shape
    # A grid of less than one column or row becomes a single one. Otherwise scale the image to the whole cells of the
    # grid, and round down to whole patches.
    if columns < 1:
        size = square, (most - 2) // 2 * square
    elif rows < 1:
        size = (most - 3) * square, square
    else:
        scale = min(math.floor(columns) * square / w, math.floor(rows) * square / h)
        size = max(1, math.floor(w * scale / p)) * p, max(1, math.floor(h * scale / p)) * p
    return _make_layout(size[0] // p, size[1] // p, vision)


def _make_layout(columns: int, rows: int, vision: VisionLayout) -> Layout:
    """Make the layout of an image of `rows` x `columns` patches."""
    p, ratio = vision.patch_size, vision.downsample_ratio
    return Layout((columns * p, rows * p), (rows, columns), (-(-rows // ratio), -(-columns // ratio)))


def token_types(grid: tuple[int, int]) -> np.ndarray:
    """Make the types of an image's positions, int32 [positions], from its `grid`.

    They are START, then for each row of cells an IMAGE per cell and a NEWLINE, then END.
    """
    row = [*[IMAGE] * grid[1], NEWLINE]
    return np.array([START, *row * grid[0], END], np.int32)


def opened(image: bytes | str | Path | Image.Image) -> Image.Image:
    """Open an image from encoded bytes or a path and decode its pixels; return an open image unchanged.

    Raises:
        ImageError: if it cannot be read, is truncated, or has more pixels than `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    if isinstance(image, Image.Image):
        return image
    try:
        picture = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=FORMATS)
        if picture.width * picture.height > (most := Image.MAX_IMAGE_PIXELS or math.inf):
            raise ImageError(
                f"{picture.width} x {picture.height} are more than {most:,} pixels (Pillow's MAX_IMAGE_PIXELS)"
            )
        picture.load()
    except Image.UnidentifiedImageError:
        raise ImageError(f"no image of a known format ({', '.join(FORMATS)})") from None
    except ImageError:
        raise
    except Exception as error:  # a reader of Pillow may raise any exception on a damaged file
        raise ImageError(f"{type(error).__name__}: {error}") from error
    return picture


def inspect(image: bytes | str | Path | Image.Image, vision: VisionLayout) -> Layout:
    """Decode an image to check that it can be used, and return its layout.

    Raises:
        ImageError: if it cannot be decoded, or is so thin that resizing leaves at most half a pixel of its short side.
    """
    width, height = opened(image).size
    layout = layout_of(width, height, vision)
    if min(layout.size[0] / width, layout.size[1] / height) * min(width, height) <= 0.5:
        raise ImageError(f"{width} x {height} is too thin: less than a pixel at {layout.size[0]} x {layout.size[1]}")
    return layout


def read(image: bytes | str | Path | Image.Image, vision: VisionLayout) -> np.ndarray:
    """Read an image as patches in reading order, float32 [n, 3, p, p], RGB scaled to [-1, 1].

    The image is resized to its layout, with grey borders where its shape differs.

    Raises:
        ImageError: if the image cannot be read.
    """
    picture = opened(image).convert("RGB")
    layout = layout_of(*picture.size, vision)
    pixels = np.asarray(ImageOps.pad(picture, layout.size, color=GREY), np.float32)
    rows, columns = layout.patches
    p = vision.patch_size
    # From [rows p, columns p, 3] to [rows columns, 3, p, p].
    patches = pixels.reshape(rows, p, columns, p, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, p, p)
    return (patches / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


class Budget(NamedTuple):
    """The maximum of patches and images in a row of a batch.

    Attributes:
        vision: numbers that determine the layout of an image.
        patches: maximum number of patches of all images in a row.
        images: maximum number of images in a row.
    """

    vision: VisionLayout
    patches: int
    images: int


def row_budget(vision: VisionLayout | None, data: DataConfig) -> Budget | None:
    """Compute the maximum of patches and images in a row; None without vision.

    With `data.row_patches = 0`, the patches are those of one image of the largest size or of a quarter of the row's
    positions, whichever is more, limited to the positions of the row. With `data.row_images = 0`, the images are the
    number of images of the smallest area that those patches can hold.

    Raises:
        ConfigError: if `model.vision_max_n_token` is too low for any image.
    """
    if vision is None:
        return None
    if vision.max_n_token < 4:
        raise ConfigError(f"model.vision_max_n_token = {vision.max_n_token} must be 4 at least: the smallest image")
    positions = min(data.seq_len, max(vision.max_n_token, data.seq_len // 4))
    patches = data.row_patches or positions * vision.downsample_ratio**2
    smallest = max(1, vision.min_pixels // vision.patch_size**2)
    return Budget(vision, patches, data.row_images or max(1, patches // smallest))
