# SPDX-License-Identifier: Apache-2.0
"""Keys of a configuration, `section.key`: list them, replace values by them, and know which ones a stage may change."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from dsv4_jax.model.compute import COMPUTE_KEYS
from dsv4_jax.section import ConfigError, Section, nearest

# Of the model, a stage may change how it is computed.
CHANGEABLE = re.compile(
    rf"data\.(seq_len|batch_size|path|mixture|row_patches|row_images)|model\.({'|'.join(sorted(COMPUTE_KEYS))})|loss\.\w+"
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


def changeable(cfg: Section) -> list[str]:
    """List the keys that a stage may change."""
    return [key for key in keys(cfg) if CHANGEABLE.fullmatch(key)]


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


def changed(cfg: Section, changes: Mapping[str, Any]) -> Any:
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
