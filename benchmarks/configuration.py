# SPDX-License-Identifier: Apache-2.0
"""Write docs/configuration.md: every key of a configuration with its type, its default and its help text.

    python benchmarks/configuration.py            # write the page
    python benchmarks/configuration.py --check    # exit status 1 if the page is not up to date

The keys come from the dataclasses, the help texts from the strings under their fields, which `train.py CONFIG --help`
prints too.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4_jax.config import Config, Stage
from dsv4_jax.config.files import load_config
from dsv4_jax.config.keys import changeable

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

`make figures` writes this page from the code. A configuration is a Python file with a function `config()` that returns
a `Config`; every key below is a field there and a flag on the command line:

    python train.py configs/tiny_v4.py --optim.learning-rate 1e-3 --train.deterministic

A field `section.key` is the flag `--section.key`, with `-` for `_`. A `bool` is `--section.key` or `--section.no-key`,
a `tuple` takes several values, a `dict` pairs of key and value. In Python, `cfg.replace({"optim.learning_rate": 1e-3})`
makes another configuration. Keys with `*` may change between the stages of a run ([stages.md](stages.md)).

A file of your own starts from one that is near:

```python
import dsv4_jax as ds


def config():
    base = ds.load_config("configs/tiny_v4.py")
    return base.replace({"data.seq_len": 256, "model.n_routed_experts": 8, "train.run_dir": "runs/mine"})
```
"""


def _help(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass, inherited ones too, in one line."""
    texts = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def _type(hint: Any) -> str:
    """A type as a reader would name it: the values of a Literal, alone or in a tuple, else its name."""
    if typing.get_origin(hint) is tuple and typing.get_origin(typing.get_args(hint)[0]) is typing.Literal:
        return f"tuple of {_type(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint).replace("typing.", "")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def _section(cls: type, prefix: str, changing: set[str]) -> Iterator[str]:
    """Lines of a section and of those inside it; keys in `changing` get a star."""
    hints, texts, inner = typing.get_type_hints(cls), _help(cls), []
    about = (inspect.getdoc(cls) or "").partition("\n\nRaises:")[0]
    yield from ("", f"## {prefix.rstrip('.') or 'stages'}", "", about, "")
    yield from ("| key | type | default | |", "|---|---|---|---|")
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            inner.append((hint, key + "."))
            continue
        star = " \\*" if key in changing else ""
        cells = (f"`{key}`{star}", _type(hint), _default(field), texts[field.name])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    for section in inner:
        yield from _section(*section, changing)


def page() -> str:
    """The text of the page."""
    hints = typing.get_type_hints(Config)
    sections = [(hints[f.name], f.name + ".") for f in dataclasses.fields(Config) if f.name != "stages"]
    changing = set(changeable(load_config(ROOT / "configs" / "tiny_v4.py")))
    lines = [line for section in [*sections, (Stage, "")] for line in _section(*section, changing)]
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Write or check the page."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit("docs/configuration.md is not up to date: python benchmarks/configuration.py")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
