# SPDX-License-Identifier: Apache-2.0
"""Records of text and images as documents of token ids."""

from collections.abc import Iterator

from dsv4_jax.config import DataConfig
from dsv4_jax.data.drawn import PREFIX, Drawn
from dsv4_jax.data.images import ImageError, Layout, inspect
from dsv4_jax.data.interleaved import NO_SPANS, Document, interleave
from dsv4_jax.data.records import PLACE, Record, records
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.validate import ConfigError

_TOGETHER = 256  # records that are tokenised together
_TOGETHER_BYTES = 1 << 26  # or fewer, of so many bytes


def tokenized(
    path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: ModelConfig | None = None
) -> Iterator[tuple[Record, Document | None]]:
    """Every record of a source of texts and its document; None for a bad one that is skipped.

    Empty texts are left out. Images are decoded once here, to see that they can be.

    Raises:
        ConfigError: for a bad record, unless `data.on_error` skips them.
    """
    waiting: list[tuple[Record, list[Layout], list[str]]] = []

    def flush() -> Iterator[tuple[Record, Document | None]]:
        encoded = iter(tokenizer.encode([text for _, _, texts in waiting for text in texts]))
        for record, layouts, texts in waiting:
            parts = [next(encoded) for _ in texts]
            if vision and any((ids == vision.image_token_id).any() for ids in parts):
                raise ConfigError(
                    f"data.path = {path!r}, record {record.name}: its text has the id of images, "
                    f"model.image_token_id = {vision.image_token_id}; choose one that no text has"
                )
            if vision and layouts:
                yield record, Document(*interleave(parts, layouts, vision.image_token_id), record.images)
            else:
                yield record, Document(parts[0], NO_SPANS)
        waiting.clear()

    drawing = Drawn(tokenizer, vision) if vision and path.startswith(PREFIX) else None
    image_field = cfg.image_field if vision and not drawing else ""
    held = 0
    for record in records(path.removeprefix(PREFIX), cfg.text_field, image_field):
        layouts: list[Layout] = []
        for number, image in enumerate(record.images, 1):
            try:
                layouts.append(inspect(image, vision))  # ty: ignore[invalid-argument-type]  # no vision, no images
            except ImageError as error:
                record = Record(record.name, None, f"image {number}: {error}", record.size)
                break
        if record.text is None:
            if cfg.on_error == "raise":
                what = f"data.path = {path!r}, record {record.name}: {record.why}"
                raise ConfigError(f"{what}; data.on_error = 'skip' leaves bad records out")
            yield record, None
        elif drawing:
            yield from ((record, document) for document in drawing.documents(record.text))
        elif record.text:
            held += record.size
            waiting.append((record, layouts, record.text.split(PLACE) if layouts else [record.text]))
            if len(waiting) == _TOGETHER or held > _TOGETHER_BYTES:
                yield from flush()
                drawing = Drawn(tokenizer, vision) if vision and path.startswith(PREFIX) else None
    held = 0
    yield from flush()
