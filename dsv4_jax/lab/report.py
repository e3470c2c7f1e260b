# SPDX-License-Identifier: Apache-2.0
"""The table and the pictures of a comparison."""

from pathlib import Path

import numpy as np

from dsv4_jax.lab.runner import CHUNK, Lab, Results, Run


def _best(lab: Lab, results: Results, name: str) -> float:
    """The rate that was chosen for a contender: the best of the first seed."""
    first = [r for r in results.runs if (r.contender, r.seed, r.steps) == (name, lab.seeds[0], lab.steps)]
    return min(first, key=lambda run: run.score(lab.metric)).rate


def _at_best(lab: Lab, results: Results, name: str, steps: int) -> list[Run]:
    rate = _best(lab, results, name)
    runs = [results.find(name, rate, seed, steps) for seed in lab.seeds]
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
                cells.append(f"{np.mean(scores):.4f} ± {np.std(scores, ddof=min(1, len(scores) - 1)):.4f}")
            seconds = f"{np.mean([run.seconds for run in runs]):.0f}"
            rows.append([contender.name, str(steps), f"{runs[0].rate:g}", *cells, seconds])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(lab: Lab, results: Results, folder: Path) -> list[Path]:
    """Training loss at the best rates, and the measure by rate, as PNG files."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    files = []
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for contender in lab.contenders:
        curves = [run.curve for run in _at_best(lab, results, contender.name, lab.steps)]
        mean = np.mean(np.array(curves, float), axis=0)
        at = np.minimum(CHUNK * np.arange(1, len(mean) + 1), lab.steps)
        axes.plot(at, mean, label=f"{contender.name}, rate {_best(lab, results, contender.name):g}")
    axes.set(
        xlabel="step", ylabel="training loss", yscale="log", title=f"Mean of {len(lab.seeds)} seeds at the best rate"
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    files.append(folder / "curves.png")
    figure.savefig(files[-1], dpi=130)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for contender in lab.contenders:
        runs = [r for r in results.runs if (r.contender, r.seed, r.steps) == (contender.name, lab.seeds[0], lab.steps)]
        points = sorted((run.rate, run.score(lab.metric)) for run in runs)
        axes.plot(*zip(*points, strict=True), marker="o", label=contender.name)
    axes.set(
        xlabel="learning rate",
        ylabel=lab.metric,
        xscale="log",
        yscale="log",
        title=f"{lab.steps} steps, seed {lab.seeds[0]}",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    files.append(folder / "rates.png")
    figure.savefig(files[-1], dpi=130)
    plt.close(figure)
    return files
