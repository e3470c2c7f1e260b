# SPDX-License-Identifier: Apache-2.0
"""Lines of text as pictures: their documents, the room for them in a row, and batches of them on devices."""

import dataclasses
import io
import json
import math

import jax
import numpy as np
import pytest
from rich.console import Console
from support.golden_models import small_config
from test_multimodal import VISION

import dsv4_jax as ds
from dsv4_jax.config import Config, DataConfig, MeshConfig, TrainConfig
from dsv4_jax.data import drawn, packing
from dsv4_jax.data.batch import abstract_batch, accumulation_parts, put_batch
from dsv4_jax.data.images import row_budget
from dsv4_jax.data.packing import split
from dsv4_jax.data.prepare import run
from dsv4_jax.data.sources import open_source, open_sources
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.mesh import make_mesh
from dsv4_jax.train.feed import read_data, streams

STEP = TrainConfig(steps=200)
TEXT = "first line of the text\nx = 1\n    def f(self, a, b, c, d, e):\n\tfirst line of the text\nnot ascii: äöü\n"


def drawn_config(tmp_path, **changes):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(TEXT + "".join(f"line {j} of file {i}\n" for j in range(9)))
    vision = VISION | {"vision_patch_size": 6, "vision_max_n_token": 32}
    fields = dict(path=f"drawn:{tmp_path}", seq_len=120, batch_size=4, held_out=0.3, row_patches=200, row_images=5)
    return Config(model=small_config(vocab_size=258, **vision), data=DataConfig(**fields | changes), train=STEP)


def test_drawn_lines_are_pictures_and_their_text(tmp_path):
    assert drawn.lines(TEXT) == ["first line of th", "def f(self, a, b"]
    cfg = drawn_config(tmp_path)
    s = open_source(cfg.data.path, cfg.data, Bytes(), VisionLayout.of(cfg.model))
    line = "first line of th"
    assert s.tokens(0, 0, 99).tolist() == [256, *[257] * (16 + 1 + 2), *line.encode(), 256]
    assert s.spans.table[0].tolist() == [1, 19, 2, 32]
    picture = np.asarray(s.image(0))
    assert picture.shape == (12, 192, 3) and 0.02 < (picture < 128).mean() < 0.5
    np.testing.assert_array_equal(picture, np.asarray(drawn.draw(line)))
    letters = [drawn.draw(chr(c)).tobytes() for c in range(32, 127)]
    assert len(set(letters)) == 95  # all can be told apart
    text = open_source(str(tmp_path), cfg.data, Bytes(), VisionLayout.of(cfg.model))
    assert set(s.keys.tolist()) == set(text.keys.tolist())  # a held-out file is neither read nor drawn
    train, held_out = split(s, cfg.data, 120, row_budget(VisionLayout.of(cfg.model), cfg.data))
    assert train.pieces and held_out.pieces
    assert not set(s.keys[train.documents].tolist()) & set(s.keys[held_out.documents].tolist())
    said = io.StringIO()
    run(cfg, Console(file=said, width=200))
    assert "220 images" in said.getvalue() and "wrote" not in said.getvalue()


def test_records_that_are_drawn_need_no_images(tmp_path):
    (tmp_path / "r.jsonl").write_text(json.dumps({"text": "a <image> of a cat", "images": ["no/such.png"]}) + "\n")
    path = f"drawn:{tmp_path / 'r.jsonl'}"
    s = open_source(path, DataConfig(path=path), Bytes(), VisionLayout.of(drawn_config(tmp_path).model))
    assert s.tokens(0, 0, 99).tolist()[-17:] == [*b"a <image> of a c", 256]


def test_pictures_need_a_model_that_sees():
    with pytest.raises(ds.ConfigError, match="vision_n_layers = 0"):
        open_sources(DataConfig(path="drawn:"), 258)


def test_the_default_budget_follows_the_row():
    """Room for the largest image, or for a quarter of the row; never for more than the row."""
    official = small_config(vocab_size=258, vision_n_layers=1, vision_dim=8, vision_n_heads=2, image_token_id=257)
    budget = lambda **data: row_budget(VisionLayout.of(official), DataConfig(**data))[1:]
    assert budget(seq_len=65536) == (9 * 16384, 9 * 16384 // 1509)
    assert budget(seq_len=2048) == (9 * 1024, 6)
    assert budget(seq_len=512) == (9 * 512, 3)
    assert budget(seq_len=512, row_patches=7, row_images=9) == (7, 9)
    assert row_budget(VisionLayout.of(small_config()), DataConfig()) is None


# On the devices


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2), (2, 2, 2)])
def test_a_batch_on_a_mesh_and_its_parts(tmp_path, shape):
    cfg = drawn_config(tmp_path, seq_len=121, batch_size=8, row_patches=201)
    data, expert, context = shape
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(data=data, expert=expert, context=context))
    (data,) = read_data(cfg)
    assert "images" in data.line
    with jax.set_mesh(make_mesh(*shape)), streams(cfg, data, packing.ORIGIN) as (stream, evaluation):
        assert (evaluation[0]["image_grids"][..., 2] > 0).any()
        batch = next(stream)
        placed = put_batch(batch, stream.own, 8)
        np.testing.assert_equal(jax.device_get(placed), batch)
        told = abstract_batch(cfg, 8)
        for name, x in placed.items():
            assert (x.shape, x.dtype, x.sharding) == (told[name].shape, told[name].dtype, told[name].sharding), name
            pieces = math.prod(shape[:2] if name == "image_grids" else shape)
            assert math.prod(x.sharding.shard_shape(x.shape)) * pieces == x.size, name
        assert sorted(told) == sorted(placed)
        parts = jax.device_get(jax.jit(accumulation_parts, static_argnums=1)(placed, 2))
    devices = shape[0] * shape[1]
    order = np.arange(8).reshape(devices, 2, -1).transpose(1, 0, 2).reshape(2, -1)
    for number, rows in enumerate(order):
        for name, x in batch.items():
            got, want = parts[name][number], x[rows]
            if name == "image_grids":
                real = want[..., 2] > 0
                assert (got[..., 0] == np.where(real, np.arange(4)[:, None], 0)).all()
                got, want = got[..., 1:], want[..., 1:]
            np.testing.assert_array_equal(got, want)


def test_the_identity_of_the_data_follows_what_images_become(tmp_path):
    one = drawn_config(tmp_path)
    other = drawn_config(tmp_path, row_images=4)
    assert read_data(one)[0].identity != read_data(other)[0].identity
