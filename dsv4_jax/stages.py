# SPDX-License-Identifier: Apache-2.0
"""Stages of a run: parts that end at token counts and change keys of the configuration (docs/stages.md)."""

import contextlib
import dataclasses
import re
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4_jax.optim.schedules import Clock, Stepwise
from dsv4_jax.validate import ConfigError, Section, check_rules, deferred_rules, nearest

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

    @property
    def planned(self) -> int:
        """Tokens that the data of the stage are planned for: up to its end, by the batch of its first step.

        Another batch after that leaves them alone, so that a position in the data still means the same row.
        """
        seen = self.clock.tokens(self.first)
        size = self.clock.tokens(self.first + 1) - seen
        return -(-(self.stage.until - seen) // size) * size


_CHANGEABLE = re.compile(
    rf"data\.(seq_len|batch_size|path|mixture|row_patches|row_images)|model\.({'|'.join(sorted(RUNTIME))})|loss\.\w+"
    r"|optim\.(learning_rate|end_learning_rate|engram_factor|vision_factor|weight_decay|clip|tau)|routing\..+|mesh\.\w+"
    r"|train\.(accumulate|frozen)"
)


# A key that takes the place of another one: giving the first resets the second to this value.
_REPLACES: dict[str, tuple[str, Any]] = {
    "data.path": ("data.mixture", {}),
    "data.mixture": ("data.path", ""),
    "data.held_out": ("data.held_out_path", ""),
    "optim.decay_steps": ("optim.decay_tokens", ()),
}


def changeable(cfg: "Config") -> list[str]:
    """List the keys that a stage may change."""
    return [key for key in keys(cfg) if _CHANGEABLE.fullmatch(key)]


def legs(cfg: "Config", done: tuple[tuple[int, int], ...] = ((0, 0),)) -> tuple[Leg, ...]:
    """Resolve the stages; a run without stages is one stage.

    Args:
        cfg: the run.
        done: (steps, tokens) of the steps that are done, whatever batch they had (`Clock`).
    """
    if not cfg.stages:
        clock = Clock(Stepwise(((0, cfg.data.batch_size * cfg.data.seq_len),)), done)
        return (Leg(0, Stage(name="", until=clock.tokens(cfg.train.steps)), cfg, 0, cfg.train.steps, clock),)
    resolved = []
    part = cfg
    for number, stage in enumerate(cfg.stages, 1):
        with _named(number, stage):
            for key in stage.changes:
                if not _CHANGEABLE.fullmatch(key):
                    raise ConfigError(f"it cannot change {key!r}{nearest(key, changeable(cfg))}")
            with deferred_rules():  # those across sections need the number of steps, which comes from the data's
                part = changed(part, {"stages": (), **stage.changes})
            check_rules(part.data)
        resolved.append(part)
    starts = [0, *(stage.until for stage in cfg.stages)]
    if starts != sorted(set(starts)):
        raise ConfigError(f"the stages must end at ascending token counts above 0, found {starts[1:]}")
    sizes = (part.data.batch_size * part.data.seq_len for part in resolved)
    clock = Clock(Stepwise(tuple(zip(starts, sizes, strict=False))), done)
    steps = [clock.steps(start) for start in starts]
    found = []
    for number, (stage, part) in enumerate(zip(cfg.stages, resolved, strict=True)):
        first, last = steps[number : number + 2]
        with _named(number + 1, stage):
            if first == last:
                raise ConfigError(f"no step begins before it ends at {stage.until:,} tokens")
            with deferred_rules():
                part = changed(part, {"train.steps": steps[-1]})
            check_rules(part)
        found.append(Leg(number, stage, part, first, last, clock))
    return tuple(found)


@contextlib.contextmanager
def _named(number: int, stage: Stage) -> Generator[None]:
    """Name the stage, numbered from 1 as in `plan`, in errors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"stage {number} ({stage.name}): {error}") from None


def keys(node: Any, prefix: str = "") -> list[str]:
    """List every leaf key of a configuration, `section.key`, except the stages."""
    found: list[str] = []
    for field in dataclasses.fields(node):
        if field.name == "stages":
            continue
        value, name = getattr(node, field.name), prefix + field.name
        found += keys(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return found


def replaced_by(key: str) -> str:
    """Return the key that giving `key` resets, because one takes the place of the other, or `key` itself."""
    return _REPLACES.get(key, (key, None))[0]


def changed(cfg: "Config", changes: Mapping[str, Any]) -> "Config":
    """Replace values by their keys, `section.key`, or whole sections by their names.

    A key that takes the place of another one resets it: `data.path` and `data.mixture`, `optim.decay_steps` and
    `optim.decay_tokens`, `data.held_out` and `data.held_out_path`.

    Raises:
        ConfigError: for an unknown key (naming the nearest one), a value of the wrong type or one that breaks a rule.
    """
    resets = {}
    for key, value in changes.items():
        other, empty = _REPLACES.get(key, (key, None))
        if other not in changes and (value or key != "data.mixture"):
            resets[other] = empty

    def replaced(node: Any, changes: Mapping[str, Any], prefix: str) -> Any:
        fields = {f.name for f in dataclasses.fields(node)}
        whole: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            name, dot, rest = key.partition(".")
            if name not in fields or (dot and not dataclasses.is_dataclass(getattr(node, name))):
                raise ConfigError(f"unknown key {prefix + key!r}{nearest(prefix + key, keys(cfg))}")
            if dot:
                parts.setdefault(name, {})[rest] = value
            else:
                whole[name] = value
        for name, inner in parts.items():
            whole[name] = replaced(whole.get(name, getattr(node, name)), inner, f"{prefix}{name}.")
        return dataclasses.replace(node, **whole)

    return replaced(cfg, {**resets, **changes}, "")
