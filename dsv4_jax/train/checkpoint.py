# SPDX-License-Identifier: Apache-2.0
"""Save and restore checkpoints of a run: written beside the training, verified after writing and before reading.

A checkpoint is a folder named after its step: the arrays as orbax writes them (under `state`, one flat
dict by name) and `manifest.json` (manifests.py). It is made under another name, `STEP.new`, and renamed
when the disk has given back what the manifest lists. While a step is replaced the one before is `STEP.old`.

With several processes, which need a folder that all of them see, all call the same methods. Each writes and
verifies its part; process 0 joins their parts, renames and deletes.

Nothing is unpickled: orbax's handler of arrays reads JSON and tensorstore's files.
"""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from orbax.checkpoint import v1 as ocp

from dsv4_jax.config import Config
from dsv4_jax.data.remote import open_path
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.section import ConfigError, RunError
from dsv4_jax.train import manifests
from dsv4_jax.train.console import printable
from dsv4_jax.train.mirror import fetch_run
from dsv4_jax.train.processes import of_all, of_first
from dsv4_jax.train.state import abstract_model, abstract_state

_COUNTS = re.compile(r"\d+(\.old)?")  # names of checkpoints
_FAILURES = 3  # saves in a row that fail end a run
_LEFT_OVER = re.compile(r"\d+(\.old)?\.(new|gone).*")  # of what a crash has left: half written, half deleted


class CheckpointError(RunError):
    """No checkpoint is usable, or one could not be written."""


class Checkpoints:
    """The checkpoints in a folder: the newest `keep`, and permanently every multiple of `keep_every` (0: none).

    Steps above the one just saved, from which a run has fallen back, neither count nor are deleted.

    Attributes:
        before: the newest checkpoint up to this step stays too: from before the decay of the learning rate, so that
            the run can be continued without it.
        publish: called by process 0 when a save is finished, before it counts as such; may raise.
    """

    before: int = 0
    publish: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, folder: Path, keep: int, keep_every: int = 0):
        self._folder, self._keep, self._keep_every = folder.absolute(), keep, keep_every
        self._saving: tuple[int, Future[None]] | None = None
        self._failures = 0  # saves in a row that failed
        self._unreported, self._reported = (
            "",
            False,
        )  # a failure for `failed`; whether it had that of the save in flight
        self._pool = ThreadPoolExecutor(1, "checkpoint")

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Start to save the arrays of `state` and the JSON values of `host`, in place of an earlier save of `step`.

        Returns when the host has a copy of the arrays, which may then be donated. Orbax makes this one
        copy, of one replica of each array, and writes it as it is: compressing it would need another.
        An array that lies whole on one CPU device is not copied unless it is donated meanwhile.

        Waits for the save before. If that failed, `failed` returns the reason, and this save is made all
        the same. After two failures in a row it also waits for this save.

        Raises:
            CheckpointError: if this is the third save in a row to fail.
        """
        self._settle()
        arrays = manifests.named(state)
        manifest = {"step": step, "host": json.loads(json.dumps(host)), "arrays": manifests.types(arrays)}
        saving: Future[None] = Future()
        try:
            if jax.process_index() == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._tidy()
            context = ocp.Context()
            context.array_options.saving.use_compression = False
            with context:
                write = ocp.save_async(str(self._folder / f"{step}.new"), arrays, checkpointable_name="state")
            saving = self._pool.submit(self._finish, step, manifest, write)
        except Exception as error:
            saving.set_exception(error)
        self._saving = step, saving
        if self._failures == _FAILURES - 1:
            self.wait()

    def failed(self) -> str:
        """Return why the save in flight or the one before it failed, once; empty if neither did.

        Asks no other process, so that it costs nothing after every step.
        """
        found, self._unreported = self._unreported, ""
        if not found and self._saving is not None and not self._reported:
            step, saving = self._saving
            if saving.done() and (error := saving.exception()):
                found, self._reported = _failure(step, error), True
        return found

    def wait(self) -> None:
        """Wait until the save in flight is finished and verified.

        Raises:
            CheckpointError: if it failed. Earlier checkpoints are untouched.
        """
        if reason := self._settle():
            self._unreported = ""
            more = f"; it is the last of {self._failures} saves in a row that failed" if self._failures > 1 else ""
            raise CheckpointError(reason + more)

    def _settle(self) -> str:
        """Wait for the save in flight in all processes; return why it failed in any, empty if it did not."""
        if self._saving is None:
            return ""
        (step, saving), self._saving = self._saving, None
        error = saving.exception()
        reason = next(filter(None, of_all("" if error is None else _failure(step, error))), "")
        self._failures = self._failures + 1 if reason else 0
        if reason and not self._reported:
            self._unreported = reason
        self._reported = False
        return reason

    def latest(self) -> int | None:
        """Return the newest step whose manifest is whole and whose files have their sizes, without reading them."""
        found = self.newest()
        return None if found is None else found[0]

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Return the step of `latest` and its host values, without waiting for other processes."""
        whole = (path for path in self._found() if not manifests.damage(path, content=False))
        return next(((int(path.stem), manifests.read(path)["host"]) for path in whole), None)

    def restore(
        self,
        abstract: Any,
        say: Callable[[str], None],
        part: bool = False,
        before: int | None = None,
        step: int | None = None,
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest usable checkpoint, None if there is none at all: its step, state and host values.

        Args:
            abstract: shapes, types and shardings of the state, whatever mesh it was saved from; or a function
                that gives them from the step and the host values.
            say: told of every damaged checkpoint that is skipped.
            part: `abstract` is a part of the state; the other arrays are not read.
            before: consider only steps before this one.
            step: consider only this step.

        Raises:
            CheckpointError: if there are checkpoints to consider and all are damaged.
            ConfigError: if the newest usable one holds other arrays than `abstract`.
        """
        self._settle()
        name, problems = self._choose(before, step)
        if not name and problems:
            lines = [f"checkpoint {which}: {problem}" for which, problem in problems]
            raise CheckpointError("\n  ".join([f"{self._folder} holds no usable checkpoint", *lines]))
        for which, problem in problems:
            say(f"checkpoint {which} is skipped: {problem}")
        if not name:
            return None
        path = self._folder / name
        manifest = manifests.read(path)
        tree = abstract(manifest["step"], manifest["host"]) if callable(abstract) else abstract
        wanted = manifests.named(tree)
        if lines := manifests.differences(manifest["arrays"], manifests.types(wanted), part):
            raise ConfigError("\n  ".join([f"{path} holds the state of another configuration", *lines]))
        skipped: dict[str, Any] = dict.fromkeys(manifest["arrays"], ocp.PLACEHOLDER)
        arrays: Any = ocp.load(str(path), skipped | wanted, checkpointable_name="state")
        state = jax.tree.unflatten(jax.tree.structure(tree), [arrays[key] for key in wanted])
        return manifest["step"], state, manifest["host"]

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, before the run continues from `step` in another way."""
        self._settle()
        if jax.process_index() == 0:
            for path in self._found():
                if int(path.stem) > step:
                    _delete(path)
        of_first(None)  # the others go on when they are gone

    def close(self) -> None:
        """Wait as `wait` does, then end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        self._pool.shutdown()  # waits, without the other processes: they may be elsewhere
        if self._saving and (failed := self._saving[1].exception()):
            error.add_note(_failure(self._saving[0], failed))

    def _finish(self, step: int, manifest: dict[str, Any], write: ocp.AsyncResponse[None]) -> None:
        """Wait for orbax (in all processes), verify the checkpoint and give it its final name."""
        write.result()
        new, final = self._folder / f"{step}.new", self._folder / str(step)
        process, count = jax.process_index(), jax.process_count()
        if process:
            try:
                files = manifests.hash_files(new, manifests.written_by(manifests.list_files(new), process, count))
            except Exception as error:
                manifests.write_part(new, process, {"error": f"{type(error).__name__}: {error}"})
                raise
            manifests.write_part(new, process, {"files": files})
            return
        files = manifests.hash_files(new, manifests.written_by(manifests.list_files(new), 0, count))
        files |= manifests.join_parts(new, count)
        # What others did not see, on a file system that shows new files late, is left to process 0.
        files |= manifests.hash_files(new, [name for name in manifests.list_files(new) if name not in files])
        manifests.write(new, manifest, files)
        if problem := manifests.damage(new, content=False):
            raise CheckpointError(problem)
        if final.exists():
            final.rename(self._folder / f"{step}.old")
        new.rename(final)
        manifests.to_disk(self._folder)
        self._tidy()
        found = [path for path in self._found() if int(path.stem) <= step]
        spare = next((path for path in found if int(path.stem) <= self.before), None)
        for path in found[self._keep :]:
            if path != spare and (not self._keep_every or int(path.stem) % self._keep_every):
                _delete(path)
        self.publish()

    def _found(self) -> list[Path]:
        return list_checkpoints(self._folder)

    def _choose(self, before: int | None, step: int | None) -> tuple[str, list[tuple[str, str]]]:
        """Name of the newest usable checkpoint, empty if there is none; names and faults of later ones.

        The processes share the reading of its files.
        """
        found = [path for path in self._found() if step in (None, int(path.stem))]
        names = of_first([path.name for path in found if before is None or int(path.stem) < before])
        process, count, problems = jax.process_index(), jax.process_count(), []
        for name in names:
            faults = of_all(manifests.damage(self._folder / name, process=process, count=count))
            found = [fault for fault in dict.fromkeys(faults) if fault]
            if not found:
                return name, problems
            problems.append((name, "; ".join(found)))
        return "", problems

    def _tidy(self) -> None:
        """Delete what crashes have left, and checkpoints that have been replaced."""
        for path in list(self._folder.iterdir()):
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path)
            elif _COUNTS.fullmatch(path.name) and path.suffix and path.with_suffix("").exists():
                _delete(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """List all checkpoints in a folder, the newest first, usable or not."""
    if not folder.exists():
        return []
    found = [path for path in folder.iterdir() if _COUNTS.fullmatch(path.name)]
    return sorted(found, key=lambda path: (int(path.stem), path.suffix == ""), reverse=True)


def parse_source(source: str) -> tuple[Any, int | None]:
    """Split `RUN@STEP` into a run directory and a step; `RUN` alone stands for its newest checkpoint, None.

    A folder whose name ends like this is meant with a slash behind it: `RUN@3/`.
    """
    named = re.fullmatch(r"(.+)@(\d+)", source)
    name, step = (named[1], int(named[2])) if named else (source, None)
    return open_path(name, "the run"), step


def find_checkpoint(run_dir: Any, step: int | None = None) -> Path:
    """Find the checkpoint of a step, or the newest one; the sizes of its files are checked, their content is not.

    That of a run at an address is copied first, see `mirror.fetch_run`.

    Raises:
        ConfigError: if there is none; it lists the steps that there are.
        CheckpointError: if it is damaged.
    """
    run_dir = fetch_run(run_dir, step)
    paths = list_checkpoints(run_dir / "checkpoints")
    candidates = [path for path in paths if step in (None, int(path.stem))]
    if not paths:
        raise ConfigError(f"{run_dir} holds no checkpoint")
    if not candidates:
        steps = ", ".join(map(str, sorted({int(path.stem) for path in paths})))
        raise ConfigError(f"{run_dir} has no checkpoint of step {step}; it has those of steps {steps}")
    faults = []
    for path in candidates:
        fault = manifests.damage(path, content=False)
        if not fault:
            return path
        faults.append(f"checkpoint {path.name}: {fault}")
    raise CheckpointError("\n  ".join([f"{run_dir} holds no usable checkpoint", *faults]))


def load_model(cfg: Config, source: str = "") -> DeepSeek:
    """Load the model of a checkpoint of the run that `cfg` describes, the newest usable one; stderr hears of damage.

    Args:
        cfg: the run.
        source: another run of the same model, `RUN` or `RUN@STEP`.

    Raises:
        ConfigError: if the run has no checkpoint, not that one, or one of another configuration.
        CheckpointError: if none is usable.
    """
    ensure_mesh()
    run_dir, step = parse_source(source) if source else (open_path(cfg.train.run_dir, "train.run_dir"), None)
    folder = find_checkpoint(run_dir, step).parent
    abstract = dataclasses.replace(abstract_state(cfg), opt_state=None)
    with Checkpoints(folder, cfg.train.keep) as checkpoints:
        say = lambda line: print(printable(line), file=sys.stderr)
        found = checkpoints.restore(abstract, say, part=True, step=step)
    assert found is not None
    return nnx.merge(nnx.graphdef(abstract_model(cfg)), found[1].params, found[1].buffers)


def _failure(step: int, error: BaseException) -> str:
    return f"saving checkpoint {step} failed: {type(error).__name__}: {error}"


def _delete(path: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that it never counts with files missing."""
    gone = path.with_name(f"{path.name}.gone")
    path.rename(gone)
    shutil.rmtree(gone)
