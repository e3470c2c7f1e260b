# SPDX-License-Identifier: Apache-2.0
"""Loggers: destinations of the scalars of every step, beside `metrics.jsonl` (`train.loggers`)."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tensorboardX import SummaryWriter

from dsv4_jax.config import Config
from dsv4_jax.config.plugins import resolve
from dsv4_jax.section import ConfigError
from dsv4_jax.train.run_dir import resolved

Scalars = dict[str, float | None]


class Logger(Protocol):
    """A destination of scalars. Process 0 makes one at the start of training and closes it at the end."""

    def write(self, scalars: Scalars) -> None:
        """Write the scalars of one step, with its number as `step`; None stands for what is not finite.

        After a rollback step numbers repeat. An evaluation that a resumed command makes up for comes alone, with the
        number of its step.
        """
        ...

    def close(self) -> None:
        """Finish writing. It is called after an error and after a signal too."""
        ...


class TensorBoard:
    """Write TensorBoard files into the folder `tensorboard` of the run."""

    def __init__(self, cfg: Config, run_dir: Path, step: int):
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, scalars: Scalars) -> None:
        """See `Logger`."""
        for name, value in scalars.items():
            if value is not None:
                self._board.add_scalar(name, value, int(scalars["step"] or 0))

    def close(self) -> None:
        """See `Logger`."""
        self._board.close()


class WandB:
    """Send scalars to Weights & Biases. Its own variables (WANDB_PROJECT, WANDB_MODE, ...) choose where and how."""

    def __init__(self, cfg: Config, run_dir: Path, step: int):
        import wandb  # ty: ignore[import-not-found]  # an extra

        # The name of the folder gives the id, so that a resumed run continues there.
        name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(id=name, name=run_dir.name, dir=str(run_dir), config=resolved(cfg), resume="allow")
        # Its own count of steps cannot go back, which a rollback does: the number of the step is a scalar instead.
        self._run.define_metric("*", step_metric="step")

    def write(self, scalars: Scalars) -> None:
        """See `Logger`."""
        self._run.log({name: value for name, value in scalars.items() if value is not None})

    def close(self) -> None:
        """See `Logger`."""
        self._run.finish()


_NAMED: dict[str, Callable[[Config, Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


def find_loggers(names: tuple[str, ...]) -> list[Callable[[Config, Path, int], Logger]]:
    """Return the functions that make the named loggers, from the configuration, the run folder and the steps done.

    Raises:
        ConfigError: for a name that leads nowhere, or a package that is not installed.
    """
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise ConfigError("train.loggers = 'wandb' needs the package wandb: pip install 'dsv4_jax[wandb]'")
    return [_NAMED[name] if name in _NAMED else resolve(name, "train.loggers") for name in names]


def make_loggers(cfg: Config, run_dir: Path, step: int) -> list[Logger]:
    """Make the loggers of a run that continues after `step`.

    Raises:
        ConfigError: if what a function returns is no logger.
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
