# SPDX-License-Identifier: Apache-2.0
"""Print text from data, files and models without letting it control the terminal."""

import unicodedata
from typing import Any

from rich.console import Console


def printable(text: str) -> str:
    r"""Escape what is not printable: control characters such as ESC, and marks that reorder or hide text.

    Line breaks, tabs and spaces of any width stay. "\x1b" becomes the four characters \, x, 1 and b.
    """
    if text.isprintable():
        return text
    keep = lambda c: c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs"
    return "".join(c if keep(c) else c.encode("unicode_escape").decode() for c in text)


class SafeConsole(Console):
    """A console that escapes what is not printable in all strings that it prints."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `Console` does, with strings escaped."""
        super().print(*(printable(x) if isinstance(x, str) else x for x in objects), **options)
