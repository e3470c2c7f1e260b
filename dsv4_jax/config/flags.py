# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of a configuration: `--section.key value`, and `--stages.N.section.key value` for one stage."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

import tyro

from dsv4_jax.config.keys import changeable, changed, keys, replaced_by
from dsv4_jax.config.root import Config, Stage
from dsv4_jax.config.shorter import fitting_schedule, note
from dsv4_jax.section import ConfigError, nearest


def with_flags(config: Config, flags: Sequence[str]) -> Config:
    """Apply flags to a configuration; no flag is dropped in silence.

    A flag holds for the whole run. One that a stage would override with another value is refused, except the mesh: its
    flags replace the meshes of all stages. Fewer `train.steps` shorten the schedule (`fitting_schedule`).

    Args:
        config: made inside `deferred_rules`.
        flags: `--section.key value`, and `--stages.N.section.key value` for stage N (from 1) or the stage of that name.

    Raises:
        ConfigError: for an unknown key or stage, a value of the wrong type, or a flag that a stage overrides.
    """
    if {"-h", "--help"} & set(flags):
        tyro.cli(type(config), default=config, args=list(flags))
    whole, parts = _split(config, flags)
    given = _values(config, whole)
    of_stages = {number: _stage_values(config, words) for number, words in parts.items()}
    stages = list(config.stages)
    for number, stage in enumerate(stages):
        stages[number] = _flagged_stage(number, stage, given, of_stages.get(number, {}))
    given |= fitting_schedule(config, given)
    return dataclasses.replace(changed(config, given), stages=tuple(stages))


def _key(flag: str) -> tuple[str, str]:
    """Split a flag into its key and `=value`, or nothing."""
    key, equals, value = flag[2:].partition("=")
    return key, equals + value


def _split(config: Config, flags: Sequence[str]) -> tuple[list[str], dict[int, list[str]]]:
    """Separate the words of the run's flags from those of each stage, by its number from 0."""
    whole: list[str] = []
    parts: dict[int, list[str]] = {}
    words = whole
    for word in flags:
        if not word.startswith("--"):
            words.append(word)
            continue
        words, (key, value) = whole, _key(word)
        if key.startswith("stages."):
            _, which, *rest = key.split(".", 2)
            if not rest:
                raise ConfigError(f"--{key}: expected --stages.N.section.key")
            words, word = parts.setdefault(_stage_number(config, which), []), f"--{rest[0]}{value}"
        words.append(word)
    return whole, parts


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _stage_number(config: Config, which: str) -> int:
    """Find a stage by its number, counted from 1, or by its name; return its number from 0."""
    if not config.stages:
        raise ConfigError(f"--stages.{which}: the run has no stages")
    names = [_slug(stage.name) for stage in config.stages]
    if re.fullmatch(r"[0-9]+", which) and 1 <= int(which) <= len(names):
        return int(which) - 1
    if names.count(_slug(which)) == 1:
        return names.index(_slug(which))
    listed = ", ".join(f"{number} or {name}" for number, name in enumerate(names, 1))
    raise ConfigError(f"--stages.{which}: expected one of {listed}")


def _values(config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Parse flags; return the value of every key they give."""
    valid, given = keys(config), []
    for flag in (word for word in words if word.startswith("--")):
        key = _key(flag)[0].replace("-", "_")
        section, _, name = key.rpartition(".")
        given.append(key if key in valid else f"{section}.{name.removeprefix('no_')}")
        if given[-1] not in valid:
            raise ConfigError(f"unknown key {key!r}{nearest(key, valid)}")
    # tyro prints its errors and exits; the text becomes the error of a library call.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            parsed = tyro.cli(type(config), default=config, args=list(words))
    except SystemExit:
        text = re.sub(r"[─│╭╮╰╯]+|-{3,}", " ", printed.getvalue())
        text = re.split(r"Argument helptext|For full helptext", text)[0]
        text = re.sub(r"^(Value error )?Error parsing ", "", " ".join(text.split()))
        raise ConfigError(text) from None
    return {key: _value(parsed, key) for key in given}


def _value(node: Any, key: str) -> Any:
    for name in key.split("."):
        node = getattr(node, name)
    return node


def _stage_values(config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Parse the flags of one stage: keys that a stage may change, and `until`."""
    words, until, valid = list(words), {}, changeable(config)
    for at, word in enumerate(words):
        if word.startswith("--") and _key(word)[0] == "until":
            count = _key(word)[1][1:] or "".join(words[at + 1 : at + 2])
            if not re.fullmatch(r"[0-9_]+", count):
                raise ConfigError(f"until of a stage: expected a number of tokens, found {count!r}")
            until, words = {"until": int(count)}, words[:at] + words[at + (1 if "=" in word else 2) :]
            break
    found = _values(config, words)
    for key in found:
        if key not in valid:
            raise ConfigError(f"a stage cannot change {key!r}{nearest(key, valid)}")
    return until | found


def _flagged_stage(number: int, stage: Stage, run: dict[str, Any], own: dict[str, Any]) -> Stage:
    """Apply the run's flags and its own flags to a stage.

    Raises:
        ConfigError: if the stage changes a key that a flag of the run gives, to another value.
    """
    label, changes = f"stage {number + 1} ({stage.name})", dict(stage.changes)
    meshes = {key: value for key, value in changes.items() if key.startswith("mesh.")}
    if meshes and any(key.startswith("mesh.") for key in run):
        changes = {key: value for key, value in changes.items() if key not in meshes}
        lost = ", ".join(f"{key} = {value}" for key, value in meshes.items() if key not in own)
        if lost:
            note(f"the mesh that the flags give holds for {label} too, instead of its {lost}")
    for key in run:
        for changed_key in {key, replaced_by(key)} & set(changes) - set(own):
            if changed_key == key and changes[key] == run[key]:
                continue
            flag = key.replace("_", "-")
            raise ConfigError(
                f"--{flag} would be lost: {label} sets {changed_key} = {changes[changed_key]!r}; address the stages "
                f"that you mean, as --stages.{number + 1}.{flag} (which holds until a later stage changes it)"
            )
    until = own.pop("until", stage.until)
    for key in own:
        changes.pop(replaced_by(key), None)
    chosen = tuple(key for key in stage.chosen if key not in own and key in {"until", *changes})
    if until != stage.until:
        chosen = tuple(key for key in chosen if key != "until")
    return dataclasses.replace(stage, until=until, changes=changes | own, chosen=chosen)
