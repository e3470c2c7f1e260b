# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package stand on floors, and a module imports only from the floors below its own.

Read from the sources, so also imports inside functions count. Those for type checkers alone do not.
"""

import ast
import graphlib
from pathlib import Path

import pytest

# From the ground up. Rooms of one floor do not know each other.
FLOORS = (
    "roofline section",
    "mesh",
    "ops optim",
    "model",
    "config weights",
    "data",
    "generate",
    "train",
    "report",
    "lab plan",
    "cli",
    "__main__",
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
SOURCES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for path in Path("dsv4_jax").rglob("*.py")
}


def room(module):
    return module.split(".")[1] if "." in module else ""


def imports(source, modules):
    """The modules that a source imports; of a package that re-exports names, the package."""

    def statements(node):
        yield node
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            for child in ast.iter_child_nodes(node):
                yield from statements(child)

    names = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= whole & modules or {node.module}
    return names & modules


def upward(graph):
    """Imports that do not go down, `a -> b`."""
    arrows = ((a, b) for a, targets in graph.items() for b in targets if room(a) != room(b))
    return sorted(f"{a} -> {b}" for a, b in arrows if FLOOR[room(b)] >= FLOOR[room(a)])


GRAPH = {name: imports(source, {*SOURCES}) - {name} for name, source in SOURCES.items()}


def test_every_import_goes_down():
    assert {room(name) for name in SOURCES} - {""} == set(FLOOR)
    assert not upward(GRAPH)


def test_no_circle_of_modules():
    assert len([*graphlib.TopologicalSorter(GRAPH).static_order()]) == len(SOURCES)


def test_at_most_six_modules_stand_beside_the_folders():
    loose = [path.stem for path in Path("dsv4_jax").glob("*.py") if path.stem != "__init__"]
    assert len(loose) <= 6, loose


def test_the_model_knows_of_the_optimizers_only_what_a_tensor_is():
    targets = {b for a, targets in GRAPH.items() if room(a) == "model" for b in targets if room(b) == "optim"}
    assert targets == {"dsv4_jax.optim.roles"}


def test_imports_are_seen_wherever_they_stand():
    """Or the tests above could not fail."""
    modules = {"dsv4_jax.mesh", "dsv4_jax.model", "dsv4_jax.model.rope", "dsv4_jax.ops", "dsv4_jax.train"}
    source = """
from typing import TYPE_CHECKING
import numpy
import dsv4_jax.mesh
if TYPE_CHECKING:
    import dsv4_jax.train
def f():
    from dsv4_jax.model import rope
"""
    seen = imports(source, modules)
    assert seen == {"dsv4_jax.mesh", "dsv4_jax.model.rope"}
    assert upward({"dsv4_jax.ops.x": seen}) == ["dsv4_jax.ops.x -> dsv4_jax.model.rope"]
    with pytest.raises(graphlib.CycleError):
        [*graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order()]
    assert "dsv4_jax.ops.attention" in GRAPH["dsv4_jax.model.attention"]
