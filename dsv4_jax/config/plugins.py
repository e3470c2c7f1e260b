# SPDX-License-Identifier: Apache-2.0
"""Import functions that a configuration names: `module:function` or `path/to/file.py:function`.

The configuration stores a name and no function object, so that config.json can hold it and a resumed run imports the
same function. A module is imported when a run or `plan` needs the function, not when the configuration is made or
read.
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
    """Return the name of `function` as a configuration stores it; if it is a name already, check its form.

    Args:
        function: a function at the top level of a module or of a configuration file, or a name; an empty name is
            returned unchanged.
        key: the configuration key, for errors.

    Raises:
        ConfigError: for a name of another form, or a function that cannot be imported by name (a lambda, a function
            defined inside another one, a `functools.partial`).
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
    # A configuration file runs as a script, so that its module has no name that can be imported. The file of a function
    # is that of its code, the file of a class that of the code of its methods.
    codes = [getattr(part, "__code__", None) for part in (function, *getattr(function, "__dict__", {}).values())]
    files = [code.co_filename for code in codes if code is not None]
    if files and module in ("__main__", "<run_path>"):
        return f"{files[0]}:{name}"
    return f"{module}:{name}"


def resolve(name: str, key: str) -> Callable[..., Any]:
    """Import the function that `name` names, and return it.

    Args:
        name: `module:function` or `path/to/file.py:function`; a path is relative to the working directory.
        key: the configuration key, for errors.

    Raises:
        ConfigError: if there is no such module, file or function, or if importing the module fails.
    """
    match = _FORM.fullmatch(name)
    if match is None:
        raise ConfigError(f"{key} = {name!r}: expected {EXPECTED}")
    # Import the module or file. Every failure becomes a ConfigError that names the key.
    where, function = match["where"], match["function"]
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError:
        raise ConfigError(f"{key} = {name!r}: there is no file {where} (working directory {Path.cwd()})") from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} = {name!r}: {error}; install the package, or give the file: 'path/to/file.py:{function}'"
        ) from None
    except Exception as error:
        raise ConfigError(f"{key} = {name!r}: importing {where} failed: {type(error).__name__}: {error}") from error
    # Look up the function, which may also be a class or another callable object.
    imported = getattr(module, function, None)
    if not callable(imported):
        what = "is not a function" if imported is not None else "does not exist there"
        public = [n for n, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{key} = {name!r}: {function} {what}{nearest(function, public)}")
    return imported


def call(function: Callable[..., Any], name: str, key: str, *arguments: Any) -> Any:
    """Call `function` with `arguments`, and return its result.

    Args:
        function: a function that `resolve` has returned.
        name: the function's name in the configuration, for errors.
        key: the configuration key, for errors.
        arguments: positional arguments of the call.

    Raises:
        ConfigError: if the function raises; the message names the line of its file that failed.
    """
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise failure(error, function, name, key) from error


def failure(error: Exception, function: Callable[..., Any], name: str, key: str) -> ConfigError:
    """Make the ConfigError for an `error` raised inside `function`.

    Its message names the innermost line of the traceback that is in the function's own file.
    """
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    lines = [f" (line {frame.lineno})" for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return ConfigError(f"{key} = {name!r} failed: {type(error).__name__}: {error}{lines[-1] if lines else ''}")


def _import_file(path: Path) -> ModuleType:
    """Import a Python file, once per absolute path, under the module name `file PATH`.

    No installed module can have that name, because it has a space.
    """
    path = path.resolve()
    name = f"file {path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: a dataclass in it looks up its module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
