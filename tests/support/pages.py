# SPDX-License-Identifier: Apache-2.0
"""Read README.md and docs/: code blocks, command lines, and what inline code names."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("python", "make", "pip", "dsv4", "gcloud", "sbatch", "scancel", "squeue", "kubectl", "gsutil", "docker")
LANGUAGES = ("sh", "python", "json", "yaml", "text")


class Block(NamedTuple):
    """A block of code: its page, the line of its start, its language ("" if it is indented) and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.name}:{self.line}"


class Command(NamedTuple):
    """A command line of a page as words, and the comment behind it."""

    where: str
    words: list[str]
    comment: str = ""


def blocks(page: Path) -> list[Block]:
    """Fenced blocks, and blocks indented by four spaces after an empty line (a list's lines are indented by two)."""
    text, found = page.read_text(), []

    def take(match: re.Match[str]) -> str:
        found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]))
        return "\n" * match[0].count("\n")  # line numbers stay

    text = re.sub(r"(?ms)^```(\w*)\n(.*?)^```$", take, text)
    for match in re.finditer(r"\n\n((?: {4}.*\n)+)", text):
        lines = re.sub(r"(?m)^ {4}", "", match[1])
        found.append(Block(page, text[: match.start()].count("\n") + 3, "", lines))
    return found


def commands(page: Path) -> list[Command]:
    """The command lines of the shell blocks and of inline code; a line that ends in a backslash goes on."""
    found = []
    for block in blocks(page):
        if block.language in ("", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.append(Command(block.where, words, line.rpartition(" # ")[2] if " # " in line else ""))
    for code in inline(page):
        code = " ".join(code.split())
        if code.startswith(("python ", "make ", "pip ", "dsv4 ")):
            found.append(Command(f"{page.name}: `{code}`", shlex.split(code)))
    return found


def inline(page: Path) -> list[str]:
    """What stands between single backquotes outside of blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
