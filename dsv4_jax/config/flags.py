# SPDX-License-Identifier: Apache-2.0
"""Apply command-line flags to a configuration: `--section.key value` for the run, `--stages.N.section.key value` for
a stage."""

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
    """Return a copy of `config` with `flags` applied; a flag without effect is an error.

    A flag without a stage applies to the whole run. If a stage sets the same key to another value, the flag is refused,
    because that stage would override it. Mesh flags are the exception: they replace the meshes of all stages. A lower
    `train.steps` shortens the schedule (`fitting_schedule`). `--help` prints all flags and exits.

    Args:
        config: configuration before the flags, made inside `deferred_rules`.
        flags: words of the command line: `--section.key value`, or `--stages.N.section.key value`, where N is the
            stage's number from 1 or its name.

    Raises:
        ConfigError: for an unknown key or stage, a value of the wrong type, or a flag that a stage overrides.
    """
    if {"-h", "--help"} & set(flags):
        tyro.cli(type(config), default=config, args=list(flags))
    # Parse first: `given` has the values of the run's keys, `of_stages` those of each stage by its number from 0.
    whole, parts = _split_by_stage(config, flags)
    given = _parse_flags(config, whole)
    of_stages = {number: _parse_stage_flags(config, words) for number, words in parts.items()}
    # Then apply: flags of the run and of the stage to every stage, flags of the run to the other sections.
    stages = list(config.stages)
    for number, stage in enumerate(stages):
        stages[number] = _apply_to_stage(number, stage, given, of_stages.get(number, {}))
    given |= fitting_schedule(config, given)
    return dataclasses.replace(changed(config, given), stages=tuple(stages))


def _split_flag(flag: str) -> tuple[str, str]:
    """Split `--key=value` into `key` and `=value`, and `--key` into `key` and an empty string."""
    key, equals, value = flag[2:].partition("=")
    return key, equals + value


def _split_by_stage(config: Config, flags: Sequence[str]) -> tuple[list[str], dict[int, list[str]]]:
    """Split the words of the command line: those of the run, and those of each stage by its number from 0.

    A flag of a stage loses its prefix `stages.N.`.
    """
    whole: list[str] = []
    parts: dict[int, list[str]] = {}
    words = whole  # the list that the current flag and the values after it belong to
    for word in flags:
        if not word.startswith("--"):
            words.append(word)
            continue
        words, (key, value) = whole, _split_flag(word)
        if key.startswith("stages."):
            _, which, *rest = key.split(".", 2)
            if not rest:
                raise ConfigError(f"--{key}: expected --stages.N.section.key")
            words, word = parts.setdefault(_find_stage(config, which), []), f"--{rest[0]}{value}"
        words.append(word)
    return whole, parts


def _to_slug(name: str) -> str:
    """Spell a stage's name in lower case, with `-` for everything except letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _find_stage(config: Config, which: str) -> int:
    """Find the stage that `which` gives by number from 1 or by name; return its number from 0."""
    if not config.stages:
        raise ConfigError(f"--stages.{which}: the run has no stages")
    names = [_to_slug(stage.name) for stage in config.stages]
    if re.fullmatch(r"[0-9]+", which) and 1 <= int(which) <= len(names):
        return int(which) - 1
    if names.count(_to_slug(which)) == 1:
        return names.index(_to_slug(which))
    listed = ", ".join(f"{number} or {name}" for number, name in enumerate(names, 1))
    raise ConfigError(f"--stages.{which}: expected one of {listed}")


def _parse_flags(config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Parse flags; return the value of each key for which there is a flag."""
    # Check the keys here, where the error can name the nearest valid one. `--section.no-key` sets `key` to False.
    valid, given = keys(config), []
    for flag in (word for word in words if word.startswith("--")):
        key = _split_flag(flag)[0].replace("-", "_")
        section, _, name = key.rpartition(".")
        given.append(key if key in valid else f"{section}.{name.removeprefix('no_')}")
        if given[-1] not in valid:
            raise ConfigError(f"unknown key {key!r}{nearest(key, valid)}")
    # Parse with tyro. It prints an error in a frame and exits; here that text, without the frame, is raised instead.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            parsed = tyro.cli(type(config), default=config, args=list(words))
    except SystemExit:
        text = re.sub(r"[─│╭╮╰╯]+|-{3,}", " ", printed.getvalue())
        text = re.split(r"Argument helptext|For full helptext", text)[0]
        text = re.sub(r"^(Value error )?Error parsing ", "", " ".join(text.split()))
        raise ConfigError(text) from None
    return {key: _get_value(parsed, key) for key in given}


def _get_value(node: Any, key: str) -> Any:
    """Read the value of a key, `section.key`, from a configuration."""
    for name in key.split("."):
        node = getattr(node, name)
    return node


def _parse_stage_flags(config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Parse the flags of one stage; return the values of its keys and of `until`."""
    words, until, valid = list(words), {}, changeable(config)
    # `until` is no key of a configuration, so that tyro cannot parse it: it is taken out of the words.
    for position, word in enumerate(words):
        if word.startswith("--") and _split_flag(word)[0] == "until":
            count = _split_flag(word)[1][1:] or "".join(words[position + 1 : position + 2])
            if not re.fullmatch(r"[0-9_]+", count):
                raise ConfigError(f"until of a stage: expected a number of tokens, found {count!r}")
            until, words = {"until": int(count)}, words[:position] + words[position + (1 if "=" in word else 2) :]
            break
    values = _parse_flags(config, words)
    for key in values:
        if key not in valid:
            raise ConfigError(f"a stage cannot change {key!r}{nearest(key, valid)}")
    return until | values


def _apply_to_stage(number: int, stage: Stage, run: dict[str, Any], own: dict[str, Any]) -> Stage:
    """Return a copy of a stage with flags applied.

    Args:
        number: number of the stage, from 0.
        stage: the stage as the configuration file declares it.
        run: values of the run's flags, by key.
        own: values of the stage's own flags, by key; `until` is taken out.

    Raises:
        ConfigError: if the stage sets a key of `run`, or a key that it replaces, to another value.
    """
    label, changes = f"stage {number + 1} ({stage.name})", dict(stage.changes)
    # Mesh flags of the run replace the stage's mesh.
    meshes = {key: value for key, value in changes.items() if key.startswith("mesh.")}
    if meshes and any(key.startswith("mesh.") for key in run):
        changes = {key: value for key, value in changes.items() if key not in meshes}
        lost = ", ".join(f"{key} = {value}" for key, value in meshes.items() if key not in own)
        if lost:
            note(f"the mesh that the flags give holds for {label} too, instead of its {lost}")
    # Refuse every other flag of the run that this stage overrides, except by one of its own flags.
    for key in run:
        for changed_key in {key, replaced_by(key)} & set(changes) - set(own):
            if changed_key == key and changes[key] == run[key]:
                continue
            flag = key.replace("_", "-")
            raise ConfigError(
                f"--{flag} would be lost: {label} sets {changed_key} = {changes[changed_key]!r}; address the stages "
                f"that you mean, as --stages.{number + 1}.{flag} (which holds until a later stage changes it)"
            )
    # Apply the stage's own flags. A value from a flag is no longer listed in `chosen`.
    until = own.pop("until", stage.until)
    for key in own:
        changes.pop(replaced_by(key), None)
    chosen = tuple(key for key in stage.chosen if key not in own and key in {"until", *changes})
    if until != stage.until:
        chosen = tuple(key for key in chosen if key != "until")
    return dataclasses.replace(stage, until=until, changes=changes | own, chosen=chosen)
