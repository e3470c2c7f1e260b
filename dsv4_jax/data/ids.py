# SPDX-License-Identifier: Apache-2.0
"""Read documents from arrays of ids, in memory or mapped: a piece of a document is read without the rest of it."""

import dataclasses
import functools
import hashlib
import json
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dsv4_jax.config import DataConfig
from dsv4_jax.data import drawn, remote
from dsv4_jax.data.interleaved import Spans
from dsv4_jax.data.records import sample_hash
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.section import ConfigError, RunError

# A document in an array of ids: [start, end) without borders, and the hash of its name.
TABLE = np.dtype([("start", "<i8"), ("end", "<i8"), ("key", "<u4")])
_INDEX_FORMAT = 2
_INDEXED = 1 << 26  # bytes of a file of ids from which its table is kept; less is scanned in a tenth of a second
_TABLES = ".tables"  # folder of those tables in `data.prepared`
_HEADERS = {20240520: "uint16", 20240801: "uint32"}  # llm.c's `.bin` files begin with one of these
_HEADER = 256  # int32 of such a header; the third is the number of ids
_OPEN = 256  # files that are mapped at a time: each holds one file open, of which a process may often have 1024
_CHUNK = 1 << 24  # ids that are scanned together
_DIGITS = 4  # decimal digits that are hashed by one look-up


class ArrayFile(NamedTuple):
    """An array of one axis in a file, which is mapped when it is read.

    At most `_OPEN` files are mapped at a time; the one that was read longest ago is closed for the next.

    Attributes:
        file: where it is.
        dtype: of its elements.
        offset: bytes before the first element.
        length: number of elements.
        stamp: size and time of the file, by which a replaced one is noticed.
    """

    file: Path
    dtype: np.dtype
    offset: int
    length: int
    stamp: tuple[int, int]

    @classmethod
    def of(cls, file: Path, dtype: np.dtype, offset: int, length: int) -> "ArrayFile":
        """Describe an array in a file as it is now."""
        stat = file.stat()
        return cls(file, dtype, offset, length, (stat.st_size, stat.st_mtime_ns))

    @classmethod
    def of_npy(cls, file: Path) -> "ArrayFile":
        """Describe the array of an `.npy` file.

        Raises:
            ValueError: if it has not one axis.
        """
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1:
            raise ValueError(f"it holds {array.dtype}{list(array.shape)}, expected one axis")
        return cls.of(file, array.dtype, array.offset, len(array))

    def read(self) -> np.ndarray:
        """Return the array, mapped.

        Raises:
            RunError: if the file is another than when it was opened first.
        """
        return _map(self)


@functools.lru_cache(maxsize=_OPEN)
def _map(array: ArrayFile) -> np.ndarray:
    """See `ArrayFile.read`."""
    if not array.length:
        return np.zeros(0, array.dtype)
    if ArrayFile.of(*array[:4]) != array:
        raise RunError(f"{array.file} has been replaced while the run reads it: start the run again")
    mapped = np.memmap(array.file, array.dtype, mode="r", offset=array.offset, shape=array.length)
    return np.asarray(mapped)  # a slice of np.memmap costs several times that of an array


def _cut(body: np.ndarray, border: int, first: int, last: int) -> np.ndarray:
    """Return tokens [first, last) of a document, which has `body` between two borders, int32."""
    edge = np.array([border], np.int32)
    parts = [edge[first:last]] if first < 1 else []
    parts.append(body[max(first - 1, 0) : max(last - 1, 0)].astype(np.int32))
    if first <= len(body) + 1 < last:
        parts.append(edge)
    return np.concatenate(parts)


@dataclasses.dataclass
class Flat:
    """Hold documents in one array of ids in memory: document i has ids[starts[i]:ends[i]].

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
        return _cut(self.ids[self.starts[document] : self.ends[document]], self.border, first, last)

    def image(self, number: int) -> bytes | Image.Image:
        """See `Source`."""
        image = self.images[number]
        return drawn.draw(image) if isinstance(image, str) else image


class Mapped:
    """Documents in one mapped array of ids, and their mapped `TABLE`. Only keys and lengths are held in memory."""

    skipped = 0
    spans: Spans | None = None

    def __init__(self, name: str, ids: ArrayFile, table: ArrayFile | np.ndarray, border: int):
        """Take the arrays; a `table` that is no file stays in memory."""
        self.name, self._ids, self._table, self._border = name, ids, table, border
        rows = self._rows()
        self.lengths: np.ndarray = rows["end"] - rows["start"] + 2
        self.keys = rows["key"].copy()  # a view would keep the file mapped

    def _rows(self) -> np.ndarray:
        return self._table.read() if isinstance(self._table, ArrayFile) else self._table

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        start, end, _ = self._rows()[document]
        return _cut(self._ids.read()[start:end], self._border, first, last)

    def image(self, number: int) -> bytes:
        """See `Source`."""
        raise IndexError(number)


class Joined:
    """Several arrays of documents as one source, without images."""

    spans: Spans | None = None

    def __init__(self, name: str, parts: Sequence[Mapped], skipped: int = 0):
        self.name, self.skipped, self._parts = name, skipped, parts
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self.keys = np.concatenate([np.zeros(0, np.uint32), *(part.keys for part in parts)])
        self._ends = np.cumsum([len(part.lengths) for part in parts], dtype=np.int64)
        for part, end in zip(parts, self._ends.tolist(), strict=True):
            part.lengths = self.lengths[end - len(part.lengths) : end]  # a view: each length is held once

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """See `Source`."""
        part = int(np.searchsorted(self._ends, document, side="right"))
        return self._parts[part].tokens(document - (int(self._ends[part - 1]) if part else 0), first, last)

    def image(self, number: int) -> bytes:
        """See `Source`."""
        raise IndexError(number)


def table_of(starts: np.ndarray, ends: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Make the `TABLE` of documents from its columns."""
    table: np.ndarray = np.zeros(len(starts), TABLE)
    table["start"], table["end"], table["key"] = starts, ends, keys
    return table


def open_id_files(
    path: str, files: list[Any], cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None
) -> Mapped | Joined:
    """Open files of ids, each a stream of documents with borders between them; they have no images.

    Raises:
        ConfigError: for a file that is none of ids, or has one that no text has.
    """
    parts = [_open(remote.local(file), str(file), cfg, tokenizer, vision) for file in files]
    return parts[0] if len(parts) == 1 else Joined(path, parts)


def _open(file: Path, name: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None) -> Mapped:
    ids = _array(file, cfg.bin_type)
    if ids.length * ids.dtype.itemsize < _INDEXED:
        return Mapped(name, ids, _scan(file, ids.read(), tokenizer, vision), tokenizer.border)
    # All that the table depends on. The file's content is taken from a sample: its path and time change with a copy.
    known: list[Any] = [_INDEX_FORMAT, file.name, file.stat().st_size, sample_hash(file), ids.dtype.str]
    known += [tokenizer.size, tokenizer.border, vision.image_token_id if vision else None]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
    # In a hidden folder, so that a `data.path` that holds `data.prepared` does not give the table as ids.
    index = remote.open_path(cfg.prepared, "data.prepared") / _TABLES / f"{file.name[-40:]}-{digest}.npy"
    if not index.exists():
        _write(index, _scan(file, ids.read(), tokenizer, vision))
    return Mapped(name, ids, _read(index), tokenizer.border)


def _array(file: Path, bin_type: str) -> ArrayFile:
    """Describe the ids of a file.

    Raises:
        ConfigError: if it does not hold one axis of integers.
    """
    try:
        if file.suffix == ".npy":
            ids = ArrayFile.of_npy(file)
        else:
            size, kind = file.stat().st_size, np.dtype(bin_type)
            offset = _header(file, size, bin_type) if size else 0
            if size % kind.itemsize:
                raise ConfigError(f"{file} has {size:,} bytes, no whole number of {bin_type}: it is truncated")
            ids = ArrayFile.of(file, kind, offset, (size - offset) // kind.itemsize)
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is no array of ids: {error}") from error
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"{file} holds {ids.dtype}[{ids.length}], expected integers")
    return ids


def _header(file: Path, size: int, bin_type: str) -> int:
    """Return the bytes before the ids of a `.bin` file: those of llm.c's header if it has one, else 0."""
    header, offset = np.fromfile(file, "<i4", _HEADER), 4 * _HEADER
    kind = _HEADERS.get(int(header[0])) if header.size else None
    if kind is None:
        return 0
    if kind != bin_type:
        raise ConfigError(f"{file} has llm.c's header of {kind} ids, but data.bin_type is {bin_type}: set it to {kind}")
    expected = offset + (int(header[2]) * np.dtype(kind).itemsize if header.size == _HEADER else 0)
    if size != expected:
        raise ConfigError(f"{file} has {size:,} bytes, but by its header {expected:,}: it is truncated or replaced")
    return offset


def _scan(file: Path, ids: np.ndarray, tokenizer: Tokenizer, vision: VisionLayout | None) -> np.ndarray:
    """Read all ids once: check them, and return the `TABLE` of the documents between their borders."""
    borders = [np.array([-1])]
    for first in range(0, len(ids), _CHUNK):
        some = ids[first : first + _CHUNK]
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
    return table_of(starts[some], ends[some], numbered_keys(f"{file.name}:", starts[some]))


def numbered_keys(prefix: str, numbers: np.ndarray) -> np.ndarray:
    """Return crc32 of f"{prefix}{number}" for every number (int64, not negative), without a string for each.

    The CRC of texts of one length is affine in their bits: it is that of the text with zeros for digits, xor what
    each group of digits changes, which depends only on the digits and on how many follow them.
    """
    digits = np.searchsorted(10 ** np.arange(1, 19), numbers, side="right") + 1
    keys = np.array([zlib.crc32(f"{prefix}{'0' * n}".encode()) for n in range(20)], np.uint32)[digits]
    for after in range(0, int(digits.max(initial=0)), _DIGITS):
        numbers, group = np.divmod(numbers, 10**_DIGITS)
        keys ^= _changes(after)[group]
    return keys


@functools.cache
def _changes(after: int) -> np.ndarray:
    """Return what `_DIGITS` digits, by their value, change in a CRC against zeros, with so many digits after them."""
    texts = (f"{value:0{_DIGITS}}{'0' * after}".encode() for value in range(10**_DIGITS))
    codes = np.array([zlib.crc32(text) for text in texts], np.uint32)
    return codes ^ codes[0]


def _write(index: Any, table: np.ndarray) -> None:
    """Write a table, which is there whole or not at all; several processes may do it at once.

    Raises:
        ConfigError: if the folder cannot be written to.
    """
    here = isinstance(index, Path)
    new = (index if here else remote.copies() / _TABLES / index.name).with_name(f"{index.name}.{uuid.uuid4().hex}.new")
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            np.save(file, table)
        if here:
            new.replace(index)
        else:
            remote.copy_up(new, index)
            new.unlink()
    except Exception as error:  # each client of a store has its own
        raise ConfigError(
            f"data.prepared = {str(index.parent.parent)!r}: cannot write the index of a file of ids there ({error}); "
            "choose a folder that can be written to"
        ) from error


def _read(index: Any) -> ArrayFile:
    """Describe the table of a file of ids."""
    try:
        table = ArrayFile.of_npy(remote.local(index))
        if table.dtype != TABLE:
            raise ValueError(f"it holds {table.dtype}[{table.length}], expected {TABLE}")
        return table
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{index}, the index of a file of ids, is damaged ({error}): delete it") from error
