# SPDX-License-Identifier: Apache-2.0
"""Write, read and check the manifest of a checkpoint, which lists what its folder must hold.

`manifest.json` has the format's version, the step, the host's values, the type and shape of every array,
the size and checksum of every other file, and a checksum of itself. It is the last file to be written.

Hashing is shared between the processes, so that its time does not grow with the state when devices are added: each
hashes the files that it wrote, process 0 joins what they found; before a checkpoint is read each checks a part.
"""

import hashlib
import json
import os
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

FORMAT = 2  # in format 1 the checksums of files are BLAKE2b
_READABLE = (1, 2)
_BLOCK = 1 << 20  # bytes that are read together
NAME = "manifest.json"
_PART = re.compile(r"manifest\.\d+\.part(\.new)?")
_WRITER = re.compile(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)")  # how orbax names what one process has written
_PATIENCE = 1200.0  # seconds to wait for another process, which has as much to hash


class ManifestError(ValueError):
    """A manifest that is missing or cannot be trusted."""


def named(tree: Any) -> dict[str, Any]:
    """Name the leaves of a tree by their paths: `params.groups.0.1.attn.wq_a`."""
    leaves = jax.tree.leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    found = {name(path): leaf for path, leaf in leaves}
    if len(found) < len(leaves):
        raise ValueError("two arrays of the state have the same name")
    return found


def types(arrays: dict[str, Any]) -> dict[str, str]:
    """Return types and shapes by name: `float32[2,64,16]`."""
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in arrays.items()}


def differences(there: dict[str, str], here: dict[str, str], part: bool) -> list[str]:
    """Describe the first 20 names whose types differ, a line each; with `part` only of names that are `here`."""
    names = [name for name in (here if part else there | here) if there.get(name) != here.get(name)]

    def line(name: str) -> str:
        if name not in here or name not in there:
            return f"{name}: {there[name]} there only" if name in there else f"{name}: {here[name]} here only"
        return f"{name}: {there[name]} there, {here[name]} here"

    more = [f"and {len(names) - 20} more"] if len(names) > 20 else []
    return [*map(line, names[:20]), *more]


def _hash(path: Path) -> str:
    """Return the CRC-32 of a file.

    It finds damage, not intent, and costs a sixth of BLAKE2b: every byte of a checkpoint is summed three times, as it
    was written, as the disk gives it back, and before it is read.
    """
    found, block = 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            found = zlib.crc32(block[:size], found)
    return f"crc32:{found:08x}"


def _matches(path: Path, expected: str) -> bool:
    """Return whether a file has a checksum, also one of format 1."""
    if expected.startswith("crc32:"):
        return _hash(path) == expected
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest() == expected


def _render(manifest: dict[str, Any]) -> bytes:
    """Make the content of the manifest's file: its JSON with a checksum."""
    checksum = zlib.crc32(json.dumps(manifest).encode())
    return json.dumps(manifest | {"checksum": checksum}, indent=1).encode()


def list_files(folder: Path) -> list[str]:
    """Return the names of the files that a manifest must list, relative to the folder."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if not _PART.fullmatch(name))


def written_by(names: list[str], process: int, count: int) -> list[str]:
    """Return the files for one of `count` processes to hash: those that it wrote, and a share of the common ones."""

    def owner(number: int, name: str) -> int:
        found = _WRITER.search(name)
        return (int(found[1]) if found else number) % count

    return [name for number, name in enumerate(names) if owner(number, name) == process]


def hash_files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Sum files as they were written, flush them to the disk, and compare with what the disk gives back.

    Args:
        folder: the checkpoint.
        names: files in it, which several threads read.

    Returns:
        Size in bytes and checksum of each file.

    Raises:
        ManifestError: if the disk gives back something else.
    """

    def check(name: str) -> dict[str, Any]:
        path = folder / name
        entry = {"size": path.stat().st_size, "hash": _hash(path)}
        to_disk(path)
        if fault := _fault(path, name, entry, content=True):
            raise ManifestError(fault)
        return entry

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(check, names), strict=True))


def write_part(folder: Path, process: int, part: dict[str, Any]) -> None:
    """Write the part of a process other than 0: its `files`, or the `error` that it met."""
    path = folder / f"manifest.{process}.part"
    _wait_for(folder)
    new = path.with_suffix(".part.new")
    new.write_text(json.dumps(part))
    new.replace(path)


def join_parts(folder: Path, count: int) -> dict[str, dict[str, Any]]:
    """Wait for the parts of all processes but 0, delete them, and return their files.

    Raises:
        ManifestError: if a process met an error, or did not write its part in time.
    """
    files: dict[str, dict[str, Any]] = {}
    for process in range(1, count):
        path = folder / f"manifest.{process}.part"
        if not _wait_for(path):
            raise ManifestError(f"process {process} has not verified its files after {_PATIENCE} s")
        part = json.loads(path.read_text())
        if "error" in part:
            raise ManifestError(f"process {process}: {part['error']}")
        files |= part["files"]
        path.unlink()
    return files


def write(folder: Path, content: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest with `content` and the entries of `files`; flush it and all folders to the disk."""
    new = folder / f"{NAME}.new"
    new.write_bytes(_render({"format": FORMAT} | content | {"files": dict(sorted(files.items()))}))
    to_disk(new)
    new.replace(folder / NAME)
    for path in [*filter(Path.is_dir, folder.rglob("*")), folder]:
        to_disk(path)


def read(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        ManifestError: if it is missing, of another format, or not byte for byte what was written.
    """
    try:
        raw = (folder / NAME).read_bytes()
        found = json.loads(raw)
    except FileNotFoundError:
        raise ManifestError(f"{NAME} is missing") from None
    except OSError as error:
        raise ManifestError(f"{NAME} cannot be read ({error.strerror})") from error
    except ValueError:
        raise ManifestError(f"{NAME} is damaged (it is not JSON)") from None
    if not isinstance(found, dict) or found.get("format") not in _READABLE:
        raise ManifestError(f"{NAME} is not of format {FORMAT}, which this version reads")
    manifest = {key: value for key, value in found.items() if key != "checksum"}
    if raw != _render(manifest):
        raise ManifestError(f"{NAME} is damaged (its checksum differs)")
    return manifest


def damage(folder: Path, content: bool = True, process: int = 0, count: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, naming the first files; None if nothing is.

    Args:
        folder: the checkpoint.
        content: read the files too, in several threads, not their sizes alone.
        process: which share of the files to check, the largest first.
        count: number of shares.
    """
    try:
        files = read(folder)["files"]
    except ManifestError as error:
        return str(error)
    largest = sorted(files, key=lambda name: (-files[name]["size"], name))
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _fault(folder / name, name, files[name], content), largest[process::count])
        found = list(filter(None, faults))
    more = [f"{len(found) - 10} more files"] if len(found) > 10 else []
    return "; ".join([*found[:10], *more]) or None


def _fault(path: Path, name: str, entry: dict[str, Any], content: bool) -> str | None:
    """Return what is wrong with one file, which the manifest lists as `name` with `entry`; None if nothing is."""
    try:
        found, size = path.stat().st_size, entry["size"]
        if found != size:
            how = "is truncated" if found < size else "is too long"
            return f"{name} {how} (found {found} bytes, expected {size})"
        return f"{name} is damaged (its checksum differs)" if content and not _matches(path, entry["hash"]) else None
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _wait_for(path: Path) -> bool:
    """Wait until another process has made a file or folder; return whether it is there."""
    end = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def to_disk(path: Path) -> None:
    """Flush a file or folder to the disk, and drop its cached pages so that it is read from there next."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if path.is_file() and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
