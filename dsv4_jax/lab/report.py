# SPDX-License-Identifier: Apache-2.0
"""The table and the pictures of a comparison."""

from pathlib import Path

import numpy as np

from dsv4_jax.lab.runner import CHUNK, Lab, Results, Run


def _at_best(lab: Lab, results: Results, name: str, steps: int) -> list[Run]:
    runs = [results.find(name, results.rates[name], seed, steps) for seed in lab.seeds]
    return [run for run in runs if run is not None]


def table(lab: Lab, results: Results) -> str:
    """Markdown: for every contender and length the best rate, and mean and deviation of every measure."""
    measures = list(results.runs[0].measures)
    rows = [["optimizer", "steps", "rate", *measures, "seconds"]]
    for contender in lab.contenders:
        for steps in (lab.steps, *contender.shorter):
            runs = _at_best(lab, results, contender.name, steps)
            cells = []
            for name in measures:
                scores = [run.score(name) for run in runs]
                if np.isfinite(scores).all():
                    cells.append(f"{np.mean(scores):.4f} ± {np.std(scores, ddof=min(1, len(scores) - 1)):.4f}")
                else:
                    cells.append("a seed diverged")
            seconds = f"{np.mean([run.seconds for run in runs]):.0f}"
            rows.append([contender.name, str(steps), f"{runs[0].rate:g}", *cells, seconds])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(lab: Lab, results: Results, folder: Path) -> list[Path]:
    """Training loss at the best rates, and the measure by rate, as PNG files."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    runs = {c.name: [r for r in results.runs if (r.contender, r.steps) == (c.name, lab.steps)] for c in lab.contenders}

    def curves(axes):
        for name in runs:
            curves = np.array([run.curve for run in _at_best(lab, results, name, lab.steps)], float)
            at = np.minimum(CHUNK * np.arange(1, curves.shape[1] + 1), lab.steps)
            axes.plot(at, curves.mean(0), label=f"{name}, rate {results.rates[name]:g}")
        title = f"Mean of {len(lab.seeds)} seeds at the best rate"
        axes.set(xlabel="step", ylabel="training loss", yscale="log", title=title)

    def rates(axes):
        for name in runs:
            points = sorted((run.rate, run.score(lab.metric)) for run in runs[name] if run.seed == lab.seeds[0])
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        title = f"{lab.steps} steps, seed {lab.seeds[0]}"
        axes.set(xlabel="learning rate", ylabel=lab.metric, xscale="log", yscale="log", title=title)

    files = []
    for plot in (curves, rates):
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        plot(axes)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
        for axis in (axes.yaxis, axes.xaxis) if plot is rates else (axes.yaxis,):
            axis.set_major_formatter("{x:g}")
            low, high = axis.get_view_interval()
            labelled = "25" if high > 10 * low else "123456789"  # leading digits
            axis.set_minor_formatter(lambda x, _, digits=labelled: f"{x:g}" if f"{x:e}"[0] in digits else "")
        files.append(folder / f"{plot.__name__}.png")
        figure.savefig(files[-1], dpi=110)
        plt.close(figure)
    return files
