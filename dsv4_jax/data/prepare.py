# SPDX-License-Identifier: Apache-2.0
"""`python -m dsv4_jax data CONFIG`: tokenises sources ahead of time, and shows what they hold."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dsv4_jax.config import Config, DataConfig
from dsv4_jax.data.packing import Plan, split
from dsv4_jax.data.records import TOKENS, ArrayRecordWriter, find
from dsv4_jax.data.sources import (
    FORMAT,
    INDEX,
    Source,
    id_type,
    key_of,
    open_source,
    open_sources,
    prepared_folder,
    tokenized,
)
from dsv4_jax.data.tokenizer import Tokenizer, load_tokenizer

_SHARD = 1 << 28  # bytes of ids in a shard


def run(cfg: Config, console: Console) -> None:
    """Makes the tokens of every source of text that are not there yet, then describes all sources.

    Raises:
        ConfigError: if a source or the tokenizer cannot be used.
    """
    data = cfg.data
    tokenizer = load_tokenizer(data.tokenizer, data.border)
    for path in [*data.paths, *filter(None, [data.held_out_path])]:
        if (Path(path) / INDEX).is_file() and path:
            continue
        _, files = find(path)
        if any(f.suffix in TOKENS for f in files):
            continue  # ids already; `open_source` checks them
        folder = prepared_folder(path, data, tokenizer)
        if (folder / INDEX).is_file():
            console.print(f"{folder} is there already")
        else:
            size = sum(f.stat().st_size for f in files)
            write_shards(path, data, tokenizer, folder, size, console)
            open_source(path, data, tokenizer)  # as training will, checks included
            console.print(f"wrote {folder}")
    sources, held_out, tokenizer = open_sources(data, cfg.model.vocab_size)
    for source in [*sources, *filter(None, [held_out])]:
        for line in describe(source, cfg, tokenizer):
            console.print(line)


def write_shards(path: str, data: DataConfig, tokenizer: Tokenizer, folder: Path, size: int, console: Console) -> None:
    """Tokenises a source into shards of ArrayRecord under an index; the folder appears when all of it is done."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    skipped, shards = 0, _Shards(new, id_type(tokenizer))
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
    )
    with bar, contextlib.closing(shards):
        task = bar.add_task(f"tokenising {path or 'the standard library'}", total=size)
        for record, ids in tokenized(path, data, tokenizer):
            bar.advance(task, record.size)
            if ids is None:
                skipped += 1
            elif len(ids):
                shards.add(ids, key_of(record.name))
    index: dict[str, Any] = {
        "format": FORMAT,
        "source": path or "standard library",
        "tokenizer": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "type": shards.kind.name,
        "skipped": skipped,
        "shards": shards.done,
    }
    (new / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    new.replace(folder)


class _Shards:
    """Writes documents into one shard after another, each with a table of lengths and keys beside it."""

    def __init__(self, folder: Path, kind: np.dtype):
        self.kind, self.done = kind, []
        self._folder, self._writer, self._table, self._bytes = folder, None, [], 0

    def add(self, ids: np.ndarray, key: int) -> None:
        if self._writer is None:
            self._name = f"{len(self.done):05}"
            # A record a group: a document is read without its neighbours.
            self._writer = ArrayRecordWriter(str(self._folder / f"{self._name}.array_record"), "group_size:1")
        data = ids.astype(self.kind).tobytes()
        self._writer.write(data)
        self._table.append((len(ids), key))
        self._bytes += len(data)
        if self._bytes >= _SHARD:
            self.close()

    def close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        files = [self._folder / f"{self._name}{suffix}" for suffix in (".array_record", ".npy")]
        np.save(files[1], np.array(self._table, np.uint32))
        sizes = [file.stat().st_size for file in files]
        self.done.append({"name": self._name, "bytes": sizes[0], "table_bytes": sizes[1]})
        self._writer, self._table, self._bytes = None, [], 0


def describe(source: Source, cfg: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """What a source holds, how well it packs, and how a document starts: a line each."""
    lengths, S = source.lengths, cfg.data.seq_len
    tokens = f"{lengths.sum():,} tokens ({tokenizer.name})"
    yield f"{source.name}: {len(lengths):,} documents, {tokens}, {source.skipped:,} records skipped"
    quarters = ", ".join(f"{int(q):,}" for q in np.quantile(lengths, [0, 0.25, 0.5, 0.75, 1]))
    yield f"  lengths (least, quartiles, most): {quarters}"
    train, held_out = split(source, cfg.data.held_out, S)
    yield f"  {train.tokens:,} tokens to train on, {held_out.tokens:,} held out"
    rows = Plan([train], [1.0], S, cfg.train.seed, repeat=True).block(0) if train.pieces else []
    if rows:
        filled = sum(piece.length for row in rows for piece in row) / (len(rows) * S)
        yield f"  packed into rows of {S}: {1 - filled:.2%} padding"
    start = source.tokens(int(np.argmax(lengths >= np.median(lengths))), 1, 121)
    yield f"  sample: {tokenizer.decode(start[start != tokenizer.border])!r}"
