# SPDX-License-Identifier: Apache-2.0
"""Draw the charts of a report: one for each metric, in sections, as SVG with a legend in HTML."""

import html
import io
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from dsv4_jax.report.read import Run, Series

BINS = 200  # a curve of more than twice as many points is drawn as the mean and range of so many bins
MARKS: dict[str, Literal["solid", "dashed"]] = {"rollback": "dashed", "stage": "solid"}  # events that every chart marks
IMAGE, RANDOM, HELD_OUT = "_image", "_random", "eval/"  # NAME_image, NAME_random and eval/NAME: the chart of NAME
RATIO, LAYERS = "optim/update_ratio/", "moe/load_max/"
# Okabe and Ito's colours without yellow, which is pale on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY = "#666666"

# Section -> metric -> title and unit; every RATIO joins the optimization, all LAYERS are one chart for each run.
# What is not here goes into "Other".
SECTIONS = {
    "Losses": {
        "loss": ("Next-token loss", "nats per token"),
        "train/objective": ("Objective", "weighted sum of the losses"),
        "train/mtp_loss": ("MTP loss", "nats per token"),
        "train/balance_loss": ("Balance loss", "per token, summed over layers"),
        "train/indexer_loss": ("Indexer loss", "nats per token, summed over layers"),
        "recall": ("Recall of the indexer", "share of attention mass in its top-k"),
    },
    "Optimization": {"lr": ("Learning rate", "learning rate"), "grad_norm": ("Gradient norm", "norm")},
    "Experts": {
        "moe/load_max": ("Largest expert load", "largest / mean tokens of an expert"),
        LAYERS: ("Largest expert load by layer", "largest / mean tokens of an expert"),
        "moe/load_dead": ("Experts without a token", "share of the experts"),
        "moe/load_entropy": ("Entropy of the expert loads", "normalised, 1 is even"),
        "moe/bias_max": ("Largest router bias", "absolute value"),
        "moe/clamped": ("Clamped activations", "share of SwiGLU activations"),
    },
    "Speed and lost steps": {
        "tokens_per_s": ("Speed", "tokens/s"),
        "train/skipped": ("Skipped steps", "steps so far"),
        "train/skipped_records": ("Skipped records", "bad records left out"),
        "train/spikes": ("Spikes", "spikes so far"),
        "train/rollbacks": ("Rollbacks", "rollbacks so far"),
        "train/lag": ("Anticipatory routing", "steps between routing and use"),
    },
    "Time": {
        "perf/mfu": ("Model FLOP utilisation", "share of the devices' peak"),
        "perf/memory_in_use": ("Device memory in use", "bytes on the fullest device"),
        "perf/memory_peak": ("Device memory, most so far", "bytes on the fullest device"),
        "perf/goodput": ("Goodput", "share of the process's time in steps that count"),
        "perf/seconds/compile": ("Compiling", "seconds so far"),
        "perf/seconds/data": ("Waiting for data", "seconds so far, part of the steps"),
        "perf/seconds/evaluate": ("Evaluating", "seconds so far"),
        "perf/seconds/save": ("Saving", "seconds so far"),
        "perf/seconds/restore": ("Reading checkpoints", "seconds so far"),
        "perf/seconds/lost": ("Steps that were taken back", "seconds so far"),
    },
}


def human(x: float) -> str:
    """A number in few characters: 1.2M, 35k, 0.003."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.4g}{letter}"
    return f"{x:.4g}"


def label_ticks(axes: Any) -> None:
    """Write the numbers on both axes of a finished plot with `human`.

    On a log axis the ticks between powers of ten get a number too: all of them if the axis spans at most one power
    of ten, else those at 2 and 5.
    """
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: human(value))
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            digits = "25" if high > 10 * low else "123456789"
            axis.set_minor_formatter(lambda value, _, d=digits: human(value) if f"{value:e}"[0] in d else "")


def draw_charts(runs: Sequence[Run]) -> list[str]:
    """Draw every metric that has a value, under headings. The x axis is `tokens` if every line of every run has it."""
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


def _parts(run: Run) -> list[Series]:
    """List the series that the run kept, then those that it took back."""
    return [run.series, *run.lost]


def _metrics(run: Run, chart: str | None = None) -> list[str]:
    """List the metrics of the run, or of one chart of it; the metric that names the chart comes first."""
    names = {name for part in _parts(run) for name in part} - {"step", "tokens"}
    return sorted((x for x in names if chart in (None, _chart_of(x))), key=lambda x: (x != chart, x))


def _chart_of(metric: str) -> str:
    """Return the metric that names the chart of `metric`."""
    if metric.startswith(LAYERS):
        return LAYERS
    return metric.removeprefix(HELD_OUT).removesuffix(IMAGE).removesuffix(RANDOM)


def _gradient(count: int) -> list[str]:
    """Return `count` colours along a map that colour-blind readers can order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.9, count))]


def _colours(count: int) -> list[str]:
    """Return `count` colours: of the palette, or of a gradient if there are more."""
    return list(PALETTE[:count]) if count <= len(PALETTE) else _gradient(count)


def _thinned(x: np.ndarray, y: np.ndarray, width: int) -> np.ndarray:
    """Return x, mean, least and largest y [4, bins] of bins of `width` points; NaN where a bin has no finite y."""
    binned = lambda a: np.ma.masked_invalid(np.append(a, np.full(-len(a) % width, np.nan)).reshape(-1, width))
    x, y = binned(x), binned(y)
    return np.stack([np.ma.filled(a, np.nan) for a in (x.mean(1), y.mean(1), y.min(1), y.max(1))])


def _plot(axes: Any, axis: str, parts: Sequence[Series], metric: str, alpha: float, **look: Any) -> None:
    """Draw a metric of several parts as one line with gaps between them; a thinned line has its range around it."""
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
    """Return the places of steps, kept or taken back, on the x axis."""
    if axis == "step":
        return np.array(steps)
    known, x = (np.concatenate([part[name][1] for part in _parts(run)]) for name in ("step", axis))
    order = np.argsort(known, kind="stable")
    return np.interp(steps, known[order], x[order])


def _entry(look: str, colour: str, words: Iterable[str]) -> str:
    """Make one entry of a legend."""
    return f'<span><i class="{look}" style="color:{colour}"></i>{html.escape(", ".join(words))}</span>'


def _layers(run: Run) -> tuple[list[tuple[Run, str, str]], list[str]]:
    """Return the curves of all layers in their order, and the legend: a colour scale for more than the palette has."""
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
    """Draw a metric, its held-out values and its values of images, for every run, with a legend in HTML.

    Parts that were taken back are faint and dotted. They may widen the y axis by half its height on either side, so
    that a diverged part does not flatten the rest. The chart of LAYERS shows one run.
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
    label_ticks(axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    return f"<figure><figcaption><b>{html.escape(title)}</b>{''.join(legend)}</figcaption>{svg}</figure>"
