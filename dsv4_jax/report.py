# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about one or several training runs, from what they wrote."""

import dataclasses
import html
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_jax.validate import ConfigError

BINS = 200  # a curve of more than twice as many points is drawn as the mean and range of so many bins
IMAGE, RANDOM, HELD_OUT = "_image", "_random", "eval_"  # NAME_image, NAME_random and eval_NAME: the chart of NAME
RATIO = "update_ratio/"
MISSING = "-"
# Okabe and Ito's colours without yellow, which is pale on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

# Section -> metric -> title and unit; every RATIO joins the optimization. What is not here goes into "Other".
SECTIONS = {
    "Losses": {
        "loss": ("Next-token loss", "nats per token"),
        "objective": ("Objective", "weighted sum of the losses"),
        "mtp_loss": ("MTP loss", "nats per token"),
        "balance_loss": ("Balance loss", "per token, summed over layers"),
        "indexer_loss": ("Indexer loss", "nats per token, summed over layers"),
        "recall": ("Recall of the indexer", "share of attention mass in its top-k"),
    },
    "Optimization": {"lr": ("Learning rate", "learning rate"), "grad_norm": ("Gradient norm", "norm")},
    "Experts": {
        "load_max": ("Largest expert load", "largest / mean tokens of an expert"),
        "load_dead": ("Experts without a token", "share of the experts"),
        "load_entropy": ("Entropy of the expert loads", "normalised, 1 is even"),
        "bias_max": ("Largest router bias", "absolute value"),
        "clamped": ("Clamped activations", "share of SwiGLU activations"),
    },
    "Speed and lost steps": {
        "tokens_per_s": ("Speed", "tokens/s"),
        "skipped": ("Skipped steps", "steps so far"),
        "skipped_records": ("Skipped records", "bad records left out"),
        "spikes": ("Spikes", "spikes so far"),
        "rollbacks": ("Rollbacks", "rollbacks so far"),
        "lag": ("Anticipatory routing", "steps between routing and use"),
    },
}

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1200px; margin: 0 auto;
  padding: 0 16px 32px; overflow-wrap: anywhere; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin: 28px 0 8px; border-bottom: 1px solid #ddd; }
.wide { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
td, th { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #eee; }
td:first-child, th:first-child { text-align: left; }
.charts { display: grid; gap: 20px 24px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; min-width: 0; } figure svg { display: block; width: 100%; max-width: 100%; height: auto; }
figcaption b { display: block; } figcaption span { display: inline-block; margin-right: 16px; font-size: 13px; }
i { display: inline-block; width: 22px; border-top: 3px solid; margin-right: 6px; vertical-align: middle; }
i.dashed { border-top-style: dashed; }
i.dot::before { content: ""; display: block; width: 5px; height: 5px; margin: -6px auto -3px; background: #fff;
  border: 2px solid; border-radius: 50%; }
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its files tell it: every metric's values and the steps that have one, and the configuration."""

    name: str
    steps: np.ndarray
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    config: dict[str, Any]


def read_run(run_dir: Path) -> Run:
    """Reads `metrics.jsonl`, and `config.json` if there is one.

    A line replaces the earlier ones of its step and of all later steps: those belong to a part of the run
    that was lost. A last line that was cut short is left out.

    Raises:
        ConfigError: if there are no metrics or a file cannot be read.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    rows: list[dict[str, Any]] = []
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            if number == len(lines):
                break
            raise ConfigError(f"{path}, line {number}: expected a JSON object with a step, found {line[:60]!r}")
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} holds no step yet")
    steps, series = np.array([row["step"] for row in rows]), {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        values = [row[name] if isinstance(row[name], int | float) else np.nan for row in rows if name in row]
        series[name] = (np.array([row["step"] for row in rows if name in row]), np.array(values, float))
    config_path = run_dir / "config.json"
    config = _parsed(config_path.read_text()) if config_path.is_file() else {}
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path} is not a JSON object")
    return Run(run_dir.resolve().name, steps, series, config)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Writes the page about the runs to `out` and returns it.

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
    body = [f"<h1>{title}</h1>", _table(_overview(read)), *_differences(read), *_charts(read)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>'
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([page, *body, "</body></html>\n"]), encoding="utf-8")
    return out


def human(x: float) -> str:
    """A number in few characters: 1.2M, 35k, 0.003."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.4g}{letter}"
    return f"{x:.4g}"


def _parsed(text: str) -> Any:
    """The JSON value, or None if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _table(rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of plain texts, of which the first row is the heading."""
    line = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
    lines = [line(row, "td" if i else "th") for i, row in enumerate(rows)]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def _overview(runs: Sequence[Run]) -> list[list[str]]:
    """The rows of the table of runs; best and median are those of the finite values."""
    last = lambda x: x[-1]
    columns = {
        "tokens": ("tokens", last),
        "last loss": ("loss", last),
        "last held-out loss": ("eval_loss", last),
        "best held-out loss": ("eval_loss", np.nanmin),
        "median tokens/s": ("tokens_per_s", np.nanmedian),
        "skipped": ("skipped", last),
        "rollbacks": ("rollbacks", last),
    }
    rows = [["run", "steps", *columns]]
    for run in runs:
        rows.append([run.name, f"{run.steps[-1]:,}"])
        for metric, of in columns.values():
            _, x = run.series.get(metric, (None, np.array([])))
            x = np.where(np.isfinite(x), x, np.nan)
            rows[-1].append(MISSING if np.isnan(x).all() else human(of(x)))
    return rows


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"model": {"dim": 8}}` as `{"model.dim": "8"}`."""
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: json.dumps(value)}
    return flat


def _differences(runs: Sequence[Run]) -> list[str]:
    """A table of the configuration keys, but for the run directory, in which several runs differ."""
    configs = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "train.run_dir")
    rows = [[key, *(config.get(key, MISSING) for config in configs)] for key in keys]
    known = [i for i, config in enumerate(configs, 1) if config]
    rows = [row for row in rows if len({row[i] for i in known}) > 1]
    if len(known) < 2:
        return []
    table = _table([["key", *(run.name for run in runs)], *rows]) if rows else "<p>None.</p>"
    return ["<h2>Differences in the configuration</h2>", table]


def _chart_of(metric: str) -> str:
    """The metric that names the chart."""
    return metric.removeprefix(HELD_OUT).removesuffix(IMAGE).removesuffix(RANDOM)


def _charts(runs: Sequence[Run]) -> list[str]:
    """Headings and charts of everything that has a value; `tokens` is the x axis if every run has it throughout."""
    found = sorted({_chart_of(metric) for run in runs for metric in run.series if metric != "tokens"})
    ratios = [name for name in found if name.startswith(RATIO)]
    groups = {name: (f"Update to weights, {name.removeprefix(RATIO)}", "ratio of norms") for name in ratios}
    sections = SECTIONS | {"Optimization": SECTIONS["Optimization"] | groups}
    named = {metric for charts in sections.values() for metric in charts}
    sections["Other"] = {name: (name, "value") for name in found if name not in named}
    counted = [(run, run.series.get("tokens", (None, np.array([])))[1]) for run in runs]
    axis = "tokens" if all(np.isfinite(x).sum() == len(run.steps) for run, x in counted) else "step"
    parts = []
    for section, charts in sections.items():
        drawn = [_chart(runs, axis, metric, *chart) for metric, chart in charts.items() if metric in found]
        if drawn:
            parts += [f"<h2>{section}</h2>", '<div class="charts">', *drawn, "</div>"]
    return parts


def _colours(count: int) -> list[str]:
    """A colour for every run: the palette, or for more runs a colour map that is also safe."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.9, count))]


def _thinned(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """x, mean, least and largest y in each of BINS bins of equally many points; NaN where a bin has no finite y."""
    width = -(-len(x) // BINS)
    binned = lambda a: np.ma.masked_invalid(np.append(a, np.full(-len(a) % width, np.nan)).reshape(-1, width))
    x, y = binned(x), binned(y)
    return [np.ma.filled(a, np.nan) for a in (x.mean(1), y.mean(1), y.min(1), y.max(1))]


def _chart(runs: Sequence[Run], axis: str, chart: str, title: str, unit: str) -> str:
    """A chart of a metric, its held-out values and those of images, in every run, with a legend in HTML."""
    from matplotlib.figure import Figure

    scale = "log" if chart == "grad_norm" or chart.startswith(RATIO) else "linear"
    figure = Figure(figsize=(6, 3.1))
    axes = figure.add_axes((0.115, 0.15, 0.865, 0.77))
    legend = []
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        for metric in sorted((name for name in run.series if _chart_of(name) == chart), key=lambda name: name != chart):
            steps, y = run.series[metric]
            x = run.series["tokens"][1][np.searchsorted(run.steps, steps)] if axis == "tokens" else steps
            gaps = int((~np.isfinite(y)).sum())
            y = np.where(np.isfinite(y) & ((y > 0) | (scale != "log")), y, np.nan)
            if len(x) > 2 * BINS:
                x, y, low, high = _thinned(x, y)
                axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            held_out, image, random = metric.startswith(HELD_OUT), metric.endswith(IMAGE), metric.endswith(RANDOM)
            style = "dashed" if image or random else "solid"
            (line,) = axes.plot(x, y, linestyle=style, color=colour, linewidth=1.2, gid=f"{metric}:{run.name}")
            if held_out or len(x) < 20:
                line.set(marker="o", markersize=4, markerfacecolor="white")
            words = [run.name, *["held out"] * held_out, *["image"] * image, *["random choice"] * random]
            words += [f"{gaps:,} {'value' if gaps == 1 else 'values'} not finite"] * (gaps > 0)
            key = style + " dot" * held_out
            legend.append(f'<span><i class="{key}" style="color:{colour}"></i>{html.escape(", ".join(words))}</span>')
    axes.set(xlabel=axis, yscale=scale)
    axes.set_title(unit, loc="left", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for direction in (axes.xaxis, axes.yaxis):
        direction.set_major_formatter(lambda value, _: human(value))
    if scale == "log":
        low, high = axes.get_ylim()
        labelled = "25" if high > 10 * low else "123456789"  # leading digits
        axes.yaxis.set_minor_formatter(lambda value, _: human(value) if f"{value:e}"[0] in labelled else "")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    return f"<figure><figcaption><b>{html.escape(title)}</b>{''.join(legend)}</figcaption>{svg}</figure>"
