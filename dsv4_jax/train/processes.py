# SPDX-License-Identifier: Apache-2.0
"""Let the processes of a run agree. Every process must call these functions, in the same order."""

import json
import secrets
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv4_jax.section import ConfigError

_PATIENCE = 5.0  # seconds; some network file systems show new files late


def of_first(value: Any) -> Any:
    """Return process 0's JSON value in every process."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    text = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    return json.loads(bytes(text.tolist()))


def of_all(value: Any) -> list[Any]:
    """Return the JSON values of all processes in every process, by process number."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    texts = multihost_utils.process_allgather(np.resize(text, int(sizes.max())))
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(texts, sizes, strict=True)]


def check_shared(folder: Path) -> None:
    """Refuse a run directory that the processes do not share, before anything else is written into it.

    Checkpoints need one folder that all processes see. Without this check a run would fail as late as its first save.

    Raises:
        ConfigError: in every process, naming those that do not see what process 0 wrote.
    """
    if jax.process_count() == 1:
        return
    path, failure = folder / ".shared", ""
    nonce = of_first(secrets.token_hex(16))
    if jax.process_index() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(nonce)
        except OSError as error:
            failure = f"process 0 cannot write into train.run_dir = {str(folder)!r}: {error.strerror}"
    if failure := of_first(failure):
        raise ConfigError(failure)
    found, end = _text(path), time.monotonic() + _PATIENCE
    while found != nonce and time.monotonic() < end:
        time.sleep(0.1)
        found = _text(path)
    blind = [process for process, sees in enumerate(of_all(found == nonce)) if not sees]
    if jax.process_index() == 0:
        path.unlink()
    if blind:
        raise ConfigError(
            f"train.run_dir = {str(folder)!r} is not shared: process {', '.join(map(str, blind))} of "
            f"{jax.process_count()} found another folder at this path. Checkpoints need a folder that all processes "
            "see, such as a network file system"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
