# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/: their commands are run or at least parsed, their code runs, what they name exists."""

import contextlib
import dataclasses
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from support.golden_models import empty_model, small_config
from support.pages import LANGUAGES, PAGES, PROGRAMS, ROOT, blocks, commands, inline
from tokenizers import Tokenizer, models, pre_tokenizers

from dsv4_jax import cli
from dsv4_jax.config.files import load_config
from dsv4_jax.config.keys import keys
from dsv4_jax.data.packing import ORIGIN
from dsv4_jax.train.feed import read_data, streams
from dsv4_jax.weights.names import to_official

pytestmark = pytest.mark.usefixtures("cheap_compilation")
COMMANDS = [command for page in PAGES for command in commands(page)]
OFFICIAL = small_config(n_mtp_layers=0, compress_ratios=(4,))
TINY = ROOT / "configs" / "tiny_v4.py"


def filled(command, config=None, run="runs/default"):
    """A command's words with its placeholders replaced, and without what stands in square brackets."""
    text = "\0".join(command.words)
    if not config:  # one of ours that has what the command is about
        config = "tiny_v41" if re.search(r"drawn:|pages|draft", text) else "tiny_v4"
        if command.where.startswith("stages.md"):
            config = "v4_flash" if "--mesh." in text else "tiny_stages"
        config = f"configs/{config}.py"
    names = {"CONFIG": config, "RUN": run, "STEP": "3"}
    return [names.get(word, word) for word in re.sub(r"\0\[[^\]]*\]", "", text).split("\0")]


def parse(words, monkeypatch):
    """Checks a command as its program would, up to where work begins."""
    monkeypatch.chdir(ROOT)
    program, rest = words[0], [word for word in words[1:] if word not in ("--help", "...")]
    if program.startswith("deploy/"):
        assert (ROOT / program).is_file(), f"no file {program}"
        return
    assert program in PROGRAMS, f"unknown program {program}"
    if program == "make":
        targets = [word for word in rest if "=" not in word]
        for target in targets:
            assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text()), f"no target {target}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install"
        for names in re.findall(r"(?:\.|dsv4_jax)\[([\w,]+)\]", " ".join(rest)):
            assert set(names.split(",")) <= set(extras), f"no extra {names}"
    elif rest[:1] == ["train.py"] or (program == "dsv4" and rest[:1] == ["train"]):
        load_config(rest[1], rest[2:])
    elif program == "dsv4" or rest[:2] == ["-m", "dsv4_jax"]:
        rest = rest[2 * (program == "python") :]
        if len(rest) < 2:  # the command is only named
            with pytest.raises(SystemExit, match="0"):
                cli.main([*rest, "--help"])
            return
        parsed = []
        for name in ("_plan", "_data", "_sample", "_rewind", "_report", "_optim_lab", "_convert"):
            monkeypatch.setattr(cli, name, parsed.append)
        cli.main(rest)
        (args,) = parsed
        if "config" in args:
            load_config(args.config, args.overrides)
    elif program == "python":
        path = ROOT / rest[0]
        assert path.is_file(), f"no file {rest[0]}"
        if len(rest) > 1 and rest[1].endswith(".py"):
            load_config(rest[1], rest[2:])
        else:
            assert all(word in path.read_text() for word in rest[1:] if word.startswith("--")), "unknown flag"
    else:
        files = [word for word in rest if word.startswith("deploy/")]
        assert all((ROOT / file).is_file() for file in files), f"no file {files}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.where} {' '.join(c.words)[:60]}")
def test_every_command_is_one_that_exists(command, monkeypatch):
    with pytest.raises(ValueError) if command.comment.startswith("refused") else contextlib.nullcontext():
        parse(filled(command), monkeypatch)


def test_unknown_commands_and_flags_fail(monkeypatch):
    for words in ("jq .", "make lunch", "pip install 'dsv4_jax[fast]'", "python nowhere.py"):
        with pytest.raises(AssertionError):
            parse(words.split(), monkeypatch)
    with pytest.raises(ValueError, match=r"train\.steps"):
        parse("python train.py configs/tiny_v4.py --train.stepz 3".split(), monkeypatch)
    for words in ("plan configs/tiny_v4.py --topologi v5p", "sample x", "fly"):
        with pytest.raises((SystemExit, AssertionError, ValueError)):
            parse(["python", "-m", "dsv4_jax", *words.split()], monkeypatch)


def test_blocks_say_their_language():
    for page in PAGES:
        for block in blocks(page):
            if block.language:
                assert block.language in LANGUAGES, f"{block.where}: unknown language {block.language}"
            else:
                first = block.text.split()[0]
                assert first in PROGRAMS or first.startswith("deploy/"), (
                    f"{block.where}: fence this block with its language: {LANGUAGES}"
                )
            if block.language == "json":
                json.loads(block.text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    """A folder with the data that the pages' commands name, and a configuration of a small model."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("texts", "my_texts", "web", "code"):
        (folder / name).symlink_to(corpus)
    (folder / "corpus").mkdir()
    lines = [json.dumps({"text": f"Line {i} of the corpus, which is read twice."}) for i in range(60)]
    for i in range(20):
        (folder / "corpus" / f"{i}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[3 * i : 3 * i + 3]).encode()))
    ids = np.concatenate([np.r_[np.arange(i, i + 50) % 256, 256] for i in range(60)])
    ids.astype(np.uint16).tofile(folder / "train.bin")
    words = {f"{a}": i for i, a in enumerate(["<|endoftext|>", "?", *(chr(c) for c in range(33, 127))])}
    library = Tokenizer(models.WordLevel(words, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "small.py").write_text(
        "from support.runs import small\n\n\ndef config():\n    return small('', 'runs/small')\n"
    )
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall("```python\n(.*?)```", page, re.DOTALL)
    for file, name in re.findall(r"(\w+\.py):(\w+)", " ".join(" ".join(c.words) for c in COMMANDS)):
        (folder / file).write_text(next(block for block in blocks if re.search(rf"^(def|class) {name}\b", block, re.M)))
    official = dataclasses.asdict(OFFICIAL)
    (folder / "config.json").write_text(json.dumps(official))
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


SOURCES = [c for c in COMMANDS if c.words[:3] == ["python", "train.py", "CONFIG"] and "--data." in str(c.words)]
SOURCES = [c for c in SOURCES if "drawn:" not in str(c.words) and "pages" not in c.words]


@pytest.mark.parametrize("command", SOURCES, ids=lambda c: f"{c.where} {' '.join(c.words[3:])[:60]}")
def test_sources_of_the_commands_give_batches(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    flags = filled(command, "small.py")[3:]
    if not {"--data.path", "--data.mixture"} & set(flags):
        flags += ["--data.path", "texts/"]
    cfg = load_config("small.py", flags)
    data = read_data(cfg)[0]
    with streams(cfg, data, ORIGIN) as (stream, evaluation):
        batch = next(stream)
    assert (batch["targets"] >= 0).mean() > 0.3 and evaluation


def test_training_profile_sample_report_and_data_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("dsv4_jax.train.run.start_devices", lambda *_: None)
    (command,) = (c for c in COMMANDS if "--train.profile-steps" in c.words and "CONFIG" in c.words)
    more = ["--data.path", "texts/", "--train.run-dir", "runs/a", "--train.steps", "13", "--train.eval-every", "100"]
    cli.train([*filled(command, "small.py")[2:], *more])
    assert list((folder / "runs" / "a" / "profile").rglob("*.xplane.pb"))
    cli.main(["data", "small.py", "--data.path", "texts/"])
    cli.main(["sample", "runs/a", "def main(", "--tokens", "4"])
    cli.main(["report", "runs/a"])
    said = capsys.readouterr().out
    assert "held-out loss" in said and "tokens to train on" in said and "def main(" in said
    assert (folder / "runs" / "a" / "report.html").is_file()


def long(page, block):
    return page.name == "README.md" and "ds.train(" in block.text  # a minute: a slow test


PRELUDE = """
import jax, jax.numpy as jnp, optax
import dsv4_jax as ds
from flax import nnx
from dsv4_jax import optim
from dsv4_jax.config import Config, Stage
"""


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=lambda p: p.name
)
def test_python_blocks_run_and_print_what_they_say(page, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(PRELUDE, names)
    names["tensors"] = dict(to_official(empty_model(OFFICIAL)))
    names["params"] = {n: np.zeros(s) for n, s in {"embed": (8, 4), "lm_head": (4, 8), "norm": (4,)}.items()}
    names["params"] |= {n: np.zeros(s) for n, s in {"q_proj": (4, 64), "bias": (4,), "kernel": (4, 4)}.items()}
    names["rate"] = 1e-3
    for block in (b for b in blocks(page) if b.language == "python" and not long(page, b)):
        capsys.readouterr()
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
        said = capsys.readouterr().out.splitlines()
        right = re.findall(r"(?m)^ *print\(.*\)  # (.*)$", block.text)
        assert [line for line in said if line in right] == right, f"{block.where}: printed {said}"


FILES = re.compile(r"[\w./]+\.(py|md|json|npy|sh|sbatch|yaml)")
THEIRS = {"small.py", "lion.py", "csv_loss.py", "z_loss.py", "extremes.py", "next_token.py"}  # files of a reader


def test_keys_and_files_that_the_pages_name_exist():
    valid, places = (
        set(keys(load_config(TINY))),
        ("", "dsv4_jax/", "tests/", "docs/", "configs/", "benchmarks/", "dsv4_jax/train/", "dsv4_jax/data/"),
    )
    sections = "|".join(sorted({key.partition(".")[0] for key in valid}))
    for page in PAGES:
        for code in inline(page):
            for flag in re.findall(rf"--((?:{sections})\.[\w.-]+)", code):
                key = flag.replace("-", "_")
                assert key in valid or key.replace(".no_", ".") in valid, f"{page.name}: no key {key}"
            if match := re.fullmatch(rf"((?:{sections})\.[a-z_.0-9]+)( = .*)?", code):
                known = match[1] in valid or any(key.startswith(match[1] + ".") for key in valid)
                section, _, name = match[1].partition(".")
                known |= section in ("optim", "mesh") and hasattr(importlib.import_module(f"dsv4_jax.{section}"), name)
                assert known or FILES.fullmatch(code), f"{page.name}: no key {code}"
            if (
                code not in THEIRS
                and FILES.fullmatch(code)
                and code.endswith((".py", ".sh", ".sbatch", ".yaml", ".md"))
            ):
                there = any((ROOT / place / code).exists() for place in places)
                assert there or list((ROOT / "tests").rglob(code)), f"{page.name}: no file {code}"


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" not in target:
                path = page.parent / target if target else page
                assert path.exists(), f"{page.name}: no {target}"
                assert not anchor or anchor in anchors(path), f"{page.name}: no section {anchor} in {path.name}"


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES if f"{page.name}" not in index and page.stem not in index] == []


@pytest.mark.slow
def test_the_training_of_the_readme_returns_its_metrics(monkeypatch, tmp_path):
    (block,) = (b for b in blocks(ROOT / "README.md") if "ds.train(" in b.text)
    for name in ("configs", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(PRELUDE + block.text, names)
    assert len(names["metrics"]) == 20 and int(names["state"].step) == 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_training_command_runs(folder):
    """In the order of the pages, in a folder of their own, for two steps each, or three if they set the steps."""
    (folder / "train.py").symlink_to(ROOT / "train.py")
    runs = [c.words for c in COMMANDS if c.words[0] == "python" and "CONFIG" not in c.words and len(c.words) > 2]
    runs = [
        w
        for w in runs
        if "/shared" not in str(w) and "gs://" not in str(w) and (w[1] == "train.py" or (w[1] == "-m" and len(w) > 4))
    ]
    runs = [w for w in runs if not {"optim-lab", "RUN", "convert"} & set(w)]
    env = {key: value for key, value in os.environ.items() if key not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    short = ["--optim.warmup-steps", "1", "--optim.decay-steps", "0", "--train.sample-tokens", "0"]
    short += ["--train.eval-batches", "1", "--data.path", "texts", "--data.held-out", "0.2"]
    for number, words in enumerate(runs):
        more = []
        if words[1] == "train.py":
            more = [*short, "--train.steps", "3" if "--train.steps" in words else "2"]
            if re.search(r"--(optim|data|mesh|model)\.", " ".join(words)):  # not a run that goes on
                more += ["--train.run-dir", f"runs/{number}"]
        elif words[3] == "sample":
            more = ["--tokens", "2"]
        done = subprocess.run(
            [sys.executable, *words[1:], *more], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr[-2000:])
