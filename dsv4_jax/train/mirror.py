# SPDX-License-Identifier: Apache-2.0
"""Keep a run directory at an address such as `gs://BUCKET/RUN`: work in a local folder and copy to and from the store.

An object store has no rename, no append and no file locks. So a run works in a local folder as any other does, and the
store gets the same files: checkpoints when they are finished, the rest every minute and at the end. What is in the
store counts: at a start the local folder is made equal to it.

A checkpoint in the store counts once it has its manifest, which is copied last and deleted first.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dsv4_jax.data import remote
from dsv4_jax.section import ConfigError, RunError
from dsv4_jax.train import manifests

_CHECKPOINT = re.compile(r"\d+(\.old)?")
_BEAT = 20.0  # seconds between two writes of the lock's time
_STALE = 180.0  # a lock whose time is older than this many seconds is that of a process that has ended
_EVERY = 60.0  # seconds between two copies of metrics and events
_SHARE = 20  # such a copy takes at most one part in this many of the time
_OWN = (".new", ".shared")  # ends of the names of files that are not copied


def work_folder(run_dir: str) -> Path:
    """Return the folder in which a run works: `train.run_dir` itself, or for an address a local one."""
    if not remote.is_address(run_dir):
        return Path(run_dir)
    digest = hashlib.sha256(run_dir.rstrip("/").encode()).hexdigest()[:8]
    return remote.copies() / "runs" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', run_dir).strip('-')[-60:]}-{digest}"


def fetch_run(run_dir: Any, step: int | None = None) -> Path:
    """Return a local folder with `config.json` and one checkpoint of a run: the newest, or that of `step`.

    Of a run at an address that is a copy, which the processes of a host share and which the run itself does not use. A
    run in a local folder is returned as it is.

    Raises:
        ConfigError: if the store cannot be read, or has no such checkpoint.
    """
    if not remote.is_address(run_dir):
        return Path(run_dir)
    with remote.reading(str(run_dir)):
        there, folder = remote.open_path(str(run_dir), "the run"), work_folder(str(run_dir))
        folder = folder.with_name(f"{folder.name}.read")
        with remote.exclusive(folder.with_suffix(".lock")):
            files, _ = _by_checkpoint(there)
            chosen = [name for name in _newest_first(files) if step is None or int(Path(name).stem) == step]
            if not chosen:
                steps = ", ".join(_newest_first(files)) or "none"
                raise ConfigError(f"{run_dir} has no checkpoint{f' of step {step}' if step else ''}; it has {steps}")
            config = [there / "config.json"] if (there / "config.json").exists() else []
            _pull(there, folder, {chosen[0]: files[chosen[0]]}, config)
    return folder


class Mirror:
    """A run directory at an address, and the local folder in which the run works.

    As a context it holds the store's lock. A thread keeps the lock's time fresh and copies metrics and events.
    """

    def __init__(self, run_dir: str, say: Callable[[str], None], keep_every: int = 0):
        """Prepare; nothing is read or written yet.

        Args:
            run_dir: the address.
            say: prints a line about a store that cannot be reached.
            keep_every: checkpoints at multiples of this, except the newest, are left in the store; 0: none.
        """
        self.folder = work_folder(run_dir)
        self._there, self._say = remote.open_path(run_dir, "train.run_dir"), say
        self._lock, self._nonce = self._there / "lock", secrets.token_hex(8)
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of every file as it was copied
        self._keep_every = keep_every
        self._checkpoints: dict[str, bytes] = {}  # manifests of those in the store that are here too
        self._others: list[str] = []  # those that are in the store only
        self._busy, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        with remote.reading(str(self._there)):
            self._take()
        try:
            with remote.reading(str(self._there)):
                whole, broken = _by_checkpoint(self._there)
                for name in broken:
                    _delete(self._there / "checkpoints" / name)
                kept = lambda name: self._keep_every and int(Path(name).stem) % self._keep_every == 0
                self._others = [name for name in _newest_first(whole)[1:] if kept(name)]
                wanted = {name: whole[name] for name in whole if name not in self._others}
                small = [f for f in remote.files_in(self._there) if self._is_small(f.relative_to(self._there).parts)]
                self._checkpoints = _pull(self._there, self.folder, wanted, small)
            self._sent = {name: _stamp(self.folder / name) for name in self._small_files()}
            self._thread.start()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self.publish()
        except Exception as failure:
            text = (
                f"{self._there} is not up to date: {type(failure).__name__}: {failure}; until the run is started again "
                f"what it lacks is in {self.folder}"
            )
            if error is None:
                raise RunError(text) from failure
            self._say(text)
        finally:
            self._release()

    def publish(self) -> None:
        """Copy what the store lacks, metrics and events first, and delete checkpoints there that are gone here.

        Raises:
            RunError: if another process has taken the run directory over.
            Exception: whatever the store's client raises. Earlier checkpoints in the store are untouched.
        """
        with self._busy:
            self._check_held()
            self._send_small()
            here = _manifests(self.folder / "checkpoints")
            for name, manifest in here.items():
                if self._checkpoints.get(name) != manifest and not name.endswith(".old"):
                    self._send_checkpoint(name)
                    self._checkpoints[name] = manifest
            # After a rollback there are later ones, of a course of the run that was given up.
            last = max((int(Path(name).stem) for name in here), default=0)
            gone = [name for name in self._checkpoints if name not in here]
            for name in gone + [name for name in self._others if int(Path(name).stem) > last]:
                _delete(self._there / "checkpoints" / name)
                self._checkpoints.pop(name, None)
            self._others = [name for name in self._others if int(Path(name).stem) <= last]

    def _send_checkpoint(self, name: str) -> None:
        """Copy a checkpoint; one of the same step stays as STEP.old until the new one is whole."""
        to = self._there / "checkpoints" / name
        old = to.with_name(f"{name}.old")
        if (to / manifests.NAME).exists():
            files = [file.relative_to(to).as_posix() for file in remote.files_in(to)]
            for file in sorted(files, key=lambda file: file == manifests.NAME):
                to.fs.cp_file((to / file).path, (old / file).path)
        _delete(to)
        remote.copy_folder_up(self.folder / "checkpoints" / name, to, last=manifests.NAME)
        _delete(old)

    def _send_small(self) -> None:
        for name in self._small_files():
            stamp = _stamp(self.folder / name)
            if self._sent.get(name) != stamp:
                remote.copy_up(self.folder / name, self._there / name)
                self._sent[name] = stamp

    def _small_files(self) -> list[str]:
        names = (f.relative_to(self.folder) for f in self.folder.rglob("*") if f.is_file())
        return sorted(name.as_posix() for name in names if self._is_small(name.parts))

    @staticmethod
    def _is_small(parts: tuple[str, ...]) -> bool:
        """Return whether a file is none of a checkpoint or of a lock, by the parts of its name."""
        return parts[0] not in ("checkpoints", "lock") and not parts[-1].endswith(_OWN)

    def _beat(self) -> None:
        """Keep the lock fresh and copy metrics, until the end; print when failures begin and when they end."""
        failing, due = False, time.monotonic() + _EVERY
        while not self._ended.wait(_BEAT):
            try:
                self._check_held()
                self._lock.fs.pipe_file(self._lock.path, self._holder())
                # A checkpoint may be on its way for longer than the lock stays fresh: do not wait for it.
                if time.monotonic() >= due and self._busy.acquire(blocking=False):
                    start = time.monotonic()
                    try:
                        self._send_small()
                    finally:
                        self._busy.release()
                    due = time.monotonic() + max(_EVERY, _SHARE * (time.monotonic() - start))
                if failing:
                    self._say(f"{self._there} can be reached again")
                failing = False
            except Exception as error:
                if not failing:
                    self._say(
                        f"warning: {self._there} cannot be written: {type(error).__name__}: {error}; trying again"
                    )
                failing = True

    def _take(self) -> None:
        """Create the lock; one that nobody keeps fresh is removed first.

        Raises:
            RunError: if another process holds it.
        """
        fs = self._lock.fs
        for _ in range(2):
            try:
                fs.pipe_file(self._lock.path, self._holder(), mode="create")
                return
            except Exception as error:
                held = self._read()
                if not held:
                    raise RunError(
                        f"{self._lock} cannot be created: {type(error).__name__}: {error}; the lock of a run needs a "
                        "store that can be written to and that creates a file only if it is absent"
                    ) from error
                if held["nonce"] == self._nonce:  # the answer to a successful request was lost
                    return
            age = time.time() - held["time"]
            if age < _STALE and not (held["host"] == socket.gethostname() and not _runs(held["process"])):
                break
            fs.rm_file(self._lock.path)
        raise RunError(
            f"{self._there} is in use by process {held['process']} on {held['host']}, which was alive {age:.0f} s ago: "
            f"wait until it has ended (after a crash {_STALE:.0f} s), or choose another train.run_dir"
        )

    def _check_held(self) -> None:
        held = self._read()
        if held and held["nonce"] != self._nonce:
            raise RunError(
                f"{self._there} was taken over by process {held['process']} on {held['host']}; this run ends"
            )

    def _release(self) -> None:
        with contextlib.suppress(Exception):  # it goes stale by itself
            if self._read().get("nonce") == self._nonce:
                self._lock.fs.rm_file(self._lock.path)

    def _holder(self) -> bytes:
        who = {"host": socket.gethostname(), "process": os.getpid(), "time": time.time(), "nonce": self._nonce}
        return json.dumps(who).encode()

    def _read(self) -> dict[str, Any]:
        """Return what the lock holds, empty if there is none."""
        self._lock.fs.invalidate_cache()
        try:
            return json.loads(self._lock.read_text())
        except FileNotFoundError:
            return {}


def _by_checkpoint(there: Any) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the files of every checkpoint in the store that has its manifest, and the names of those without one."""
    found: dict[str, list[Any]] = {}
    top = there / "checkpoints"
    for file in remote.files_in(top):
        found.setdefault(file.relative_to(top).parts[0], []).append(file)
    has_manifest = lambda name: any(f.relative_to(top / name).as_posix() == manifests.NAME for f in found[name])
    names = [name for name in found if _CHECKPOINT.fullmatch(name)]
    whole = [name for name in names if has_manifest(name)]
    return {name: found[name] for name in whole}, [name for name in names if name not in whole]


def _newest_first(names: Any) -> list[str]:
    """Order names of checkpoints: of one step the one that was not replaced first."""
    return sorted(names, key=lambda name: (int(Path(name).stem), not name.endswith(".old")), reverse=True)


def _pull(there: Any, folder: Path, checkpoints: dict[str, list[Any]], small: list[Any]) -> dict[str, bytes]:
    """Make a local folder equal to these files of the store; a checkpoint that is the same already is not copied.

    Returns:
        The manifests by name.
    """
    top, local = there / "checkpoints", folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: (top / name / manifests.NAME).read_bytes() for name in checkpoints}
    here = _manifests(local)
    for path in list(local.iterdir()) if local.exists() else []:
        if here.get(path.name) is None or here[path.name] != wanted.get(path.name):
            shutil.rmtree(path)
    for path in list(folder.iterdir()) if folder.exists() else []:
        if path.name not in ("checkpoints", "lock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # The manifest is the last file of a checkpoint here too, since its folder is renamed when all files are there.
    copies = [(file, folder / file.relative_to(there).as_posix()) for file in small]
    missing = [name for name in wanted if here.get(name) != wanted[name]]
    for name in missing:
        new = local / f"{name}.new"
        copies += [(file, new / file.relative_to(top / name).as_posix()) for file in checkpoints[name]]
    with ThreadPoolExecutor(remote.TOGETHER) as pool:
        list(pool.map(lambda pair: remote.copy_down(*pair), copies))
    for name in missing:
        (local / f"{name}.new").rename(local / name)
    return wanted


def _manifests(folder: Path) -> dict[str, bytes]:
    """Return the manifests of the finished checkpoints in a local folder, by name."""
    paths = folder.iterdir() if folder.exists() else ()
    files = {path.name: path / manifests.NAME for path in paths if _CHECKPOINT.fullmatch(path.name)}
    return {name: file.read_bytes() for name, file in files.items() if file.exists()}


def _delete(checkpoint: Any) -> None:
    """Delete a checkpoint in the store, its manifest first: from then on it does not count."""
    files = remote.files_in(checkpoint)
    for file in sorted(files, key=lambda file: file.relative_to(checkpoint).as_posix() != manifests.NAME):
        file.fs.rm_file(file.path)


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _runs(process: int) -> bool:
    """Return whether a process of this host runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
