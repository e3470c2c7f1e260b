# SPDX-License-Identifier: Apache-2.0
"""Measure the figures of README.md and docs/ again and compare them with the pages.

    python benchmarks/figures.py            # all that a plan or a configuration gives: about three minutes
    python benchmarks/figures.py --cheap    # seconds; a test runs this
    python benchmarks/figures.py --all      # also trainings, benchmarks and comparisons of optimizers: hours
    python benchmarks/figures.py --write    # correct the pages instead of failing

Each `Figure` names a page, a pattern that finds its numbers there, the command that measures them, and a pattern that
finds the same numbers in its output. Exit status 1 if a figure differs.
"""

import argparse
import dataclasses
import functools
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
COSTS = ("cheap", "plan", "expensive")
PLAN = "python -m dsv4_jax plan configs/"


@dataclasses.dataclass(frozen=True)
class Figure:
    """Numbers on a page that a command measures.

    Attributes:
        page: the page, from the repository's root.
        there: regular expression of the page's text, a group for each figure.
        command: the command line to run, or a function that returns what such a command prints.
        output: regular expression of the command's output, with as many groups; its last match counts.
        unit: divides the measured numbers before they are compared.
        within: largest relative difference. 0: equal when rounded to the decimals that the page shows.
        cost: cheap (seconds, without a process of its own), plan (half a minute) or expensive.
    """

    page: str
    there: str
    command: str | Callable[[], str]
    output: str
    unit: float = 1.0
    within: float = 0.0
    cost: str = "plan"

    @property
    def name(self) -> str:
        """The command as a reader would type it."""
        return self.command if isinstance(self.command, str) else self.command.__doc__ or ""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A figure of a page that is not what was measured, with its place in the page's text."""

    page: str
    start: int
    end: int
    found: str
    right: str
    command: str


def _describes(config: str, *parts: str) -> Callable[[], str]:
    """Make a function that returns parts of `plan`'s output which need no tracing of a step."""

    def describe() -> str:
        import jax

        import dsv4_jax as ds
        from dsv4_jax.mesh import abstract_mesh
        from dsv4_jax.train import describe
        from dsv4_jax.train.objectives import objective_of
        from dsv4_jax.train.state import abstract_state

        run = ds.load_config(ROOT / "configs" / f"{config}.py")
        cfg = run.resolved_stages[0].cfg
        lines: list[str] = []
        if "stages" in parts:
            lines += describe.describe_stages(run)
        if "model" in parts:
            lines += describe.describe_model(cfg.model)
        with abstract_mesh(cfg.mesh.data, cfg.mesh.expert, cfg.mesh.context):
            if "objective" in parts:
                lines.append(describe.describe_objective(objective_of(cfg).weights))
            if "optimizer" in parts:
                lines += describe.describe_optimizer(cfg)
            if "checkpoint" in parts:
                state = abstract_state(run)
                arrays = jax.tree.leaves((state.params, state.opt_state))
                lines.append(f"checkpoint {sum(x.size * x.dtype.itemsize for x in arrays):,} bytes")
        return "\n".join(lines)

    describe.__doc__ = f"{PLAN}{config}.py"
    return functools.cache(describe)


def _lines(page: str, command: str | Callable[[], str], *starts: str) -> Iterator[Figure]:
    """Lines of a page that stand in the output word for word, given how each starts."""
    for start in starts:
        line = rf"(?m)^({re.escape(start)}.*)$"
        yield Figure(page, line, command, line, cost="cheap")


def _cheap() -> Iterator[Figure]:
    v41, v4 = _describes("tiny_v41", "model", "objective", "optimizer"), _describes("tiny_v4", "optimizer")
    yield from _lines("README.md", v41, "parameters  ", "layers    ", "               mtp", "attention   ")
    yield from _lines("README.md", v41, "objective   ", "optimizer   ")
    names = ("embed", "groups.0.0.attn.wo_a", "groups.0.0.hc_attn_fn")
    for name in names:
        cells = r"\s+".join([rf"(?m)^{re.escape(name)}", *[r"(\S+(?: \S+)*)"] * 3, *[r"(\S+)"] * 3]) + "$"
        yield Figure("docs/optimizers.md", cells, v4, cells, cost="cheap")
    stages = _describes("tiny_stages", "stages")
    yield from _lines(
        "docs/stages.md", stages, "dense, short rows  ", "dense   ", "warm-up of the indexer  ", "sparse   "
    )
    counts = r"parameters\s+([\d,]+), of which a token uses"
    used = r"of which a token uses ([\d,]+)"
    for column, name in enumerate(("v4_flash", "v4_pro", "v41_flash")):
        described = _describes(name, "model", "checkpoint")
        there = r"(?m)^\| a checkpoint \|" + r"[^|]*\|" * column + r" ([\d.]+) TB \|"
        yield Figure("docs/deploy.md", there, described, r"checkpoint ([\d,]+) bytes", unit=1e12, cost="cheap")
        if name == "v41_flash":
            yield Figure("docs/v41.md", r"real sizes\s+\(([\d,]+) parameters\)", described, counts, cost="cheap")
            there = r"full size: (\d+) billion parameters"
            yield Figure("configs/v41_flash.py", there, described, counts, unit=1e9, cost="cheap")
        else:
            there = r"parameters, ([\d.]+) billion of which a token uses"
            yield Figure(f"configs/{name}.py", there, described, used, unit=1e9, cost="cheap")


def _plans() -> Iterator[Figure]:
    page, held = "docs/performance.md", r"bytes per device: parameters ([\d,]*\d)"
    rows = {
        "parameters, a device": held,
        "gradients": r"gradients ([\d,]*\d)",
        "optimizer state": r"optimizer ([\d,]*\d)",
        "kept for the backward pass": r"activations ([\d,]+) bytes",
    }
    names = ("v4_flash.py", "v4_pro.py", "v41_flash.py")
    for (row, output), (column, name) in itertools.product(rows.items(), enumerate(names)):
        there = rf"(?m)^\| {row} \|" + r"[^|]*\|" * column + r" ([\d.]+) GB \|"
        yield Figure(page, there, PLAN + name, output, unit=1e9)
    remat = r"last line is (\d+) GB for Flash and (\d+) GB for Pro"
    stages = [f"{name} --stage {n}" for name, n in zip(names, (11, 10, 3), strict=True)]
    for i, name in enumerate(names[:2]):
        yield Figure(
            page, _only(remat, i), f"{PLAN}{name} --model.remat full", rows["kept for the backward pass"], unit=1e9
        )
    for i, name in enumerate(stages):
        there = _only(r"`3`\): ([\d.]+), ([\d.]+) and ([\d.]+) GB of parameters", i)
        yield Figure(page, there, PLAN + name, held, unit=1e9)
        there = _only(r"(\d+), (\d+) and (\d+) GB for the backward pass", i)
        yield Figure(page, there, PLAN + name, rows["kept for the backward pass"], unit=1e9)


def _only(pattern: str, index: int) -> str:
    """The pattern with only its group of that number left; the others match without being a figure."""
    groups = iter(range(pattern.count("(") - pattern.count(r"\(")))
    return re.sub(r"(?<!\\)\((?!\?)", lambda _: "(" if next(groups) == index else "(?:", pattern)


def _expensive() -> Iterator[Figure]:
    train = "python train.py configs/tiny_v41.py --train.run-dir {tmp}/tiny_v41"
    held_out = r"held-out loss +([\d.]+) nats per byte \("
    image = r"after an image +([\d.]+) nats per byte, ([\d.]+) if"
    make = lambda *args, **more: Figure(*args, cost="expensive", **more)
    yield make("README.md", held_out, train, held_out, within=0.05)
    yield make("README.md", image, train, image, within=0.15)
    yield make("README.md", r"unigram entropy   ([\d.]+)", train, r"unigram entropy +([\d.]+)", within=0.02)
    page = "docs/results.md"
    tiny = "python train.py configs/tiny_v4.py --train.run-dir {tmp}/tiny_v4"
    yield make(page, r"150 steps of 2 x 512 bytes: held-out loss\s+([\d.]+) nats", tiny, held_out, within=0.05)
    stages = "python train.py configs/tiny_stages.py --train.run-dir {tmp}/tiny_stages"
    for step in (50, 90, 120, 170):
        there = rf"(?m)^\| {step} \| [^|]*\| ([\d.]+) \|"
        yield make("docs/stages.md", there, stages, rf"step {step}: held-out loss ([\d.]+)", within=0.05)
    for more, there in (
        ("--train.steps 180", r"180 steps: ([\d.]+);"),
        ("--train.steps 220 --optim.learning-rate 5e-3", r"([\d.]+) at a rate of 5e-3"),
        ("--train.steps 220 --optim.learning-rate 1e-2", r"([\d.]+) at 1e-2"),
        ("--train.steps 220 --optim.learning-rate 2e-2", r"([\d.]+) at 2e-2"),
    ):
        run_dir = "{tmp}/" + re.sub(r"[^\w]+", "_", more)
        command = f"python train.py configs/tiny_v4.py {more} --train.run-dir {run_dir}"
        yield make(page, there, command, held_out, within=0.05)
    for step, column in itertools.product((100, 120, 170), ("eval/recall", "eval/recall_random")):
        there = rf"(?m)^\| {step}[^|]*\| [^|]*\| [^|]*\| " + ("[^|]*\\| " if "random" in column else "") + r"([\d.]+)"
        found = rf'"step": {step}\b[^\n]*"{column}": ([\d.]+)'
        yield make("docs/stages.md", there, stages, found, within=0.05)
    draft = (
        "python train.py configs/tiny_v41.py --train.objective draft --train.init-from {tmp}/tiny_v41 --train.run-dir "
        "{tmp}/draft --train.steps 40 --optim.learning-rate 3e-3 --optim.decay-steps 20 --loss.draft-anchors 64"
    )
    for step, there in ((1, r"acceptance\s+from ([\d.]+) to"), (40, r"acceptance\s+from [\d.]+ to ([\d.]+)\.")):
        yield make(page, there, draft, rf'"step": {step}\b[^\n]*"train/draft_acceptance": ([\d.]+)', within=0.2)
    command = "python benchmarks/grouped_matmul.py"
    for shape, groups in (("4096 x 512 x 512", 8), ("4096 x 512 x 512", 64), ("8192 x 128 x 128", 16)):
        for kind in ("forward", "gradient"):
            there = rf"\| {shape}, {groups} \| {kind} \| [\d.]+ s \| [\d.]+ s \| ([\d.]+) \|"
            yield make(page, there, command, rf"{shape}, +{groups} groups, {kind} .* ([\d.]+)x", within=0.5)
    command = "python benchmarks/attention.py"
    for S, ratio in ((2048, 4), (2048, 16), (4096, 16), (4096, 32), (8192, 32)):
        there = rf"\| {S} \| {ratio} \| [\d.]+ s \| [\d.]+ s \| ([\d.]+) \|"
        yield make(page, there, command, rf"S +{S} .*M/k +{ratio} .*gathered is ([\d.]+)x", within=0.5)
    memory = "python benchmarks/attention.py"
    for kind in ("masked", "gathered"):
        there = rf"{kind} (\d+), (\d+), (\d+) MiB"
        yield make(
            page, there, memory, rf"temporary MiB, {kind}: S 2048: (\d+), S 4096: (\d+), S 8192: (\d+)", within=0.1
        )
    command = "python benchmarks/compile_time.py"
    yield make(page, r"([\d.]+) times as long", command, r"take ([\d.]+)x", within=0.3)
    page, command = "docs/optimizers.md", "python benchmarks/optimizers.py --step"
    for shape in ("40 x 64 x 128", "16 x 256 x 1024", "16 x 1024 x 256", "8 x 512 x 1280", "4 x 768 x 768"):
        forms = {"Gram form": 1, "in fours": 2, "optax": 3, "plain loop": 4}
        for form, column in forms.items():
            there = rf"\| {shape} \| 1 \([^|]*\|" + r"[^|]*\|" * (column - 1) + r" ([\d.]+) \|"
            yield make(page, there, command, rf"\| {shape} \| {form} \| [\d.]+ \| ([\d.]+) \|", within=0.5)
    for name, there in (
        ("deepseek_v4", r"V4's table \(([\d.]+) times"),
        ("deepseek_v41", r"V4.1's\s+\(([\d.]+) times"),
    ):
        yield make(page, there, command, rf"\| {name} \| [\d.]+ \| ([\d.]+) \|", within=0.3)
    command = "python benchmarks/modality_bias.py --train.run-dir {tmp}/modality_bias"
    for name in ("no bias", "one bias", "two biases"):
        there = rf"(?m)^\| {name} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
        found = rf"{name} +max/mean, mean of layers: both ([\d.]+), text ([\d.]+), images ([\d.]+)"
        yield make("docs/v41.md", there, command, found, within=0.15)
    rows = (rf"\| {name} \|[^\n]*\| ([\d.]+) \|\n" for name in ("no bias", "one bias", "two biases"))
    losses = r"held-out loss +([\d.]+) nats per byte \(.*" * 3
    yield make("docs/v41.md", "".join(rows), command, "(?s)" + losses, within=0.05)
    yield from _labs()


def _labs() -> Iterator[Figure]:
    """Validation losses of the comparisons of optimizers; the names of the page and of the lab differ in some."""
    command = "python -m dsv4_jax optim-lab benchmarks/optim/{}.py --out {{tmp}}/{}"
    names = ("AdamW", "Muon", "Muon, five steps", "head-wise Muon")
    cases = [("charlm", name, 600) for name in names] + [("charlm", "Muon", steps) for steps in (450, 400, 300)]
    for lab, name, steps in cases:
        there = rf"(?m)^\| {name} \| {steps} \| [\d.]+ \| ([\d.]+) ±"
        yield Figure("docs/optimizers.md", there, command.format(lab, lab), there, within=0.02, cost="expensive")
    for name in ("AdamW", "head-wise Muon"):
        there = rf"(?m)^\| {name} \| 0\.0\d+ \| (1\.[\d]+) ±"
        found = rf"(?m)^\| {name} \| 2000 \| [\d.]+ \| ([\d.]+) ±"
        yield Figure(
            "docs/optimizers.md", there, command.format("nanogpt", "nanogpt"), found, within=0.02, cost="expensive"
        )
    zipf = {"SGD, momentum 0.9": "SGD", "AdamW (0.9, 0.95)": "AdamW", "AdamW (0.9, 0.999)": "AdamW, b2 0.999"}
    for name, contender in zipf.items():
        there = rf"(?m)^\| {re.escape(name)} \| [\d.]+ \| ([\d.]+) ±"
        found = rf"(?m)^\| {re.escape(contender)} \| 1500 \| [\d.]+ \| ([\d.]+) ±"
        yield Figure("docs/optimizers.md", there, command.format("zipf", "zipf"), found, within=0.1, cost="expensive")


FIGURES = (*_cheap(), *_plans(), *_expensive())


@functools.cache
def _run(command: str, folder: str) -> str:
    """Standard output of a command in the repository's root and its run's metrics.jsonl; an error if it fails."""
    words = [sys.executable if word == "python" else word.replace("{tmp}", folder) for word in shlex.split(command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {command} ended with exit status {done.returncode}: {done.stderr[-2000:]}")
    runs = [Path(b) for a, b in itertools.pairwise(words) if a == "--train.run-dir"]
    return "\n".join([done.stdout, *(path.read_text() for run in runs for path in run.glob("metrics.jsonl"))])


def _as_shown(shown: str, value: float) -> str:
    """The value with the decimals and thousands separators of the number that the page shows."""
    return f"{value:{',' if ',' in shown or abs(value) >= 1e4 else ''}.{len(shown.partition('.')[2])}f}"


def differences(figure: Figure, page: str, output: str) -> list[Difference]:
    """The figures in the text of a page that differ from a command's output.

    Raises:
        SystemExit: if the page or the output lacks the figure: a pattern is out of date.
    """
    there, matches = re.search(figure.there, page), list(re.finditer(figure.output, output))
    if there is None or not matches:
        where = figure.page if there is None else f"the output of {figure.name}"
        what = figure.there if there is None else figure.output
        raise SystemExit(f"error: benchmarks/figures.py looks for {what!r}, which {where} lacks; correct the pattern")
    found = []
    for group, (shown, measured) in enumerate(zip(there.groups(), matches[-1].groups(), strict=True), 1):
        right = measured
        if re.fullmatch(r"[\d,]*\.?\d+", shown) and re.fullmatch(r"[\d,]*\.?\d+", measured):
            value, old = float(measured.replace(",", "")) / figure.unit, float(shown.replace(",", ""))
            right = shown if abs(value - old) <= figure.within * old and figure.within else _as_shown(shown, value)
        if right != shown:
            found.append(Difference(figure.page, *there.span(group), shown, right, figure.name))
    return found


def check(figures: Iterable[Figure], folder: str) -> list[Difference]:
    """Measure the figures and return those that differ from their pages."""
    found = []
    for figure in figures:
        output = _run(figure.command, folder) if isinstance(figure.command, str) else figure.command()
        found += differences(figure, (ROOT / figure.page).read_text(), output)
    return found


def write(found: list[Difference]) -> None:
    """Replace the figures on their pages by the measured ones."""
    for d in sorted(set(found), key=lambda d: -d.start):  # from the end, so that places stay right
        path = ROOT / d.page
        text = path.read_text()
        path.write_text(text[: d.start] + d.right + text[d.end :])


def main() -> None:
    """Check or correct the pages."""
    parser = argparse.ArgumentParser(description="Measure the figures of README.md and docs/ again.")
    parser.add_argument("--cheap", action="store_true", help="only those that take seconds")
    parser.add_argument("--all", action="store_true", help="also trainings, benchmarks and optimizer comparisons")
    parser.add_argument("--write", action="store_true", help="correct the pages")
    parser.add_argument("--only", default="", help="regular expression of commands; the others are left out")
    args = parser.parse_args()
    costs = COSTS[:1] if args.cheap else COSTS if args.all else COSTS[:2]
    figures = [f for f in FIGURES if f.cost in costs and re.search(args.only, f.name)]
    with tempfile.TemporaryDirectory() as folder:
        found = check(figures, folder)
    for d in found:
        print(f"{d.page}: {d.found} should be {d.right}: {d.command}")
    print(f"{len(figures)} figures compared, {len(found)} differ")
    if args.write:
        write(found)
    elif found:
        sys.exit(1)


if __name__ == "__main__":
    main()
