# SPDX-License-Identifier: Apache-2.0
"""What planning, tokenising, filling and opening cost does not grow with what they do not need. Nothing is timed."""

import json
import tracemalloc

import numpy as np
import pytest
from golden_models import small_config

from dsv4_jax.config import DataConfig
from dsv4_jax.data import documents, packing
from dsv4_jax.data.documents import tokenized
from dsv4_jax.data.images import Budget
from dsv4_jax.data.interleaved import Spans
from dsv4_jax.data.packing import Part, Plan, part
from dsv4_jax.data.sources import Flat
from dsv4_jax.data.tokenizer import Bytes


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
        plan = Plan([part(s, np.ones(n, bool), 16)], [1.0], 16, 0, repeat=True)
        needs.append(peak(lambda plan=plan: plan.block(1)))
    assert needs[1] < 1.2 * needs[0]
    assert s.lengths is s.lengths


def test_a_piece_of_a_cut_document_is_found_without_cutting_it_again(monkeypatch):
    """Or a document of n pieces with images costs n^2 / 2."""
    n = 40
    spans = np.array([[1 + 8 * i, 5, 2, 3] for i in range(n)], np.int32)
    s, S = source([8 * n], Spans.of([spans])), 20
    p = part(s, np.ones(1, bool), S, Budget(small_config(), 12, 2))
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
