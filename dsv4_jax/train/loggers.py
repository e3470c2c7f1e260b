# SPDX-License-Identifier: Apache-2.0
"""Make the loggers of `train.loggers`, which receive the scalars of every step in addition to `metrics.jsonl`."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tensorboardX import SummaryWriter

from dsv4_jax.config import Config
from dsv4_jax.config.plugins import resolve
from dsv4_jax.data.remote import is_address
from dsv4_jax.section import ConfigError
from dsv4_jax.train.run_dir import resolved

Scalars = dict[str, float | None]


class Logger(Protocol):
    """The interface of a logger. Process 0 makes it at the start of training and closes it at the end."""

    def write(self, scalars: Scalars) -> None:
        """Write the scalars of one step, which include its number `step`; None replaces values that are not finite.

        After a rollback step numbers repeat. If a run stopped before the evaluation of its last step, the resumed run
        evaluates first and writes those scalars by themselves, with the number of that step.
        """
        ...

    def close(self) -> None:
        """Finish writing; called at the end of training, also after an error or a signal."""
        ...


class TensorBoard:
    """Write TensorBoard files into the folder `tensorboard` of the run."""

    def __init__(self, cfg: Config, run_dir: Path, step: int):
        """Open the files; TensorBoard hides what an earlier process wrote after `step`."""
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, scalars: Scalars) -> None:
        """Write the scalars of one step (see `Logger`)."""
        for name, value in scalars.items():
            if value is not None:
                self._board.add_scalar(name, value, int(scalars["step"] or 0))

    def close(self) -> None:
        """Finish writing (see `Logger`)."""
        self._board.close()


class WandB:
    """Send scalars to Weights & Biases, which environment variables (WANDB_PROJECT, WANDB_MODE, ...) configure."""

    def __init__(self, cfg: Config, run_dir: Path, step: int):
        """Start or resume the run of Weights & Biases that belongs to `run_dir`."""
        import wandb  # ty: ignore[import-not-found]  # an extra

        # The id is a hash of the folder's path or address, so that a resumed run continues the same run there.
        where = cfg.train.run_dir if is_address(cfg.train.run_dir) else str(run_dir.resolve())
        name = hashlib.sha256(where.encode()).hexdigest()[:16]
        self._run = wandb.init(id=name, name=run_dir.name, dir=str(run_dir), config=resolved(cfg), resume="allow")
        # The step counter of Weights & Biases cannot decrease, as step numbers do after a rollback. Therefore the step
        # is sent as a scalar, which is the axis of all others.
        self._run.define_metric("*", step_metric="step")

    def write(self, scalars: Scalars) -> None:
        """Write the scalars of one step (see `Logger`)."""
        self._run.log({name: value for name, value in scalars.items() if value is not None})

    def close(self) -> None:
        """Finish writing (see `Logger`)."""
        self._run.finish()


_NAMED: dict[str, Callable[[Config, Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


def find_loggers(names: tuple[str, ...]) -> list[Callable[[Config, Path, int], Logger]]:
    """Return the function that makes each named logger, called as function(cfg, run_dir, step).

    Args:
        names: `tensorboard`, `wandb`, or names of functions as `plugins.resolve` imports them.

    Raises:
        ConfigError: if a function cannot be imported, or the package of `wandb` is not installed.
    """
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise ConfigError("train.loggers = 'wandb' needs the package wandb: pip install 'dsv4_jax[wandb]'")
    return [_NAMED[name] if name in _NAMED else resolve(name, "train.loggers") for name in names]


def make_loggers(cfg: Config, run_dir: Path, step: int) -> list[Logger]:
    """Make the loggers of `train.loggers` for a run that continues after `step`.

    Raises:
        ConfigError: if a function returns an object without `write` and `close`.
    """
    loggers: list[Logger] = []
    for name, make in zip(cfg.train.loggers, find_loggers(cfg.train.loggers), strict=True):
        logger = make(cfg, run_dir, step)
        if not (callable(getattr(logger, "write", None)) and callable(getattr(logger, "close", None))):
            raise ConfigError(
                f"train.loggers = {name!r} must return an object with write(scalars) and close(), found "
                f"{type(logger).__name__}"
            )
        loggers.append(logger)
    return loggers
