# SPDX-License-Identifier: Apache-2.0
"""Read texts of files: plain text, JSONL, Parquet, ArrayRecord. Bad records are named, or skipped and counted.

A record of JSONL or Parquet may have images; `<image>` in its text stands for each of them, in order.
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
INDEX = "index.json"  # of a folder that the `data` command made
TOKENS = (".bin", ".npy")  # files that hold ids, not text
JSON = (".jsonl", ".ndjson", ".json")
# Suffixes of files that are plain text, besides files without one.
TEXT = frozenset(
    ".txt .text .md .markdown .rst .tex .bib .org .adoc .html .htm .xml .svg .css .scss .csv .tsv .log .srt .vtt "
    ".py .pyi .ipynb .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .java .kt .scala .swift .js .jsx .mjs .ts "
    ".tsx .vue .rb .php .pl .pm .r .jl .lua .hs .ml .mli .clj .ex .exs .erl .f .f90 .cs .fs .vb .dart .zig .nim .lean "
    ".v .vhd .sv .asm .s .sql .proto .graphql .sh .bash .zsh .fish .ps1 .bat .cmake .mk .el .lisp .scm .toml .yaml "
    ".yml .ini .cfg .conf .diff .patch".split()
)
# Names without suffix of files that describe a folder of records and are no part of them.
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
PLACE = "<image>"  # stands in a text for an image
# Folders of the standard library that are tests, legacy tools or not the standard library.
_SKIPPED = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_SAMPLES, _SAMPLE = 16, 1 << 12  # pieces of a file that are compared, and bytes of each
_PART = 1 << 14  # a single text file is cut into documents of about this many bytes, at line ends


class Record(NamedTuple):
    """A document, or why there is none.

    Attributes:
        name: file and, where it holds several, number of the record; the same on every machine.
        text: its text, None if it is bad.
        why: what is wrong with it.
        size: bytes read for it.
        images: encoded images, one for each `PLACE` in the text.
    """

    name: str
    text: str | None
    why: str
    size: int
    images: tuple[bytes, ...] = ()


def find(path: str, prepared: str = "") -> tuple[Any, list[Any]]:
    """Return the folder that names are relative to, and all files of a source, in the order of their names.

    A folder gives its files, hidden ones left out, and of a folder with files of records or ids those that only
    describe it (`README.md`, `LICENSE`, `dataset_info.json`); else a file or a glob pattern; an empty path is the
    standard library's source on this machine. An address gives `UPath`s (see remote.py), a path `pathlib.Path`s.

    Args:
        path: as `data.path` has it.
        prepared: `data.prepared`; if that is a folder inside the source, what it holds is no part of the source.

    Raises:
        ConfigError: if there is no file.
    """
    root, files = _find(path)
    files = _without_prepared(prepared, root, files)
    files = sorted(files, key=lambda f: f.relative_to(root).as_posix())
    if not files:
        raise ConfigError(f"data.path = {path!r}: there is no such file, folder with files, or pattern")
    return root, files


def _find(path: str) -> tuple[Any, list[Any]]:
    """See `find`: the folder, and the files in any order."""
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
        root = start.parent
        while any(c in str(root) for c in "*?["):
            root = root.parent
    return root, [f for f in files if not isinstance(f, Path) or f.is_file()]


def _without_prepared(prepared: str, root: Any, files: list[Any]) -> list[Any]:
    """Leave out what the `data` command has made, if `data.prepared` is the source's folder or a folder inside it."""
    if not prepared or remote.is_address(prepared) != remote.is_address(str(root)):
        return files
    folder = remote.open_path(prepared, "data.prepared").resolve()
    if folder == root.resolve():
        made = {f.parent for f in files if f.name == INDEX}
        return [f for f in files if f.parent not in made]
    if not folder.is_relative_to(root.resolve()):
        return files
    inside = f"{root / folder.relative_to(root.resolve()).as_posix()}/"
    return [f for f in files if not str(f).startswith(inside)]


def sample_hash(file: Any) -> str:
    """Hash a file of up to 64 KiB whole, of a larger one `_SAMPLES` pieces at even distances, both ends included.

    The time of a file's last change is no substitute: a copy has another one.
    """
    size, found = file.stat().st_size, hashlib.sha256()
    if size <= _SAMPLES * _SAMPLE:
        found.update(file.read_bytes())
    else:
        starts = [(size - _SAMPLE) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
        for piece in remote.parts(file, starts, _SAMPLE):
            found.update(piece)
    return found.hexdigest()[:16]


def kind(file: Any) -> str:
    """Return the suffix that says how a file is read, in lower case: of `a.jsonl.gz` it is `.jsonl`."""
    name = Path(file.name.lower())
    return Path(name.stem).suffix if name.suffix in (".gz", ".zst") else name.suffix


def _check_kinds(path: str, files: list[Any]) -> None:
    """Refuse files that no suffix declares as something that can be read.

    Raises:
        ConfigError: with the name of the first one.
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
    """Open a file for reading, decompressed if it is `.gz` or `.zst`.

    Raises:
        ConfigError: if the library for it is absent.
    """
    suffix = file.suffix.lower()
    if suffix == ".zst":
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(f"{file} needs a library: pip install 'dsv4_jax[text]'")
        import pyarrow

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
    """Yield every record of a source of texts, in a fixed order.

    JSON and Parquet give the text in `field`, `.array_record` a record each, a file of text is a document; if it is
    the only one it is cut at line ends. With an `image_field` JSON and Parquet also give the images there, and files
    that are images are left out. Text and JSON may be compressed (`.gz`, `.zst`).

    Raises:
        ConfigError: for a file that cannot be read as what its name says, naming it.
    """
    root, files = find(path, prepared)
    if image_field:
        files = [file for file in files if file.suffix.lower() not in SUFFIXES]
    _check_kinds(path, files)
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            if kind(file) in JSON:
                yield from _jsonl(file, name, field, image_field)
            elif kind(file) == ".parquet":
                yield from _parquet(file, name, field, image_field)
            elif kind(file) == ".array_record":
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


def _text(file: Any, name: str, alone: bool) -> Iterator[Record]:
    if not alone:
        with opened(file) as whole:
            yield _decoded(name, whole.read())
        return
    part: list[bytes] = []
    start = upto = 0
    with opened(file) as lines:
        for line in lines:
            if part and (upto + len(line)) // _PART > start // _PART:
                yield _decoded(f"{name}:{start}", b"".join(part))
                part, start = [], upto
            part.append(line)
            upto += len(line)
    yield _decoded(f"{name}:{start}", b"".join(part))


def _jsonl(file: Any, name: str, field: str, image_field: str) -> Iterator[Record]:
    """Yield a record a line, or of a `.json` file that begins with `[` one for each entry of that list."""
    with opened(file) as lines:
        first = lines.read(1)
        while first.isspace():
            first = lines.read(1)
        if kind(file) == ".json" and first == b"[":
            values = json.loads(first + lines.read())
            for number, value in enumerate(values, 1):
                record = _field(f"{name}:{number}", value, field, len(json.dumps(value)))
                yield _with_images(record, value, image_field, file.parent) if image_field else record
            return
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
                record = _field(where, value, field, size)
                yield _with_images(record, value, image_field, file.parent) if image_field else record


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


def _parquet(file: Any, name: str, field: str, image_field: str) -> Iterator[Record]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{file} needs a library: pip install 'dsv4_jax[text]'")
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        content = file if isinstance(file, Path) else stack.enter_context(file.open("rb"))
        table = stack.enter_context(pq.ParquetFile(content))
        columns = table.schema_arrow.names
        if field not in columns:
            raise ConfigError(f"{file}: no column {field!r}, only {', '.join(columns)}; data.text_field names it")
        number, wanted = 0, [field]
        if image_field in columns:
            wanted.append(image_field)
        for batch in table.iter_batches(columns=wanted, batch_size=1024 if len(wanted) == 1 else 64):
            for value in batch.select(wanted).to_pylist():
                number += 1
                text = value[field]
                record = _field(f"{name}:{number}", value, field, len(text) if text else 0)
                yield _with_images(record, value, image_field, file.parent) if image_field else record


def _with_images(record: Record, value: dict[str, Any], field: str, folder: Any) -> Record:
    """Add the images of a record; it is bad if one cannot be found or their number is not that of their places."""
    listed = value.get(field) if record.text is not None else None
    if listed is None:
        return record
    bad = lambda why: Record(record.name, None, why, record.size)
    images = []
    for number, entry in enumerate(listed if isinstance(listed, list) else [listed], 1):
        try:
            images.append(_encoded(entry, folder))
        except (OSError, ValueError) as error:
            return bad(f"image {number} of field {field!r}: {error}")
    places = str(record.text).count(PLACE)
    if places != len(images):
        return bad(f"{len(images)} images in field {field!r}, but {places} {PLACE} in the text")
    return record._replace(images=tuple(images), size=record.size + sum(map(len, images)))


def _encoded(entry: object, folder: Any) -> bytes:
    """Return the bytes of an image: as they are, base64 after `data:...,`, a path from `folder`, or a dict of these.

    A dict may have them as `bytes` (base64 if they are text), else as `path`.
    """
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


def _array_record(file: Any, name: str) -> Iterator[Record]:
    reader = ArrayRecordReader(str(remote.local(file)))
    for number in range(reader.num_records()):
        yield _decoded(f"{name}:{number + 1}", reader.read([number])[0])
    reader.close()
