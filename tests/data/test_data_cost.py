# SPDX-License-Identifier: Apache-2.0
"""What planning, tokenising, filling and opening cost does not grow with what they do not need. Nothing is timed."""

import io
import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.golden_models import small_config

import dsv4_jax as ds
from dsv4_jax.config import Config, DataConfig, TrainConfig
from dsv4_jax.data import documents, ids, packing
from dsv4_jax.data.documents import tokenized
from dsv4_jax.data.images import Budget
from dsv4_jax.data.interleaved import Spans
from dsv4_jax.data.packing import Part, RowPlan, part
from dsv4_jax.data.prepare import run
from dsv4_jax.data.sources import Flat, key_of, open_source, prepared_folder
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.data.vision_layout import VisionLayout


def source(lengths, spans=None):
    ends = np.cumsum(lengths)
    keys = np.arange(len(ends), dtype=np.uint32)
    return Flat("s", np.zeros(ends[-1], np.uint16), ends - lengths, ends, keys, Bytes.border, 0, spans)


def peak(function):
    """The most bytes that a call holds at once beyond what it found: NumPy's arrays included."""
    tracemalloc.start()
    try:
        function()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_planning_a_block_does_not_read_the_whole_corpus(monkeypatch):
    """A temporary of all documents for each piece would show at once; a hundred times the documents need no more."""
    monkeypatch.setattr(packing, "BLOCK", 64)
    needs = []
    for n in (1000, 100_000):
        s = source(np.full(n, 9))
        plan = RowPlan([part(s, np.ones(n, bool), 16)], [1.0], 16, 0, repeat=True)
        needs.append(peak(lambda plan=plan: plan.block(1)))
    assert needs[1] < 1.2 * needs[0]
    assert s.lengths is s.lengths


def test_a_piece_of_a_cut_document_is_found_without_cutting_it_again(monkeypatch):
    """Or a document of n pieces with images costs n^2 / 2."""
    n = 40
    spans = np.array([[1 + 8 * i, 5, 2, 3] for i in range(n)], np.int32)
    s, S = source([8 * n], Spans.of([spans])), 20
    p = part(s, np.ones(1, bool), S, Budget(VisionLayout(63, 2, 2, 24, 1, None), 12, 2))
    monkeypatch.setattr(Part, "cut", lambda *_: pytest.fail("cut again"))
    pieces = [p.numbered(i) for i in range(p.pieces)]
    assert [i for piece in pieces for i in piece.images] == list(range(n))
    assert sum(piece.length for piece in pieces) == 8 * n + 1 and max(piece.length for piece in pieces) <= S
    assert all(piece.patches == 6 * len(piece.images) <= 12 for piece in pieces)


class Counting(Bytes):
    """Bytes, which notes how many texts come in each call."""

    def __init__(self):
        self.calls = []

    def encode(self, texts):
        self.calls.append(len(texts))
        return super().encode(texts)


def test_records_are_tokenised_together_to_the_end(tmp_path, monkeypatch):
    """Also beyond the bytes of the first groups, and next to bad records."""
    monkeypatch.setattr(documents, "_TOGETHER_BYTES", 10_000)
    lines = [json.dumps({"text": f"{i:0990}"}) for i in range(300)]
    lines[50:50] = ["{}", json.dumps({"text": ""})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    counting = Counting()
    found = list(tokenized(str(tmp_path), DataConfig(on_error="skip"), counting))
    assert [bytes(d.ids).decode() for _, d in found if d] == [f"{i:0990}" for i in range(300)]
    assert [record.name for record, d in found if d is None] == ["a.jsonl:51"]
    assert len(counting.calls) <= 31 and min(counting.calls[:-1]) >= 9
    monkeypatch.setattr(documents, "_TOGETHER_BYTES", 1 << 26)
    counting = Counting()
    list(tokenized(str(tmp_path), DataConfig(on_error="skip"), counting))
    assert counting.calls == [255, 45]


def test_a_piece_of_a_long_document_is_read_without_the_rest(tmp_path):
    """Of tokens made ahead, of files of ids and of text in memory: 100 of a million tokens need a few KB."""
    text = "abcdefghi\n" * 100_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    np.frombuffer(text.encode(), np.uint8).astype(np.uint16).tofile(tmp_path / "a.bin")
    data = DataConfig(path=str(tmp_path / "a.jsonl"), prepared=str(tmp_path / "prepared"))
    in_memory = open_source(data.path, data, Bytes())
    cfg = Config(model=small_config(vocab_size=257), data=data, train=TrainConfig(steps=200))
    run(cfg, Console(file=io.StringIO()))
    ahead = open_source(str(prepared_folder(data.path, data, Bytes())), data, Bytes())
    assert type(ahead).__name__ == "TokenShards"
    for s in (in_memory, ahead, open_source(str(tmp_path / "a.bin"), data, Bytes())):
        assert s.tokens(0, 500_001, 500_101).tolist() == list(text[:100].encode())
        assert peak(lambda s=s: s.tokens(0, 500_001, 500_101)) < 10_000


def id_file(tmp_path, values=(1, 2, 256, 256, 3, 256, 4)):
    file = tmp_path / "a.bin"
    np.array(values, np.uint16).tofile(file)
    return file, DataConfig(prepared=str(tmp_path / "prepared"))


def test_a_large_file_of_ids_is_scanned_once(tmp_path, monkeypatch):
    """Its table is kept until its content or what it is read with changes; a later start or a copy reads no id."""
    monkeypatch.setattr(ids, "_INDEXED", 1)
    scan, scanned = ids._scan, []
    monkeypatch.setattr(ids, "_scan", lambda file, *args: scanned.append(file) or scan(file, *args))
    file, data = id_file(tmp_path)
    first = open_source(str(file), data, Bytes())
    assert first.keys.tolist() == [key_of(f"a.bin:{start}") for start in (0, 4, 6)] and len(scanned) == 1
    copy = tmp_path / "elsewhere" / file.name
    copy.parent.mkdir()
    shutil.copyfile(file, copy)
    os.utime(copy, (1, 1))
    for path in (file, copy):
        again = open_source(str(path), data, Bytes())
        assert again.lengths.tolist() == [4, 3, 3] and again.keys.tolist() == first.keys.tolist()
    assert len(scanned) == 1
    stat = file.stat()
    id_file(tmp_path, [300] * 7)  # as long, and of the same time
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ds.ConfigError, match="id 300 at position 0"):
        open_source(str(file), data, Bytes())
    id_file(tmp_path, [5, 256, 6])
    assert open_source(str(file), data, Bytes()).lengths.tolist() == [3, 3]
    for index in (tmp_path / "prepared" / ids._TABLES).iterdir():
        index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ds.ConfigError, match=r"a.bin-.*npy, the index of a file of ids, is damaged .*: delete it"):
        open_source(str(file), data, Bytes())
    (tmp_path / "file").write_text("")
    with pytest.raises(ds.ConfigError, match=r"data.prepared = '.*file': cannot write the index"):
        open_source(str(file), DataConfig(prepared=str(tmp_path / "file")), Bytes())


def test_a_small_file_of_ids_leaves_nothing_behind(tmp_path):
    file, data = id_file(tmp_path)
    assert open_source(str(file), data, Bytes()).lengths.tolist() == [4, 3, 3]
    assert not (tmp_path / "prepared").exists()


@given(st.lists(st.integers(0, 2**63 - 1)), st.text(max_size=9))
def test_names_are_hashed_together_as_one_by_one(numbers, prefix):
    """So that what is held out of a file of ids does not move."""
    found = ids.numbered_keys(prefix, np.array(numbers, np.int64))
    assert found.tolist() == [key_of(f"{prefix}{number}") for number in numbers]


def test_tokens_of_an_older_format_are_refused(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"format": 1, "source": "texts", "shards": []}))
    words = r"format 1, but this version reads \d: run the data command again with data.path = 'texts'"
    with pytest.raises(ds.ConfigError, match=words):
        open_source(str(tmp_path), DataConfig(), Bytes())
