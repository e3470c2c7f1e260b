# SPDX-License-Identifier: Apache-2.0
"""Stages of a run: parts that end at token counts and change keys of the configuration (docs/stages.md)."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4_jax.optim.schedules import Clock, Stepwise
from dsv4_jax.validate import ConfigError, Section, nearest

if TYPE_CHECKING:
    from dsv4_jax.config import Config

# Keys of the model that may change in a run: they leave its arrays alone.
RUNTIME = {
    *("attention", "attention_block", "compute_dtype", "remat", "select", "yarn"),
    *("expert_matmul", "expert_exchange", "expert_waves", "expert_gradients", "recall"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Section):
    """A part of a run."""

    name: str
    """What the table of stages calls it."""
    until: int
    """Tokens of all steps so far, counted as rows x data.seq_len, at which it ends: the first step that begins there
    or later belongs to the next stage."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the configuration, `section.key`, and their values from this stage on."""
    chosen: tuple[str, ...] = ()
    """Which of those keys, or `until`, are our choice, where the model's report is silent."""


class Leg(NamedTuple):
    """A stage, resolved.

    Attributes:
        number: of the stage, from 0.
        stage: its name and what of it is our choice.
        cfg: the configuration in it, which has no stages itself; `train.steps` are those of all stages.
        first: steps before it.
        last: steps up to its end.
        clock: tokens of the run's steps.
    """

    number: int
    stage: Stage
    cfg: "Config"
    first: int
    last: int
    clock: Clock


_CHANGEABLE = re.compile(
    rf"data\.(seq_len|batch_size|path|mixture|row_patches|row_images)|model\.({'|'.join(sorted(RUNTIME))})|loss\.\w+"
    r"|optim\.(learning_rate|end_learning_rate|engram_factor|vision_factor|weight_decay|clip|tau)|routing\..+|mesh\.\w+"
    r"|train\.(accumulate|frozen)"
)


def legs(cfg: "Config") -> tuple[Leg, ...]:
    """The stages, resolved; of a run without stages one, the whole run."""
    if not cfg.stages:
        clock = Clock(Stepwise(((0, cfg.data.batch_size * cfg.data.seq_len),)))
        return (Leg(0, Stage(name="", until=clock.tokens(cfg.train.steps)), cfg, 0, cfg.train.steps, clock),)
    sections = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name != "stages"}
    resolved = []
    for number, stage in enumerate(cfg.stages):
        try:
            for key, value in stage.changes.items():
                if not _CHANGEABLE.fullmatch(key):
                    valid = [k for k in keys(cfg) if _CHANGEABLE.fullmatch(k)]
                    raise ConfigError(f"it cannot change {key!r}{nearest(key, valid)}")
                sections = _changed(sections, key.split("."), value, key)
            resolved.append(sections)
        except ConfigError as error:
            raise ConfigError(f"stages[{number}] ({stage.name}): {error}") from None
    starts = [0, *(stage.until for stage in cfg.stages)]
    if starts != sorted(set(starts)):
        raise ConfigError(f"the stages must end at ascending token counts above 0, found {starts[1:]}")
    sizes = (s["data"].batch_size * s["data"].seq_len for s in resolved)
    clock = Clock(Stepwise(tuple(zip(starts, sizes, strict=False))))
    steps = [first for first, _, _ in clock.segments] + [clock.steps(starts[-1])]
    found = []
    for number, (stage, part) in enumerate(zip(cfg.stages, resolved, strict=True)):
        first, last = steps[number : number + 2]
        try:
            if first == last:
                raise ConfigError(f"no step begins before it ends at {stage.until:,} tokens")
            train = dataclasses.replace(part["train"], steps=steps[-1])
            found.append(Leg(number, stage, type(cfg)(**part | {"train": train}), first, last, clock))
        except ConfigError as error:
            raise ConfigError(f"stages[{number}] ({stage.name}): {error}") from None
    return tuple(found)


def keys(node: Any, prefix: str = "") -> list[str]:
    """Every leaf key of a configuration, `section.key`, but for the stages."""
    found: list[str] = []
    for field in dataclasses.fields(node):
        if field.name == "stages":
            continue
        value, name = getattr(node, field.name), prefix + field.name
        found += keys(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return found


def _changed(sections: dict[str, Any], path: list[str], value: Any, key: str) -> dict[str, Any]:
    """The sections with the value at `path` replaced."""

    def replaced(node: Any, path: list[str]) -> Any:
        if not path:
            return value
        if path[0] not in {f.name for f in dataclasses.fields(node)}:
            raise ConfigError(f"unknown key {key!r}{nearest(path[0], [f.name for f in dataclasses.fields(node)])}")
        return dataclasses.replace(node, **{path[0]: replaced(getattr(node, path[0]), path[1:])})

    return sections | {path[0]: replaced(sections[path[0]], path[1:])}
