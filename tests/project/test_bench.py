# SPDX-License-Identifier: Apache-2.0
"""Measured figures keep their goals, dates and neighbours in JSON, and their tables stand on the page."""

import json
import sys

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import peers
import results
from results import Line


def test_lines_of_other_figures_stay_and_the_table_replaces_what_stood_there(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench:x -->\nold\n<!-- end -->\nafter\n")
    path = tmp_path / "results.json"
    results.save("x", [Line("a", 1.0, "x", 2.0), Line("b", 5.0, date="2026-01-01")], "run", "1", path)
    results.save("y", [Line("a", 9.0)], "run", "1", path)
    results.save("x", [Line("a", 3.0, "x", 2.0, note="slow")], "run", "2", path)
    assert [line.value for line in results.load("y", path)[1]] == [9.0] and results.load("z", path) == ({}, [])
    results.write_table("x", page, path)
    text = page.read_text()
    assert text.startswith("before\n<!-- bench:x -->\n`run`, 2026-01-01 to ") and text.endswith("<!-- end -->\nafter\n")
    assert "| a | 3 x | at most 2 x | no | slow |" in text and "| b | 5 |  |  |  |" in text and "old" not in text


def test_goals_are_limits_from_above_or_below_and_a_missing_value_reaches_none():
    assert Line("a", 2.0, goal=2.0).reached and not Line("a", 2.1, goal=2.0).reached
    assert not Line("a", 1.4, goal=1.5, at_most=False).reached and Line("a", 1.5, goal=1.5, at_most=False).reached
    assert Line("a", None, goal=2.0).reached is False and Line("a", 2.0).reached is None


@pytest.mark.parametrize("suite", json.loads(results.RESULTS.read_text()))
def test_the_page_shows_the_measured_lines(suite):
    head, lines = results.load(suite)
    assert lines and results.format_table(head, lines) in results.PAGE.read_text(), "python benchmarks/run.py --tables"


def test_sides_that_run_different_models_are_refused():
    side = {"tokens_per_cpu_s": 300.0, "peak_bytes": 2**30, "loss": 9.05, "parameters": 10}
    assert peers.compare((1, 2048), side, side | {"tokens_per_cpu_s": 100.0})[0].value == 3
    for other in ({"parameters": 11}, {"loss": float("nan")}):
        with pytest.raises(SystemExit):
            peers.compare((1, 2048), side, side | other)
