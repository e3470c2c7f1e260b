# SPDX-License-Identifier: Apache-2.0
"""Documents as token ids, by number: in memory, in files of ids, or in shards that were made ahead of time."""

import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsv4_jax.config import DataConfig
from dsv4_jax.data.records import TOKENS, ArrayRecordReader, Record, find, records
from dsv4_jax.data.tokenizer import Tokenizer, load_tokenizer
from dsv4_jax.validate import ConfigError

INDEX = "index.json"
FORMAT = 1
_IN_MEMORY = 1 << 30  # bytes of text that a run tokenises at its start
_TOGETHER = 256  # records that are tokenised together


class Source(Protocol):
    """Documents of one source."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, its two borders included, int64 [n]."""
        ...

    @property
    def keys(self) -> np.ndarray:
        """A hash of every document's name, the same wherever its tokens lie, uint32 [n]."""
        ...

    @property
    def skipped(self) -> int:
        """Bad records that were left out."""
        ...

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Tokens [first, last) of a document, int32; past its end there are none."""
        ...


@dataclasses.dataclass(frozen=True)
class Flat:
    """Documents that lie in one array of ids, in memory or mapped: document i has ids[starts[i]:ends[i]]."""

    name: str
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    keys: np.ndarray
    border: int
    skipped: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document and its borders."""
        return self.ends - self.starts + 2

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        body = self.ids[self.starts[document] : self.ends[document]]
        return _bordered(body, self.border, first, last)


def _bordered(body: np.ndarray, border: int, first: int, last: int) -> np.ndarray:
    """[first, last) of a document's ids between two borders."""
    edge = np.array([border], np.int32)
    parts = [edge[first:last]] if first < 1 else []
    parts.append(body[max(first - 1, 0) : max(last - 1, 0)].astype(np.int32))
    if first <= len(body) + 1 < last:
        parts.append(edge)
    return np.concatenate(parts)


class Shards:
    """Documents that the `data` command has tokenised, in ArrayRecord files under an index."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        index = _read_index(folder)
        if index["fingerprint"] != tokenizer.fingerprint:
            raise ConfigError(
                f"{folder} was made with the tokenizer {index['tokenizer']}, not with this {tokenizer.name}: "
                "run the data command again, or set data.tokenizer and data.border as they were"
            )
        self.name, self.skipped, self._type = index["source"], index["skipped"], np.dtype(index["type"])
        self._border, self._folder, self._readers = tokenizer.border, folder, {}
        tables = [np.zeros((0, 2), np.uint32)]
        for shard in index["shards"]:
            for suffix, size in ((".array_record", shard["bytes"]), (".npy", shard["table_bytes"])):
                file = folder / (shard["name"] + suffix)
                found = file.stat().st_size if file.exists() else 0
                if found != size:
                    raise ConfigError(f"{file} has {found:,} bytes, expected {size:,}: it is truncated or replaced")
            tables.append(np.load(folder / (shard["name"] + ".npy"), allow_pickle=False))
        self._names = [shard["name"] for shard in index["shards"]]
        self._ends = np.cumsum([len(table) for table in tables[1:]])
        table = np.concatenate(tables)
        self.lengths, self.keys = table[:, 0].astype(np.int64) + 2, table[:, 1].astype(np.uint32)

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        shard = int(np.searchsorted(self._ends, document, side="right"))
        if shard not in self._readers:
            self._readers[shard] = ArrayRecordReader(str(self._folder / (self._names[shard] + ".array_record")))
        number = document - (int(self._ends[shard - 1]) if shard else 0)
        body = np.frombuffer(self._readers[shard].read([number])[0], self._type)
        return _bordered(body, self._border, first, last)


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise ConfigError(f"{folder / INDEX} has format {index['format']}, expected {FORMAT}: make it again")
        return index
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder / INDEX} is damaged ({error}); run the data command again") from error


def id_type(tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds the tokenizer's ids."""
    return np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)


def key_of(name: str) -> int:
    """Hash of a document's name, below 2^32."""
    return zlib.crc32(name.encode())


def tokenized(path: str, cfg: DataConfig, tokenizer: Tokenizer) -> Iterator[tuple[Record, np.ndarray | None]]:
    """Every record of a source of texts and its ids; None for a bad one that is skipped. Empty texts are left out.

    Raises:
        ConfigError: for a bad record, unless `data.on_error` skips them.
    """
    waiting: list[Record] = []

    def flush() -> Iterator[tuple[Record, np.ndarray | None]]:
        yield from zip(waiting, tokenizer.encode([str(record.text) for record in waiting]), strict=True)
        waiting.clear()

    for record in records(path, cfg.text_field):
        if record.text is None:
            if cfg.on_error == "raise":
                what = f"data.path = {path!r}, record {record.name}: {record.why}"
                raise ConfigError(f"{what}; data.on_error = 'skip' leaves bad records out")
            yield record, None
        elif record.text:
            waiting.append(record)
            if len(waiting) == _TOGETHER:
                yield from flush()
    yield from flush()


def prepared_folder(path: str, cfg: DataConfig, tokenizer: Tokenizer) -> Path:
    """Where the tokens of a source lie once the `data` command has made them.

    The name changes with the files (their sizes and times), the tokenizer and what reading depends on.
    """
    root, files = find(path)
    stats = [(f.relative_to(root).as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    told = [FORMAT, str(root.resolve()), stats, tokenizer.fingerprint, cfg.text_field, cfg.on_error]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
    slug = re.sub(r"[^\w.-]+", "-", path or "stdlib").strip("-.") or "source"
    return Path(cfg.prepared) / f"{slug[-40:]}-{digest}"


def open_source(path: str, cfg: DataConfig, tokenizer: Tokenizer) -> Source:
    """The documents of one source.

    Raises:
        ConfigError: if there is nothing there, or it is damaged, or too much to be tokenised at every start.
    """
    if (Path(path) / INDEX).is_file() and path:
        return _checked(Shards(Path(path), tokenizer), path)
    _, files = find(path)
    if ids := [f for f in files if f.suffix in TOKENS]:
        if len(ids) < len(files):
            other = next(f for f in files if f.suffix not in TOKENS)
            raise ConfigError(f"data.path = {path!r} holds ids ({ids[0].name}) and text ({other.name}); separate them")
        return _checked(_id_files(path, ids, cfg, tokenizer), path)
    folder = prepared_folder(path, cfg, tokenizer)
    if (folder / INDEX).is_file():
        return _checked(Shards(folder, tokenizer), path)
    if (size := sum(f.stat().st_size for f in files)) > _IN_MEMORY:
        raise ConfigError(
            f"data.path = {path!r} holds {size:,} bytes, too much to tokenise at every start: "
            "`python -m dsv4_jax data CONFIG` does it once"
        )
    return _checked(_in_memory(path, cfg, tokenizer), path)


def _checked(source: Source, path: str) -> Source:
    if not len(source.lengths):
        raise ConfigError(f"data.path = {path!r} holds no text ({source.skipped} bad records skipped)")
    return source


def _in_memory(path: str, cfg: DataConfig, tokenizer: Tokenizer) -> Flat:
    kind = id_type(tokenizer)
    bodies, keys, skipped = [], [], 0
    for record, ids in tokenized(path, cfg, tokenizer):
        if ids is None:
            skipped += 1
        elif len(ids):
            bodies.append(ids.astype(kind))
            keys.append(key_of(record.name))
    ends = np.cumsum([len(body) for body in bodies], dtype=np.int64)
    starts = ends - [len(body) for body in bodies]
    ids = np.concatenate(bodies) if bodies else np.zeros(0, kind)
    return Flat(path or "standard library", ids, starts, ends, np.array(keys, np.uint32), tokenizer.border, skipped)


def _id_files(path: str, files: list[Path], cfg: DataConfig, tokenizer: Tokenizer) -> Source:
    """Files of ids, each a stream of documents with borders between them."""
    parts = [_id_file(file, cfg, tokenizer) for file in files]
    return parts[0] if len(parts) == 1 else Joined(path, parts)


def _id_file(file: Path, cfg: DataConfig, tokenizer: Tokenizer) -> Flat:
    try:
        if file.suffix == ".npy":
            ids = np.load(file, mmap_mode="r", allow_pickle=False)
        elif size := file.stat().st_size:
            width = np.dtype(cfg.bin_type).itemsize
            if size % width:
                raise ConfigError(f"{file} has {size:,} bytes, no whole number of {cfg.bin_type}: it is truncated")
            ids = np.memmap(file, cfg.bin_type, mode="r")
        else:
            ids = np.zeros(0, cfg.bin_type)
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is no array of ids: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(f"{file} holds {ids.dtype}{list(ids.shape)}, expected one axis of integers")
    borders, step = [np.array([-1])], 1 << 24
    for first in range(0, len(ids), step):
        some = ids[first : first + step]
        low, high = some.min(), some.max()
        if low < 0 or high >= tokenizer.size:
            at = first + int(np.argmax((some < 0) | (some >= tokenizer.size)))
            raise ConfigError(
                f"{file}: id {ids[at]} at position {at:,} is outside the tokenizer's {tokenizer.size} ids; is "
                "data.tokenizer the one it was made with, and data.bin_type right?"
            )
        borders.append(first + np.flatnonzero(some == tokenizer.border))
    edges = np.concatenate([*borders, [len(ids)]]).astype(np.int64)
    starts, ends = edges[:-1] + 1, edges[1:]
    some = ends > starts
    starts, ends = starts[some], ends[some]
    keys = np.array([key_of(f"{file.name}:{start}") for start in starts.tolist()], np.uint32)
    return Flat(str(file), ids, starts, ends, keys, tokenizer.border)


class Joined:
    """Several sources, one after another."""

    def __init__(self, name: str, parts: list[Flat]):
        self.name, self._parts, self.skipped = name, parts, sum(part.skipped for part in parts)
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.keys = np.concatenate([part.keys for part in parts])
        self._ends = np.cumsum([len(part.lengths) for part in parts])

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        part = int(np.searchsorted(self._ends, document, side="right"))
        return self._parts[part].tokens(document - (int(self._ends[part - 1]) if part else 0), first, last)


def open_sources(cfg: DataConfig, vocab: int) -> tuple[list[Source], Source | None, Tokenizer]:
    """The sources to train on, in the order of `data.paths`; the one to evaluate on, if it is another; the tokenizer.

    Raises:
        ConfigError: for anything that is wrong with them; `vocab` is the model's.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.border)
    if tokenizer.size > vocab:
        raise ConfigError(
            f"model.vocab_size = {vocab} is less than the {tokenizer.size} ids of the tokenizer {tokenizer.name}"
        )
    sources = [open_source(path, cfg, tokenizer) for path in cfg.paths]
    return sources, open_source(cfg.held_out_path, cfg, tokenizer) if cfg.held_out_path else None, tokenizer
