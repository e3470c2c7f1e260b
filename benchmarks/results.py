# SPDX-License-Identifier: Apache-2.0
"""Keep measured figures in `benchmarks/results.json` and write them as tables into docs/performance.md."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "performance.md"


@dataclasses.dataclass(frozen=True)
class Line:
    """One measured figure and its goal.

    Attributes:
        figure: what was measured.
        value: the number, or None where it could not be measured; `note` then has the reason.
        unit: unit of value and goal.
        goal: the limit; None: the figure has no goal.
        at_most: whether the goal is an upper limit.
        note: what bounds the figure, or how it was measured, in a few words.
        date: day of the measurement, ISO.
    """

    figure: str
    value: float | None
    unit: str = ""
    goal: float | None = None
    at_most: bool = True
    note: str = ""
    date: str = dataclasses.field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())

    @property
    def reached(self) -> bool | None:
        """Return whether the value meets the goal; None where there is no goal. A missing value meets none."""
        if self.goal is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def describe_machine() -> str:
    """Describe the machine by its number of cores and its kind of CPU, without any name of its own."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return f"{os.cpu_count()} cores, {match[1] if match else platform.processor() or platform.machine()}"


def describe_versions(*packages: str) -> str:
    """Return the versions of Python and of those packages that are installed here."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def save(suite: str, lines: Iterable[Line], command: str, versions: str, path: Path = RESULTS) -> None:
    """Write lines of a suite into the file. Lines of other figures that are there stay, with their own dates."""
    everything = json.loads(path.read_text()) if path.exists() else {}
    merged = {line.figure: line for line in (*load(suite, path)[1], *lines)}
    head = {"command": command, "machine": describe_machine(), "versions": versions}
    everything[suite] = head | {"lines": [dataclasses.asdict(line) for line in merged.values()]}
    path.write_text(json.dumps(everything, indent=1) + "\n")


def load(suite: str, path: Path = RESULTS) -> tuple[dict[str, Any], list[Line]]:
    """Return the head and the lines of a suite; nothing if it was not measured yet."""
    head = (json.loads(path.read_text()) if path.exists() else {}).get(suite, {})
    return head, [Line(**line) for line in head.pop("lines", [])]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_table(head: dict[str, Any], lines: list[Line]) -> str:
    """Format one suite: a caption with command, dates, versions and machine, then a row for each figure."""
    dates = sorted({line.date for line in lines})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    rows = [f"`{head['command']}`, {span}, {head['versions']}; {head['machine']}.", ""]
    rows += ["| figure | value | goal | reached | note |", "|---|---|---|---|---|"]
    for line in lines:
        unit = f" {line.unit}" if line.unit else ""
        goal = "" if line.goal is None else f"at {'most' if line.at_most else 'least'} {_number(line.goal)}{unit}"
        reached = {None: "", True: "yes", False: "no"}[line.reached]
        value = _number(line.value) + (unit if line.value is not None else "")
        rows.append(f"| {line.figure} | {value} | {goal} | {reached} | {line.note} |")
    return "\n".join(rows)


def write_table(suite: str, page: Path = PAGE, path: Path = RESULTS) -> None:
    """Replace the text between `<!-- bench:SUITE -->` and `<!-- end -->` of the page by the suite's table.

    Raises:
        ValueError: if the page has no such markers.
    """
    head, lines = load(suite, path)
    if not lines:
        return
    text, start = page.read_text(), f"<!-- bench:{suite} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition("<!-- end -->")
    if not (found and closed):
        raise ValueError(f"{page.name} needs the lines {start} and <!-- end -->")
    page.write_text(f"{before}{start}\n{format_table(head, lines)}\n<!-- end -->{after}")
