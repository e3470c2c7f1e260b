# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run with orbax: the state and the data's position, saved and restored together."""

from pathlib import Path
from typing import Any

import grain
from flax import nnx
from orbax.checkpoint import v1 as ocp

from dsv4_jax.config import Config
from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.train.state import TrainState, abstract_model, abstract_state
from dsv4_jax.validate import ConfigError


class Checkpoints:
    """The checkpoints in a folder, of which the newest `keep` are kept."""

    def __init__(self, folder: Path, keep: int):
        policy: Any = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(str(folder.absolute()), preservation_policy=policy)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, None if there is none."""
        found = self._checkpointer.latest
        return None if found is None else found.step

    def save(self, state: TrainState, data: grain.DatasetIterator, tokens: int) -> None:
        """Saves the state, the position of the data iterator and the count of tokens seen so far."""
        parts = {"state": state, "data": data, "host": {"tokens": tokens}}
        self._checkpointer.save_checkpointables(int(state.step), parts, force=True)

    def restore(self, abstract: TrainState, data: grain.DatasetIterator) -> tuple[TrainState, int]:
        """The newest state, laid out like `abstract`, and the tokens seen; moves `data` to its position."""
        parts = {"state": abstract, "data": data, "host": {"tokens": 0}}
        found = self._checkpointer.load_checkpointables(self.latest, parts)
        return found["state"], found["host"]["tokens"]

    def restore_state(self, abstract: TrainState) -> TrainState:
        """The newest state alone."""
        return self._checkpointer.load_checkpointables(self.latest, {"state": abstract})["state"]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: Any) -> None:
        self._checkpointer.close()


def load_model(cfg: Config) -> DeepSeek:
    """The model of the newest checkpoint of the run that `cfg` describes.

    Raises:
        ConfigError: if the run has no checkpoint.
    """
    ensure_mesh()
    folder = Path(cfg.train.run_dir) / "checkpoints"
    with Checkpoints(folder, cfg.train.keep) as checkpoints:
        if checkpoints.latest is None:
            raise ConfigError(f"{folder} holds no checkpoint")
        state = checkpoints.restore_state(abstract_state(cfg))
    return nnx.merge(nnx.graphdef(abstract_model(cfg)), state.params, state.buffers)
