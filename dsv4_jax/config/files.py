# SPDX-License-Identifier: Apache-2.0
"""A run's configuration from a Python file with command-line flags, and from a run's config.json."""

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
    """The configuration that the Python file at `path` makes, with command-line overrides.

    Args:
        path: a file that defines `config()`, which returns a `Config`; or the name of a shipped one, as `tiny_v41`.
        overrides: `--section.key value` pairs, typed like the fields; see `flags.with_flags`.

    Raises:
        ConfigError: for a file that does not give a `Config`, an unknown key (naming the nearest valid
            one), a value of the wrong type or one that breaks a rule.
    """
    path = find_config(path)
    with deferred_rules():  # a flag may replace what breaks a rule
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
    """Return the configuration file at `path`, or the shipped one of that name.

    Raises:
        ConfigError: if there is neither; it lists the shipped names.
    """
    if Path(path).is_file():
        return Path(path)
    package = Path(__file__).parent.parent  # an installed one holds the folder, which lies beside it in a checkout
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), package)
    shipped = {file.stem: file for file in sorted(folder.glob("*.py"))}
    if str(path) in shipped:
        return shipped[str(path)]
    raise ConfigError(f"there is no configuration file {path}; the shipped ones are {', '.join(shipped)}")


def made_by(path: str | Path, function: str) -> Any:
    """What the function of that name in the Python file at `path` returns.

    Raises:
        ConfigError: naming the file, if there is none, or it fails.
    """
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        return runpy.run_path(str(path))[function]()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except TypeError as error:
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
    """Read a run directory's config.json.

    Raises:
        ConfigError: if it is not a JSON object.
    """
    try:
        tree = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(tree).__name__}")
    return tree


def config_from_json(tree: dict[str, Any]) -> Config:
    """Make the configuration of a run's config.json, which an older version may have written.

    A missing key has its default. A renamed key is read under its new name. A key that is not known any more is left
    out, except one of the model, whose weights may mean nothing without it. The rules are not checked: the run kept to
    those of the version that wrote it.

    Raises:
        ConfigError: if a key of the model is unknown, or a value is missing or has another type.
    """
    with deferred_rules():
        return _from_json(Config, with_new_names(tree), "config.json")


def with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json's tree with the keys that were renamed since under their new names."""
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()}
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        if name in tree.get(section, {}):
            section_now, _, name_now = new.partition(".")
            tree.setdefault(section_now, {}).setdefault(name_now, tree[section].pop(name))
    return tree


def _from_json(cls: type[Any], tree: dict[str, Any], where: str) -> Any:
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
        if dataclasses.is_dataclass(hints[key]):
            value = _from_json(hints[key], value, f"{key} of {where}")
        elif key == "stages":
            value = tuple(_from_json(Stage, stage, f"{key} of {where}") for stage in value)
        values[key] = tuple(value) if isinstance(value, list) else value
    return from_fields(cls, values, where)
