# SPDX-License-Identifier: Apache-2.0
"""Read documents from arrays of ids, in memory or memory-mapped.

Reading a piece of a document does not read the rest of the document.
"""

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

# One document in an array of ids: its range [start, end) without borders, and the hash of its name.
TABLE = np.dtype([("start", "<i8"), ("end", "<i8"), ("key", "<u4")])
_INDEX_FORMAT = 2
_INDEXED = 1 << 26  # bytes from which a file's table is saved; a smaller file is scanned in a tenth of a second
_TABLES = ".tables"  # folder of the saved tables, in `data.prepared`
_HEADERS = {20240520: "uint16", 20240801: "uint32"}  # first int32 of llm.c's `.bin` files -> type of their ids
_HEADER = 256  # length of llm.c's header in int32; the third int32 is the number of ids
_OPEN = 256  # maximum number of mapped files: each keeps a file open, and a process may often open only 1024
_CHUNK = 1 << 24  # ids that are scanned at a time
_DIGITS = 4  # decimal digits that one look-up hashes


class ArrayFile(NamedTuple):
    """An array of one axis in a file, which is mapped when it is read.

    At most `_OPEN` files are mapped at a time. To map another one, the least recently read one is closed.

    Attributes:
        file: path of the file.
        dtype: dtype of the elements.
        offset: number of bytes before the first element.
        length: number of elements.
        stamp: size of the file in bytes and time of its last change in ns, to detect that the file has been replaced.
    """

    file: Path
    dtype: np.dtype
    offset: int
    length: int
    stamp: tuple[int, int]

    @classmethod
    def of(cls, file: Path, dtype: np.dtype, offset: int, length: int) -> "ArrayFile":
        """Describe an array in a file, with the file's present size and time of change."""
        stat = file.stat()
        return cls(file, dtype, offset, length, (stat.st_size, stat.st_mtime_ns))

    @classmethod
    def of_npy(cls, file: Path) -> "ArrayFile":
        """Describe the array of an `.npy` file.

        Raises:
            ValueError: if the array has another number of axes than one.
        """
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1:
            raise ValueError(f"it holds {array.dtype}{list(array.shape)}, expected one axis")
        return cls.of(file, array.dtype, array.offset, len(array))

    def read(self) -> np.ndarray:
        """Map the array and return it.

        Raises:
            RunError: if the file has changed since it was described.
        """
        return _map(self)


@functools.lru_cache(maxsize=_OPEN)
def _map(array: ArrayFile) -> np.ndarray:
    """Map an array; the last `_OPEN` ones stay mapped (see `ArrayFile.read`)."""
    if not array.length:
        return np.zeros(0, array.dtype)
    if ArrayFile.of(*array[:4]) != array:
        raise RunError(f"{array.file} has been replaced while the run reads it: start the run again")
    mapped = np.memmap(array.file, array.dtype, mode="r", offset=array.offset, shape=array.length)
    return np.asarray(mapped)  # a slice of an array costs a fraction of a slice of np.memmap


def _cut(body: np.ndarray, border: int, first: int, last: int) -> np.ndarray:
    """Return tokens [first, last) of a document, int32.

    The tokens of a document are a border, its ids `body` and a border. Past the second border there are none.
    """
    edge = np.array([border], np.int32)
    parts = [edge[first:last]] if first < 1 else []
    parts.append(body[max(first - 1, 0) : max(last - 1, 0)].astype(np.int32))
    if first <= len(body) + 1 < last:
        parts.append(edge)
    return np.concatenate(parts)


@dataclasses.dataclass
class Flat:
    """A source whose documents are in one array of ids in memory: document i is ids[starts[i]:ends[i]].

    `lengths` is computed once and stored, because packing reads it for every piece: a property would go through all
    documents each time.
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
        """Return tokens [first, last) of a document, int32 [last - first] or fewer at its end (see `Source`)."""
        return _cut(self.ids[self.starts[document] : self.ends[document]], self.border, first, last)

    def image(self, number: int) -> bytes | Image.Image:
        """Return image `number` of the source (see `Source`)."""
        image = self.images[number]
        return drawn.draw(image) if isinstance(image, str) else image


class Mapped:
    """A source whose documents are in one mapped array of ids, with a `TABLE` of them.

    Only keys and lengths are in memory, and the table if it is not in a file.
    """

    skipped = 0
    spans: Spans | None = None

    def __init__(self, name: str, ids: ArrayFile, table: ArrayFile | np.ndarray, border: int):
        """Read lengths and keys from the table.

        Args:
            name: name of the source, for messages.
            ids: the documents' ids.
            table: the `TABLE` of the documents, in a file or in memory.
            border: id of the token before and after each document.
        """
        self.name, self._ids, self._table, self._border = name, ids, table, border
        rows = self._rows()
        self.lengths: np.ndarray = rows["end"] - rows["start"] + 2
        self.keys = rows["key"].copy()  # a view would keep the file mapped

    def _rows(self) -> np.ndarray:
        """Return the `TABLE` of the documents, mapped if it is in a file."""
        return self._table.read() if isinstance(self._table, ArrayFile) else self._table

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Return tokens [first, last) of a document, int32 [last - first] or fewer at its end (see `Source`)."""
        start, end, _ = self._rows()[document]
        return _cut(self._ids.read()[start:end], self._border, first, last)

    def image(self, number: int) -> bytes:
        """Raise IndexError, because the source has no images."""
        raise IndexError(number)


class Joined:
    """A source that joins the documents of several mapped arrays, in order; without images."""

    spans: Spans | None = None

    def __init__(self, name: str, parts: Sequence[Mapped], skipped: int = 0):
        self.name, self.skipped, self._parts = name, skipped, parts
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self.keys = np.concatenate([np.zeros(0, np.uint32), *(part.keys for part in parts)])
        self._ends = np.cumsum([len(part.lengths) for part in parts], dtype=np.int64)
        for part, end in zip(parts, self._ends.tolist(), strict=True):
            part.lengths = self.lengths[end - len(part.lengths) : end]  # a view, so that each length is in memory once

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Return tokens [first, last) of a document, int32 [last - first] or fewer at its end (see `Source`)."""
        part = int(np.searchsorted(self._ends, document, side="right"))
        return self._parts[part].tokens(document - (int(self._ends[part - 1]) if part else 0), first, last)

    def image(self, number: int) -> bytes:
        """Raise IndexError, because the source has no images."""
        raise IndexError(number)


def table_of(starts: np.ndarray, ends: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Make the `TABLE` of documents from its columns."""
    table: np.ndarray = np.zeros(len(starts), TABLE)
    table["start"], table["end"], table["key"] = starts, ends, keys
    return table


def open_id_files(
    path: str, files: list[Any], cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None
) -> Mapped | Joined:
    """Open files of ids as one source; in each file the documents are separated by borders. They have no images.

    Raises:
        ConfigError: for a file that does not hold ids, an id outside the tokenizer's range, or the id of images.
    """
    parts = [_open(remote.local(file), str(file), cfg, tokenizer, vision) for file in files]
    return parts[0] if len(parts) == 1 else Joined(path, parts)


def _open(file: Path, name: str, cfg: DataConfig, tokenizer: Tokenizer, vision: VisionLayout | None) -> Mapped:
    """Open one file of ids; scan it for documents unless it is large and its table has been saved by an earlier run."""
    ids = _describe_ids(file, cfg.bin_type)
    if ids.length * ids.dtype.itemsize < _INDEXED:
        return Mapped(name, ids, _scan(file, ids.read(), tokenizer, vision), tokenizer.border)
    # The name of the saved table has a digest of all that the table depends on. The content of the file enters by a
    # sample, not by path and time, which a copy changes.
    depends_on: list[Any] = [_INDEX_FORMAT, file.name, file.stat().st_size, sample_hash(file), ids.dtype.str]
    depends_on += [tokenizer.size, tokenizer.border, vision.image_token_id if vision else None]
    digest = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:12]
    # The folder is hidden, so that a `data.path` that contains `data.prepared` does not read the table as ids.
    index = remote.open_path(cfg.prepared, "data.prepared") / _TABLES / f"{file.name[-40:]}-{digest}.npy"
    if not index.exists():
        _save_table(index, _scan(file, ids.read(), tokenizer, vision))
    return Mapped(name, ids, _describe_table(index), tokenizer.border)


def _describe_ids(file: Path, bin_type: str) -> ArrayFile:
    """Describe the array of ids in an `.npy` or `.bin` file; `bin_type` is the dtype of a `.bin` file.

    Raises:
        ConfigError: if the file does not hold one axis of integers, or is truncated.
    """
    try:
        if file.suffix == ".npy":
            ids = ArrayFile.of_npy(file)
        else:
            # A `.bin` file is a plain array, perhaps after llm.c's header.
            size, kind = file.stat().st_size, np.dtype(bin_type)
            offset = _measure_header(file, size, bin_type) if size else 0
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


def _measure_header(file: Path, size: int, bin_type: str) -> int:
    """Return the number of bytes before the ids of a `.bin` file: the size of llm.c's header if there is one, else 0.

    Raises:
        ConfigError: if the header gives another type than `bin_type`, or another file size than `size` in bytes.
    """
    header, offset = np.fromfile(file, "<i4", _HEADER), 4 * _HEADER
    kind = _HEADERS.get(int(header[0])) if header.size else None
    if kind is None:
        return 0
    # There is a header: its type of ids and its number of ids must fit the configuration and the file.
    if kind != bin_type:
        raise ConfigError(f"{file} has llm.c's header of {kind} ids, but data.bin_type is {bin_type}: set it to {kind}")
    expected = offset + (int(header[2]) * np.dtype(kind).itemsize if header.size == _HEADER else 0)
    if size != expected:
        raise ConfigError(f"{file} has {size:,} bytes, but by its header {expected:,}: it is truncated or replaced")
    return offset


def _scan(file: Path, ids: np.ndarray, tokenizer: Tokenizer, vision: VisionLayout | None) -> np.ndarray:
    """Read all ids of a file once, check their range, and return the `TABLE` of the documents between borders.

    Raises:
        ConfigError: for an id outside the tokenizer's range, or the id of images.
    """
    # Positions of all borders, chunk by chunk; the start of the file counts as one at -1.
    borders = [np.array([-1])]
    for first in range(0, len(ids), _CHUNK):
        some = ids[first : first + _CHUNK]
        low, high = some.min(), some.max()
        if low < 0 or high >= tokenizer.size:
            wrong = first + int(np.argmax((some < 0) | (some >= tokenizer.size)))
            raise ConfigError(
                f"{file}: id {ids[wrong]} at position {wrong:,} is outside the tokenizer's {tokenizer.size} ids; is "
                "data.tokenizer the one it was made with, and data.bin_type right?"
            )
        if vision and (some == vision.image_token_id).any():
            wrong = first + int(np.argmax(some == vision.image_token_id))
            raise ConfigError(f"{file}: position {wrong:,} has model.image_token_id, but files of ids have no images")
        borders.append(first + np.flatnonzero(some == tokenizer.border))
    # A document is what is between two borders, if anything is. Its name is that of the file with its start.
    edges = np.concatenate([*borders, [len(ids)]]).astype(np.int64)
    starts, ends = edges[:-1] + 1, edges[1:]
    filled = ends > starts
    return table_of(starts[filled], ends[filled], numbered_keys(f"{file.name}:", starts[filled]))


def numbered_keys(prefix: str, numbers: np.ndarray) -> np.ndarray:
    """Compute crc32 of f"{prefix}{number}" for int64 `numbers` [n] that are not negative: uint32 [n].

    No string is made for each number. The CRC of texts of one length is affine in their bits. It is the CRC of the text
    with all digits 0, xor a change for each group of digits. That change depends only on the group's digits and on the
    number of digits after the group.
    """
    # Start from the CRC of the prefix and zeros, with the number of digits that each number has (1 to 19).
    digits = np.searchsorted(10 ** np.arange(1, 19), numbers, side="right") + 1
    keys = np.array([zlib.crc32(f"{prefix}{'0' * n}".encode()) for n in range(20)], np.uint32)[digits]
    # Add the change of each group of `_DIGITS` digits, the last group first.
    for after in range(0, int(digits.max(initial=0)), _DIGITS):
        numbers, group = np.divmod(numbers, 10**_DIGITS)
        keys ^= _crc_changes(after)[group]
    return keys


@functools.cache
def _crc_changes(after: int) -> np.ndarray:
    """Compute the xor that a group of digits makes to the CRC of zeros: uint32 [10^_DIGITS], by the group's value.

    `after` is the number of digits after the group.
    """
    texts = (f"{value:0{_DIGITS}}{'0' * after}".encode() for value in range(10**_DIGITS))
    codes = np.array([zlib.crc32(text) for text in texts], np.uint32)
    return codes ^ codes[0]


def _save_table(index: Any, table: np.ndarray) -> None:
    """Save a table at `index`, a local path or an address.

    The file appears under its name only when it is complete, so that several processes may save the same table at once.

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
    except Exception as error:  # every store's client raises errors of its own
        raise ConfigError(
            f"data.prepared = {str(index.parent.parent)!r}: cannot write the index of a file of ids there ({error}); "
            "choose a folder that can be written to"
        ) from error


def _describe_table(index: Any) -> ArrayFile:
    """Describe the saved table at `index`.

    Raises:
        ConfigError: if it is damaged.
    """
    try:
        table = ArrayFile.of_npy(remote.local(index))
        if table.dtype != TABLE:
            raise ValueError(f"it holds {table.dtype}[{table.length}], expected {TABLE}")
        return table
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{index}, the index of a file of ids, is damaged ({error}): delete it") from error
