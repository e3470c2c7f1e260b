# SPDX-License-Identifier: Apache-2.0
"""List the keys of a configuration, `section.key`, replace values by key, and define which keys a stage may change."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from dsv4_jax.model.compute import COMPUTE_KEYS
from dsv4_jax.section import ConfigError, Section, nearest

# Keys that a stage may change. Of the model these are only the keys that define how it is computed, since the weights
# of the stage before must still fit.
CHANGEABLE = re.compile(
    rf"data\.(seq_len|batch_size|path|mixture|row_patches|row_images)|model\.({'|'.join(sorted(COMPUTE_KEYS))})|loss\.\w+"
    r"|optim\.(learning_rate|end_learning_rate|engram_factor|vision_factor|weight_decay|clip|tau)|routing\..+|mesh\.\w+"
    r"|train\.(accumulate|frozen)"
)


# Alternatives: a change of the first key resets the second one to the value given here.
_REPLACES: dict[str, tuple[str, Any]] = {
    "data.path": ("data.mixture", {}),
    "data.mixture": ("data.path", ""),
    "data.held_out": ("data.held_out_path", ""),
    "optim.decay_steps": ("optim.decay_tokens", ()),
}


def changeable(cfg: Section) -> list[str]:
    """List the keys of `cfg` that a stage may change."""
    return [key for key in keys(cfg) if CHANGEABLE.fullmatch(key)]


def keys(node: Any, prefix: str = "") -> list[str]:
    """List the keys of all values in a section and in those inside it, except `stages`; each begins with `prefix`."""
    names: list[str] = []
    for field in dataclasses.fields(node):
        if field.name == "stages":
            continue
        value, name = getattr(node, field.name), prefix + field.name
        names += keys(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return names


def replaced_by(key: str) -> str:
    """Return the alternative that a change of `key` resets, as `data.mixture` for `data.path`; else `key` itself."""
    return _REPLACES.get(key, (key, None))[0]


def changed(cfg: Section, changes: Mapping[str, Any]) -> Any:
    """Return a copy of `cfg` with `changes` applied: values by their keys, `section.key`, or whole sections by name.

    Some keys are alternatives. A change of `data.path` resets `data.mixture` and the reverse. A change of
    `optim.decay_steps` resets `optim.decay_tokens`, and one of `data.held_out` resets `data.held_out_path`.

    Raises:
        ConfigError: for an unknown key (naming the nearest one), a value of the wrong type or one that breaks a rule.
    """
    # An alternative that is changed too keeps its new value. An empty mixture does not replace a path.
    resets = {}
    for key, value in changes.items():
        other, empty = _REPLACES.get(key, (key, None))
        if other not in changes and (value or key != "data.mixture"):
            resets[other] = empty

    def replaced(node: Any, changes: Mapping[str, Any], prefix: str) -> Any:
        """Return a copy of the section `node`, whose keys begin with `prefix`, with changes by the rest of the key."""
        # Sort the changes into values of this section (`whole`) and those of each section inside it (`parts`).
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
        # A section that is replaced as a whole gets its changes by key afterwards.
        for name, inner in parts.items():
            whole[name] = replaced(whole.get(name, getattr(node, name)), inner, f"{prefix}{name}.")
        return dataclasses.replace(node, **whole)

    return replaced(cfg, {**resets, **changes}, "")
