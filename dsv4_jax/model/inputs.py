# SPDX-License-Identifier: Apache-2.0
"""The arrays that a forward pass reads, with the checks of their shapes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import act_spec, row_spec
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.token_types import TEXT


class Inputs(NamedTuple):
    """Arrays that a forward pass reads. Only `ids` must be given.

    Attributes:
        ids: int [B, S], token ids.
        segment_ids: int [B, S]; documents of packed rows are 1, 2, ... and padding is 0. If absent, every row is one
            document.
        token_types: int [B, S]: -1 text, and inside images 0 start, 1 image, 2 end of a line, 3 end.
        patches: float [P, 3, p, p], all images' patches one after another in reading order.
        image_grids: int [images, 4]: row, position of the start, rows and columns of patches. A line without patch
            rows is padding.
        engram_rows: int32 [B, S, Engrams, columns], rows of the Engrams' tables. If absent, they are computed from
            `ids`.
        following: int [B, S], the token after each one, which the MTP block reads. If absent, it is taken from `ids`
            inside each document (after the last token comes the first).
        replay_starts: int [B, S], the row position at which the decoder begins for a token's document. The windows of
            decoder layers see nothing before it (bounded replay, V4.1 section 3.2.2). If absent, they see the whole
            document.
        forced_experts: for every layer int [B, S, k], laid out like `Output.experts`. They replace the choice of
            learned layers, whose weights still come from the current scores. Hashed layers may have None.
    """

    ids: jax.Array
    segment_ids: jax.Array | None = None
    token_types: jax.Array | None = None
    patches: jax.Array | None = None
    image_grids: jax.Array | None = None
    engram_rows: jax.Array | None = None
    following: jax.Array | None = None
    replay_starts: jax.Array | None = None
    forced_experts: Sequence[jax.Array | None] | None = None

    @property
    def image(self) -> jax.Array | None:
        """Return where images are, bool [B, S], delimiters included; None without images."""
        return None if self.token_types is None else self.token_types != TEXT

    @classmethod
    def of(cls, batch: Mapping[str, jax.Array], **others: Any) -> Self:
        """Take the arrays of a batch that the model reads, by name, and `others`, which no batch has."""
        arrays: dict[str, Any] = {name: batch[name] for name in cls._fields if name in batch}
        return cls(**arrays, **others)

    def checked(self, cfg: ModelConfig) -> Self:
        """Check the shapes, place the arrays on the mesh, and fill in `segment_ids`.

        Raises:
            ValueError: for an argument of the wrong shape or type, or one that needs another one.
        """
        given: dict[str, Any] = {
            name: jnp.asarray(x) for name, x in self._asdict().items() if x is not None and name != "forced_experts"
        }
        ids = given["ids"]
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"ids must be integers [B, S], found {ids.dtype}{list(ids.shape)}")
        given.setdefault("segment_ids", jnp.ones_like(ids))

        # One number for each token: split over rows and positions, but whole rows for what becomes tables.
        for name in ("ids", "segment_ids", "token_types", "following", "replay_starts"):
            if name in given:
                if given[name].shape != ids.shape:
                    raise ValueError(f"{name} must be {list(ids.shape)} like ids, found {list(given[name].shape)}")
                given[name] = jax.reshard(given[name], (row_spec if name == "replay_starts" else act_spec)(2))

        if ("patches" in given) != ("image_grids" in given):
            raise ValueError("patches and image_grids belong together: one of them is missing")
        if "patches" in given and "token_types" not in given:
            raise ValueError("patches need token_types [B, S], the kind of every position")

        if "engram_rows" in given:
            rows, columns = given["engram_rows"], (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
            want = (*ids.shape, len(cfg.engram_layer_ids), columns)
            if rows.shape != want or not jnp.issubdtype(rows.dtype, jnp.integer):
                raise ValueError(f"engram_rows must be integers {list(want)}, found {rows.dtype}{list(rows.shape)}")
            given["engram_rows"] = jax.reshard(rows, act_spec(4))

        if self.forced_experts is not None:
            given["forced_experts"] = _checked_experts(cfg, ids.shape, self.forced_experts)
        return self._replace(**given)


def _checked_experts(
    cfg: ModelConfig, shape: tuple[int, ...], forced: Sequence[jax.Array | None]
) -> list[jax.Array | None]:
    """Check and place the experts of every layer, for ids [B, S] of `shape`."""
    forced = [f if f is None else jax.reshard(jnp.asarray(f), act_spec(3)) for f in forced]
    shapes, want = {f.shape for f in forced if f is not None}, (*shape, cfg.n_activated_experts)
    learned = len(forced) == cfg.n_layers and all(
        f is not None or spec.hashed for f, spec in zip(forced, cfg.layer_specs, strict=True)
    )
    if not learned or shapes - {want}:
        raise ValueError(
            f"forced_experts must be {cfg.n_layers} arrays {list(want)}, or None for hashed layers; found "
            f"{len(forced)} of shapes {sorted(shapes)}"
        )
    return forced
