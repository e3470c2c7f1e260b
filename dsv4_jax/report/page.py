# SPDX-License-Identifier: Apache-2.0
"""Write one self-contained HTML page about one or several training runs, from their files."""

import dataclasses
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_jax.report.charts import draw_charts, human
from dsv4_jax.report.read import Run, read_run
from dsv4_jax.train.console import printable

EVENTS = 200  # most events of a run in the table: the last ones
MISSING = "-"

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1200px; margin: 0 auto;
  padding: 0 16px 32px; overflow-wrap: anywhere; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin: 28px 0 8px; border-bottom: 1px solid #ddd; }
.wide { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
td, th { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #eee; }
td:first-child, th:first-child, .events td, .events th { text-align: left; }
.events { max-height: 320px; overflow-y: auto; } .events td { vertical-align: top; }
.events td:last-child { white-space: pre-wrap; }
.charts { display: grid; gap: 20px 24px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; min-width: 0; } figure svg { display: block; width: 100%; max-width: 100%; height: auto; }
figcaption b { display: block; } figcaption span { display: inline-block; margin-right: 16px; font-size: 13px; }
i { display: inline-block; width: 22px; border-top: 3px solid; margin-right: 6px; vertical-align: middle; }
i.dashed { border-top-style: dashed; } i.lost { border-top: 2px dotted; }
i.dot::before { content: ""; display: block; width: 5px; height: 5px; margin: -6px auto -3px; background: #fff;
  border: 2px solid; border-radius: 50%; }
i.bar { width: 0; height: 15px; border-top: 0; border-left: 2px solid; } i.bar.dashed { border-left-style: dashed; }
i.scale { width: 90px; height: 10px; border: 0; margin: 0 6px; }
"""


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page about the runs to `out`; return `out`.

    Raises:
        ConfigError: if one of the runs cannot be read.
    """
    read = [read_run(run_dir) for run_dir in runs]
    names = [run.name for run in read]
    read = [
        dataclasses.replace(run, name=str(run_dir)) if names.count(run.name) > 1 else run
        for run, run_dir in zip(read, runs, strict=True)
    ]
    title = html.escape("Training report: " + ", ".join(run.name for run in read))
    body = [f"<h1>{title}</h1>", _table(_overview(read)), *_events(read), *_differences(read), *draw_charts(read)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>'
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(printable("\n".join([page, *body, "</body></html>\n"])), encoding="utf-8")
    return out


def _table(rows: Iterable[Sequence[str]], look: str = "") -> str:
    """Make an HTML table of plain texts; the first row is the heading."""
    line = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
    lines = [line(row, "td" if i else "th") for i, row in enumerate(rows)]
    return f'<div class="wide {look}"><table>' + "\n".join(lines) + "</table></div>"


def _overview(runs: Sequence[Run]) -> list[list[str]]:
    """Make the rows of the table of runs; best and median are over finite values."""
    last = lambda x: x[-1]
    columns = {
        "tokens": ("tokens", last),
        "last loss": ("loss", last),
        "last held-out loss": ("eval/loss", last),
        "best held-out loss": ("eval/loss", np.nanmin),
        "median tokens/s": ("tokens_per_s", np.nanmedian),
        "skipped": ("train/skipped", last),
        "rollbacks": ("train/rollbacks", last),
    }
    rows = [["run", "steps", *columns]]
    for run in runs:
        rows.append([run.name, f"{run.steps[-1]:,}"])
        for metric, of in columns.values():
            _, x = run.series.get(metric, (None, np.array([])))
            x = np.where(np.isfinite(x), x, np.nan)
            rows[-1].append(MISSING if np.isnan(x).all() else human(of(x)))
    return rows


def _events(runs: Sequence[Run]) -> list[str]:
    """Make a table of the last events of every run; nothing without events."""
    several = len(runs) > 1
    rows = [
        [*[run.name] * several, f"{step:,}", kind, text] for run in runs for step, kind, text in run.events[-EVENTS:]
    ]
    left_out = sum(max(len(run.events) - EVENTS, 0) for run in runs)
    if not rows:
        return []
    head = [*["run"] * several, "step", "event", "what happened"]
    note = [f"<p>{left_out:,} earlier {'event is' if left_out == 1 else 'events are'} left out.</p>"] * (left_out > 0)
    return ["<h2>Events</h2>", *note, _table([head, *rows], "events")]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a tree to its keys: `{"model": {"dim": 8}}` becomes `{"model.dim": "8"}`."""
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: json.dumps(value)}
    return flat


def _differences(runs: Sequence[Run]) -> list[str]:
    """Make a table of the configuration keys in which the runs differ; `train.run_dir` is left out."""
    configs = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "train.run_dir")
    rows = [[key, *(config.get(key, MISSING) for config in configs)] for key in keys]
    known = [i for i, config in enumerate(configs, 1) if config]
    rows = [row for row in rows if len({row[i] for i in known}) > 1]
    if len(known) < 2:
        return []
    table = _table([["key", *(run.name for run in runs)], *rows]) if rows else "<p>None.</p>"
    return ["<h2>Differences in the configuration</h2>", table]
