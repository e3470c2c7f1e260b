# SPDX-License-Identifier: Apache-2.0
"""Make documents of token ids from records of text and images."""

from collections.abc import Iterable, Iterator

from dsv4_jax.config import DataConfig
from dsv4_jax.data.drawn import PREFIX, Drawn
from dsv4_jax.data.images import ImageError, Layout, inspect
from dsv4_jax.data.interleaved import NO_SPANS, Document, interleave
from dsv4_jax.data.records import PLACE, Record, records
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.section import ConfigError

_TOGETHER = 256  # records per call of the tokenizer: `tokenizers` processes the texts of a call in parallel
_TOGETHER_BYTES = 1 << 26  # a group of records ends earlier when it reaches this size

Inspected = tuple[Record, list[Layout]]  # a record and the layout of each of its images


def tokenized(
    path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None = None
) -> Iterator[tuple[Record, Document | None]]:
    """Yield every record of a source of texts with its document, in order; for a bad record the document is None.

    Records with an empty text are not yielded. A record of a `drawn:` source is yielded once for each line that is
    drawn. Every image is decoded here once, so that a damaged one is found before training.

    Raises:
        ConfigError: for a bad record, unless `data.on_error` is `skip`.
    """
    if vision and path.startswith(PREFIX):
        drawing = Drawn(tokenizer, vision)
        for record, _ in inspected(path, cfg, None):
            documents = [None] if record.text is None else drawing.documents(record.text)
            yield from ((record, document) for document in documents)
    else:
        for group in batched(inspected(path, cfg, vision), _TOGETHER, _TOGETHER_BYTES):
            yield from encode(group, path, tokenizer, vision)


def inspected(path: str, cfg: DataConfig, vision: VisionLayout | None) -> Iterator[Inspected]:
    """Yield the records of a source whose text is not empty, with the layouts of their images if there is `vision`.

    A bad record has the text None. A record with an image that cannot be used is bad.

    Raises:
        ConfigError: for a bad record, unless `data.on_error` is `skip`.
    """
    for record in records(path.removeprefix(PREFIX), cfg.text_field, cfg.image_field if vision else "", cfg.prepared):
        layouts = []
        for number, image in enumerate(record.images, 1):
            try:
                layouts.append(inspect(image, vision))  # ty: ignore[invalid-argument-type]  # without vision there are no images
            except ImageError as error:
                record = Record(record.name, None, f"image {number}: {error}", record.size)
                break
        if record.text is None and cfg.on_error == "raise":
            what = f"data.path = {path!r}, record {record.name}: {record.why}"
            raise ConfigError(f"{what}; data.on_error = 'skip' leaves bad records out")
        if record.text != "":
            yield record, layouts


def batched(items: Iterable[Inspected], count: int, size: int) -> Iterator[list[Inspected]]:
    """Group records: a group ends when it has `count` records or at least `size` bytes."""
    group, held = [], 0
    for item in items:
        group.append(item)
        held += item[0].size
        if len(group) == count or held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


def encode(
    group: list[Inspected], path: str, tokenizer: Tokenizer, vision: VisionLayout | None
) -> Iterator[tuple[Record, Document | None]]:
    """Tokenise the texts of a group of records in one call; yield each record with its document of text and images.

    A bad record has the document None.

    Raises:
        ConfigError: if a text contains the id of images.
    """
    # All texts of the group go to the tokenizer in one list, and are taken back in the same order.
    pieces = [_split_text(record, layouts) for record, layouts in group]
    encoded = iter(tokenizer.encode([text for texts in pieces for text in texts]))
    for (record, layouts), texts in zip(group, pieces, strict=True):
        if record.text is None:
            yield record, None
            continue
        ids = [next(encoded) for _ in texts]
        if vision and any((some == vision.image_token_id).any() for some in ids):
            raise ConfigError(
                f"data.path = {path!r}, record {record.name}: its text has the id of images, "
                f"model.image_token_id = {vision.image_token_id}; choose one that no text has"
            )
        # `ids` are those of the k + 1 texts around k images, or of the whole text.
        if vision and layouts:
            yield record, Document(*interleave(ids, layouts, vision.image_token_id), record.images)
        else:
            yield record, Document(ids[0], NO_SPANS)


def _split_text(record: Record, layouts: list[Layout]) -> list[str]:
    """Split the text of a record at its images; a bad record gives no text."""
    if record.text is None:
        return []
    return record.text.split(PLACE) if layouts else [record.text]
