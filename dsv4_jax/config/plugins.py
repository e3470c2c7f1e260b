# SPDX-License-Identifier: Apache-2.0
"""Find functions that a configuration names: `module:function` or `path/to/file.py:function`.

A name is text, so config.json can hold it and a resumed run finds the same function. Nothing is imported when a
configuration is made or read, only when the run, or its plan, asks for the function.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4_jax.section import ConfigError, nearest

_FORM = re.compile(r"(?P<where>[A-Za-z_][\w.]*|.+\.py):(?P<function>[A-Za-z_]\w*)")
EXPECTED = "'module:function' or 'path/to/file.py:function'"


def reference(function: str | Callable[..., Any], key: str) -> str:
    """Return the text that names `function`; text is checked for its form and returned as it is.

    Args:
        function: a function at the top level of a module or of a configuration file, or its name.
        key: the configuration key, for errors.

    Raises:
        ConfigError: for text of another form, or a function that no text can name (a lambda, a function made
            inside another one, a `functools.partial`).
    """
    if not isinstance(function, str) and not callable(function):
        raise ConfigError(f"{key} = {function!r}: expected a function, {EXPECTED}")
    if isinstance(function, str):
        if function and not _FORM.fullmatch(function):
            raise ConfigError(f"{key} = {function!r}: expected {EXPECTED}")
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if not name.isidentifier() or not module:
        raise ConfigError(
            f"{key} = {function!r} has no name that config.json could hold; define a function at the top level of a "
            f"file and give it, or {EXPECTED}"
        )
    # Functions and classes of a configuration file, which runs as a script, are found again by the file.
    codes = [getattr(part, "__code__", None) for part in (function, *getattr(function, "__dict__", {}).values())]
    files = [code.co_filename for code in codes if code is not None]
    if files and module in ("__main__", "<run_path>"):
        return f"{files[0]}:{name}"
    return f"{module}:{name}"


def resolve(name: str, key: str) -> Callable[..., Any]:
    """Import and return the function that `name` stands for.

    Args:
        name: `module:function`, or `path/to/file.py:function`; a relative path starts at the working directory.
        key: the configuration key, for errors.

    Raises:
        ConfigError: if there is no such module, file or function, or importing it fails.
    """
    match = _FORM.fullmatch(name)
    if match is None:
        raise ConfigError(f"{key} = {name!r}: expected {EXPECTED}")
    where, function = match["where"], match["function"]
    try:
        module = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError:
        raise ConfigError(f"{key} = {name!r}: there is no file {where} (working directory {Path.cwd()})") from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} = {name!r}: {error}; install the package, or give the file: 'path/to/file.py:{function}'"
        ) from None
    except Exception as error:
        raise ConfigError(f"{key} = {name!r}: importing {where} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        what = "is not a function" if found is not None else "does not exist there"
        public = [n for n, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{key} = {name!r}: {function} {what}{nearest(function, public)}")
    return found


def call(function: Callable[..., Any], name: str, key: str, *arguments: Any) -> Any:
    """Call a function that a configuration names.

    Args:
        function: what `name` stands for.
        name: its name, for errors.
        key: the configuration key, for errors.
        arguments: of the call.

    Raises:
        ConfigError: if it fails, with the line of its file.
    """
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise failure(error, function, name, key) from error


def failure(error: Exception, function: Callable[..., Any], name: str, key: str) -> ConfigError:
    """Return the error of a named function that failed, with the last line in the function's own file."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    lines = [f" (line {frame.lineno})" for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return ConfigError(f"{key} = {name!r} failed: {type(error).__name__}: {error}{lines[-1] if lines else ''}")


def _file(path: Path) -> ModuleType:
    """Import a Python file, once for each absolute path, under a name that no installed module has."""
    path = path.resolve()
    name = f"file {path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as the import system does: dataclasses in the file look themselves up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
