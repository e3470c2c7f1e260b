# SPDX-License-Identifier: Apache-2.0
"""Data: no token lost or invented, documents kept apart, the same stream after a resume."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_jax as ds
from dsv4_jax.data.pipeline import batches
from dsv4_jax.data.text import BORDER, Document, read_documents, split

documents = st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=12).map(
    lambda texts: [Document(str(i), text) for i, text in enumerate(texts)]
)


def runs(batch):
    """(ids, targets, mtp_targets) of every document piece of a batch."""
    for row in range(len(batch["ids"])):
        segment = batch["segment_ids"][row]
        for s in range(1, segment.max() + 1):
            at = np.flatnonzero(segment == s)
            assert (np.diff(at) == 1).all()
            yield tuple(batch[name][row, at].tolist() for name in ("ids", "targets", "mtp_targets"))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(documents, st.integers(1, 40))
def test_an_epoch_holds_every_token_of_every_document_once(docs, seq_len):
    """Joined again, the pieces are the documents; every token but the first is a target exactly once."""
    want = sorted((d.tokens[:-1].tolist(), d.tokens[1:].tolist(), [*d.tokens[2:].tolist(), -1]) for d in docs)
    pieces = []
    for batch in batches(docs, seq_len=seq_len, rows=1, seed=0, repeat=False):
        padding = batch["segment_ids"] == 0
        assert (batch["targets"][padding] == -1).all() and (batch["mtp_targets"][padding] == -1).all()
        pieces += list(runs(batch))
    # A piece that starts a document starts with the border; each other piece follows the one whose
    # last two targets are its first input and its first target.
    starts = [p for p in pieces if p[0][0] == BORDER]
    assert len(starts) == len(docs) and max(len(p[0]) for p in pieces) <= seq_len
    assert sorted(t for p in pieces for t in p[1]) == sorted(t for w in want for t in w[1])
    assert sorted(t for p in pieces for t in p[2]) == sorted(t for w in want for t in w[2])
    if seq_len > 101:
        assert sorted(pieces) == want


def test_a_cut_document_continues_where_it_was_cut():
    (doc,) = docs = [Document("a", bytes(range(100)))]
    found = [run for b in batches(docs, seq_len=30, rows=1, seed=0, repeat=False) for run in runs(b)]
    ids, targets, mtp = (
        list(itertools.chain(*x)) for x in zip(*sorted(found, key=lambda r: r[0][0] % BORDER), strict=True)
    )
    assert ids == doc.tokens[:-1].tolist()
    assert targets == doc.tokens[1:].tolist()
    assert mtp == [*doc.tokens[2:].tolist(), -1]


def test_padding_is_under_one_percent_on_the_embedded_text():
    train, _ = split(read_documents(""), 0.02)
    stream = itertools.islice(batches(train, seq_len=512, rows=4, seed=0), 200)
    assert np.mean([(b["segment_ids"] == 0).mean() for b in stream]) < 0.01


def test_the_stream_depends_on_the_seed_alone_and_resumes_exactly():
    docs = [Document(str(i), bytes([i] * (i + 1))) for i in range(60)]
    one, two = (iter(batches(docs, seq_len=64, rows=2, seed=3)) for _ in range(2))
    seen = []
    for _ in range(40):  # several epochs
        seen.append(next(one))
    for batch in seen[:17]:
        np.testing.assert_equal(next(two), batch)
    three = iter(batches(docs, seq_len=64, rows=2, seed=3))
    three.set_state(two.get_state())
    for batch in seen[17:]:
        np.testing.assert_equal(next(three), batch)
    other = next(iter(batches(docs, seq_len=64, rows=2, seed=4)))
    assert not np.array_equal(other["ids"], seen[0]["ids"])


def test_sources_are_files_and_folders_in_a_fixed_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"\xff\x00one")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"no")
    assert read_documents(str(tmp_path)) == [Document("a.txt", b"\xff\x00one"), Document("b/x.txt", b"two")]
    text = b"".join(b"line %d\n" % i for i in range(20000))
    (tmp_path / "long.txt").write_bytes(text)
    parts = read_documents(str(tmp_path / "long.txt"))
    assert b"".join(d.text for d in parts) == text and len(parts) > 5
    assert all(d.text.endswith(b"\n") for d in parts)


def test_held_out_documents_are_never_trained_on():
    docs = read_documents("")
    train, held_out = split(docs, 0.02)
    assert len(train) + len(held_out) == len(docs) and held_out
    assert not {d.name for d in train} & {d.name for d in held_out}
    assert split(docs, 0.02) == (train, held_out)


def test_bad_sources_are_refused(tmp_path):
    with pytest.raises(ds.ConfigError, match=r"data\.path = 'nowhere'"):
        read_documents("nowhere")
    with pytest.raises(ds.ConfigError, match="no text"):
        read_documents(str(tmp_path))
    with pytest.raises(ds.ConfigError, match=r"data\.held_out"):
        split([Document("a", b"x")], 0.5)
