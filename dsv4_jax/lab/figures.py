# SPDX-License-Identifier: Apache-2.0
"""Show a comparison of optimizers: a table in Markdown and two pictures."""

from pathlib import Path

import numpy as np

from dsv4_jax.lab.runner import CHUNK, FinishedRun, Lab, Results
from dsv4_jax.report.charts import label_ticks


def _best_runs(lab: Lab, results: Results, name: str, steps: int) -> list[FinishedRun]:
    """List a contender's finished runs of that many steps at its best rate, one for each seed."""
    runs = [results.find(name, results.rates[name], seed, steps) for seed in lab.seeds]
    return [run for run in runs if run is not None]


def format_table(lab: Lab, results: Results) -> str:
    """Format as Markdown: the best rate, the mean and deviation of each measure, a line per contender and length."""
    measures = list(results.runs[0].measures)
    rows = [["optimizer", "steps", "rate", *measures, "seconds"]]
    for contender in lab.contenders:
        for steps in (lab.steps, *contender.shorter):
            runs = _best_runs(lab, results, contender.name, steps)
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


def draw_figures(lab: Lab, results: Results, folder: Path) -> list[Path]:
    """Draw the training loss at the best rates, and the measure against the rate, as PNG files in `folder`."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    runs = {c.name: [r for r in results.runs if (r.contender, r.steps) == (c.name, lab.steps)] for c in lab.contenders}

    def curves(axes):
        for name in runs:
            curves = np.array([run.curve for run in _best_runs(lab, results, name, lab.steps)], float)
            steps = np.minimum(CHUNK * np.arange(1, curves.shape[1] + 1), lab.steps)
            axes.plot(steps, curves.mean(0), label=f"{name}, rate {results.rates[name]:g}")
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
        label_ticks(axes)
        files.append(folder / f"{plot.__name__}.png")
        figure.savefig(files[-1], dpi=110)
        plt.close(figure)
    return files
