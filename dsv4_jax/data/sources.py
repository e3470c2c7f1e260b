# SPDX-License-Identifier: Apache-2.0
"""Documents as token ids, by number: in memory, in files of ids, or in shards that were made ahead of time."""

import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from dsv4_jax.config import DataConfig
from dsv4_jax.data import drawn
from dsv4_jax.data.documents import tokenized
from dsv4_jax.data.interleaved import NO_SPANS, Spans, vision_settings
from dsv4_jax.data.records import TOKENS, ArrayRecordReader, find
from dsv4_jax.data.tokenizer import Tokenizer, load_tokenizer
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.validate import ConfigError

INDEX = "index.json"
IMAGES, SPANS = ".images.array_record", ".images.npy"  # of a shard: encoded images; document and span of each
FORMAT = 1
_IN_MEMORY = 1 << 30  # bytes of text that a run tokenises at its start


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

    @property
    def spans(self) -> Spans | None:
        """Where its images lie; None without images."""
        ...

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Tokens [first, last) of a document, int32; past its end there are none."""
        ...

    def image(self, number: int) -> bytes | Image.Image:
        """The image of a line of `spans.table`."""
        ...


@dataclasses.dataclass
class Flat:
    """Hold documents in one array of ids, in memory or mapped: document i has ids[starts[i]:ends[i]].

    `lengths` is computed once: planning reads it for every piece, so a property would cost the whole corpus a piece.
    """

    name: str
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    keys: np.ndarray
    border: int
    skipped: int = 0
    spans: Spans | None = None
    images: Sequence[bytes | str] = ()
    lengths: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self):
        self.lengths = self.ends - self.starts + 2

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        body = self.ids[self.starts[document] : self.ends[document]]
        return _bordered(body, self.border, first, last)

    def image(self, number: int) -> bytes | Image.Image:
        """See `Source`."""
        image = self.images[number]
        return drawn.draw(image) if isinstance(image, str) else image


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

    def __init__(self, folder: Path, tokenizer: Tokenizer, vision: ModelConfig | None = None):
        index = _read_index(folder)
        if index["fingerprint"] != tokenizer.fingerprint:
            raise ConfigError(
                f"{folder} was made with the tokenizer {index['tokenizer']}, not with this {tokenizer.name}: "
                "run the data command again, or set data.tokenizer and data.border as they were"
            )
        made, now = index.get("vision"), vision and vision_settings(vision)
        if made and made != now:
            raise ConfigError(
                f"{folder} holds images for a model of {made}, but this one has {now or 'no vision'}: run the data "
                "command again, or set the model's vision_* keys and image_token_id as they were"
            )
        self.name, self.skipped, self._type = index["source"], index["skipped"], np.dtype(index["type"])
        self._border, self._folder, self._readers = tokenizer.border, folder, {}
        tables, spans = [np.zeros((0, 2), np.uint32)], []
        for shard in index["shards"]:
            files = [(".array_record", shard["bytes"]), (".npy", shard["table_bytes"])]
            if "images_bytes" in shard:
                files += [(IMAGES, shard["images_bytes"]), (SPANS, shard["spans_bytes"])]
            for suffix, size in files:
                file = folder / (shard["name"] + suffix)
                found = file.stat().st_size if file.exists() else 0
                if found != size:
                    raise ConfigError(f"{file} has {found:,} bytes, expected {size:,}: it is truncated or replaced")
            tables.append(np.load(folder / (shard["name"] + ".npy"), allow_pickle=False))
            if made:
                spans.append(self._spans(shard, len(tables[-1])))
        self.spans, self._image_ends = None, np.cumsum([len(table) for _, table in spans])
        if any(len(table) for _, table in spans):
            counts, found = (np.concatenate(some) for some in zip(*spans, strict=True))
            self.spans = Spans(np.cumsum(counts), found)
        self._names = [shard["name"] for shard in index["shards"]]
        self._ends = np.cumsum([len(table) for table in tables[1:]])
        table = np.concatenate(tables)
        self.lengths, self.keys = table[:, 0].astype(np.int64) + 2, table[:, 1].astype(np.uint32)

    def _spans(self, shard: dict[str, Any], documents: int) -> tuple[np.ndarray, np.ndarray]:
        """Images of each of a shard's documents, and their lines of `Spans.table`."""
        if "images_bytes" not in shard:
            return np.zeros(documents, np.int64), NO_SPANS
        table = np.load(self._folder / (shard["name"] + SPANS), allow_pickle=False)
        return np.bincount(table[:, 0], minlength=documents), table[:, 1:]

    def _record(self, ends: np.ndarray, number: int, suffix: str) -> bytes:
        """A record of one of the shards; `ends` are the records up to and including each."""
        shard = int(np.searchsorted(ends, number, side="right"))
        file = self._names[shard] + suffix
        if file not in self._readers:
            self._readers[file] = ArrayRecordReader(str(self._folder / file))
        return self._readers[file].read([number - (int(ends[shard - 1]) if shard else 0)])[0]

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        body = np.frombuffer(self._record(self._ends, document, ".array_record"), self._type)
        return _bordered(body, self._border, first, last)

    def image(self, number: int) -> bytes:
        """See `Source`."""
        return self._record(self._image_ends, number, IMAGES)


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


def id_type(tokenizer: Tokenizer, vision: ModelConfig | None = None) -> np.dtype:
    """The smallest type that holds the tokenizer's ids, and that of images."""
    most = max(tokenizer.size, vision.image_token_id + 1 if vision else 0)
    return np.dtype(np.uint16 if most <= 1 << 16 else np.uint32)


def key_of(name: str) -> int:
    """Hash of a document's name, below 2^32."""
    return zlib.crc32(name.encode())


def prepared_folder(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: ModelConfig | None = None) -> Path:
    """Where the tokens of a source lie once the `data` command has made them.

    The name changes with the files (their sizes and times), the tokenizer and what reading depends on. Images
    that lie outside a folder that is the source are not looked at.
    """
    root, files = find(path)
    stats = [(f.relative_to(root).as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    told: list[Any] = [FORMAT, str(root.resolve()), stats, tokenizer.fingerprint, cfg.text_field, cfg.on_error]
    if vision:
        told += [cfg.image_field, vision_settings(vision)]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
    slug = re.sub(r"[^\w.-]+", "-", path or "stdlib").strip("-.") or "source"
    return Path(cfg.prepared) / f"{slug[-40:]}-{digest}"


def open_source(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: ModelConfig | None = None) -> Source:
    """The documents of one source; with images, if there is a model with `vision` for them.

    Raises:
        ConfigError: if there is nothing there, or it is damaged, or too much to be tokenised at every start.
    """
    if (Path(path) / INDEX).is_file() and path:
        return _checked(Shards(Path(path), tokenizer, vision), path)
    if path.startswith(drawn.PREFIX) and not vision:
        raise ConfigError(f"data.path = {path!r} gives pictures, but model.vision_n_layers = 0: the model sees none")
    _, files = find(path.removeprefix(drawn.PREFIX))
    if ids := [f for f in files if f.suffix in TOKENS]:
        if len(ids) < len(files):
            other = next(f for f in files if f.suffix not in TOKENS)
            raise ConfigError(f"data.path = {path!r} holds ids ({ids[0].name}) and text ({other.name}); separate them")
        return _checked(_id_files(path, ids, cfg, tokenizer, vision), path)
    if not path.startswith(drawn.PREFIX):
        folder = prepared_folder(path, cfg, tokenizer, vision)
        if (folder / INDEX).is_file():
            return _checked(Shards(folder, tokenizer, vision), path)
    _check_size(path, sum(f.stat().st_size for f in files))
    return _checked(_in_memory(path, cfg, tokenizer, vision), path)


def _check_size(path: str, size: int) -> None:
    if size > _IN_MEMORY:
        raise ConfigError(
            f"data.path = {path!r} holds {size:,} bytes, too much to tokenise at every start: "
            "`python -m dsv4_jax data CONFIG` does it once"
        )


def _checked(source: Source, path: str) -> Source:
    if not len(source.lengths):
        raise ConfigError(f"data.path = {path!r} holds no text ({source.skipped} bad records skipped)")
    return source


def _in_memory(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: ModelConfig | None) -> Flat:
    kind = id_type(tokenizer, vision)
    bodies, keys, spans, images, skipped, size = [], [], [], [], 0, 0
    for record, document in tokenized(path, cfg, tokenizer, vision):
        if document is None:
            skipped += 1
        elif len(document.ids):
            bodies.append(document.ids.astype(kind))
            keys.append(key_of(record.name))
            spans.append(document.spans)
            images += document.images
            size += sum(map(len, document.images))
            _check_size(path, size)
    ends = np.cumsum([len(body) for body in bodies], dtype=np.int64)
    starts = ends - [len(body) for body in bodies]
    ids, name = np.concatenate(bodies) if bodies else np.zeros(0, kind), path or "standard library"
    keys = np.array(keys, np.uint32)
    return Flat(name, ids, starts, ends, keys, tokenizer.border, skipped, Spans.of(spans), images)


def _id_files(
    path: str, files: list[Path], cfg: DataConfig, tokenizer: Tokenizer, vision: ModelConfig | None
) -> Source:
    """Files of ids, each a stream of documents with borders between them; they have no images."""
    parts = [_id_file(file, cfg, tokenizer, vision) for file in files]
    return parts[0] if len(parts) == 1 else Joined(path, parts)


def _id_file(file: Path, cfg: DataConfig, tokenizer: Tokenizer, vision: ModelConfig | None) -> Flat:
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
        if vision and (some == vision.image_token_id).any():
            at = first + int(np.argmax(some == vision.image_token_id))
            raise ConfigError(f"{file}: position {at:,} has model.image_token_id, but files of ids have no images")
        borders.append(first + np.flatnonzero(some == tokenizer.border))
    edges = np.concatenate([*borders, [len(ids)]]).astype(np.int64)
    starts, ends = edges[:-1] + 1, edges[1:]
    some = ends > starts
    starts, ends = starts[some], ends[some]
    keys = np.array([key_of(f"{file.name}:{start}") for start in starts.tolist()], np.uint32)
    return Flat(str(file), ids, starts, ends, keys, tokenizer.border)


class Joined:
    """Several sources without images, one after another."""

    spans = None

    def __init__(self, name: str, parts: list[Flat]):
        self.name, self._parts, self.skipped = name, parts, sum(part.skipped for part in parts)
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.keys = np.concatenate([part.keys for part in parts])
        self._ends = np.cumsum([len(part.lengths) for part in parts])

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        part = int(np.searchsorted(self._ends, document, side="right"))
        return self._parts[part].tokens(document - (int(self._ends[part - 1]) if part else 0), first, last)

    def image(self, number: int) -> bytes:
        """See `Source`."""
        raise IndexError(number)


def open_sources(
    cfg: DataConfig, vocab: int, vision: ModelConfig | None = None
) -> tuple[list[Source], Source | None, Tokenizer]:
    """The sources to train on, in the order of `data.paths`; the one to evaluate on, if it is another; the tokenizer.

    Args:
        cfg: what to read.
        vocab: ids of the model.
        vision: the model, if it sees images.

    Raises:
        ConfigError: for anything that is wrong with them.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.border)
    if tokenizer.size > vocab:
        raise ConfigError(
            f"model.vocab_size = {vocab} is less than the {tokenizer.size} ids of the tokenizer {tokenizer.name}"
        )
    if vision and vision.image_token_id == tokenizer.border:
        raise ConfigError(
            f"model.image_token_id = {tokenizer.border} is the tokenizer's id between documents; choose another"
        )
    sources = [open_source(path, cfg, tokenizer, vision) for path in cfg.paths]
    other = open_source(cfg.held_out_path, cfg, tokenizer, vision) if cfg.held_out_path else None
    return sources, other, tokenizer
