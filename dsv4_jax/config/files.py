# SPDX-License-Identifier: Apache-2.0
"""Load a run's configuration from a Python file with command-line flags, or from the config.json of a run."""

import dataclasses
import json
import re
import runpy
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4_jax.config.flags import with_flags
from dsv4_jax.config.root import Config, Stage
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.section import RENAMED, ConfigError, Section, check_rules, deferred_rules, from_fields, nearest


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration of the Python file at `path`, and apply command-line flags.

    Args:
        path: a file that defines `config()`, which returns a `Config`; or the name of a shipped file, as `tiny_v41`.
        overrides: words of the command line, `--section.key value`; see `flags.with_flags`.

    Raises:
        ConfigError: if `config()` returns no `Config`, or for an unknown key (naming the nearest valid one), a value
            of the wrong type or one that breaks a rule.
    """
    path = find_config(path)
    with deferred_rules():  # a flag may replace a value that breaks a rule
        config = made_by(path, "config")
        if not isinstance(config, Config):
            raise ConfigError(f"{path}: config() must return a dsv4_jax.config.Config, found {type(config).__name__}")
        config = with_flags(config, overrides)
    try:
        check_rules(config)
    except ConfigError as error:
        raise ConfigError(str(error) if overrides else f"{path}: {error}") from None
    return config


def find_config(path: str | Path) -> Path:
    """Return `path` if it is a file, else the path of the shipped configuration file of that name.

    Raises:
        ConfigError: if there is neither; the message lists the shipped names.
    """
    if Path(path).is_file():
        return Path(path)
    # The folder `configs` is inside an installed package, and next to the package in a checkout.
    package = Path(__file__).parent.parent
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), package)
    shipped = {file.stem: file for file in sorted(folder.glob("*.py"))}
    if str(path) in shipped:
        return shipped[str(path)]
    raise ConfigError(f"there is no configuration file {path}; the shipped ones are {', '.join(shipped)}")


def made_by(path: str | Path, function: str) -> Any:
    """Run the Python file at `path`, call its function of that name, and return the result.

    Raises:
        ConfigError: if there is no such file, or if the file or the function raises; the message names the file.
    """
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        return runpy.run_path(str(path))[function]()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except TypeError as error:
        # A misspelled field of a section gets an error with the nearest valid field.
        unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        sections = {c.__name__: c for c in (ModelConfig, *Section.__subclasses__())}
        if unknown and unknown[1] in sections:
            valid = [f.name for f in dataclasses.fields(sections[unknown[1]])]
            key = f"{unknown[1].removesuffix('Config').lower()}.{unknown[2]}"
            hint = nearest(key if key in RENAMED else unknown[2], valid)
            what = f"unknown field {unknown[2]!r} of {unknown[1]}{hint}"
            raise ConfigError(f"{path}: {what}") from None
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """Read the config.json at `path` as a JSON object.

    Raises:
        ConfigError: if the file holds anything else.
    """
    try:
        tree = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(tree).__name__}")
    return tree


def config_from_json(tree: dict[str, Any]) -> Config:
    """Make the configuration from the JSON object of a config.json, which an older version may have written.

    A missing key gets its default. A renamed key is read under its new name. An unknown key is ignored, but one of the
    model is an error, because the weights may be of a different model without it. The rules are not checked, because
    the run was checked by the version that wrote the file.

    Raises:
        ConfigError: if a key of the model is unknown, a key without default is missing, or a value has another type.
    """
    with deferred_rules():
        return _make_from_json(Config, with_new_names(tree), "config.json")


def with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json's JSON object in which renamed keys have their new names."""
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()}
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        if name in tree.get(section, {}):
            section_now, _, name_now = new.partition(".")
            tree.setdefault(section_now, {}).setdefault(name_now, tree[section].pop(name))
    return tree


def _make_from_json(cls: type[Any], tree: dict[str, Any], where: str) -> Any:
    """Make the dataclass `cls`, and those inside it, from a JSON object; `where` names the object in errors."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for key, value in tree.items():
        if key not in hints:
            if cls is ModelConfig:
                raise ConfigError(
                    f"model.{key} = {value!r} in config.json is no key of this version{nearest(key, hints)}; use the "
                    "version that wrote it or, if the model is the same without the key, delete it there"
                )
            continue
        # Sections and stages are JSON objects; JSON has lists in place of tuples.
        if dataclasses.is_dataclass(hints[key]):
            value = _make_from_json(hints[key], value, f"{key} of {where}")
        elif key == "stages":
            value = tuple(_make_from_json(Stage, stage, f"{key} of {where}") for stage in value)
        elif key == "changes":
            value = {name: tuple(new) if isinstance(new, list) else new for name, new in value.items()}
        values[key] = tuple(value) if isinstance(value, list) else value
    return from_fields(cls, values, where)
