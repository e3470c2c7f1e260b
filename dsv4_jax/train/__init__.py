# SPDX-License-Identifier: Apache-2.0
"""Training. The package is a function as well: `dsv4_jax.train(cfg)` trains and returns state and metrics."""

import json
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

    from dsv4_jax.config import Config
    from dsv4_jax.train.state import TrainState


class Result(NamedTuple):
    """What training gives.

    Attributes:
        state: parameters, buffers and optimizer state at the end.
        metrics: every line of the run's metrics.jsonl, one dict a step, from before a resume too.
    """

    state: "TrainState"
    metrics: list[dict[str, Any]]


def train(cfg: "Config", console: "Console | None" = None) -> Result:
    """Train as `train.py` does, in this process, for notebooks and scripts.

    A run after another one may have another mesh of the same number of devices.

    Args:
        cfg: the run; its run directory is written, and resumed if it holds a run already.
        console: where lines are printed; stdout if absent.

    Raises:
        ConfigError, RunError: see `run.run`.
    """
    from dsv4_jax.train.mirror import work_folder
    from dsv4_jax.train.run import run

    state = run(cfg, console)
    path = work_folder(cfg.train.run_dir) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []  # process 0 alone writes them
    return Result(state, [json.loads(line) for line in lines])


class _Callable(types.ModuleType):
    """A package that can be called; `import dsv4_jax.train.run` would otherwise hide a function of its name."""

    __call__ = staticmethod(train)


sys.modules[__name__].__class__ = _Callable
