# SPDX-License-Identifier: Apache-2.0
"""Text of data and models on a terminal, in a log and in the report: readable, and without power over them."""

import html
import io
import json
import types

import numpy as np
import pytest
from support.runs import small, train

from dsv4_jax import cli, report
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.generate import command
from dsv4_jax.generate import sample as sampling
from dsv4_jax.generate.engine import Token
from dsv4_jax.model.cache import init_cache
from dsv4_jax.model.token_types import END, IMAGE, NEWLINE, START, TEXT
from dsv4_jax.section import ConfigError
from dsv4_jax.train import checkpoint, run, run_dir
from dsv4_jax.train.console import SafeConsole, printable

EVIL = "a\x1b]0;owned\x07\r\x9b31mb\u202ec\x00"
TAME = r"a\x1b]0;owned\x07\r\x9b31mb\u202ec\x00"


def test_what_is_escaped_and_what_is_not():
    assert printable(EVIL) == TAME and printable(TAME) == TAME
    for text in ("plain", "two\nlines\twith a tab", "Grüße, 你好\u3000世界, nbsp\u00a0", "🙂"):
        assert printable(text) == text
    assert printable("\udc80\x85\u2028") == r"\udc80\x85\u2028"
    assert all(printable(chr(c)) == f"\\x{c:02x}" or chr(c) in "\t\n\r" for c in (*range(32), *range(127, 160)))


def test_a_console_and_errors_escape(capsys):
    said = io.StringIO()
    SafeConsole(file=said).print(EVIL, style="yellow")
    assert said.getvalue() == TAME + "\n"

    def fail():
        raise ConfigError(f"line 1 of {EVIL}")

    with pytest.raises(SystemExit):
        cli.exit_on_error(fail)
    assert capsys.readouterr().err == f"error: line 1 of {TAME}\n"


def test_a_run_prints_no_control_characters_of_its_sample(corpus, tmp_path, monkeypatch, cheap_compilation):
    asked = []

    def evil(model, tokenizer, prompt, *arguments, **options):
        asked.append((prompt, options))
        return EVIL, []

    monkeypatch.setattr(run, "sample", evil)
    said = train(small(corpus, tmp_path, steps=2, sample_tokens=8))
    ((prompt, options),) = asked
    assert prompt.startswith("The quick brown fox number") and options == {"pictures": []}
    assert f"step 2: sample: after {prompt!r} of the held-out text:\n{TAME}\n" in said
    page = report.write_report([tmp_path], tmp_path / "page.html").read_text()
    assert f"of the held-out text:\n{html.escape(TAME)}</td>" in page


@pytest.fixture
def evil_model(corpus, tmp_path, monkeypatch):
    class Evil:
        """A generator of one request, whose text is evil."""

        rows, capacity, draft, last, busy = 1, 64, 0, "token", False

        def __init__(self, *arguments, **options):
            self.cache = init_cache(config.model, 1, 64)

        def add(self, request, after):
            self.busy = True
            return 0

        def step(self):
            self.busy = False
            return [Token(0, 1, 0.0, "stop", EVIL, None)]

    config = small(corpus, tmp_path)
    monkeypatch.setattr(command, "Generator", Evil)
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: types.SimpleNamespace(cfg=config.model))
    (tmp_path / "config.json").write_text(json.dumps(run_dir.resolved(config)))
    return str(tmp_path)


def test_raw_samples_go_into_a_pipe_only(evil_model, capsysbinary, monkeypatch):
    cli.main(["sample", evil_model, "x"])
    assert capsysbinary.readouterr().out == f"x{TAME}\n".encode()
    cli.main(["sample", evil_model, "x", "--raw"])
    assert capsysbinary.readouterr().out == f"x{EVIL}\n".encode()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(SystemExit) as stop:
        cli.main(["sample", evil_model, "x", "--raw"])
    assert stop.value.code == 2 and b"pipe" in capsysbinary.readouterr().err


def test_the_report_has_no_control_characters(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, EVIL: 2.0}) + "\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({"step": 1, "event": EVIL, "text": EVIL}) + "\n")
    page = report.write_report([tmp_path], tmp_path / "out.html").read_text()
    assert TAME in page and not set(EVIL) - set(TAME) & set(page)
    assert not set("\x1b\x07\r\x9b\u202e\x00") & set(page)


def test_the_prompt_is_half_of_the_longest_whole_document_of_text():
    border = Bytes.border
    text = lambda words: list(words.encode())
    rows = [
        [border, *text("short"), *[border, *text("a longer document")], 0, 0],
        [*text("the rest of a very long document"), border, *text("x")],
        [border, *text("a document with a picture in it, longer than all")],
    ]
    segments = [[1] * 6 + [2] * 18 + [0] * 2, [1] * 32 + [2] * 2, [1] * 49]
    length = max(map(len, rows))
    pad = lambda lists: np.array([x + [0] * (length - len(x)) for x in lists])
    kinds = np.full((3, length), TEXT)
    kinds[2, 5] = IMAGE
    batch = {"ids": pad(rows), "segment_ids": pad(segments)}
    assert sampling.held_out_prompt([batch | {"token_types": kinds}], Bytes()) == "a longer "
    assert sampling.held_out_prompt([batch], Bytes(), most=10) == "a document"
    pictures = {k: v[2:] for k, v in (batch | {"token_types": kinds}).items()}
    assert sampling.held_out_prompt([pictures], Bytes()) == ""
    assert sampling.held_out_prompt([pictures, batch], Bytes(), most=10) == "a document"


def test_pictures_are_those_of_the_documents_with_the_text_that_follows():
    """The second picture of a row, of a document with text before it; the next picture ends its text."""
    border = Bytes.border
    picture = [START, IMAGE, NEWLINE, END]
    pieces = [
        ([border], [TEXT]), ([7] * 4, picture), ([*b"one"], [TEXT] * 3),
        ([border, *b"so: "], [TEXT] * 5), ([7] * 4, picture), ([*b"two"], [TEXT] * 3),
        ([7] * 4, picture), ([9], [TEXT]),
        ([border, *b"text"], [TEXT] * 5), ([border], [TEXT]), ([7] * 4, picture),
    ]  # fmt: skip
    ids, kinds = (np.concatenate([piece[k] for piece in pieces])[None] for k in (0, 1))
    patches = np.arange(1 * 8 * 3 * 1 * 1, dtype=np.float32).reshape(1, 8, 3, 1, 1)
    grids = np.array([[[5, 1, 1, 1], [5, 13, 1, 3], [5, 20, 2, 1], [5, 31, 1, 1], [0, 0, 0, 0]]])
    batch = {
        "ids": ids, "segment_ids": np.cumsum(ids == border, 1), "token_types": kinds, "patches": patches,
        "image_grids": grids,
    }  # fmt: skip
    one, two = json.loads(json.dumps(sampling.held_out_pictures([batch, batch], Bytes(), most=2)))
    assert (one["ids"], one["written"], one["image_grids"]) == ([border, *[7] * 4], "one", [[0, 1, 1, 1]])
    assert (two["ids"], two["written"]) == ([border, *b"so: ", *[7] * 4], "two")
    assert two["image_grids"] == [[0, 5, 1, 3]] and two["token_types"] == [TEXT] * 5 + picture
    np.testing.assert_array_equal(two["patches"], patches[0, 1:4])
    assert len(sampling.held_out_pictures([batch, batch], Bytes(), most=9)) == 4  # nothing follows the fourth picture
    assert sampling.held_out_pictures([{"ids": ids}], Bytes()) == []
    (short,) = sampling.held_out_pictures([batch], Bytes(), most=1, longest=2)
    assert short["written"] == "on"


def test_a_sample_past_the_end_of_documents():
    border = Bytes.border
    out = [*b"one", border, border, *b"two", 300, *b"3"]
    assert sampling.split_documents(out, Bytes()) == ["one", "", "two", "3"]
