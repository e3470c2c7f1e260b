# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about one or several training runs, from what they wrote."""

import dataclasses
import html
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dsv4_jax.terminal import printable
from dsv4_jax.validate import ConfigError

BINS = 200  # a curve of more than twice as many points is drawn as the mean and range of so many bins
EVENTS = 200  # the table shows so many events of a run, the last ones
MARKS: dict[str, Literal["solid", "dashed"]] = {"rollback": "dashed", "stage": "solid"}  # events that every chart marks
IMAGE, RANDOM, HELD_OUT = "_image", "_random", "eval_"  # NAME_image, NAME_random and eval_NAME: the chart of NAME
RATIO, LAYERS = "update_ratio/", "load_max/"
MISSING = "-"
# Okabe and Ito's colours without yellow, which is pale on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY = "#666666"

# Section -> metric -> title and unit; every RATIO joins the optimization, all LAYERS are one chart for each run.
# What is not here goes into "Other".
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
        LAYERS: ("Largest expert load by layer", "largest / mean tokens of an expert"),
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
    "Time": {
        "mfu": ("Model FLOP utilisation", "share of the devices' peak"),
        "memory_in_use": ("Device memory in use", "bytes on the fullest device"),
        "memory_peak": ("Device memory, most so far", "bytes on the fullest device"),
        "goodput": ("Goodput", "share of the process's time in steps that count"),
        "seconds/compile": ("Compiling", "seconds so far"),
        "seconds/data": ("Waiting for data", "seconds so far, part of the steps"),
        "seconds/evaluate": ("Evaluating", "seconds so far"),
        "seconds/save": ("Saving", "seconds so far"),
        "seconds/restore": ("Reading checkpoints", "seconds so far"),
        "seconds/lost": ("Steps that were taken back", "seconds so far"),
    },
}

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1200px; margin: 0 auto;
  padding: 0 16px 32px; overflow-wrap: anywhere; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin: 28px 0 8px; border-bottom: 1px solid #ddd; }
.wide { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
td, th { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #eee; }
td:first-child, th:first-child, .events td, .events th { text-align: left; }
.events { max-height: 320px; overflow-y: auto; } .events td { vertical-align: top; }
.events td:last-child { white-space: normal; }
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


Series = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its files tell it.

    `series` has every metric's values and the steps that have one, and the steps themselves as "step". `lost` has
    the same of each part that a rollback took back, from the last line before it. Events are step, kind and text.
    """

    name: str
    steps: np.ndarray
    series: Series
    config: dict[str, Any]
    lost: list[Series]
    events: list[tuple[int, str, str]]


def read_run(run_dir: Path) -> Run:
    """Reads `metrics.jsonl`, and `events.jsonl` and `config.json` if they are there.

    A line replaces the earlier ones of its step and of all later steps: those belong to a part of the run
    that was lost. A last line that was cut short is left out.

    Raises:
        ConfigError: if there are no metrics or a file cannot be read.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    rows, lost = [], []
    for row in _rows(path):
        kept = len(rows)
        while kept and rows[kept - 1]["step"] >= row["step"]:
            kept -= 1
        if kept < len(rows):
            lost.append(_lost(rows, kept))
        rows[kept:] = [row]
    if not rows:
        raise ConfigError(f"{path} holds no step yet")
    series = _series(rows)
    events_path, config_path = run_dir / "events.jsonl", run_dir / "config.json"
    events = _rows(events_path) if events_path.is_file() else ()
    events = [(row["step"], str(row.get("event", "")), str(row.get("text", ""))) for row in events]
    config = _parsed(config_path.read_text()) if config_path.is_file() else {}
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path} is not a JSON object")
    return Run(run_dir.resolve().name, series["step"][0], series, config, lost, events)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that has one a line, each with a step, but for a last line that was cut short."""
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
        elif number < len(lines):
            raise ConfigError(f"{path}, line {number}: expected a JSON object with a step, found {line[:60]!r}")


def _series(rows: Sequence[dict[str, Any]]) -> Series:
    """Steps and values of everything that the rows have; NaN where a value is not a number."""
    series = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] if isinstance(row[name], int | float) else np.nan for row in rows if name in row]
        series[name] = (np.array([row["step"] for row in rows if name in row]), np.array(values, float))
    return series


def _lost(rows: Sequence[dict[str, Any]], kept: int) -> Series:
    """What the rows after the first `kept` have a number of, from the row before them on."""
    series = _series(rows[max(kept - 1, 0) :])
    return {name: series[name] for name, (_, y) in _series(rows[kept:]).items() if np.isfinite(y).any()}


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
    body = [f"<h1>{title}</h1>", _table(_overview(read)), *_events(read), *_differences(read), *_charts(read)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>'
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(printable("\n".join([page, *body, "</body></html>\n"])), encoding="utf-8")
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


def _table(rows: Iterable[Sequence[str]], look: str = "") -> str:
    """An HTML table of plain texts, of which the first row is the heading."""
    line = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
    lines = [line(row, "td" if i else "th") for i, row in enumerate(rows)]
    return f'<div class="wide {look}"><table>' + "\n".join(lines) + "</table></div>"


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


def _events(runs: Sequence[Run]) -> list[str]:
    """A table of the last events of every run, if there are any."""
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


def _parts(run: Run) -> list[Series]:
    """What the run kept, and then what it lost."""
    return [run.series, *run.lost]


def _metrics(run: Run, chart: str | None = None) -> list[str]:
    """The names of everything that the run measured, or of what belongs to a chart, its own metric first."""
    names = {name for part in _parts(run) for name in part} - {"step", "tokens"}
    return sorted((x for x in names if chart in (None, _chart_of(x))), key=lambda x: (x != chart, x))


def _chart_of(metric: str) -> str:
    """The metric that names the chart."""
    if metric.startswith(LAYERS):
        return LAYERS
    return metric.removeprefix(HELD_OUT).removesuffix(IMAGE).removesuffix(RANDOM)


def _charts(runs: Sequence[Run]) -> list[str]:
    """Headings and charts of everything that has a value; `tokens` is the x axis if every run has it throughout."""
    found = sorted({_chart_of(metric) for run in runs for metric in _metrics(run)})
    ratios = [name for name in found if name.startswith(RATIO)]
    groups = {name: (f"Update to weights, {name.removeprefix(RATIO)}", "ratio of norms") for name in ratios}
    sections = SECTIONS | {"Optimization": SECTIONS["Optimization"] | groups}
    named = {metric for charts in sections.values() for metric in charts}
    sections["Other"] = {name: (name, "value") for name in found if name not in named}
    counted = [(part["step"][1], part.get("tokens", (None, np.array([])))[1]) for run in runs for part in _parts(run)]
    axis = "tokens" if all(np.isfinite(x).sum() == len(steps) for steps, x in counted) else "step"
    parts = []
    for section, charts in sections.items():
        drawn = []
        for chart, (title, unit) in charts.items():
            if chart == LAYERS:
                with_layers = [run for run in runs if _metrics(run, LAYERS)]
                titles = [title + f", {run.name}" * (len(runs) > 1) for run in with_layers]
                drawn += [_chart([run], axis, LAYERS, of, unit) for run, of in zip(with_layers, titles, strict=True)]
            elif chart in found:
                drawn.append(_chart(runs, axis, chart, title, unit))
        if drawn:
            parts += [f"<h2>{section}</h2>", '<div class="charts">', *drawn, "</div>"]
    return parts


def _gradient(count: int) -> list[str]:
    """Colours along a map that is safe for every eye."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.9, count))]


def _colours(count: int) -> list[str]:
    """A colour for every run: the palette, or for more runs a gradient."""
    return list(PALETTE[:count]) if count <= len(PALETTE) else _gradient(count)


def _thinned(x: np.ndarray, y: np.ndarray, width: int) -> np.ndarray:
    """x, mean, least and largest y in each bin of `width` points; NaN where a bin has no finite y."""
    binned = lambda a: np.ma.masked_invalid(np.append(a, np.full(-len(a) % width, np.nan)).reshape(-1, width))
    x, y = binned(x), binned(y)
    return np.stack([np.ma.filled(a, np.nan) for a in (x.mean(1), y.mean(1), y.min(1), y.max(1))])


def _plot(axes: Any, axis: str, parts: Sequence[Series], metric: str, alpha: float, **look: Any) -> None:
    """Draws what the parts have of a metric as one line with gaps between them, and its range if it is thinned."""
    gap, pieces = np.full((4, 1), np.nan), []
    points = sum(len(part[metric][0]) for part in parts)
    width = 1 if points <= 2 * BINS else -(-points // BINS)
    for part in parts:
        steps, y = part[metric]
        y = np.where(np.isfinite(y) & ((y > 0) | (axes.get_yscale() != "log")), y, np.nan)
        pieces += [gap, _thinned(np.interp(steps, *part[axis]), y, width)]
    x, y, low, high = np.concatenate(pieces, axis=1)
    if width > 1:
        axes.fill_between(x, low, high, color=look["color"], alpha=0.12 * alpha, linewidth=0)
    (line,) = axes.plot(x, y, alpha=alpha, **look)
    if metric.startswith(HELD_OUT) or points < 20:
        line.set(marker="o", markersize=4, markerfacecolor="white")


def _places(run: Run, axis: str, steps: Sequence[int]) -> np.ndarray:
    """Where steps of a run, of kept or lost parts, lie on the axis."""
    if axis == "step":
        return np.array(steps)
    known, x = (np.concatenate([part[name][1] for part in _parts(run)]) for name in ("step", axis))
    order = np.argsort(known, kind="stable")
    return np.interp(steps, known[order], x[order])


def _entry(look: str, colour: str, words: Iterable[str]) -> str:
    """An entry of a legend."""
    return f'<span><i class="{look}" style="color:{colour}"></i>{html.escape(", ".join(words))}</span>'


def _layers(run: Run) -> tuple[list[tuple[Run, str, str]], list[str]]:
    """The curves of all layers, in their order, and the legend: a scale of colours for what the palette cannot tell."""
    number = lambda metric: metric.removeprefix(LAYERS)
    metrics = sorted(_metrics(run, LAYERS), key=lambda x: (not number(x).isdigit(), len(x), x))
    words = [f"layer {number(x)}" if number(x).isdigit() else number(x) for x in metrics]
    colours, legend, scaled = _colours(len(metrics)), [], 0
    if len(metrics) > len(PALETTE):
        scaled = sum(number(x).isdigit() for x in metrics)
        colours = _gradient(scaled) + list(itertools.islice(itertools.cycle(PALETTE[1:]), len(metrics) - scaled))
        ramp = f"background:linear-gradient(90deg,{','.join(colours[:scaled])})"
        legend = [f'<span>{words[0]}<i class="scale" style="{ramp}"></i>{words[scaled - 1]}</span>']
    legend += [_entry("solid", colour, [word]) for word, colour in list(zip(words, colours, strict=True))[scaled:]]
    return [(run, metric, colour) for metric, colour in zip(metrics, colours, strict=True)], legend


def _chart(runs: Sequence[Run], axis: str, chart: str, title: str, unit: str) -> str:
    """A chart of a metric, its held-out values and those of images, in every run, with a legend in HTML.

    The parts that were lost are faint and dotted, and add half of its height to either side of the chart at most.
    The chart of LAYERS is that of one run.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.1))
    axes = figure.add_axes((0.115, 0.15, 0.865, 0.77))
    scale = "log" if chart == "grad_norm" or chart.startswith(RATIO) else "linear"
    axes.set_yscale(scale)
    colours = _colours(len(runs))
    curves = [(run, name, colour) for run, colour in zip(runs, colours, strict=True) for name in _metrics(run, chart)]
    curves, legend = _layers(runs[0]) if chart == LAYERS else (curves, [])
    width = 0.7 if chart == LAYERS and len(curves) > len(PALETTE) else 1.2
    for run, metric, colour in curves:
        if metric not in run.series:
            continue
        held_out, image, random = metric.startswith(HELD_OUT), metric.endswith(IMAGE), metric.endswith(RANDOM)
        style = "dashed" if image or random else "solid"
        gid = f"{metric}:{run.name}"
        _plot(axes, axis, [run.series], metric, 1, color=colour, linewidth=width, linestyle=style, gid=gid)
        gaps = int((~np.isfinite(run.series[metric][1])).sum())
        words = [run.name, *["held out"] * held_out, *["image"] * image, *["random choice"] * random]
        words += [f"{gaps:,} {'value' if gaps == 1 else 'values'} not finite"] * (gaps > 0)
        if chart != LAYERS:
            legend.append(_entry(style + " dot" * held_out, colour, words))
    kept = axes.get_ylim() if np.isfinite(axes.dataLim.y0) else None
    lost = [(curve, parts) for curve in curves if (parts := [part for part in curve[0].lost if curve[1] in part])]
    for (run, metric, colour), parts in lost:
        gid = f"lost {metric}:{run.name}"
        _plot(axes, axis, parts, metric, 0.7, color=colour, linewidth=width, linestyle="dotted", zorder=1.5, gid=gid)
    if lost:
        legend.append(_entry("lost", GREY, ["rolled back"]))
        if kept:
            to = axes.yaxis.get_transform()
            low, high = to.transform(kept)
            margin = (high - low) / 2
            drawn = np.clip(to.transform(axes.dataLim.intervaly), low - margin, high + margin)
            axes.set_ylim(*to.inverted().transform((min(low, drawn[0]), max(high, drawn[1]))))
    for kind, style in MARKS.items():
        for run, colour in zip(runs, colours if len(runs) > 1 else [GREY], strict=True):
            x = _places(run, axis, [step for step, event, _ in run.events if event == kind])
            lines = axes.vlines(x, 0, 1, colour, style, linewidth=0.8, transform=axes.get_xaxis_transform())
            lines.set_gid(f"{kind}:{run.name}")
        if any(event == kind for run in runs for _, event, _ in run.events):
            legend.append(_entry(f"bar {style}", GREY, [kind]))
    axes.set_xlabel(axis)
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
