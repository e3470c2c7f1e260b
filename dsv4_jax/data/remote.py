# SPDX-License-Identifier: Apache-2.0
"""Open files at addresses such as `gs://` and `s3://`, through fsspec: as streams, or as local copies.

A path is a `pathlib.Path`, or for an address a `UPath`, which has the same methods. What has to be mapped or is read by
a library for local files is copied once into `copies`, which all processes of a host share.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import uuid
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dsv4_jax.section import ConfigError, RunError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
TOGETHER = 8  # files that are copied at a time


def is_address(path: object) -> bool:
    """Return whether a path, or the text of one, is an address: `scheme://...`."""
    return _SCHEME.match(str(path)) is not None and not isinstance(path, Path)


def open_path(path: str, key: str) -> Any:
    """Return the `pathlib.Path` of a local path, or the `UPath` of an address, without reading anything.

    Args:
        path: the text.
        key: of the configuration, for messages.

    Raises:
        ConfigError: for a scheme that no file system is known for, or one whose package is not installed.
    """
    scheme = _SCHEME.match(path)
    if not scheme:
        return Path(path)
    what = f"{key} = {path!r}"
    if "::" in path:
        raise ConfigError(f"{what} is a chain of addresses (::), expected one address such as gs://BUCKET/FOLDER")
    try:
        from upath import UPath
        from upath.registry import available_implementations

        if scheme[1].lower() not in available_implementations(fallback=False):
            raise ValueError
        found = UPath(path)
        _ = found.fs  # makes the client
        return found
    except ImportError as error:
        raise ConfigError(f"{what} needs a package: pip install 'dsv4_jax[stores]' ({error})") from None
    except ValueError:
        raise ConfigError(
            f"{what}: no file system is known for {scheme[1]}://, expected gs://, s3:// or another that fsspec opens; "
            "copy the data to a disk or mount the store as a folder"
        ) from None
    except Exception as error:  # credentials, for example
        raise ConfigError(f"{what} cannot be opened: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def reading(*paths: str) -> Generator[None]:
    """Turn what a store's client raises into a ConfigError, if one of these paths is an address."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:  # each client has its own
        if not (addresses := [path for path in paths if is_address(path)]):
            raise
        raise ConfigError(f"{' or '.join(addresses)} cannot be read: {type(error).__name__}: {error}") from error


def copies() -> Path:
    """Return the local folder for copies of what is at addresses: `stores` in $DSV4_CACHE, or in ~/.cache/dsv4_jax."""
    return Path(os.environ.get("DSV4_CACHE") or "~/.cache/dsv4_jax").expanduser().absolute() / "stores"


def local(file: Any) -> Path:
    """Return a local copy of a file at an address, or a local file itself.

    A copy is made once for each content: its folder is named after the address and what the store has as the object's
    properties (size, etag, time). Several processes may ask for the same file; one copies and the others wait.

    Raises:
        ConfigError: if it cannot be copied.
    """
    if isinstance(file, Path):
        return file
    folder = None
    try:
        file.fs.invalidate_cache()
        digest = hashlib.sha256(f"{file} {file.fs.ukey(file.path)}".encode()).hexdigest()[:16]
        folder = copies() / "files" / digest
        with exclusive(folder.with_suffix(".lock")):
            if not (folder / file.name).exists():
                copy_down(file, folder / file.name)
        return folder / file.name
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be copied to {folder or copies()}: {type(error).__name__}: {error}"
        ) from error


def copy_down(file: Any, to: Path) -> None:
    """Copy a file from its address to a local path, which is there whole or not at all.

    Raises:
        OSError: if the copy has another size than the store says; or what the store's client raises.
    """
    size = file.stat().st_size
    to.parent.mkdir(parents=True, exist_ok=True)
    new = to.with_name(f"{to.name}.{uuid.uuid4().hex}.new")
    try:
        file.fs.get_file(file.path, str(new))
        if (found := new.stat().st_size) != size:
            raise OSError(f"{file}: {found:,} bytes were read, expected {size:,}")
        new.replace(to)
    finally:
        new.unlink(missing_ok=True)


def copy_folder_up(folder: Path, to: Any, last: str) -> None:
    """Copy all files of a local folder to an address; `last` is the name of the file that is copied last.

    That file stands for the whole: whoever finds it finds all others.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    files.sort(key=lambda file: (file.relative_to(folder).as_posix() == last, file))
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(lambda file: copy_up(file, to / file.relative_to(folder).as_posix()), files[:-1]))
    copy_up(files[-1], to / last)


def copy_up(file: Path, to: Any) -> None:
    """Copy a local file to an address, replacing what is there.

    Raises:
        OSError: if the store then has another size; or what the store's client raises.
    """
    size = file.stat().st_size
    to.fs.makedirs(to.parent.path, exist_ok=True)  # nothing in a store without folders
    to.fs.put_file(str(file), to.path)
    to.fs.invalidate_cache()
    if (found := to.stat().st_size) != size:
        raise OSError(f"{to}: {found:,} bytes were written, expected {size:,}")


def files_in(folder: Any) -> list[Any]:
    """Return all files below a folder at an address, as the store lists them now; none if there is no such folder."""
    folder.fs.invalidate_cache()
    return [at(folder, name) for name in folder.fs.find(folder.path)]


def at(path: Any, name: str) -> Any:
    """Return the path of another object in the same store, by the name that the store gives it."""
    return type(path)(name, protocol=path.protocol, **path.storage_options)


def parts(file: Any, starts: list[int], length: int) -> list[bytes]:
    """Read pieces of a file: `length` bytes from each of `starts`, or up to the file's end."""
    if not isinstance(file, Path):
        return file.fs.cat_ranges([file.path] * len(starts), starts, [start + length for start in starts])
    with file.open("rb", buffering=0) as content:
        pieces = []
        for start in starts:
            content.seek(start)
            pieces.append(content.read(length))
        return pieces


@contextlib.contextmanager
def exclusive(path: Path) -> Generator[None]:
    """Hold a lock file of this host, waiting for the process that holds it now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
