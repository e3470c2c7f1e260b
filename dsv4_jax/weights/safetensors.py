# SPDX-License-Identifier: Apache-2.0
"""Read pieces of tensors from safetensors files, and write such files in a stream.

A file is an 8-byte length, a JSON header {name: {dtype, shape, data_offsets}}, and the bytes of all tensors. The
`safetensors` library cannot read the 8-bit types into numpy, so the headers are read here and the bytes are mapped.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dsv4_jax.section import ConfigError

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # bytes; a longer header is a damaged length

# Types by their names in a header. Packed 4-bit numbers and scale bytes stay bytes.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
}


class Stored(NamedTuple):
    """Locate a tensor in a file.

    Attributes:
        file: the file.
        dtype: type by its name in the header.
        shape: shape of the stored numbers.
        start: byte of the file at which the numbers begin.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self, *index: slice) -> np.ndarray:
        """Read a piece of the tensor, as a copy: `index` cuts its leading axes."""
        width = DTYPES[self.dtype].itemsize
        if not self.size:
            return np.zeros(self.shape, DTYPES[self.dtype])[index]
        # Map bytes: the numbers of a file need not be aligned. The last axis holds the bytes of its numbers.
        *outer, last = self.shape or (1,)
        mapped = np.memmap(self.file, np.uint8, "r", self.start, (*outer, last * width))
        if index and len(index) == len(self.shape):
            first, stop, _ = index[-1].indices(last)
            index = (*index[:-1], slice(first * width, stop * width))
        numbers = np.array(mapped[index], order="C").view(DTYPES[self.dtype])
        return numbers if self.shape else numbers.reshape(())


def read_header(file: Path) -> dict[str, Stored]:
    """Locate every tensor of a file.

    Raises:
        ConfigError: if the file is truncated or damaged, or has a tensor twice; the message names the file.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ConfigError(f"{file} has {twice!r} twice in its header")
        return content

    try:
        total = file.stat().st_size
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if total < 8 or not 2 <= length <= min(_HEADER_LIMIT, total - 8):
                raise ConfigError(f"{file} is no whole safetensors file: {total:,} bytes, header of {length:,}")
            header = json.loads(content.read(length), object_pairs_hook=once)
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            stored = Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + start)
            if stored.dtype not in DTYPES:
                raise ConfigError(f"{file}: {name} has the type {stored.dtype}, known are {', '.join(DTYPES)}")
            if stop - start != stored.size or start < 0:
                raise ConfigError(f"{file}: {name} has {stop - start:,} bytes, its shape needs {stored.size:,}")
            found[name] = stored
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} has a damaged header: {type(error).__name__}: {error}") from error
    # The tensors fill the file: one after another, without a gap.
    at = 8 + length
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if stored.start != at:
            raise ConfigError(f"{file}: {name} begins at byte {stored.start:,}, expected {at:,}: the header is damaged")
        at += stored.size
    if at != total:
        raise ConfigError(f"{file} has {total:,} bytes, expected {at:,}: it is truncated or too long")
    return found


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Locate every tensor of a folder of safetensors files, by the index or, without one, in its only file.

    Raises:
        ConfigError: if a file is missing or damaged, or the index and the files do not agree.
    """
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise ConfigError(
                f"{folder} has no {INDEX} and {len(files)} .safetensors files, expected an index or one file"
            )
        return read_header(files[0])
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    found: dict[str, Stored] = {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{index} names {name!r}, which is no file of the folder")
        for tensor, stored in read_header(folder / name).items():
            if tensor in found:
                raise ConfigError(f"{tensor} is in {found[tensor].file.name} and again in {name}")
            if weight_map.get(tensor) != name:
                raise ConfigError(f"{tensor} is in {name}, but {INDEX} has it in {weight_map.get(tensor, 'no file')}")
            found[tensor] = stored
    if absent := sorted(weight_map.keys() - found.keys()):
        raise ConfigError(
            f"{INDEX} has {absent[0]} in {weight_map[absent[0]]}, which lacks it ({len(absent)} such tensors)"
        )
    return found


class Output(NamedTuple):
    """A tensor to write.

    Attributes:
        name: its name.
        dtype: type by its name in the header.
        shape: shape of the stored numbers.
        parts: makes the bytes, as arrays of consecutive numbers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[np.ndarray]]

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def split_files(tensors: list[Output], limit: int) -> dict[str, list[Output]]:
    """Divide tensors, in their order, into files of at most `limit` bytes; a larger tensor has a file of its own."""
    files: list[list[Output]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.size > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.size
    return {f"model-{i:05}-of-{len(files):05}.safetensors": file for i, file in enumerate(files, 1)}


def write_folder(folder: Path, tensors: list[Output], limit: int, advance: Callable[[int], None]) -> None:
    """Write tensors into files of a folder, then their index.

    A file appears when it is complete, and the index last, so that an interrupted folder has no index. Files that are
    there with the same header are kept: the same call again writes only the rest.

    Args:
        folder: where to write.
        tensors: what to write, in order.
        limit: largest size of a file in bytes, unless a single tensor is larger.
        advance: called with the number of bytes that have been written.
    """
    files = split_files(tensors, limit)
    for name, content in files.items():
        header = _make_header(content)
        if _begins_with(folder / name, header, sum(tensor.size for tensor in content)):
            advance(sum(tensor.size for tensor in content))
            continue
        part = folder / f"{name}.part"
        with part.open("wb") as out:
            out.write(header)
            for tensor in content:
                written = 0
                for numbers in tensor.parts():
                    data = np.ascontiguousarray(numbers, DTYPES[tensor.dtype]).reshape(-1).view(np.uint8)
                    out.write(data.data)
                    written += data.size
                    advance(data.size)
                assert written == tensor.size, (tensor.name, written, tensor.size)
            out.flush()
            os.fsync(out.fileno())
        part.replace(folder / name)
    index = {
        "metadata": {"total_size": sum(tensor.size for tensor in tensors)},
        "weight_map": {tensor.name: name for name, content in files.items() for tensor in content},
    }
    part = folder / f"{INDEX}.part"
    part.write_text(json.dumps(index, indent=1) + "\n")
    part.replace(folder / INDEX)


def _make_header(tensors: list[Output]) -> bytes:
    """Make the length and the JSON of a file's header, padded with spaces to whole 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.size]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _begins_with(file: Path, header: bytes, size: int) -> bool:
    """Return whether a complete file of this header is there."""
    if not file.is_file() or file.stat().st_size != len(header) + size:
        return False
    with file.open("rb") as content:
        return content.read(len(header)) == header


def chunks(rows: int, row_bytes: int, most: int = 64 << 20) -> Iterator[slice]:
    """Cut rows into slices of at most `most` bytes, of at least one row."""
    step = max(1, most // max(row_bytes, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def transpose_into(out: np.ndarray, x: np.ndarray) -> None:
    """Write x [rows, columns] into `out` [columns, rows], 16 rows at a time: seven times as fast as all at once.

    The numbers of these rows stay in the processor's cache while they are written column by column.
    """
    for first in range(0, len(x), 16):
        out[:, first : first + 16] = x[first : first + 16].T
