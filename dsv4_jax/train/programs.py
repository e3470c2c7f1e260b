# SPDX-License-Identifier: Apache-2.0
"""Compile the programs of a run: which ones, with which options, and the folder that keeps them."""

import contextlib
import dataclasses
import gc
import hashlib
import os
import platform
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from dsv4_jax.config import Config
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import Batch
from dsv4_jax.mesh import QUICK_CPU, current_platform
from dsv4_jax.train.anticipation import make_route
from dsv4_jax.train.evaluate import make_eval_step
from dsv4_jax.train.state import TrainState, init_state
from dsv4_jax.train.step import make_train_step
from dsv4_jax.train.timing import Timing

Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CompilePolicy:
    """Choose XLA's options.

    Attributes:
        once: for programs that run once (initialisation), where optimising costs more time than it saves.
        cpu: for all other programs on CPUs.
        tpu: for all other programs on TPUs, where a device computes while a ragged all-to-all or the gather of a
            parameter runs. GPUs have XLA's defaults.
    """

    once: Options = dataclasses.field(
        default_factory=lambda: {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    )
    cpu: Options = dataclasses.field(default_factory=lambda: QUICK_CPU)
    tpu: Options = dataclasses.field(
        default_factory=lambda: {
            "xla_tpu_enable_async_ragged_all_to_all": True,
            "xla_enable_async_all_gather": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        }
    )

    @property
    def repeated(self) -> Options | None:
        """Return the options for programs that run many times, on the devices we trace for; None: XLA's defaults."""
        return {"cpu": self.cpu, "tpu": self.tpu}.get(current_platform())


POLICY = CompilePolicy()


class Programs:
    """Compile the programs of a run and keep those of all its stages: a rollback may return to one of them."""

    def __init__(self, timing: Timing, say: Callable[[str], None]):
        """Account for the time of compiling in `timing`; `say` prints a line for each program."""
        self._timing, self._say = timing, say
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def initial_state(self, cfg: Config) -> TrainState:
        """Make the state of a new run on the devices."""
        with without_collector():
            return jax.jit(lambda: init_state(cfg), compiler_options=POLICY.once)()

    def compiled(self, stage: ResolvedStage, name: str, state: TrainState, batch: Batch) -> Callable[..., Any]:
        """Return a function of state and batch, compiled for a stage and for batches like this one.

        Args:
            stage: its configuration.
            name: `step`, which takes the place of the state it is given, `evaluation` or `routing`.
            state: arrays, or their shapes and shardings.
            batch: the same.
        """
        # A resume with another batch size changes the clock. Only the steps to come count in it, which follow from the
        # tokens at the stage's end.
        steps = stage.last, stage.cfg.steps, stage.clock.tokens(stage.last)
        key = stage.number, *steps, name, "experts" in batch
        if key not in self._compiled:
            if name == "step":
                step = make_train_step(stage.cfg, stage.clock)
                made = jax.jit(step, donate_argnums=0, compiler_options=POLICY.repeated)
            else:
                make = {"evaluation": make_eval_step, "routing": make_route}[name]
                made = jax.jit(make(stage.cfg), compiler_options=POLICY.repeated)
            with self._timing.during("compile") as seconds, without_collector():
                self._compiled[key] = made.lower(state, batch).compile()
            self._say(f"compiled    {name} in {seconds():.0f} s")
        return self._compiled[key]


@contextlib.contextmanager
def without_collector() -> Generator[None]:
    """Pause Python's garbage collector, which takes a quarter of the time of tracing and frees next to nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def use_compile_cache(folder: str) -> None:
    """Keep compiled programs in `folder` (`~` is the home folder); empty: keep none.

    A folder that JAX was given already, by JAX_COMPILATION_CACHE_DIR or in Python, stays. Programs for the CPU are kept
    in a subfolder for the kind of CPU: machines share home folders, and such code runs on its own kind only.
    """
    if not folder or jax.config.values.get("jax_compilation_cache_dir"):
        return
    path = Path(os.path.expanduser(folder))
    if jax.default_backend() == "cpu":
        path /= "cpu-" + hashlib.sha256(_cpu().encode()).hexdigest()[:8]
    jax.config.update("jax_compilation_cache_dir", str(path))
    compilation_cache.reset_cache()  # if this process has compiled before, JAX has noted that there is no cache


def _cpu() -> str:
    """Return the instruction sets of the CPU, or what is known of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
