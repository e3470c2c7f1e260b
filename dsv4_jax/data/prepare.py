# SPDX-License-Identifier: Apache-2.0
"""Tokenise sources before training and print statistics of them: `python -m dsv4_jax data CONFIG`."""

import array
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dsv4_jax.config import Config, DataConfig
from dsv4_jax.data import remote
from dsv4_jax.data.documents import tokenized
from dsv4_jax.data.drawn import PREFIX
from dsv4_jax.data.ids import table_of
from dsv4_jax.data.images import row_budget
from dsv4_jax.data.interleaved import Document
from dsv4_jax.data.packing import RowPlan, split
from dsv4_jax.data.records import INDEX, TOKENS, ArrayRecordWriter, find
from dsv4_jax.data.sources import (
    DOCUMENTS,
    FORMAT,
    IDS,
    IMAGES,
    SPANS,
    Source,
    id_type,
    key_of,
    made_ahead,
    open_source,
    open_sources,
    prepared_folder,
)
from dsv4_jax.data.tokenizer import Tokenizer, load_tokenizer
from dsv4_jax.data.vision_layout import VisionLayout

_SHARD = 1 << 32  # bytes of ids and images after which a shard ends: large, so that a source has few files


def run(cfg: Config, console: Console) -> None:
    """Tokenise every source of text that is not tokenised yet, then print statistics of all sources.

    Raises:
        ConfigError: if a source or the tokenizer cannot be used.
    """
    data, vision = cfg.data, VisionLayout.of(cfg.model)
    tokenizer = load_tokenizer(data.tokenizer, data.border)
    for path in [*data.paths, *filter(None, [data.held_out_path])]:
        with remote.reading(path, data.prepared):
            _prepare(path, data, tokenizer, vision, console)
    sources, held_out, tokenizer = open_sources(data, cfg.model.vocab_size, vision)
    for source in [*sources, *filter(None, [held_out])]:
        for line in describe(source, cfg, tokenizer):
            console.print(line)


def _prepare(path: str, data: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None, console: Console) -> None:
    """Tokenise one source, unless it is tokenised already, holds ids, or is drawn."""
    if path.startswith(PREFIX) or made_ahead(path):
        return  # pictures are not stored; a folder that this command made needs no work
    _, files = find(path, data.prepared)
    if any(f.suffix in TOKENS for f in files):
        return  # `open_source` checks ids
    folder = prepared_folder(path, data, tokenizer, vision)
    # Of several commands that prepare the same source, one works; the others wait and then find the folder.
    with remote.exclusive(_new(folder).with_suffix(".lock")):
        if (folder / INDEX).is_file():
            console.print(f"{folder} is there already")
            return
        size = sum(f.stat().st_size for f in files)
        write_shards(path, data, tokenizer, folder, size, console, vision)
    open_source(path, data, tokenizer, vision)  # checks the new shards as training does
    console.print(f"wrote {folder}")


def _new(folder: Any) -> Path:
    """Return the local folder in which shards for `folder`, a path or an address, are made."""
    return (folder if isinstance(folder, Path) else remote.copies() / folder.name).with_name(f"{folder.name}.new")


def write_shards(
    path: str,
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: Any,
    size: int,
    console: Console,
    vision: VisionLayout | None = None,
) -> None:
    """Tokenise a source into a folder of shards with an index. The folder appears when it is complete.

    The ids of a shard are one array, which a run maps, so that reading a piece of a long document reads only that
    piece. Images are stored encoded, in ArrayRecord files. If `folder` is at an address, the shards are first made in
    the local folder of copies and then copied.

    Args:
        path: the source, as in `data.path`.
        data: how to read the source.
        tokenizer: tokenizer of the texts.
        folder: folder to make, a path or an address.
        size: number of bytes to read, for the progress bar.
        console: console of the progress bar.
        vision: layout of images; None: texts only.
    """
    new = _new(folder)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    skipped, shards = 0, _ShardWriter(new, id_type(tokenizer, vision))
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
    )
    # Tokenise all documents. Shards are closed when they are full, the last one at the end.
    with bar, contextlib.closing(shards):
        task = bar.add_task(f"tokenising {path or 'the standard library'}", total=size)
        for record, document in tokenized(path, data, tokenizer, vision):
            bar.advance(task, record.size)
            if document is None:
                skipped += 1
            elif len(document.ids):
                shards.add(document, key_of(record.name))
    # The index: how the tokens were made, the number of bad records, and the sizes of all files.
    index: dict[str, Any] = {
        "format": FORMAT,
        "source": path or "standard library",
        "tokenizer": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "type": shards.kind.name,
        "skipped": skipped,
        "shards": shards.done,
    }
    if vision:
        index["vision"] = vision._asdict()
    (new / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    # Move the finished folder to its place. In a store the index is copied last, so that it stands for a whole folder.
    if isinstance(folder, Path):
        new.replace(folder)
    else:
        remote.copy_folder_up(new, folder, last=INDEX)
        shutil.rmtree(new)


class _ShardWriter:
    """Write documents into numbered shards.

    A shard has a file of ids and a `TABLE` of its documents. If it has images, they are in a third file, and a fourth
    has an array int32 [images, 5]: (document in the shard, first token, positions, patch rows, patch columns).

    Attributes:
        kind: dtype of the ids.
        done: name and file sizes of each finished shard, as in the index.
    """

    def __init__(self, folder: Path, kind: np.dtype):
        self.kind, self.done = kind, []
        self._ids: BinaryIO | None = None
        self._images: Any = None
        self._folder, self._spans, self._bytes = folder, [], 0

    def add(self, document: Document, key: int) -> None:
        """Write a document and the hash of its name; finish the shard if it is full."""
        if self._ids is None:
            self._file = str(self._folder / f"{len(self.done):05}")
            self._ids = open(self._file + IDS, "wb")  # stays open until `close`
            self._ends, self._keys = array.array("q"), array.array("I")
        if document.images and self._images is None:
            self._images = ArrayRecordWriter(self._file + IMAGES, "group_size:1,uncompressed")
        for span, image in zip(document.spans.tolist(), document.images, strict=True):
            self._images.write(image)
            self._spans.append((len(self._ends), *span))
            self._bytes += len(image)
        self._ids.write(document.ids.astype(self.kind).tobytes())
        self._ends.append((self._ends[-1] if self._ends else 0) + len(document.ids))
        self._keys.append(key)
        self._bytes += len(document.ids) * self.kind.itemsize
        if self._bytes >= _SHARD:
            self.close()

    def close(self) -> None:
        """Finish the current shard: write its tables and record the sizes of its files."""
        if self._ids is None:
            return
        self._ids.close()
        # The table of the documents, each of which begins where the one before it ends.
        ends = np.array(self._ends, np.int64)
        table = table_of(np.concatenate([[0], ends[:-1]]), ends, np.array(self._keys, np.uint32))
        np.save(self._file + DOCUMENTS, table)
        shard: dict[str, Any] = {"name": Path(self._file).name}
        files = {"bytes": IDS, "table_bytes": DOCUMENTS}
        if self._images is not None:
            self._images.close()
            np.save(self._file + SPANS, np.array(self._spans, np.int32))
            files |= {"images_bytes": IMAGES, "spans_bytes": SPANS}
        # The index gets the sizes of the files, by which a reader detects a truncated one.
        self.done.append(shard | {key: Path(self._file + suffix).stat().st_size for key, suffix in files.items()})
        self._ids, self._images, self._spans, self._bytes = None, None, [], 0


def describe(source: Source, cfg: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield lines of text about a source: documents, lengths, images, padding in packed rows, and a sample."""
    lengths, S = source.lengths, cfg.data.seq_len
    tokens = f"{lengths.sum():,} tokens ({tokenizer.name})"
    yield f"{source.name}: {len(lengths):,} documents, {tokens}, {source.skipped:,} records skipped"
    quarters = ", ".join(f"{int(q):,}" for q in np.quantile(lengths, [0, 0.25, 0.5, 0.75, 1]))
    yield f"  lengths (least, quartiles, most): {quarters}"
    budget = row_budget(VisionLayout.of(cfg.model), cfg.data)
    if budget and (spans := source.spans):
        seen = int(spans.table[:, 1].sum())
        yield (
            f"  {len(spans.table):,} images of {spans.patches.sum():,} patches in {(spans.counts > 0).sum():,} "
            f"documents: {seen:,} positions of images, {lengths.sum() - seen:,} of text"
        )
    # Padding and use of the budget are measured on the first block of rows.
    train, held_out = split(source, cfg.data, S, budget)
    yield f"  {train.tokens:,} tokens to train on, {held_out.tokens:,} held out"
    rows = RowPlan([train], [1.0], S, cfg.train.seed, repeat=True, budget=budget).block(0) if train.pieces else []
    if rows:
        filled = sum(piece.length for row in rows for piece in row) / (len(rows) * S)
        yield f"  packed into rows of {S}: {1 - filled:.2%} padding"
        if budget:
            most = max(sum(len(piece.images) for piece in row) for row in rows)
            used = sum(piece.patches for row in rows for piece in row) / (len(rows) * budget.patches)
            yield (
                f"  {used:.2%} of the {budget.patches:,} patches of a row (data.row_patches) used; at most {most:,} "
                f"images in a row, which has room for {budget.images:,} (data.row_images)"
            )
    # The sample is the start of the first document of at least median length, without borders and images.
    start = source.tokens(int(np.argmax(lengths >= np.median(lengths))), 1, 121)
    special = [tokenizer.border, *([cfg.model.image_token_id] if budget else [])]
    yield f"  sample: {tokenizer.decode(start[~np.isin(start, special)])!r}"
