# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what its folder must hold, and what is wrong with it if it does not.

`manifest.json` has the format's version, the step, the host's values, the type and shape of every array,
the size and hash of every other file, and a checksum of itself. It is the last file to be written.
"""

import hashlib
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

FORMAT = 1
NAME = "manifest.json"


class ManifestError(ValueError):
    """A manifest that is missing or cannot be trusted."""


def named(tree: Any) -> dict[str, Any]:
    """The leaves by name: `params.groups.0.1.attn.wq_a`."""
    leaves = jax.tree.leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    found = {name(path): leaf for path, leaf in leaves}
    if len(found) < len(leaves):
        raise ValueError("two arrays of the state have the same name")
    return found


def types(arrays: dict[str, Any]) -> dict[str, str]:
    """Types and shapes by name: `float32[2,64,16]`."""
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in arrays.items()}


def differences(there: dict[str, str], here: dict[str, str], part: bool) -> list[str]:
    """A line for each of the first 20 names whose types differ; if `part`, only of those that are here."""
    names = [name for name in (here if part else there | here) if there.get(name) != here.get(name)]

    def line(name: str) -> str:
        if name not in here or name not in there:
            return f"{name}: {there[name]} there only" if name in there else f"{name}: {here[name]} here only"
        return f"{name}: {there[name]} there, {here[name]} here"

    more = [f"and {len(names) - 20} more"] if len(names) > 20 else []
    return [*map(line, names[:20]), *more]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _render(manifest: dict[str, Any]) -> bytes:
    """The manifest's file: its JSON with a checksum."""
    checksum = zlib.crc32(json.dumps(manifest).encode())
    return json.dumps(manifest | {"checksum": checksum}, indent=1).encode()


def write(folder: Path, content: dict[str, Any]) -> None:
    """Writes the manifest of the files in a folder, with `content`, and has the disk hold all of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "hash": _hash(path)} for path in files
    }
    new = folder / f"{NAME}.new"
    new.write_bytes(_render({"format": FORMAT} | content | {"files": entries}))
    to_disk(new)
    new.replace(folder / NAME)
    for path in [*folder.rglob("*"), folder]:
        to_disk(path)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

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
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ManifestError(f"{NAME} is not of format {FORMAT}, which this version reads")
    manifest = {key: value for key, value in found.items() if key != "checksum"}
    if raw != _render(manifest):
        raise ManifestError(f"{NAME} is damaged (its checksum differs)")
    return manifest


def damage(folder: Path, content: bool = True) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if nothing is. `content`: read the files too."""

    def fault(name: str, size: int, digest: str) -> str | None:
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                how = "is truncated" if found < size else "is too long"
                return f"{name} {how} (found {found} bytes, expected {size})"
            return f"{name} is damaged (its checksum differs)" if content and _hash(path) != digest else None
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"

    try:
        files = read(folder)["files"]
    except ManifestError as error:
        return str(error)
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: fault(name, files[name]["size"], files[name]["hash"]), files)
        return next(filter(None, faults), None)


def to_disk(path: Path) -> None:
    """Has the disk hold a file's or a folder's content, and what is read next come from there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if path.is_file() and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
