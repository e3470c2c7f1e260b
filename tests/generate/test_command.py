# SPDX-License-Identifier: Apache-2.0
"""The `sample` command: prompts from files and from a reader, images, and what it measures."""

import dataclasses
import functools
import itertools
import json
import types

import jax
import numpy as np
import pytest
from PIL import Image
from support import runs
from support.golden_models import ruled_model, small_config

import dsv4_jax as ds
from dsv4_jax import cli
from dsv4_jax.config import LossConfig, MeshConfig
from dsv4_jax.data.images import read
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.generate import command
from dsv4_jax.generate.command import Sampler, read_prompts
from dsv4_jax.generate.engine import Generator
from dsv4_jax.generate.request import Request, make_request
from dsv4_jax.mesh import make_mesh
from dsv4_jax.model.token_types import END, IMAGE, NEWLINE, START, TEXT
from dsv4_jax.train import checkpoint
from dsv4_jax.train.run_dir import resolved

MODEL = small_config(
    vocab_size=257, n_layers=1, compress_ratios=(4,), n_mtp_layers=0, window_size=6, hc_sinkhorn_iters=2, remat="none",
)  # fmt: skip


@functools.cache
def small():
    return ruled_model(MODEL)


def test_a_conversation_keeps_the_cache():
    """Every line continues the text before, as if all of it were one prompt."""
    how = dict(max_tokens=5, temperature=0, stop_ids=())
    written, lines = [], ["ab\n", "c\n", "de\n"]
    sampler = Sampler(small(), Bytes(), [], written.append)
    sampler._engine = engine = Generator(small(), 1, chunk=8, capacity=64, tokenizer=Bytes())
    sampler.converse(iter(lines), lambda line: make_request(line, MODEL, Bytes(), **how))
    assert engine.steps["prompt"] == 3  # none of them read the text before again
    ids, text = [Bytes.border], ""
    for line in lines:
        ids += line.encode()
        made = list(ds.generate(small(), [ids], chunk=8, capacity=64, tokenizer=Bytes(), **how))
        ids += [token.id for token in made]
        text += "".join(token.text for token in made) + "\n"
    assert "".join(written) == text
    assert "bytes per token" in "\n".join(sampler.report())


def test_only_the_last_text_of_a_row_can_go_on():
    engine = Generator(small(), 1, chunk=8, capacity=64)
    first, second = (engine.add(Request(ids=[1], max_tokens=2)) for _ in range(2))
    while engine.busy:
        engine.step()
    with pytest.raises(ds.ConfigError, match=f"request {first}"):
        engine.add(Request(ids=[1]), after=first)
    engine.add(Request(ids=[1]), after=second)


def test_a_file_of_prompts(tmp_path):
    """Each line has its own options; the results come as lines of JSON."""
    path, written = tmp_path / "prompts.jsonl", []
    lines = [{"prompt": "ab", "max_tokens": 3}, {"prompt": "", "temperature": 0}, {"prompt": "c", "stop": ["never"]}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    requests = read_prompts(path, MODEL, Bytes(), max_tokens=4, seed=7, stop_ids=())
    assert [r.max_tokens for r in requests] == [3, 4, 4] and [r.seed for r in requests] == [7] * 3
    assert list(requests[1].ids) == [Bytes.border]
    sampler = Sampler(small(), Bytes(), requests, written.append, rows=2)
    sampler.write_all()
    records = sorted((json.loads(line) for line in written), key=lambda r: r["number"])
    assert [r["number"] for r in records] == [0, 1, 2] and all(r["finish"] == "length" for r in records)
    alone = ds.generate(small(), ["ab"], tokenizer=Bytes(), max_tokens=3, seed=7, stop_ids=(), rows=2, invariant=True)
    assert records[0]["text"] == "".join(token.text for token in alone)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "object"), ('{"prompt": 1}', "object"), ('{"prompt": "a", "temp": 1}', "temp"), ("{", "line 2"),
        ('{"prompt": "a", "top_p": 2}', "top_p"), ('{"prompt": "a", "image": "x.png"}', "no images"),
        ('{"prompt": "a", "max_tokens": "3"}', "max_tokens"), ('{"prompt": "a", "temperature": "hot"}', "temperature"),
        ('{"prompt": "a", "stop": [1]}', "stop"), ('{"prompt": "a", "image": 5}', "image"),
        ('{"prompt": "a", "temperature": 1e-40}', "1e-4"), (r'{"prompt": "\udcff"}', "UTF-8"),
    ],
)  # fmt: skip
def test_wrong_lines_are_named(tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ds.ConfigError, match="line 2") as error:
        read_prompts(path, MODEL, Bytes())
    assert words in str(error.value)


def test_files_without_prompts_are_refused(tmp_path):
    for name, content in (("empty.jsonl", "\n"), ("missing.jsonl", None)):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        with pytest.raises(ds.ConfigError, match=name):
            read_prompts(path, MODEL, Bytes())


def test_an_image_stands_before_the_text(tmp_path):
    cfg = dataclasses.replace(
        MODEL, vision_n_layers=1, vision_dim=16, vision_n_heads=2, vision_inter_dim=16, vision_patch_size=2,
        vision_downsample_ratio=2, vision_min_pixels=1, image_token_id=7,
    )  # fmt: skip
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (4, 6, 3), np.uint8)).save(path)
    request = make_request("xy", cfg, Bytes(), image=str(path))
    assert list(request.ids) == [Bytes.border, *[7] * 5, *b"xy"]
    assert list(request.token_types) == [TEXT, START, IMAGE, IMAGE, NEWLINE, END, TEXT, TEXT]
    np.testing.assert_array_equal(request.image_grids, [[0, 1, 2, 3]])
    np.testing.assert_array_equal(request.patches, read(path, VisionLayout.of(cfg)))
    path.write_text("no picture")
    with pytest.raises(ds.ConfigError, match=r"picture\.png"):
        make_request("xy", cfg, Bytes(), image=str(path))


@pytest.mark.slow
def test_images_are_read_as_in_training(v41):
    """The golden model's image, in a prompt that is read in chunks of 8: its first token and its log-probability."""
    arrays, length = v41["arrays"], 30
    request = Request(
        ids=arrays["ids"][0, :length].tolist(), token_types=arrays["token_types"][0, :length], max_tokens=1,
        temperature=0, patches=arrays["patches"], image_grids=np.asarray(v41["grids"]),
    )  # fmt: skip
    (token,) = ds.generate(v41["model"], [request], chunk=8, capacity=64)
    logp = jax.nn.log_softmax(np.asarray(v41["out"].logits)[0, length - 1])
    assert token.id == logp.argmax()
    np.testing.assert_allclose(token.logprob, logp.max(), rtol=0, atol=1e-4)


def test_speed_leaves_out_what_compiles_and_what_a_reader_takes(monkeypatch):
    """The first step of a program compiles; the time between two lines is not the model's."""
    now = itertools.count(0.0, 1.0)  # a second for every look at the clock
    monkeypatch.setattr(command, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    request = Request(ids=[1], max_tokens=6, temperature=0)
    sampler = Sampler(small(), Bytes(), [request], lambda text: None)
    sampler.stream()
    for _ in range(1000):
        command.time.perf_counter()
    first, programs, *_ = sampler.report()
    assert first == "6 tokens, the first after 2.00 s, then 1.0 tokens/s"
    assert programs == "first steps of 2 programs, which compile: 2.00 s, not in tokens/s"
    short = Sampler(small(), Bytes(), [dataclasses.replace(request, max_tokens=1)], lambda text: None)
    short.stream()
    assert next(short.report()) == "1 tokens, the first after 2.00 s"


def write_config(folder):
    """The configuration of a run of the small model."""
    config = runs.config("", folder, 8, model=MODEL, loss=LossConfig(mtp=0.0))
    (folder / "config.json").write_text(json.dumps(resolved(config)))


def test_wrong_uses_end_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    """With status 2, naming what is wrong."""
    write_config(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "top_p": 7}\n')
    monkeypatch.setattr(checkpoint, "load_model", None)
    for words, told in (
        ("x --top-p 2", "top_p = 2.0"),
        ("x --draft", "no draft blocks"),
        ("x --draft -2", "draft = -2"),
        ("x --image no.png", "no images"),
        (f"--prompts {tmp_path}/bad.jsonl", "line 2: top_p"),
        ("x --mesh.data 0", "mesh.data"),
        ("x --mesh.data 64", "64 x 1 x 1 needs 64 devices"),
        ("x --mesh.dada 2", "--mesh.dada"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["sample", str(tmp_path), *words.split()])
        assert told in capsys.readouterr().err, words


@pytest.mark.slow
def test_a_run_of_a_mesh_is_sampled_on_any(corpus, tmp_path, capsys, cheap_compilation):
    cfg = runs.small(corpus, tmp_path, steps=2)
    cfg = dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, batch_size=4), mesh=MeshConfig(data=2, expert=2, context=2)
    )
    with jax.set_mesh(make_mesh()):  # the commands set others, which end with this one
        runs.train(cfg)
        texts = []
        for mesh in ([], ["--mesh.data", "2", "--mesh.context", "2"], ["--mesh.expert", "4"]):
            capsys.readouterr()
            cli.main(["sample", str(tmp_path), "The quick", "--tokens", "8", "--temperature", "0", *mesh])
            texts.append(capsys.readouterr().out)
    assert texts[0].startswith("The quick") and len(texts[0]) > 10 and len(set(texts)) == 1


def test_an_interrupted_text_still_has_its_measurements(tmp_path, monkeypatch, capsys):
    write_config(tmp_path)
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: small())

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "step", interrupt)
    with pytest.raises(SystemExit, match="130"):
        cli.main(["sample", str(tmp_path), "x"])
    assert "bytes per token" in capsys.readouterr().err
