# SPDX-License-Identifier: Apache-2.0
"""Parse the command line and call the package of each command.

Exit status: 0 done; 1 the run failed; 2 bad usage or configuration; 143 stopped by SIGTERM and 130 by SIGINT (Ctrl-C),
both after the state was saved. After a second SIGINT, or one before the first step, the status is 130 and nothing more
is saved.
"""

import argparse
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsv4_jax.config import Config
from dsv4_jax.config.files import config_from_json, load_config, made_by, read_config
from dsv4_jax.data.remote import open_path, reading
from dsv4_jax.section import ConfigError, RunError
from dsv4_jax.train.console import SafeConsole, printable


def exit_on_error(command: Callable[[], None]) -> None:
    """Run a command; turn ConfigError, RunError and KeyboardInterrupt into a message and exit status 2, 1 and 130."""
    try:
        command()
    except (ConfigError, RunError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("error: interrupted before the state was saved", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:
        if stop.code == 128 + signal.SIGTERM:  # later SIGTERMs must not end the exit with another status
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train(arguments: Sequence[str] | None = None, command_name: str = "train.py") -> None:
    """Run `train.py CONFIG [--section.key value ...]`, or `dsv4 train CONFIG ...`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0].startswith("-"):
        print(
            f"usage: {command_name} CONFIG [--section.key value ...]; {command_name} CONFIG --help lists the keys",
            file=sys.stderr,
        )
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)

    def command() -> None:
        config = load_config(arguments[0], arguments[1:])
        from dsv4_jax.train.run import run

        run(config)

    exit_on_error(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `dsv4 COMMAND`, or `python -m dsv4_jax COMMAND`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = Path(sys.argv[0]).name
    name = "python -m dsv4_jax" if name == "__main__.py" else name
    if arguments[:1] == ["train"]:
        return train(arguments[1:], f"{name} train")
    parser = argparse.ArgumentParser(
        prog=name, description="Train DeepSeek-V4 and V4.1 models; plan, inspect and sample runs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    keys: dict[str, Any] = {"allow_abbrev": False, "epilog": "Other flags: --section.key value, as for train."}
    commands.add_parser("train", help="train CONFIG [--section.key value ...]; train CONFIG --help lists the keys")
    plan = commands.add_parser("plan", help="print a run's stages, layers, parameters and optimizer", **keys)
    plan.add_argument("--topology", help="also compile the step for this TPU slice, such as v5p:2x2x1")
    plan.add_argument("--stage", type=int, default=1, help="which stage of the run to describe (default 1)")
    plan.add_argument("config", help="a configuration file, or the name of a shipped one")
    data = commands.add_parser("data", help="tokenise a configuration's sources ahead, and describe them", **keys)
    data.add_argument("config", help="a configuration file, or the name of a shipped one")
    sample = commands.add_parser("sample", help="continue a prompt with a trained model")
    sample.add_argument("run", help="folder or address of a run, or RUN@STEP for the model of one of its checkpoints")
    what = sample.add_mutually_exclusive_group(required=True)
    what.add_argument("prompt", nargs="?", help="text to continue; - reads it from the standard input")
    what.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help=(
        'continue many: a line {"prompt": ...} each; - reads them from the standard input'
    ))  # fmt: skip
    what.add_argument("--interactive", action="store_true", help="continue the text with every line that is typed")
    sample.add_argument("--image", default="", metavar="FILE", help="image to put before the prompt")
    sample.add_argument("--tokens", type=int, default=256, help="tokens to add at most (default 256)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    sample.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0: from all (default)")
    sample.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest with this probability")
    sample.add_argument("--min-p", type=float, default=0.0, help="draw from those of this share of the likeliest's")
    sample.add_argument("--stop", action="append", default=[], help="string before which the text ends; repeatable")
    sample.add_argument("--seed", type=int, default=0, help="seed of the draws")
    sample.add_argument("--rows", type=int, default=8, help="prompts of a file to continue at a time (default 8)")
    sample.add_argument("--draft", type=int, nargs="?", const=None, default=0, metavar="N", help=(
        "draft N tokens at a time, without N as many as the draft blocks make; prints the accepted share"
    ))  # fmt: skip
    for axis, splits in (("data", "rows"), ("expert", "rows and experts"), ("context", "positions of a chunk")):
        text = f"devices that split the {splits} (default 1, whatever the run had)"
        sample.add_argument(f"--mesh.{axis}", type=int, default=1, metavar="N", dest=axis, help=text)
    sample.add_argument("--raw", action="store_true", help="write control characters as they are; not to a terminal")
    convert = commands.add_parser("convert", help="write a run's model, or published weights, as a folder of weights")
    convert.add_argument("source", metavar="FROM", help="a run, RUN@STEP, or a folder of safetensors files")
    convert.add_argument("target", metavar="TO", type=Path, help="folder to make; an unfinished one is finished")
    convert.add_argument("--format", default="bf16", help="f32, bf16 (default), fp8, fp4, or hf: names of transformers")
    rewind = commands.add_parser("rewind", help="take a run back to an earlier checkpoint; what came later is moved")
    rewind.add_argument("run_dir", help="folder of a run")
    rewind.add_argument("step", type=int, help="step of the checkpoint; an unknown one lists those that there are")
    lab = commands.add_parser("optim-lab", help="compare optimizers on a small task; the same command again resumes")
    lab.add_argument("spec", type=Path, help="a Python file that defines lab()")
    lab.add_argument("--out", type=Path, help="folder of the results (default runs/optim_lab/NAME OF SPEC)")
    report = commands.add_parser("report", help="write an HTML page with the curves of one or several runs")
    report.add_argument("runs", nargs="+", metavar="RUN", help="folder or address of a run")
    report.add_argument("--out", metavar="FILE.html", help="the page (default report.html in the first RUN)")
    args, args.overrides = parser.parse_known_args(arguments)
    if args.overrides and "config" not in args:
        parser.error(f"unrecognized arguments: {' '.join(args.overrides)}")
    run = {
        "plan": _plan,
        "data": _data,
        "sample": _sample,
        "convert": _convert,
        "rewind": _rewind,
        "optim-lab": _optim_lab,
        "report": _report,
    }[args.command]
    exit_on_error(lambda: run(args))


def _plan(args: argparse.Namespace) -> None:
    config = load_config(args.config, args.overrides)
    from dsv4_jax.plan import plan

    for line in plan(config, args.stage, args.topology):
        print(line)


def _data(args: argparse.Namespace) -> None:
    config = load_config(args.config, args.overrides)
    from dsv4_jax.data.prepare import run

    run(config, SafeConsole())


def _convert(args: argparse.Namespace) -> None:
    from dsv4_jax.weights.convert import FORMATS, convert_folder, convert_model

    if args.format not in FORMATS:
        raise ConfigError(f"--format {args.format!r}, expected {', '.join(FORMATS)}")
    source = Path(args.source)
    if source.is_dir() and any(source.glob("*.safetensors*")):
        return convert_folder(source, args.target, args.format, SafeConsole())
    config, run = _read_run(args.source)
    from dsv4_jax.train.checkpoint import find_checkpoint, load_model, parse_source

    step = find_checkpoint(*parse_source(args.source)).name
    tokenizer = Path(config.data.tokenizer) if config.data.tokenizer != "bytes" else None
    convert_model(load_model(config, args.source), f"{run} {step}", tokenizer, args.target, args.format, SafeConsole())


def _read_run(source: str) -> tuple[Config, Any]:
    """Read the configuration of the run that `RUN` or `RUN@STEP` names; return it and the run's folder."""
    from dsv4_jax.train.checkpoint import parse_source

    run_dir, _ = parse_source(source)
    path = run_dir / "config.json"
    with reading(source):
        if not path.exists():
            raise ConfigError(f"{run_dir} is not a run directory: it has no config.json")
        return config_from_json(read_config(path)), run_dir


def _rewind(args: argparse.Namespace) -> None:
    from dsv4_jax.train.fork import rewind

    print(printable(rewind(open_path(args.run_dir, "RUN"), args.step)))


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the pictures need matplotlib: pip install 'dsv4_jax[lab]'")


def _optim_lab(args: argparse.Namespace) -> None:
    _need_matplotlib()
    lab = made_by(args.spec, "lab")
    from dsv4_jax.lab import Lab, run_lab
    from dsv4_jax.lab.figures import draw_figures, format_table

    if not isinstance(lab, Lab):
        raise ConfigError(f"{args.spec}: lab() must return a dsv4_jax.lab.Lab, found {type(lab).__name__}")
    out = args.out or Path("runs/optim_lab") / args.spec.stem
    results = run_lab(lab, out, lambda line: print(line, flush=True))
    print(format_table(lab, results), *draw_figures(lab, results, out), sep="\n")


def _report(args: argparse.Namespace) -> None:
    _need_matplotlib()
    runs = [open_path(path, "RUN") for path in args.runs]
    out = open_path(args.out, "--out") if args.out else runs[0] / "report.html"
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; --out takes the name of a file")
    from dsv4_jax.report import write_report

    with reading(*args.runs, args.out or ""):
        print(write_report(runs, out))


def _sample(args: argparse.Namespace) -> None:
    if args.raw and sys.stdout.isatty():
        raise ConfigError("--raw: control characters could change the terminal; write to a pipe or a file")
    config, _ = _read_run(args.run)
    from dsv4_jax.data.tokenizer import load_tokenizer
    from dsv4_jax.generate.command import Sampler, read_input, read_prompts, type_lines
    from dsv4_jax.generate.request import make_request
    from dsv4_jax.generate.speculate import check_width, full_width
    from dsv4_jax.mesh import start_devices, use_first_devices
    from dsv4_jax.train.checkpoint import load_model
    from dsv4_jax.train.programs import use_compile_cache

    # Check everything that needs no device.
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.border)
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")}
    options |= {"max_tokens": args.tokens, "image": args.image}
    draft = full_width(config.model) if args.draft is None else args.draft
    check_width(config.model, draft)
    prompt, requests = args.prompt, []
    if args.prompts:
        requests = read_prompts(args.prompts, config.model, tokenizer, **options)
    elif not args.interactive:
        prompt = read_input() if prompt == "-" else prompt
        requests = [make_request(prompt, config.model, tokenizer, **options)]

    # A run on emulated CPU devices is sampled on those, as many as the mesh asks for.
    mesh = args.data, args.expert, args.context
    start_devices(math.prod(mesh) if config.train.cpu_devices else 0)
    use_compile_cache(config.train.compile_cache)
    use_first_devices(*mesh)
    model = load_model(config, args.run)  # the run may have been moved since config.json was written

    def write(text: str) -> None:
        sys.stdout.write(text if args.raw else printable(text))
        sys.stdout.flush()

    sampler, interrupted = Sampler(model, tokenizer, requests, write, rows=args.rows, draft=draft), False
    try:
        if args.prompts:
            sampler.write_all()
        elif args.interactive:
            sampler.converse(type_lines(), lambda line: make_request(line, model.cfg, tokenizer, **options))
        else:
            write(prompt)
            sampler.stream()
    except KeyboardInterrupt:
        interrupted = True
        write("\n")
    for line in sampler.report():
        print(line, file=sys.stderr)
    if interrupted:
        sys.exit(128 + signal.SIGINT)
