# SPDX-License-Identifier: Apache-2.0
"""Measured figures keep their goals, dates and neighbours in JSON, and their tables stand on the page."""

import json
import sys
from types import SimpleNamespace

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import peers
import results
import tpu
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


PROGRAM = """
ENTRY %main (x: bf16[8,128], w: bf16[128,128]) -> bf16[32,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %w = bf16[128,128]{1,0} parameter(1)
  %start = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %y = bf16[8,128]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %k = bf16[8,128]{1,0} custom-call(%y), backend_config={"cost_estimate":{"flops":"1000"}}
  ROOT %out = bf16[32,128]{1,0} all-gather-done(%start)
}
"""


def test_a_compiled_program_is_held_against_the_chip():
    memory = SimpleNamespace(argument_size_in_bytes=19 * 2**30, temp_size_in_bytes=28.5 * 2**30, peak_memory_in_bytes=0)
    program = SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: PROGRAM)
    product, moved = 2 * 8 * 128 * 128, 2 * 128 * (8 + 32 + 8 + 128 + 8 + 8 + 8)
    lines = {line.figure: line for line in tpu.describe("p", program, "TPU v5", product, product, 0.5)}
    assert lines["p: memory over the chip's"].value == 0.5  # of 95 GiB
    # The product, and what the kernel declares.
    assert lines["p: operations over the model's"].value == pytest.approx(1 + 1000 / product)
    assert lines["p: sent beside work"].value == 1 and "1 all-gather" in lines["p: sent beside work"].note
    utilisation = lines["p: model utilisation by the roofline"]
    assert utilisation.value == pytest.approx(product / 459e12 / (moved / 2765e9)) and not utilisation.reached
