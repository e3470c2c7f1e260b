# SPDX-License-Identifier: Apache-2.0
"""Figures in README.md and docs/ are those that the code gives; every figure's pattern fits its page."""

import re
import runpy
import subprocess
import sys

from support import ROOT

figures = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
FIGURES, Figure, differences = figures["FIGURES"], figures["Figure"], figures["differences"]


def test_cheap_figures_are_right():
    command = [sys.executable, "benchmarks/figures.py", "--cheap"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 15


def test_the_list_of_keys_is_up_to_date():
    page = runpy.run_path(str(ROOT / "benchmarks" / "configuration.py"))
    assert page["PAGE"].read_text() == page["page"](), "python benchmarks/configuration.py writes docs/configuration.md"


def test_every_pattern_finds_its_figure_on_the_page():
    for figure in FIGURES:
        there = re.search(figure.there, (ROOT / figure.page).read_text())
        assert there, f"{figure.page} lacks {figure.there!r}"
        assert len(there.groups()) == re.compile(figure.output).groups > 0, figure


def test_a_wrong_figure_is_found_and_corrected():
    figure = Figure("page", r"holds ([\d.,]+) GB of (\w+)", "command", r"(\d+) bytes of (\w+)", unit=1e9)
    page = "It holds 20 GB of it."
    (found,) = differences(figure, page, "3 bytes of old\n18432938318 bytes of it")
    assert (found.found, found.right, page[found.start : found.end]) == ("20", "18", "20")
    assert differences(figure, "It holds 18.4 GB of it.", "18432938318 bytes of it") == []
    near = Figure("page", r"([\d.]+) s", "command", r"([\d.]+) s", within=0.1)
    assert differences(near, "1.00 s", "1.09 s") == []
    assert [d.right for d in differences(near, "1.00 s", "1.2 s")] == ["1.20"]
