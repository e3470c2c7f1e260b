# SPDX-License-Identifier: Apache-2.0
"""Define the six numbers of a model that decide how an image becomes positions and patches."""

from typing import NamedTuple

from dsv4_jax.model.config import ModelConfig


class VisionLayout(NamedTuple):
    """Numbers that decide how many positions and patches an image takes, and which id its positions have.

    They are part of the identity of tokens made ahead: images of another layout do not fit.

    Attributes:
        image_token_id: id of every position of an image.
        patch_size: side of a square patch, in pixels.
        downsample_ratio: side of the square of patches that shares one position, in patches.
        max_n_token: most positions of an image, with START, END and line ends.
        min_pixels: area to which smaller images are enlarged, in pixels.
        max_wh_ratio: largest ratio of width to height; None: any.
    """

    image_token_id: int
    patch_size: int
    downsample_ratio: int
    max_n_token: int
    min_pixels: int
    max_wh_ratio: float | None

    @classmethod
    def of(cls, model: ModelConfig) -> "VisionLayout | None":
        """Return the layout of a model; None without vision."""
        if not model.vision_n_layers:
            return None
        return cls(model.image_token_id, *(getattr(model, f"vision_{key}") for key in cls._fields[1:]))
