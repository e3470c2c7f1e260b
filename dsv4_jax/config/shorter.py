# SPDX-License-Identifier: Apache-2.0
"""Shorten the learning-rate schedule of a run that gets fewer steps."""

import sys
from collections.abc import Mapping
from typing import Any

from dsv4_jax.config.keys import changed
from dsv4_jax.section import deferred_rules


def fitting_schedule(cfg: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten a warm-up and a decay in steps that no longer fit into a changed `train.steps`, and print a note.

    Both keep their shares of the run. A length that `changes` gives is kept. In a run with stages, whose schedule is
    that of all stages, nothing is shortened: the run only ends earlier.

    Args:
        cfg: before the changes.
        changes: values by their keys, as for `changed`.

    Returns:
        The changes to make in addition.
    """
    if not {"train", "train.steps"} & set(changes):
        return {}
    with deferred_rules():
        after = changed(cfg, changes)
    optim, steps = after.optim, after.train.steps
    if after.stages:
        if steps and steps != cfg.train.steps:
            note(f"train.steps = {steps} ends the run before its stages do; schedules are those of all stages")
        return {}
    lengths = {"optim.warmup_steps": optim.warmup_steps}
    if not optim.decay_tokens:
        lengths["optim.decay_steps"] = optim.decay_steps
    total = sum(lengths.values())
    if not steps or total <= steps:
        return {}
    before = max(cfg.train.steps, total)
    shorter = {k: length * steps // before for k, length in lengths.items() if not {k, "optim"} & set(changes)}
    if shorter:
        each = ", ".join(f"{key} = {value} instead of {lengths[key]}" for key, value in shorter.items())
        note(f"train.steps = {steps} instead of {before} shortens the schedule in proportion: {each}")
    return shorter


def note(text: str) -> None:
    """Print a note about the configuration to stderr."""
    print(f"note: {text}", file=sys.stderr)
