# SPDX-License-Identifier: Apache-2.0
"""Documents with images: read from records, packed whole, put into batches."""

import base64
import dataclasses
import functools
import io
import itertools
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from support.golden_models import small_config

import dsv4_jax as ds
from dsv4_jax.config import Config, DataConfig, TrainConfig
from dsv4_jax.data import packing
from dsv4_jax.data.images import Budget, layout_of, read, row_budget, token_types
from dsv4_jax.data.interleaved import Spans, interleave
from dsv4_jax.data.packing import RowPlan, best_fit, best_fit_within, part
from dsv4_jax.data.pipeline import Stream
from dsv4_jax.data.prepare import run
from dsv4_jax.data.sources import Flat, open_source, open_sources, prepared_folder
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.data.vision_layout import VisionLayout

BORDER, IMAGE_ID = Bytes.border, 257
VISION = dict(
    vision_n_layers=1,
    vision_dim=8,
    vision_n_heads=2,
    vision_patch_size=2,
    vision_downsample_ratio=2,
    vision_max_n_token=24,
    vision_min_pixels=1,
    image_token_id=IMAGE_ID,
)
MODEL = small_config(vocab_size=258, **VISION)
LAYOUT = VisionLayout.of(MODEL)


@functools.cache
def png(width, height, color=0):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (color % 256, 1, 2)).save(file, "PNG")
    return file.getvalue()


def source(documents, name="s"):
    """Documents that are lists of texts (lists of ids) and images ((width, height)); each image has its own color."""
    bodies, spans, images = [], [], []
    for document in documents:
        texts, layouts = [[]], []
        for item in document:
            if isinstance(item, tuple):
                layouts.append(layout_of(*item, LAYOUT))
                images.append(png(*item, len(images) + 1))
                texts.append([])
            else:
                texts[-1] += item
        ids, some = interleave([np.array(t, np.int32) for t in texts], layouts, IMAGE_ID)
        bodies.append(ids)
        spans.append(some)
    ends = np.cumsum([len(b) for b in bodies])
    keys = np.arange(len(bodies), dtype=np.uint32)
    starts = ends - [len(b) for b in bodies]
    return Flat(name, np.concatenate(bodies), starts, ends, keys, BORDER, 0, Spans.of(spans), images)


def whole(s, S, budget):
    return part(s, np.ones(len(s.lengths), bool), S, budget)


def one_plan(s, S, budget, repeat=True, seed=0):
    return RowPlan([whole(s, S, budget)], [1.0], S, seed, repeat, budget)


def expected(s, document):
    """Inputs, token types, targets and mtp targets of a document."""
    tokens = s.tokens(document, 0, 10**6)
    types = np.full(len(tokens), -1)
    for number in s.spans.numbers(document) if s.spans else ():
        start, positions, rows, columns = s.spans.table[number]
        types[start : start + positions] = token_types((-(-rows // 2), -(-columns // 2)))
    targets = np.where(tokens[1:] == IMAGE_ID, -1, tokens[1:])
    after = np.append(targets[1:], -1)
    return [tokens[:-1], types[:-1], targets, np.where(targets < 0, -1, after)]


item = st.one_of(st.lists(st.integers(0, 255), max_size=30), st.tuples(st.integers(1, 9), st.integers(1, 9)))
documents = st.lists(
    st.lists(item, min_size=1, max_size=8).filter(lambda d: any(len(i) for i in d)), min_size=1, max_size=8
)
# 24 positions are the most of an image of at most 9 x 9 pixels in patches of 2: 3 x (3 + 1) + 2 = 14, of 25 patches


@given(documents, st.integers(14, 40), st.integers(25, 60), st.integers(1, 4), st.integers(1, 3))
def test_every_token_and_every_image_once_and_whole(docs, S, most_patches, most_images, B):
    s, budget = source(docs), Budget(LAYOUT, most_patches, most_images)
    pieces = []  # (document is unknown: pieces are found again by their content)
    for batch in Stream(one_plan(s, S, budget, repeat=False), B):
        assert batch["patches"].shape == (B, most_patches, 3, 2, 2) and batch["patches"].dtype == np.float32
        assert batch["image_grids"].shape == (B, most_images, 4)
        padding = batch["segment_ids"] == 0
        assert (batch["token_types"][padding] == -1).all() and (batch["targets"][padding] == -1).all()
        assert ((batch["token_types"] >= 0) == (batch["ids"] == IMAGE_ID)).all()
        for row in range(B):
            check_images(batch, row)
            segment = batch["segment_ids"][row]
            for number in range(1, segment.max() + 1):
                at = segment == number
                names = ("ids", "token_types", "targets", "mtp_targets")
                pieces.append([batch[name][row][at].tolist() for name in names])
    want = [expected(s, i) for i in range(len(docs))]
    for column in range(4):  # nothing is lost or invented
        found = sorted(itertools.chain.from_iterable(piece[column] for piece in pieces))
        assert found == sorted(itertools.chain.from_iterable(w[column].tolist() for w in want))
    if S == 40 and most_patches >= 25 * 8 and most_images >= 8:
        assert sorted(pieces) == sorted([x.tolist() for x in w] for w in want)


def check_images(batch, row):
    """The grids of a row name every START, its image is whole and in one document, and the patches are its own."""
    grids, types = batch["image_grids"][row], batch["token_types"][row]
    count = int((grids[:, 2] > 0).sum())
    assert (grids[count:] == 0).all() and (grids[:count, 0] == row).all()
    assert grids[:count, 1].tolist() == np.flatnonzero(types == 0).tolist()
    used = 0
    for _, start, rows, columns in grids[:count].tolist():
        want = token_types((-(-rows // 2), -(-columns // 2)))
        assert types[start : start + len(want)].tolist() == want.tolist()
        assert len(set(batch["segment_ids"][row][start : start + len(want)].tolist())) == 1
        patches = batch["patches"][row, used : used + rows * columns]
        blue = patches[:, 2].round(3)
        assert ((blue == round(2 / 127.5 - 1, 3)) | (blue == round(127 / 127.5 - 1, 3))).all()  # its own or the border
        used += rows * columns
    assert (batch["patches"][row, used:] == 0).all()


def test_a_row_with_two_images_by_hand():
    """No target is the id of images; the END predicts the text after it, and so does a text before an image nothing."""
    s = source([[[1, 2], (6, 3), [3, 4]], [(2, 2)]])
    batch = next(Stream(one_plan(s, 24, Budget(LAYOUT, 8, 3), repeat=False), 2))
    assert batch["ids"][0].tolist() == [256, 1, 2, *[257] * 5, 3, 4, 256, *[257] * 4, *[0] * 9]
    assert batch["segment_ids"][0].tolist() == [*[1] * 10, *[2] * 5, *[0] * 9]
    assert batch["token_types"][0].tolist() == [-1, -1, -1, 0, 1, 1, 2, 3, -1, -1, -1, 0, 1, 2, 3, *[-1] * 9]
    assert batch["targets"][0].tolist() == [1, 2, *[-1] * 5, 3, 4, 256, *[-1] * 4, 256, *[-1] * 9]
    assert batch["mtp_targets"][0].tolist() == [2, *[-1] * 6, 4, 256, *[-1] * 15]
    assert batch["image_grids"].tolist() == [[[0, 3, 2, 3], [0, 11, 1, 1], [0] * 4], [[0] * 4] * 3]
    np.testing.assert_array_equal(batch["patches"][0, :6], read(png(6, 3, 1), LAYOUT))
    np.testing.assert_array_equal(batch["patches"][0, 6:7], read(png(2, 2, 2), LAYOUT))
    assert not batch["patches"][0, 7:].any() and not batch["patches"][1].any()
    padded = next(Stream(one_plan(s, 24, Budget(LAYOUT, 7, 3), repeat=False), 2, multiple=8))
    np.testing.assert_equal(padded, batch)


def test_a_document_is_cut_before_an_image_that_does_not_fit():
    s = source([[[1] * 6, (6, 3), [2] * 3, (6, 3), (6, 3), [3] * 9]])  # 1 + 6, 5, 3, 5, 5, 9 inputs

    def lengths(S, patches, images):
        p = whole(s, S, Budget(LAYOUT, patches, images))
        assert p.pieces == len(p.cut(0))
        pieces = [p.piece(0, number) for number in range(p.pieces)]
        return [(piece.length, len(piece.images), piece.patches) for piece in pieces]

    assert lengths(40, 18, 3) == [(34, 3, 18)]
    assert lengths(11, 18, 3) == [(7, 0, 0), (8, 1, 6), (11, 2, 12), (8, 0, 0)]
    assert lengths(40, 17, 3) == [(20, 2, 12), (14, 1, 6)]
    assert lengths(40, 18, 1) == [(15, 1, 6), (5, 1, 6), (14, 1, 6)]


def test_an_image_that_fits_in_no_row_names_the_keys():
    s = source([[[1]], [[1], (2, 2), (9, 9)]])
    with pytest.raises(
        ds.ConfigError, match=r"s: image 2 of document 2 takes 14 positions.* 13 of a row.*data.seq_len"
    ):
        whole(s, 13, Budget(LAYOUT, 99, 9))
    with pytest.raises(ds.ConfigError, match=r"takes 25 patches, more than the 24.*data.row_patches.*vision_max_n_tok"):
        whole(s, 14, Budget(LAYOUT, 24, 9))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30), st.integers(0, 3)), max_size=200))
def test_best_fit_within_limits(costs):
    costs = np.array(costs, np.int64).reshape(-1, 3)
    for limits in ((50, 30, 3), (64, 40, 9)):
        rows = best_fit_within(costs, limits)
        assert sorted(i for row in rows for i in row) == list(range(len(costs)))
        assert all((costs[row].sum(0) <= limits).all() for row in rows)
    assert best_fit_within(costs, (50, 10**6, 10**6)) == best_fit(costs[:, 0].tolist(), 50)


def mixed():
    return source([[[i % 250] * (i + 1), (1 + i % 9, 1 + i % 5)] if i % 3 else [[i] * (2 * i + 1)] for i in range(60)])


def test_the_stream_is_the_same_for_any_workers_processes_and_after_a_resume(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", 16)
    s, budget = mixed(), Budget(LAYOUT, 40, 3)
    make = lambda **options: Stream(one_plan(s, 80, budget, seed=3), 4, **options)
    want = list(itertools.islice(make(), 30))
    for workers in (2, 8):
        stream = make(workers=workers)
        np.testing.assert_equal(list(itertools.islice(stream, 12)), want[:12])
        again = make(start=stream.position, workers=8 // workers)
        np.testing.assert_equal(list(itertools.islice(again, 18)), want[12:])
        stream.close()
        again.close()
    for own in ([0], [1, 3], [2, 3]):
        for batch, got in zip(want, make(own=own, workers=2), strict=False):
            np.testing.assert_equal(got, {name: x[own] for name, x in batch.items()})


def test_a_process_decodes_its_own_rows_only():
    """And each image when its batch is made, not before."""
    asked = []

    class Watched(list):
        def __getitem__(self, number):
            asked.append(number)
            return super().__getitem__(number)

    s, budget = mixed(), Budget(LAYOUT, 40, 3)
    s = dataclasses.replace(s, images=Watched(s.images))
    everything = next(Stream(one_plan(s, 80, budget), 4))
    assert len(asked) == (everything["image_grids"][..., 2] > 0).sum()
    asked.clear()
    next(Stream(one_plan(s, 80, budget), 4, own=[1]))
    assert len(asked) == (everything["image_grids"][1, :, 2] > 0).sum()


def test_seven_to_one_counts_positions():
    """By weights of a mixture: 7 text, 1 multimodal; an image's positions are tokens."""
    text = source([[[1] * (5 + i % 50)] for i in range(3000)], "text")
    pictures = source([[(1 + i % 9, 1 + i % 9), [2] * (i % 20)] for i in range(500)], "pictures")
    budget = Budget(LAYOUT, 100, 9)
    both = RowPlan([whole(s, 60, budget) for s in (text, pictures)], [7.0, 1.0], 60, 0, True, budget)
    tokens = np.zeros(2)
    for batch in itertools.islice(Stream(both, 8), 200):
        of_image = [set(b[batch["token_types"][r] >= 0].tolist()) for r, b in enumerate(batch["segment_ids"])]
        for row, segments in enumerate(of_image):
            real = batch["segment_ids"][row][batch["segment_ids"][row] > 0]
            seen = np.isin(real, list(segments)).sum()
            tokens += len(real) - seen, seen
    assert tokens[0] / tokens[1] == pytest.approx(7, rel=0.03)


def test_rows_of_text_alone_are_those_of_a_model_without_vision():
    text = [[[i % 250] * (i + 1)] for i in range(60)]
    with_vision = next(Stream(one_plan(source(text), 64, Budget(LAYOUT, 4, 1), seed=1), 4))
    without = next(Stream(one_plan(source(text), 64, None, seed=1), 4))
    assert sorted(without) == ["ids", "mtp_targets", "segment_ids", "targets"]
    assert sorted(with_vision) == sorted([*without, "image_grids", "patches", "token_types"])
    np.testing.assert_equal({name: with_vision[name] for name in without}, without)


# Records


A, B = png(6, 3, 7), png(2, 2, 8)
WANT = [
    [[*b"one"], (6, 3), [*b" two "], (2, 2)],
    [(6, 3), [*b"x"]],
    [[*b"plain <image> text"]],
    [[*b"no images"]],
]


def write(folder, kind):
    folder = folder / "in"
    folder.mkdir()
    (folder / "pictures").mkdir()
    (folder / "pictures" / "b.png").write_bytes(B)
    (folder / "a.PNG").write_bytes(A)
    text64 = base64.b64encode(A).decode()
    records = [
        {"text": "one<image> two <image>", "images": [f"data:image/png;base64,{text64}", "pictures/b.png"]},
        {"text": "<image>x", "images": [{"bytes": text64}]},
        {"text": "plain <image> text"},
        {"text": "no images", "images": []},
    ]
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return folder
    records[0]["images"] = [{"bytes": A, "path": None}, {"bytes": None, "path": "pictures/b.png"}]
    records[1]["images"] = [{"bytes": A, "path": "no/such.png"}]
    records[2]["images"] = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "a.parquet")
    return folder


def same(got, images=True):
    """Whether a source holds the documents of `WANT`."""
    want = source(WANT)
    for i in range(len(WANT)):
        assert got.tokens(i, 0, 999).tolist() == want.tokens(i, 0, 999).tolist()
    np.testing.assert_array_equal(got.spans.table, want.spans.table)
    np.testing.assert_array_equal(got.spans.ends, want.spans.ends)
    assert [got.image(i) for i in range(3)] == [A, B, A]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_with_images_now_and_ahead(tmp_path, kind):
    path = str(write(tmp_path, kind))
    data = DataConfig(path=path, prepared=str(tmp_path / "prepared"), seq_len=40)
    same(open_source(path, data, Bytes(), LAYOUT))
    cfg, said = Config(model=MODEL, data=data, train=TrainConfig(steps=200)), io.StringIO()
    run(cfg, Console(file=said, width=200))
    words = ["3 images of 13 patches in 2 documents", "14 positions of images", "padding", "patches of a row", "sample"]
    assert all(word in said.getvalue() for word in words), said.getvalue()
    ahead = open_source(path, data, Bytes(), LAYOUT)
    assert type(ahead).__name__ == "TokenShards"
    same(ahead)
    folder = str(prepared_folder(path, data, Bytes(), LAYOUT))
    same(open_source(folder, data, Bytes(), LAYOUT))
    for other in (LAYOUT._replace(min_pixels=4), None):
        with pytest.raises(ds.ConfigError, match="holds images for a model of"):
            open_source(folder, data, Bytes(), other)
    assert prepared_folder(path, data, Bytes()) != prepared_folder(path, data, Bytes(), LAYOUT)
    images = next((tmp_path / "prepared").rglob("*.images.array_record"))
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(ds.ConfigError, match=r"00000.images.array_record has"):
        open_source(path, data, Bytes(), LAYOUT)


def test_a_column_of_bare_images_and_several_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("dsv4_jax.data.prepare._SHARD", 100)
    rows = [
        {"text": f"<image>{i}" if i % 2 else f"{i}", "images": png(1 + i, 2, i) if i % 2 else None} for i in range(9)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = DataConfig(path=str(tmp_path / "a.parquet"), prepared=str(tmp_path / "prepared"), seq_len=40)
    now = open_source(data.path, data, Bytes(), LAYOUT)
    run(Config(model=MODEL, data=data, train=TrainConfig(steps=200)), Console(file=io.StringIO()))
    ahead = open_source(data.path, data, Bytes(), LAYOUT)
    assert type(ahead).__name__ == "TokenShards" and len(ahead._names) > 2
    np.testing.assert_array_equal(ahead.spans.table, now.spans.table)
    np.testing.assert_array_equal(ahead.spans.ends, now.spans.ends)
    assert [ahead.image(i) for i in range(4)] == list(now.images) == [png(1 + i, 2, i) for i in range(1, 9, 2)]
    budget = row_budget(LAYOUT, data)
    np.testing.assert_equal(next(Stream(one_plan(ahead, 40, budget), 2)), next(Stream(one_plan(now, 40, budget), 2)))


BAD = {
    "too few": (["a.png"], "<image><image>", "1 images in field 'images', but 2 <image> in the text"),
    "none": ([], "<image>", "0 images in field 'images', but 1"),
    "too many": (["a.png"], "text", "1 images in field 'images', but 0"),
    "missing": (["a.png", "b.png"], "<image><image>", "image 2 of field 'images'.*No such file"),
    "base64": (["data:image/png;base64,!!!!"], "<image>", "image 1 of field 'images': invalid base64"),
    "type": ([5], "<image>", "expected bytes, a path or .*found int"),
    "truncated": (["a.png", "cut.png"], "<image><image>", "image 2: "),
    "text": (["text.png"], "<image>", "image 1: no image of a known format"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named_or_its_record_skipped(tmp_path, name):
    images, text, words = BAD[name]
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "cut.png").write_bytes(png(64, 64)[:-40])
    (tmp_path / "text.png").write_bytes(b"no image")
    records = [{"text": "good <image>", "images": ["a.png"]}, {"text": text, "images": images}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    path = str(tmp_path / "r.jsonl")
    with pytest.raises(ds.ConfigError, match=f"r.jsonl', record r.jsonl:2: .*{words}.*data.on_error"):
        open_source(path, DataConfig(path=path), Bytes(), LAYOUT)
    got = open_source(path, DataConfig(path=path, on_error="skip"), Bytes(), LAYOUT)
    assert got.skipped == 1 and len(got.lengths) == 1 and len(got.spans.table) == 1


def test_the_id_of_images_means_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_text("AB")
    for number, words in ((66, "its text has the id of images"), (256, "id between documents")):
        with pytest.raises(ds.ConfigError, match=words):
            open_sources(DataConfig(path=str(tmp_path)), 258, LAYOUT._replace(image_token_id=number))
    np.array([1, 257], np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ds.ConfigError, match=r"a.bin.* position 1"):
        data = DataConfig(path=str(tmp_path / "a.bin"))
        open_source(data.path, data, Bytes(), LAYOUT._replace(image_token_id=257))


def test_too_many_images_are_to_be_read_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr("dsv4_jax.data.sources._IN_MEMORY", 400)
    (tmp_path / "in").mkdir()
    (tmp_path / "a.png").write_bytes(png(20, 20))
    record = json.dumps({"text": "<image>", "images": ["../a.png"]})
    (tmp_path / "in" / "r.jsonl").write_text((record + "\n") * 6)
    data = DataConfig(path=str(tmp_path / "in"))
    with pytest.raises(ds.ConfigError, match="python -m dsv4_jax data CONFIG"):
        open_source(data.path, data, Bytes(), LAYOUT)
