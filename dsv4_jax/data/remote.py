# SPDX-License-Identifier: Apache-2.0
"""Open files at addresses such as `gs://` and `s3://` with fsspec, as streams or as local copies.

A local path is a `pathlib.Path`. An address is a `UPath`, which has the same methods. A file that must be mapped, or
that a library can only read locally, is copied once into the folder `copies`, which all processes of a host share.
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
TOGETHER = 8  # files that are copied in parallel


def is_address(path: object) -> bool:
    """Return whether `path`, a path or its text, is an address: `scheme://...`."""
    return _SCHEME.match(str(path)) is not None and not isinstance(path, Path)


def open_path(path: str, key: str) -> Any:
    """Return the `pathlib.Path` of a local path, or the `UPath` of an address, without reading the file.

    Args:
        path: local path or address.
        key: the configuration key that holds it, for errors.

    Raises:
        ConfigError: for an unknown scheme, a chain of addresses, or a store whose package is not installed or whose
            client cannot be made.
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
        address = UPath(path)
        _ = address.fs  # makes the client, so that missing packages and credentials are found here
        return address
    except ImportError as error:
        raise ConfigError(f"{what} needs a package: pip install 'dsv4_jax[stores]' ({error})") from None
    except ValueError:
        raise ConfigError(
            f"{what}: no file system is known for {scheme[1]}://, expected gs://, s3:// or another that fsspec opens; "
            "copy the data to a disk or mount the store as a folder"
        ) from None
    except Exception as error:  # the client's own errors, as for missing credentials
        raise ConfigError(f"{what} cannot be opened: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def reading(*paths: str) -> Generator[None]:
    """Raise a ConfigError for any exception of the enclosed code if one of `paths` is an address.

    Each store's client raises exceptions of its own, which do not name the address.
    """
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:
        if not (addresses := [path for path in paths if is_address(path)]):
            raise
        raise ConfigError(f"{' or '.join(addresses)} cannot be read: {type(error).__name__}: {error}") from error


def copies() -> Path:
    """Return the local folder for copies of files at addresses: `stores` in $DSV4_CACHE, or in ~/.cache/dsv4_jax."""
    return Path(os.environ.get("DSV4_CACHE") or "~/.cache/dsv4_jax").expanduser().absolute() / "stores"


def local(file: Any) -> Path:
    """Return the path of a local copy of a file at an address; return a local file unchanged.

    The name of the copy's folder is a hash of the address and of the properties that the store reports for the object
    (such as size, etag and time), so that a changed object is copied again. If several processes need the same file,
    one copies it and the others wait.

    Raises:
        ConfigError: if the file cannot be copied.
    """
    if isinstance(file, Path):
        return file
    folder = None  # stays None if the store cannot be asked for the object's properties
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
    """Copy a file from its address to the local path `to`, where it appears only when it is complete.

    Raises:
        OSError: if the copy has another size than the object in the store. Exceptions of the store's client are raised
            too.
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
    """Copy all files of a local folder to the address `to`.

    The file with the name `last`, relative to the folder, is copied after all others. If it is in the store, the folder
    is complete.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    files.sort(key=lambda file: (file.relative_to(folder).as_posix() == last, file))
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(lambda file: copy_up(file, to / file.relative_to(folder).as_posix()), files[:-1]))
    copy_up(files[-1], to / last)


def copy_up(file: Path, to: Any) -> None:
    """Copy a local file to the address `to`, replacing an object there.

    Raises:
        OSError: if the object then has another size than the file. Exceptions of the store's client are raised too.
    """
    size = file.stat().st_size
    to.fs.makedirs(to.parent.path, exist_ok=True)  # does nothing in a store without folders
    to.fs.put_file(str(file), to.path)
    to.fs.invalidate_cache()
    if (found := to.stat().st_size) != size:
        raise OSError(f"{to}: {found:,} bytes were written, expected {size:,}")


def files_in(folder: Any) -> list[Any]:
    """List all files below a folder at an address, without cached listings; none if there is no such folder."""
    folder.fs.invalidate_cache()
    return [at(folder, name) for name in folder.fs.find(folder.path)]


def at(path: Any, name: str) -> Any:
    """Return the address of the object `name` in the store of `path`; `name` is the store's name of it."""
    return type(path)(name, protocol=path.protocol, **path.storage_options)


def parts(file: Any, starts: list[int], length: int) -> list[bytes]:
    """Read pieces of a file: at most `length` bytes from each offset of `starts`, fewer at the end of the file."""
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
    """Hold an exclusive lock on the file `path` during the enclosed code, after waiting for other holders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
