# SPDX-License-Identifier: Apache-2.0
"""Define the six numbers of a model that determine the positions and patches of an image."""

from typing import NamedTuple

from dsv4_jax.model.config import ModelConfig


class VisionLayout(NamedTuple):
    """Numbers that determine how many positions and patches an image has, and the id of its positions.

    Sources that the `data` command has tokenised store them, because images of a different layout have different
    positions and patches.

    Attributes:
        image_token_id: id of every position of an image.
        patch_size: side of a square patch, in pixels.
        downsample_ratio: side of a cell, the square of patches that shares one position, in patches.
        max_n_token: maximum number of positions of an image, including START, END and NEWLINE.
        min_pixels: minimum area in pixels; a smaller image is enlarged to it.
        max_wh_ratio: maximum ratio of width to height; None: no limit.
    """

    image_token_id: int
    patch_size: int
    downsample_ratio: int
    max_n_token: int
    min_pixels: int
    max_wh_ratio: float | None

    @classmethod
    def of(cls, model: ModelConfig) -> "VisionLayout | None":
        """Take the six numbers from the configuration of a model; return None without vision."""
        if not model.vision_n_layers:
            return None
        return cls(model.image_token_id, *(getattr(model, f"vision_{key}") for key in cls._fields[1:]))
