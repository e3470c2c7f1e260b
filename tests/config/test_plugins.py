# SPDX-License-Identifier: Apache-2.0
"""Functions that a configuration names by text."""

import functools
import math

import optax
import pytest

from dsv4_jax.config.files import made_by
from dsv4_jax.config.plugins import reference, resolve
from dsv4_jax.section import ConfigError


def test_a_module_and_a_file_give_their_functions(tmp_path):
    (tmp_path / "mine.py").write_text("CALLS = []\ndef f():\n    CALLS.append(1)\n    return len(CALLS)\n")
    assert resolve("math:sqrt", "key") is math.sqrt
    name = f"{tmp_path / 'mine.py'}:f"
    assert resolve(name, "key") is resolve(name, "key")  # imported once
    assert (resolve(name, "key")(), resolve(name, "key")()) == (1, 2)


def test_a_relative_file_starts_at_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def f(): return 7\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("mine.py:f", "key")() == 7


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nothing", "expected 'module:function' or 'path/to/file.py:function'"),
        ("a:b:c", "expected 'module:function'"),
        ("math:", "expected 'module:function'"),
        ("no_such_module:f", "No module named 'no_such_module'; install the package, or give the file"),
        ("no_such_file.py:f", "there is no file no_such_file.py"),
        ("math:sqtr", "sqtr does not exist there; the nearest valid key is 'sqrt'"),
        ("math:pi", "pi is not a function"),
    ],
)
def test_errors_name_the_key_and_the_remedy(name, what):
    with pytest.raises(ConfigError) as error:
        resolve(name, "optim.make")
    assert f"optim.make = {name!r}" in str(error.value)
    assert what in str(error.value)


def test_a_file_that_fails_is_named_and_tried_again(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"bad\.py failed: ZeroDivisionError: division by zero"):
        resolve(f"{path}:f", "key")
    path.write_text("def f(): return 1  # mended, and of another length\n")
    assert resolve(f"{path}:f", "key")() == 1


def test_functions_become_text_that_finds_them(tmp_path):
    assert reference(optax.lion, "key") == "optax._src.alias:lion"
    assert resolve(reference(optax.lion, "key"), "key") is optax.lion
    assert reference("a.b:c", "key") == "a.b:c"
    # A configuration file runs as a script: its functions are found by the file.
    path = tmp_path / "configuration.py"
    path.write_text("def f(): return 3\ndef config(): return f\n")
    name = reference(made_by(path, "config"), "key")
    assert name == f"{path}:f"
    assert resolve(name, "key")() == 3


@pytest.mark.parametrize("function", [lambda: 0, functools.partial(print)], ids=["lambda", "partial"])
def test_a_function_without_a_name_is_refused(function):
    with pytest.raises(ConfigError, match=r"key = .* has no name that config\.json could hold"):
        reference(function, "key")


def test_text_of_another_form_is_refused_without_importing():
    with pytest.raises(ConfigError, match="expected 'module:function'"):
        reference("lion", "optim.make")
    assert reference("no_such_module:f", "optim.make") == "no_such_module:f"
