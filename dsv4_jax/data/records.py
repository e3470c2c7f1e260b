# SPDX-License-Identifier: Apache-2.0
"""Texts of files: plain text, JSONL, Parquet, ArrayRecord. Bad records are refused by name, or skipped and counted."""

import glob
import gzip
import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from array_record.python import array_record_module as _library  # ty: ignore

from dsv4_jax.validate import ConfigError

ArrayRecordReader, ArrayRecordWriter = _library.ArrayRecordReader, _library.ArrayRecordWriter
TOKENS = (".bin", ".npy")  # files that hold ids, not text
# Folders of the standard library that are tests, legacy tools or not the standard library.
_SKIPPED = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_PART = 1 << 14  # a single text file is cut into documents of about this many bytes, at line ends


class Record(NamedTuple):
    """A document, or why there is none.

    Attributes:
        name: file and, where it holds several, number of the record; the same on every machine.
        text: its text, None if it is bad.
        why: what is wrong with it.
        size: bytes read for it.
    """

    name: str
    text: str | None
    why: str
    size: int


def find(path: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and all files of a source, in the order of their names.

    A folder gives its files, hidden ones left out; else a file or a glob pattern; an empty path is the
    standard library's source on this machine.

    Raises:
        ConfigError: if there is no file.
    """
    if not path:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts)]
    elif Path(path).is_dir():
        root = Path(path)
        files = [f for f in root.rglob("*") if not any(part.startswith(".") for part in f.relative_to(root).parts)]
    else:
        found = [Path(path)] if Path(path).exists() else [Path(p) for p in glob.glob(path, recursive=True)]
        root, files = Path(path).parent, found
        while any(c in str(root) for c in "*?["):
            root = root.parent
    files = sorted((f for f in files if f.is_file()), key=lambda f: f.relative_to(root).as_posix())
    if not files:
        raise ConfigError(f"data.path = {path!r}: there is no such file, folder with files, or pattern")
    return root, files


def records(path: str, field: str) -> Iterator[Record]:
    """Every record of a source of texts, in a fixed order.

    `.jsonl` (also `.gz`) and `.parquet` give the text in `field`, `.array_record` a record each, any other
    file is a document; if it is the only one it is cut at line ends.

    Raises:
        ConfigError: for a file that cannot be read as what its name says, naming it.
    """
    root, files = find(path)
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            if file.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _jsonl(file, name, field)
            elif file.suffix == ".parquet":
                yield from _parquet(file, name, field)
            elif file.suffix == ".array_record":
                yield from _array_record(file, name)
            else:
                yield from _text(file, name, alone=len(files) == 1)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def _decoded(name: str, data: bytes) -> Record:
    try:
        return Record(name, data.decode(), "", len(data))
    except UnicodeDecodeError as error:
        return Record(name, None, f"invalid UTF-8 at byte {error.start}", len(data))


def _text(file: Path, name: str, alone: bool) -> Iterator[Record]:
    if not alone:
        yield _decoded(name, file.read_bytes())
        return
    part: list[bytes] = []
    start = upto = 0
    with file.open("rb") as lines:
        for line in lines:
            if part and (upto + len(line)) // _PART > start // _PART:
                yield _decoded(f"{name}:{start}", b"".join(part))
                part, start = [], upto
            part.append(line)
            upto += len(line)
    yield _decoded(f"{name}:{start}", b"".join(part))


def _jsonl(file: Path, name: str, field: str) -> Iterator[Record]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where, size = f"{name}:{number}", len(line)
            try:
                value = json.loads(line)
            except UnicodeDecodeError as error:
                yield Record(where, None, f"invalid UTF-8 at byte {error.start}", size)
            except ValueError as error:
                yield Record(where, None, f"invalid JSON: {error}", size)
            else:
                yield _field(where, value, field, size)


def _field(where: str, value: object, field: str, size: int) -> Record:
    text = value.get(field) if isinstance(value, dict) else None
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON may name half of a surrogate pair
            return Record(where, None, "text that is no Unicode", size)
        return Record(where, text, "", size)
    if isinstance(value, dict) and field not in value:
        return Record(where, None, f"no field {field!r}, only {', '.join(map(repr, value))}", size)
    return Record(where, None, f"no text in field {field!r} but {type(text).__name__}", size)


def _parquet(file: Path, name: str, field: str) -> Iterator[Record]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{file} needs a library: pip install 'dsv4_jax[text]'")
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as table:
        columns = table.schema_arrow.names
        if field not in columns:
            raise ConfigError(f"{file}: no column {field!r}, only {', '.join(columns)}; data.text_field names it")
        number = 0
        for batch in table.iter_batches(columns=[field], batch_size=1024):
            for value in batch.column(0).to_pylist():
                number += 1
                yield _field(f"{name}:{number}", {field: value}, field, len(value) if value else 0)


def _array_record(file: Path, name: str) -> Iterator[Record]:
    reader = ArrayRecordReader(str(file))
    for number in range(reader.num_records()):
        yield _decoded(f"{name}:{number + 1}", reader.read([number])[0])
    reader.close()
