# SPDX-License-Identifier: Apache-2.0
"""Continue a run from an earlier step: as a fork, another run that begins there, or as the run itself, taken back."""

import shutil
from typing import Any

from dsv4_jax.config import Config
from dsv4_jax.data.remote import is_address, open_path
from dsv4_jax.section import ConfigError
from dsv4_jax.train import manifests
from dsv4_jax.train.checkpoint import CheckpointError, find_checkpoint, list_checkpoints, parse_source
from dsv4_jax.train.history import History
from dsv4_jax.train.metrics import drop_lines_after
from dsv4_jax.train.run_dir import RunLock, check_model, write_events
from dsv4_jax.weights.checkpoint import check_model as check_weights
from dsv4_jax.weights.checkpoint import is_folder


def find_origin(cfg: Config, newest: tuple[int, dict[str, Any]] | None) -> tuple[int, dict[str, Any]] | None:
    """Find the checkpoint that a command continues from, without reading its arrays.

    Args:
        cfg: the run.
        newest: step and host values of the newest checkpoint in the run directory, if it holds a run already.

    Returns:
        `newest`, or of a new run the step and host values of the checkpoint that `train.fork_from` names, or None.

    Raises:
        ConfigError: if `train.init_from` or `train.fork_from` names no checkpoint, or the run directory itself, or if
            the run in the directory did not begin there, or if `train.init_from` names the weights of another model.
        CheckpointError: if what it names is damaged.
    """
    own, origin = open_path(cfg.train.run_dir, "train.run_dir"), newest
    for key in ("init_from", "fork_from"):
        source = getattr(cfg.train, key)
        if not source:
            continue
        run_dir, step = parse_source(source)
        if run_dir.resolve() == own.resolve():
            raise ConfigError(
                f"train.{key} = {source!r} is the run directory itself: choose another train.run_dir, or take the run "
                f"back with `python -m dsv4_jax rewind {own} STEP`"
            )
        if newest:
            before, at = parse_source(newest[1]["config"]["train"].get(key, ""))
            if (before.resolve(), at) != (run_dir.resolve(), step):
                raise ConfigError(
                    f"train.{key} = {source!r}, but {own} holds a run that did not begin there: choose another "
                    "train.run_dir, or leave the key out to resume that run"
                )
            continue
        if key == "init_from" and is_folder(run_dir):
            check_weights(run_dir, cfg.model)
            continue
        path = find_checkpoint(run_dir, step)
        if key == "fork_from":
            check_model(cfg, run_dir)
            origin = int(path.stem), manifests.read(path)["host"]
    return origin


def rewind(run_dir: Any, step: int) -> str:
    """Take a run back to the checkpoint of an earlier step; the same training command continues from there.

    What came later becomes a run directory of its own, `rewound/NUMBER`: the later checkpoints move there, and
    `config.json`, `metrics.jsonl` and `events.jsonl` are copied there before they are cut. Nothing is deleted, and a
    call that was killed in between can be made again.

    Args:
        run_dir: folder of the run.
        step: a step that has a checkpoint.

    Returns:
        A line about what was done.

    Raises:
        ConfigError: if there is no checkpoint of that step; it lists the steps that there are.
        CheckpointError: if that checkpoint is damaged.
        RunError: if another process uses the run directory.
    """
    if is_address(run_dir):
        raise ConfigError(
            f"{run_dir} is an address, expected a local folder: continue from the step in another run directory, with "
            f"--train.fork-from {run_dir}@{step}"
        )
    path = find_checkpoint(run_dir, step)
    lock = RunLock(run_dir)
    lock.take()
    try:
        if fault := manifests.damage(path):
            raise CheckpointError(f"checkpoint {path.name} of {run_dir} is damaged: {fault}")
        history = History.from_host(manifests.read(path)["host"])
        later = [other for other in list_checkpoints(run_dir / "checkpoints") if int(other.stem) > step]
        number = 1
        while (run_dir / "rewound" / str(number)).exists():
            number += 1
        aside = run_dir / "rewound" / str(number)
        (aside / "checkpoints").mkdir(parents=True)
        for name in ("config.json", "metrics.jsonl", "events.jsonl"):
            if (run_dir / name).exists():
                shutil.copy2(run_dir / name, aside / name)
        for folder in (aside, aside / "checkpoints", aside.parent, run_dir):
            manifests.to_disk(folder)
        for other in later:  # the newest first: whatever is left is a run up to some step
            other.rename(aside / "checkpoints" / other.name)
        drop_lines_after(run_dir, step, history.recovery.rollbacks)
        write_events(run_dir, history.events)
    finally:
        lock.release()
    moved = ", ".join(sorted({other.stem for other in later}, key=int)) or "none"
    return f"{run_dir} is back at step {step}; later checkpoints ({moved}), metrics and events are in {aside}"
