# SPDX-License-Identifier: Apache-2.0
"""Open sources of documents as token ids: texts tokenised in memory, files of ids, or shards of the `data` command."""

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

# Suffixes of the files of a shard.
IDS, DOCUMENTS = ".ids", ".npy"  # ids of all documents, one after another; `TABLE` of the documents
IMAGES, SPANS = ".images.array_record", ".images.npy"  # encoded images; document and span of each image
FORMAT = 2  # version of the format of shards
_READERS = 64  # maximum number of open files of images
_IN_MEMORY = 1 << 30  # maximum size of a source that is tokenised at the start of a run, in bytes


class Source(Protocol):
    """The documents of one source, by number."""

    @property
    def name(self) -> str:
        """Return the name for messages."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of every document, including its two borders: int64 [n]."""
        ...

    @property
    def keys(self) -> np.ndarray:
        """Return the hash of every document's name, wherever its tokens are stored: uint32 [n]."""
        ...

    @property
    def skipped(self) -> int:
        """Return the number of bad records that were left out."""
        ...

    @property
    def spans(self) -> Spans | None:
        """Return the spans of the images; None without images."""
        ...

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Return tokens [first, last) of a document, int32; past its end there are none.

        Token 0 is the border before the document.
        """
        ...

    def image(self, number: int) -> bytes | Image.Image:
        """Return image `number`, which is that of line `number` of `spans.table`: encoded, or drawn."""
        ...


class TokenShards(Joined):
    """A source that the `data` command has tokenised: mapped shards of ids, with images in ArrayRecord files."""

    def __init__(self, folder: Any, tokenizer: Tokenizer, vision: VisionLayout | None = None):
        """Open the shards of a folder.

        Raises:
            ConfigError: if they were made with another tokenizer or layout of images, or a file is damaged.
        """
        # The index must fit the tokenizer and, if there are images, their layout.
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
        if vision and not made and vision.image_token_id < tokenizer.size:
            raise ConfigError(
                f"{folder} was made for a model without vision, so its texts may have model.image_token_id = "
                f"{vision.image_token_id}, an id of the tokenizer: run the data command again for this model"
            )
        self._folder = folder
        # Each reader keeps a file open, and the system limits the open files of a process.
        self._reader = functools.lru_cache(_READERS)(lambda name: ArrayRecordReader(str(self._local(name))))
        self._names = [shard["name"] for shard in index["shards"]]
        # Check the sizes of all files, and map the ids of each shard.
        parts, spans = [], []
        for shard in index["shards"]:
            files = [(IDS, shard["bytes"]), (DOCUMENTS, shard["table_bytes"])]
            if "images_bytes" in shard:
                files += [(IMAGES, shard["images_bytes"]), (SPANS, shard["spans_bytes"])]
            for suffix, size in files:
                file = folder / (shard["name"] + suffix)
                present = file.stat().st_size if file.exists() else 0
                if present != size:
                    raise ConfigError(f"{file} has {present:,} bytes, expected {size:,}: it is truncated or replaced")
            kind = np.dtype(index["type"])
            ids = ArrayFile.of(self._local(shard["name"] + IDS), kind, 0, shard["bytes"] // kind.itemsize)
            table = ArrayFile.of_npy(self._local(shard["name"] + DOCUMENTS))
            parts.append(Mapped(shard["name"], ids, table, tokenizer.border))
            if made:
                spans.append(self._spans(shard, table.length))
        super().__init__(index["source"], parts, index["skipped"])
        # Images are numbered through all shards.
        self._image_ends = np.cumsum([len(table) for _, table in spans])
        if any(len(table) for _, table in spans):
            counts, lines = (np.concatenate(some) for some in zip(*spans, strict=True))
            self.spans = Spans(np.cumsum(counts), lines)

    def _local(self, name: str) -> Path:
        """Return the local path of a file of the folder; a file at an address is copied."""
        return remote.local(self._folder / name)

    def _spans(self, shard: dict[str, Any], documents: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the spans of a shard: number of images of each document, int [documents], and lines of `Spans.table`."""
        if "images_bytes" not in shard:
            return np.zeros(documents, np.int64), NO_SPANS
        table = np.load(self._local(shard["name"] + SPANS), allow_pickle=False)
        return np.bincount(table[:, 0], minlength=documents), table[:, 1:]

    def image(self, number: int) -> bytes:
        """Return image `number` of the source (see `Source`)."""
        shard = int(np.searchsorted(self._image_ends, number, side="right"))
        return self._reader(self._names[shard] + IMAGES).read(
            [number - (int(self._image_ends[shard - 1]) if shard else 0)]
        )[0]


def _read_index(folder: Any) -> dict[str, Any]:
    """Read the index of a folder of shards.

    Raises:
        ConfigError: if it is damaged or of another format.
    """
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
    """Return the smallest dtype, uint16 or uint32, for the tokenizer's ids and the id of images."""
    most = max(tokenizer.size, vision.image_token_id + 1 if vision else 0)
    return np.dtype(np.uint16 if most <= 1 << 16 else np.uint32)


def key_of(name: str) -> int:
    """Hash a document's name to an integer below 2^32."""
    return zlib.crc32(name.encode())


def prepared_folder(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None = None) -> Any:
    """Return the folder for the shards of a source: the one that the `data` command has made, else the one to make.

    Its name ends with a digest of the source's files, the tokenizer and the keys that change how records are read. A
    file enters by its name within the source, its size and a sample of its content. So the folder is found again when
    the path is spelled differently or the source is copied to another disk. If the source is a folder, image files
    outside it do not enter the digest.
    """
    root, files = find(path, cfg.prepared)
    content = [(f.relative_to(root).as_posix(), f.stat().st_size, sample_hash(f)) for f in files]
    depends_on: list[Any] = [FORMAT, content, tokenizer.fingerprint, cfg.text_field, cfg.on_error]
    if vision:
        folder = remote.open_path(path, "data.path")
        # If the source is a file or a pattern, its images may be outside it, in a folder that the digest must name.
        beside = "" if folder.is_dir() else str(root.resolve())
        depends_on += [cfg.image_field, vision._asdict(), beside]
    digest = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:12]
    # Look for the digest at the end of a name. The start of the name comes from the path and is only for people.
    prepared = remote.open_path(cfg.prepared, "data.prepared")
    there = sorted(prepared.glob(f"*-{digest}")) if prepared.is_dir() else []
    made = (folder for folder in there if (folder / INDEX).is_file())
    slug = re.sub(r"[^\w.-]+", "-", path or "stdlib").strip("-.") or "source"
    return next(made, prepared / f"{slug[-40:]}-{digest}")


def made_ahead(path: str) -> Any:
    """Return the folder at `path` if the `data` command has made it, else None."""
    if not path or path.startswith(drawn.PREFIX):
        return None
    folder = remote.open_path(path, "data.path")
    return folder if (folder / INDEX).is_file() else None


def open_source(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None = None) -> Source:
    """Open one source; its images are read only with `vision`.

    Args:
        path: the source, as in `data.path`.
        cfg: how to read it.
        tokenizer: tokenizer of the texts.
        vision: layout of images; None: the model has no vision.

    Raises:
        ConfigError: if there is no text, a file is damaged, or the texts are too large to tokenise at every start.
    """
    with remote.reading(path.removeprefix(drawn.PREFIX), cfg.prepared):
        return _check_not_empty(_open(path, cfg, tokenizer, vision), path)


def _open(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None) -> Source:
    """Open a source by what is at its path (see `open_source`)."""
    # A folder of shards is opened directly.
    if folder := made_ahead(path):
        return TokenShards(folder, tokenizer, vision)
    if path.startswith(drawn.PREFIX) and not vision:
        raise ConfigError(f"data.path = {path!r} gives pictures, but model.vision_n_layers = 0: the model sees none")
    # Files of ids are mapped; a source has either ids or texts.
    _, files = find(path.removeprefix(drawn.PREFIX), cfg.prepared)
    if ids := [f for f in files if f.suffix in TOKENS]:
        if len(ids) < len(files):
            other = next(f for f in files if f.suffix not in TOKENS)
            raise ConfigError(f"data.path = {path!r} holds ids ({ids[0].name}) and text ({other.name}); separate them")
        return open_id_files(path, ids, cfg, tokenizer, vision)
    # Texts are read from their shards if these have been made, else tokenised now.
    if not path.startswith(drawn.PREFIX):
        folder = prepared_folder(path, cfg, tokenizer, vision)
        if (folder / INDEX).is_file():
            return TokenShards(folder, tokenizer, vision)
    _check_size(path, sum(f.stat().st_size for f in files))
    return _tokenize_in_memory(path, cfg, tokenizer, vision)


def _check_size(path: str, size: int) -> None:
    """Check that a source of `size` bytes is small enough to tokenise at every start."""
    if size > _IN_MEMORY:
        raise ConfigError(
            f"data.path = {path!r} holds {size:,} bytes, too much to tokenise at every start: "
            "`python -m dsv4_jax data CONFIG` does it once"
        )


def _check_not_empty(source: Source, path: str) -> Source:
    """Check that a source has at least one document, and return it."""
    if not len(source.lengths):
        raise ConfigError(f"data.path = {path!r} holds no text ({source.skipped} bad records skipped)")
    return source


def _tokenize_in_memory(path: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None) -> Flat:
    """Tokenise a source of texts into one array of ids in memory; its encoded images are kept in memory too."""
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
    # Document i is ids[starts[i]:ends[i]].
    ends = np.cumsum([len(body) for body in bodies], dtype=np.int64)
    starts = ends - [len(body) for body in bodies]
    ids, name = np.concatenate(bodies) if bodies else np.zeros(0, kind), path or "standard library"
    keys = np.array(keys, np.uint32)
    return Flat(name, ids, starts, ends, keys, tokenizer.border, skipped, Spans.of(spans), images)


def open_sources(
    cfg: DataConfig, vocab: int, vision: VisionLayout | None = None
) -> tuple[list[Source], Source | None, Tokenizer]:
    """Open the tokenizer and all sources; return (sources to train on, source to evaluate on, tokenizer).

    The sources to train on are in the order of `data.paths`. Without `data.held_out_path` the source to evaluate on is
    None.

    Args:
        cfg: what to read, and how.
        vocab: size of the model's vocabulary.
        vision: layout of images; None: the model has no vision.

    Raises:
        ConfigError: if a source or the tokenizer cannot be used, the vocabulary is smaller than the tokenizer's, or the
            id of images is that of the border.
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
