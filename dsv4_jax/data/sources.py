# SPDX-License-Identifier: Apache-2.0
"""Open sources of documents as token ids: in memory, in files of ids, or in shards that were made ahead of time."""

import functools
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from dsv4_jax.config import DataConfig
from dsv4_jax.data import drawn, remote
from dsv4_jax.data.documents import tokenized
from dsv4_jax.data.ids import ArrayFile, Flat, Joined, Mapped, open_id_files
from dsv4_jax.data.interleaved import NO_SPANS, Spans
from dsv4_jax.data.records import INDEX, TOKENS, ArrayRecordReader, find, sample_hash
from dsv4_jax.data.tokenizer import Tokenizer, load_tokenizer
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.section import ConfigError

IDS, DOCUMENTS = ".ids", ".npy"  # of a shard: the ids of its documents, one after another; their `TABLE`
IMAGES, SPANS = ".images.array_record", ".images.npy"  # of a shard: encoded images; document and span of each
FORMAT = 2
_READERS = 64  # files of images that are open at a time
_IN_MEMORY = 1 << 30  # bytes of text that a run tokenises at its start


class Source(Protocol):
    """Documents of one source."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every document, its two borders included, int64 [n]."""
        ...

    @property
    def keys(self) -> np.ndarray:
        """Hash of every document's name, the same wherever its tokens are, uint32 [n]."""
        ...

    @property
    def skipped(self) -> int:
        """Number of bad records that were left out."""
        ...

    @property
    def spans(self) -> Spans | None:
        """Positions of its images; None without images."""
        ...

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Return tokens [first, last) of a document, int32; past its end there are none."""
        ...

    def image(self, number: int) -> bytes | Image.Image:
        """Return the image of a line of `spans.table`."""
        ...


class TokenShards(Joined):
    """Documents that the `data` command has tokenised: mapped files of ids under an index, images in ArrayRecord."""

    def __init__(self, folder: Any, tokenizer: Tokenizer, vision: VisionLayout | None = None):
        index = _read_index(folder)
        if index["fingerprint"] != tokenizer.fingerprint:
            raise ConfigError(
                f"{folder} was made with the tokenizer {index['tokenizer']}, not with this {tokenizer.name}: "
                "run the data command again, or set data.tokenizer and data.border as they were"
            )
        made, now = index.get("vision"), vision and vision._asdict()
        if made and made != now:
            raise ConfigError(
                f"{folder} holds images for a model of {made}, but this one has {now or 'no vision'}: run the data "
                "command again, or set the model's vision_* keys and image_token_id as they were"
            )
        self._folder = folder
        # A reader holds a file open, of which a process may have a limited number.
        self._reader = functools.lru_cache(_READERS)(lambda name: ArrayRecordReader(str(self._local(name))))
        self._names = [shard["name"] for shard in index["shards"]]
        parts, spans = [], []
        for shard in index["shards"]:
            files = [(IDS, shard["bytes"]), (DOCUMENTS, shard["table_bytes"])]
            if "images_bytes" in shard:
                files += [(IMAGES, shard["images_bytes"]), (SPANS, shard["spans_bytes"])]
            for suffix, size in files:
                file = folder / (shard["name"] + suffix)
                found = file.stat().st_size if file.exists() else 0
                if found != size:
                    raise ConfigError(f"{file} has {found:,} bytes, expected {size:,}: it is truncated or replaced")
            kind = np.dtype(index["type"])
            ids = ArrayFile.of(self._local(shard["name"] + IDS), kind, 0, shard["bytes"] // kind.itemsize)
            table = ArrayFile.of_npy(self._local(shard["name"] + DOCUMENTS))
            parts.append(Mapped(shard["name"], ids, table, tokenizer.border))
            if made:
                spans.append(self._spans(shard, table.length))
        super().__init__(index["source"], parts, index["skipped"])
        self._image_ends = np.cumsum([len(table) for _, table in spans])
        if any(len(table) for _, table in spans):
            counts, found = (np.concatenate(some) for some in zip(*spans, strict=True))
            self.spans = Spans(np.cumsum(counts), found)

    def _local(self, name: str) -> Path:
        """Return a file of the folder; the copy of one at an address."""
        return remote.local(self._folder / name)

    def _spans(self, shard: dict[str, Any], documents: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of images of each of a shard's documents, and their lines of `Spans.table`."""
        if "images_bytes" not in shard:
            return np.zeros(documents, np.int64), NO_SPANS
        table = np.load(self._local(shard["name"] + SPANS), allow_pickle=False)
        return np.bincount(table[:, 0], minlength=documents), table[:, 1:]

    def image(self, number: int) -> bytes:
        """See `Source`."""
        shard = int(np.searchsorted(self._image_ends, number, side="right"))
        return self._reader(self._names[shard] + IMAGES).read(
            [number - (int(self._image_ends[shard - 1]) if shard else 0)]
        )[0]


def _read_index(folder: Any) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise ConfigError(
                f"{folder} has format {index['format']}, but this version reads {FORMAT}: run the data command again "
                f"with data.path = {index['source']!r}, of which it was made"
            )
        return index
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder / INDEX} is damaged ({error}); run the data command again") from error


def id_type(tokenizer: Tokenizer, vision: VisionLayout | None = None) -> np.dtype:
    """Return the smallest type that holds the tokenizer's ids and that of images."""
    most = max(tokenizer.size, vision.image_token_id + 1 if vision else 0)
    return np.dtype(np.uint16 if most <= 1 << 16 else np.uint32)


def key_of(name: str) -> int:
    """Hash a document's name to a number below 2^32."""
    return zlib.crc32(name.encode())


def prepared_folder(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None = None) -> Any:
    """Return the folder of a source's tokens: the one that the `data` command has made, else the one it will make.

    Its name ends with a digest of the files (names within the source, sizes and a sample of their content), the
    tokenizer and what reading depends on. So it is found however the source's path is spelled, and after a copy to
    another disk. Images that lie outside a folder that is the source are not looked at.
    """
    root, files = find(path, cfg.prepared)
    found = [(f.relative_to(root).as_posix(), f.stat().st_size, sample_hash(f)) for f in files]
    told: list[Any] = [FORMAT, found, tokenizer.fingerprint, cfg.text_field, cfg.on_error]
    if vision:
        folder = remote.open_path(path, "data.path")
        beside = "" if folder.is_dir() else str(root.resolve())  # of a lone file, images lie outside the source
        told += [cfg.image_field, vision._asdict(), beside]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
    prepared = remote.open_path(cfg.prepared, "data.prepared")
    there = sorted(prepared.glob(f"*-{digest}")) if prepared.is_dir() else []
    made = (folder for folder in there if (folder / INDEX).is_file())
    slug = re.sub(r"[^\w.-]+", "-", path or "stdlib").strip("-.") or "source"
    return next(made, prepared / f"{slug[-40:]}-{digest}")


def made_ahead(path: str) -> Any:
    """Return the folder at a path if the `data` command has made it, else None."""
    if not path or path.startswith(drawn.PREFIX):
        return None
    folder = remote.open_path(path, "data.path")
    return folder if (folder / INDEX).is_file() else None


def open_source(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None = None) -> Source:
    """Open the documents of one source; with images, if there is a model with `vision` for them.

    Raises:
        ConfigError: if there is nothing there, or it is damaged, or too much to be tokenised at every start.
    """
    with remote.reading(path.removeprefix(drawn.PREFIX), cfg.prepared):
        return _checked(_open(path, cfg, tokenizer, vision), path)


def _open(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None) -> Source:
    """See `open_source`."""
    if folder := made_ahead(path):
        return TokenShards(folder, tokenizer, vision)
    if path.startswith(drawn.PREFIX) and not vision:
        raise ConfigError(f"data.path = {path!r} gives pictures, but model.vision_n_layers = 0: the model sees none")
    _, files = find(path.removeprefix(drawn.PREFIX), cfg.prepared)
    if ids := [f for f in files if f.suffix in TOKENS]:
        if len(ids) < len(files):
            other = next(f for f in files if f.suffix not in TOKENS)
            raise ConfigError(f"data.path = {path!r} holds ids ({ids[0].name}) and text ({other.name}); separate them")
        return open_id_files(path, ids, cfg, tokenizer, vision)
    if not path.startswith(drawn.PREFIX):
        folder = prepared_folder(path, cfg, tokenizer, vision)
        if (folder / INDEX).is_file():
            return TokenShards(folder, tokenizer, vision)
    _check_size(path, sum(f.stat().st_size for f in files))
    return _in_memory(path, cfg, tokenizer, vision)


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


def _in_memory(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None) -> Flat:
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


def open_sources(
    cfg: DataConfig, vocab: int, vision: VisionLayout | None = None
) -> tuple[list[Source], Source | None, Tokenizer]:
    """Open the sources to train on, in the order of `data.paths`, the one to evaluate on, if it is another, and the
    tokenizer.

    Args:
        cfg: what to read.
        vocab: ids of the model.
        vision: layout of images; None: the model sees none.

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
