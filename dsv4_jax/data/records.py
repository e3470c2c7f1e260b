# SPDX-License-Identifier: Apache-2.0
"""Read records of text from files: plain text, JSON, JSONL, Parquet, ArrayRecord.

A bad record is yielded without a text but with its name and the reason. A record of JSON, JSONL or Parquet may have
images: each `<image>` in its text is the place of one of them, in order.
"""

import base64
import binascii
import contextlib
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import sysconfig
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from array_record.python import array_record_module as _library  # ty: ignore

from dsv4_jax.data import remote
from dsv4_jax.data.images import SUFFIXES
from dsv4_jax.section import ConfigError

ArrayRecordReader, ArrayRecordWriter = _library.ArrayRecordReader, _library.ArrayRecordWriter
INDEX = "index.json"  # name of the index in a folder that the `data` command made
TOKENS = (".bin", ".npy")  # files that hold ids, not text
JSON = (".jsonl", ".ndjson", ".json")
# Suffixes of plain text files. A file without a suffix is read as plain text too.
TEXT = frozenset(
    ".txt .text .md .markdown .rst .tex .bib .org .adoc .html .htm .xml .svg .css .scss .csv .tsv .log .srt .vtt "
    ".py .pyi .ipynb .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .java .kt .scala .swift .js .jsx .mjs .ts "
    ".tsx .vue .rb .php .pl .pm .r .jl .lua .hs .ml .mli .clj .ex .exs .erl .f .f90 .cs .fs .vb .dart .zig .nim .lean "
    ".v .vhd .sv .asm .s .sql .proto .graphql .sh .bash .zsh .fish .ps1 .bat .cmake .mk .el .lisp .scm .toml .yaml "
    ".yml .ini .cfg .conf .diff .patch".split()
)
# Names, without suffix, of files that describe a folder of records and contain none.
_ABOUT = {
    "readme",
    "license",
    "licence",
    "notice",
    "dataset_info",
    "dataset_infos",
    "dataset_dict",
    "state",
    "croissant",
}
PLACE = "<image>"  # marks the place of an image in a text
# Folders below the standard library's that hold tests, legacy tools or other packages.
_SKIPPED = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_SAMPLES, _SAMPLE = 16, 1 << 12  # number of pieces of a file that are hashed, and bytes of each
_PART = 1 << 14  # bytes of a document, about, when a single text file is cut at line ends


class Record(NamedTuple):
    """A record of a source: a text with its images, or the reason why it is bad.

    Attributes:
        name: path of the file within the source. A record of a JSON, Parquet or ArrayRecord file adds `:` and its
            number, a part of a text file `:` and its first byte. The name is the same on every machine.
        text: the text; None if the record is bad.
        why: reason why the record is bad; empty otherwise.
        size: number of bytes that were read, about.
        images: encoded images, one for each `PLACE` in the text.
    """

    name: str
    text: str | None
    why: str
    size: int
    images: tuple[bytes, ...] = ()


def find(path: str, prepared: str = "") -> tuple[Any, list[Any]]:
    """Find all files of a source; return the folder that their names are relative to, and the files ordered by name.

    Of a folder these are all files below it that are not hidden. If it has files of records or ids, files that only
    describe it (`README.md`, `LICENSE`, `dataset_info.json`) are left out. An empty path is the source code of the
    standard library on this machine. Files at an address are `UPath`s (see remote.py), local ones `pathlib.Path`s.

    Args:
        path: a file, folder, glob pattern or address, as in `data.path`.
        prepared: `data.prepared`. If it is the source's folder or inside it, the files that the `data` command has made
            there are left out.

    Raises:
        ConfigError: if there is no file.
    """
    root, files = _list_files(path)
    files = _without_prepared(prepared, root, files)
    files = sorted(files, key=lambda f: f.relative_to(root).as_posix())
    if not files:
        raise ConfigError(f"data.path = {path!r}: there is no such file, folder with files, or pattern")
    return root, files


def _list_files(path: str) -> tuple[Any, list[Any]]:
    """Find the files of a source in any order, including those in `data.prepared` (see `find`)."""
    start = remote.open_path(path, "data.path")
    if not path:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts)]
    elif start.is_dir():
        root = start
        files = list(root.rglob("*")) if isinstance(root, Path) else remote.files_in(root)
        files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts)]
        content = [f for f in files if f.name.partition(".")[0].lower() not in _ABOUT]
        if any(kind(f) in (*JSON, *TOKENS, ".parquet", ".array_record") for f in content):
            files = content
    else:
        if start.exists():
            files = [start]
        elif isinstance(start, Path):
            files = [Path(p) for p in glob.glob(path, recursive=True)]
        else:
            files = [remote.at(start, name) for name in start.fs.glob(start.path)]
        # Names are relative to the last folder of the path before a pattern.
        root = start.parent
        while any(c in str(root) for c in "*?["):
            root = root.parent
    return root, [f for f in files if not isinstance(f, Path) or f.is_file()]


def _without_prepared(prepared: str, root: Any, files: list[Any]) -> list[Any]:
    """Leave out the files that the `data` command has made, if `prepared` is the source's folder or inside it.

    Of the source's own folder, the folders with an index are left out; of a folder inside it, everything.
    """
    if not prepared or remote.is_address(prepared) != remote.is_address(str(root)):
        return files
    # Three cases: the same folder, a folder outside the source, and one inside it.
    folder = remote.open_path(prepared, "data.prepared").resolve()
    if folder == root.resolve():
        made = {f.parent for f in files if f.name == INDEX}
        return [f for f in files if f.parent not in made]
    if not folder.is_relative_to(root.resolve()):
        return files
    inside = f"{root / folder.relative_to(root.resolve()).as_posix()}/"
    return [f for f in files if not str(f).startswith(inside)]


def sample_hash(file: Any) -> str:
    """Hash a sample of a file's content, to recognise the file after it has been copied; return 16 hex digits.

    A file of up to 64 KiB is hashed as a whole, a larger one by `_SAMPLES` pieces at equal distances, including its
    start and its end. The time of the last change cannot replace the hash, because a copy has another time.
    """
    size, digest = file.stat().st_size, hashlib.sha256()
    if size <= _SAMPLES * _SAMPLE:
        digest.update(file.read_bytes())
    else:
        starts = [(size - _SAMPLE) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
        for piece in remote.parts(file, starts, _SAMPLE):
            digest.update(piece)
    return digest.hexdigest()[:16]


def kind(file: Any) -> str:
    """Return the suffix that determines the format of a file, in lower case: `.jsonl` for `a.jsonl.gz`."""
    name = Path(file.name.lower())
    return Path(name.stem).suffix if name.suffix in (".gz", ".zst") else name.suffix


def _check_kinds(path: str, files: list[Any]) -> None:
    """Check that every file has a suffix of a format that can be read.

    Raises:
        ConfigError: if one has not; the message names the first such file.
    """
    readable = {"", *TEXT, *JSON, ".parquet", ".array_record"}
    for file in files:
        packed = file.suffix.lower() in (".gz", ".zst")
        if kind(file) not in readable or (packed and kind(file) in (".parquet", ".array_record")):
            raise ConfigError(
                f"data.path = {path!r}: {file} is no text by its name. What is read: {' '.join(JSON)} with a record a "
                f"line (.json also with a list of them), .parquet, .array_record, {' '.join(TOKENS)} alone, text: no "
                f"suffix or {' '.join(sorted(TEXT))}; text and JSON also compressed (.gz, .zst). Move the file away, "
                "rename it, or choose files by a pattern such as 'texts/**/*.txt'"
            )


@contextlib.contextmanager
def opened(file: Any) -> Generator[IO[bytes] | io.BufferedReader | gzip.GzipFile]:
    """Open a file to read bytes; the bytes of a `.gz` or `.zst` file are decompressed.

    Raises:
        ConfigError: if the library for `.zst` is not installed.
    """
    suffix = file.suffix.lower()
    if suffix == ".zst":
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(f"{file} needs a library: pip install 'dsv4_jax[text]'")
        import pyarrow

        # pyarrow opens a local file itself and needs an open stream for one at an address.
        with contextlib.ExitStack() as stack:
            raw = pyarrow.OSFile(str(file)) if isinstance(file, Path) else stack.enter_context(file.open("rb"))
            with pyarrow.CompressedInputStream(raw, "zstd") as stream:
                yield io.BufferedReader(stream, 1 << 20)
    elif suffix == ".gz":
        with file.open("rb") as raw, gzip.GzipFile(fileobj=raw) as stream:
            yield stream
    else:
        with file.open("rb") as stream:
            yield stream


def records(path: str, field: str, image_field: str = "", prepared: str = "") -> Iterator[Record]:
    """Yield every record of a source of texts, in the order of the files' names.

    A record of JSON, JSONL or Parquet has its text in `field`. A record of ArrayRecord is a text. A text file is one
    record; if it is the only file of the source, it is cut at line ends into several. Text and JSON may be compressed
    (`.gz`, `.zst`).

    Args:
        path: the source, as in `data.path`.
        field: field or column of the text.
        image_field: field or column of the images in JSON, JSONL and Parquet; empty: images are not read. If it is
            given, image files in the source are left out.
        prepared: `data.prepared`, whose files are left out (see `find`).

    Raises:
        ConfigError: for a file that cannot be read in the format of its suffix; the message names the file.
    """
    root, files = find(path, prepared)
    if image_field:
        files = [file for file in files if file.suffix.lower() not in SUFFIXES]
    _check_kinds(path, files)
    # Each format has a reader. Its errors, of any type, become a ConfigError with the name of the file.
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            if kind(file) in JSON:
                yield from _read_json(file, name, field, image_field)
            elif kind(file) == ".parquet":
                yield from _read_parquet(file, name, field, image_field)
            elif kind(file) == ".array_record":
                yield from _read_array_record(file, name)
            else:
                yield from _read_text(file, name, alone=len(files) == 1)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def _decode(name: str, data: bytes) -> Record:
    """Make a record of UTF-8 `data`, a bad one if it is invalid."""
    try:
        return Record(name, data.decode(), "", len(data))
    except UnicodeDecodeError as error:
        return Record(name, None, f"invalid UTF-8 at byte {error.start}", len(data))


def _read_text(file: Any, name: str, alone: bool) -> Iterator[Record]:
    """Yield a text file as one record, or if it is `alone` in its source, as records of about `_PART` bytes."""
    if not alone:
        with opened(file) as whole:
            yield _decode(name, whole.read())
        return
    part: list[bytes] = []
    start = upto = 0  # the part's first byte in the file, and the next line's
    with opened(file) as lines:
        for line in lines:
            if part and (upto + len(line)) // _PART > start // _PART:
                yield _decode(f"{name}:{start}", b"".join(part))
                part, start = [], upto
            part.append(line)
            upto += len(line)
    yield _decode(f"{name}:{start}", b"".join(part))


def _read_json(file: Any, name: str, field: str, image_field: str) -> Iterator[Record]:
    """Yield one record per line, or per entry of the list if a `.json` file begins with `[`."""
    with opened(file) as lines:
        first = lines.read(1)
        while first.isspace():
            first = lines.read(1)
        if kind(file) == ".json" and first == b"[":
            values = json.loads(first + lines.read())
            for number, value in enumerate(values, 1):
                record = _take_text(f"{name}:{number}", value, field, len(json.dumps(value)))
                yield _add_images(record, value, image_field, file.parent) if image_field else record
            return
    # JSON Lines: empty lines are left out but counted in the numbers of the records.
    with opened(file) as lines:
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
                record = _take_text(where, value, field, size)
                yield _add_images(record, value, image_field, file.parent) if image_field else record


def _take_text(where: str, value: object, field: str, size: int) -> Record:
    """Make a record named `where` of the text in `field` of a JSON value; a bad one if there is no valid text."""
    text = value.get(field) if isinstance(value, dict) else None
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which UTF-8 cannot encode
            return Record(where, None, "text that is no Unicode", size)
        return Record(where, text, "", size)
    if isinstance(value, dict) and field not in value:
        return Record(where, None, f"no field {field!r}, only {', '.join(map(repr, value))}", size)
    return Record(where, None, f"no text in field {field!r} but {type(text).__name__}", size)


def _read_parquet(file: Any, name: str, field: str, image_field: str) -> Iterator[Record]:
    """Yield one record per row of a Parquet file.

    Raises:
        ConfigError: if the column `field` is missing, or pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{file} needs a library: pip install 'dsv4_jax[text]'")
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        content = file if isinstance(file, Path) else stack.enter_context(file.open("rb"))
        table = stack.enter_context(pq.ParquetFile(content))
        columns = table.schema_arrow.names
        if field not in columns:
            raise ConfigError(f"{file}: no column {field!r}, only {', '.join(columns)}; data.text_field names it")
        # Read only the columns of text and images, in small batches if there are images.
        number, wanted = 0, [field]
        if image_field in columns:
            wanted.append(image_field)
        for batch in table.iter_batches(columns=wanted, batch_size=1024 if len(wanted) == 1 else 64):
            for value in batch.select(wanted).to_pylist():
                number += 1
                text = value[field]
                record = _take_text(f"{name}:{number}", value, field, len(text) if text else 0)
                yield _add_images(record, value, image_field, file.parent) if image_field else record


def _add_images(record: Record, value: dict[str, Any], field: str, folder: Any) -> Record:
    """Add the images in `field` of a JSON value to the record of its text.

    The record becomes bad if an image cannot be read, or if the number of images is not that of `PLACE` in the text.
    Paths of images are relative to `folder`.
    """
    listed = value.get(field) if record.text is not None else None
    if listed is None:
        return record
    bad = lambda why: Record(record.name, None, why, record.size)
    # `listed` is one image or a list of them.
    images = []
    for number, entry in enumerate(listed if isinstance(listed, list) else [listed], 1):
        try:
            images.append(_load_image(entry, folder))
        except (OSError, ValueError) as error:
            return bad(f"image {number} of field {field!r}: {error}")
    places = str(record.text).count(PLACE)
    if places != len(images):
        return bad(f"{len(images)} images in field {field!r}, but {places} {PLACE} in the text")
    return record._replace(images=tuple(images), size=record.size + sum(map(len, images)))


def _load_image(entry: object, folder: Any) -> bytes:
    """Return the encoded image that `entry` of a record gives.

    Args:
        entry: bytes; a text `data:...,` followed by base64; a path relative to `folder`; or a dict that has one of them
            in `bytes` (where a text is base64) or else in `path`.
        folder: folder of the file with the record.

    Raises:
        OSError: if the file at a path cannot be read.
        ValueError: for another type, or invalid base64.
    """
    # Reduce a dict to bytes or to a text, which is a path or begins with `data:`.
    if isinstance(entry, dict):
        if isinstance(entry.get("bytes"), str):
            entry = "data:," + entry["bytes"]
        else:
            entry = entry.get("bytes") or entry.get("path")
    if isinstance(entry, bytes):
        return entry
    if not isinstance(entry, str):
        raise ValueError(f"expected bytes, a path or 'data:...;base64,...', found {type(entry).__name__}")
    if not entry.startswith("data:"):
        return (folder / entry).read_bytes()
    try:
        return base64.b64decode(entry.partition(",")[2], validate=True)
    except binascii.Error as error:
        raise ValueError(f"invalid base64: {error}") from error


def _read_array_record(file: Any, name: str) -> Iterator[Record]:
    """Yield each record of an ArrayRecord file as a text."""
    with contextlib.closing(ArrayRecordReader(str(remote.local(file)))) as reader:
        for number in range(reader.num_records()):
            yield _decode(f"{name}:{number + 1}", reader.read([number])[0])
