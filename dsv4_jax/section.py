# SPDX-License-Identifier: Apache-2.0
"""Check configuration dataclasses, and raise the errors that end a command with a short message."""

import contextlib
import contextvars
import dataclasses
import difflib
import typing
from collections.abc import Generator, Iterable
from typing import Any

import typeguard


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, what was found and a remedy."""


class RunError(RuntimeError):
    """A run that cannot go on; what it saved before stays."""


# Renamed keys. An old name is refused with the new one; in config.json of an older run it is read as the new one.
RENAMED = {"train.stage": "train.objective"}


def nearest(key: str, valid: Iterable[str]) -> str:
    """Return the tail of an error message: the new name of `key`, or the valid key that looks most like it."""
    if key in RENAMED:
        return f"; it is {RENAMED[key]!r} now"
    close = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.5)
    return f"; the nearest valid key is {close[0]!r}" if close else ""


_DEFERRED = contextvars.ContextVar("rules are deferred", default=False)


@contextlib.contextmanager
def deferred_rules() -> Generator[None]:
    """Build sections without checking their rules; types are still checked.

    A configuration file may break a rule that a flag or a later change repairs. `check_rules` checks them at the end.
    """
    token = _DEFERRED.set(True)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


def check_rules(section: "Section") -> None:
    """Check the rules of a section and of those in it, unless an enclosing `deferred_rules` still defers them."""
    if _DEFERRED.get():
        return
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            check_rules(value)
    section._check()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the configuration: a frozen dataclass that checks its types when it is made.

    Its rules are checked then too, except inside `deferred_rules`.

    Subclasses add their own rules in `_check`, by calling `need`.

    Raises:
        ConfigError: for a value of the wrong type or one that breaks a rule.
    """

    @property
    def prefix(self) -> str:
        """Return how the section's keys start on the command line: `model.` for ModelConfig."""
        return type(self).__name__.removesuffix("Config").lower() + "."

    def __post_init__(self) -> None:
        for key, hint in typing.get_type_hints(type(self)).items():
            try:
                typeguard.check_type(getattr(self, key), hint)
            except typeguard.TypeCheckError as error:
                raise ConfigError(f"{self.prefix}{key} = {getattr(self, key)!r}: {error}") from None
        if not _DEFERRED.get():
            self._check()

    def _check(self) -> None:
        """Check the rules of this section; subclasses override it."""

    def need(self, key: str, ok: bool, rule: str) -> None:
        """Raise ConfigError with the value of `key` and the `rule` that it breaks, unless `ok`."""
        if not ok:
            raise ConfigError(f"{self.prefix}{key} = {getattr(self, key)!r} {rule}")

    def need_positive(self, keys: str) -> None:
        """Raise ConfigError for the first of `keys`, separated by spaces, whose value is not above 0."""
        for key in keys.split():
            self.need(key, getattr(self, key) > 0, "must be above 0")


def from_fields(cls: type[Any], values: dict[str, Any], where: str) -> Any:
    """Make a `cls` of its fields' `values`; `where` names their origin in errors.

    Raises:
        ConfigError: naming an unknown field, or the missing ones.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown field {key!r} in {where}{nearest(key, fields)}")
    none = dataclasses.MISSING
    missing = [n for n, f in fields.items() if f.default is none is f.default_factory and n not in values]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return cls(**values)
