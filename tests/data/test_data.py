# SPDX-License-Identifier: Apache-2.0
"""Packing and batches: no token lost or invented, documents kept apart, one stream for any workers and processes."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.config import DataConfig
from dsv4_jax.data import packing
from dsv4_jax.data.packing import Position, RowPlan, best_fit, part, split
from dsv4_jax.data.pipeline import Stream
from dsv4_jax.data.sources import Flat, open_source
from dsv4_jax.data.tokenizer import Bytes

BORDER = Bytes.border


def source(bodies, name="s"):
    """Documents of the given ids."""
    ends = np.cumsum([len(b) for b in bodies])
    ids = np.concatenate([np.asarray(b, np.uint16) for b in bodies])
    return Flat(name, ids, ends - [len(b) for b in bodies], ends, np.arange(len(bodies), dtype=np.uint32), BORDER)


def whole(s, S):
    return part(s, np.ones(len(s.lengths), bool), S)


def plan(s, S, seed=0, repeat=True):
    return RowPlan([whole(s, S)], [1.0], S, seed, repeat)


def document(body):
    return [BORDER, *body, BORDER]


def runs(batch):
    """(ids, targets, mtp_targets) of every document piece of a batch."""
    for row in range(len(batch["ids"])):
        segment = batch["segment_ids"][row]
        for s in range(1, segment.max() + 1):
            at = np.flatnonzero(segment == s)
            assert (np.diff(at) == 1).all()
            yield tuple(batch[name][row, at].tolist() for name in ("ids", "targets", "mtp_targets"))


bodies = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=100), min_size=1, max_size=12)


@given(bodies, st.integers(1, 40), st.integers(1, 3))
def test_an_epoch_holds_every_token_of_every_document_once(docs, S, B):
    """Joined again, the pieces are the documents; every token but the first is a target exactly once."""
    docs = [document(d) for d in docs]
    want = sorted((d[:-1], d[1:], [*d[2:], -1]) for d in docs)
    pieces = []
    for batch in Stream(plan(source([d[1:-1] for d in docs]), S, repeat=False), B):
        assert batch["ids"].shape == (B, S)
        padding = batch["segment_ids"] == 0
        assert (batch["targets"][padding] == -1).all() and (batch["mtp_targets"][padding] == -1).all()
        pieces += list(runs(batch))
    starts = [p for p in pieces if p[0][0] == BORDER]
    assert len(starts) == len(docs) and max(len(p[0]) for p in pieces) <= S
    assert sorted(t for p in pieces for t in p[1]) == sorted(t for w in want for t in w[1])
    assert sorted(t for p in pieces for t in p[2]) == sorted(t for w in want for t in w[2])
    if S > 101:
        assert sorted(pieces) == want


def test_a_cut_document_continues_where_it_was_cut():
    doc = document(range(100))
    found = [run for b in Stream(plan(source([doc[1:-1]]), 30, repeat=False), 1) for run in runs(b)]
    ids, targets, mtp = (
        list(itertools.chain(*x)) for x in zip(*sorted(found, key=lambda r: r[0][0] % BORDER), strict=True)
    )
    assert (ids, targets, mtp) == (doc[:-1], doc[1:], [*doc[2:], -1])


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 64))
def test_best_fit(lengths, S):
    """Every piece once, no row too full, and not more rows than longest-first packing needs."""
    rows = best_fit(lengths, S)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= S for row in rows)
    assert len(rows) <= 11 / 9 * sum(lengths) / S + 1 + sum(2 * n > S for n in lengths)


def test_padding_is_under_one_percent_on_realistic_lengths():
    """On the embedded text in rows of 512, and on log-normal lengths around 600 in rows of 4096."""
    embedded, _ = split(open_source("", DataConfig(), Bytes()), DataConfig(), 512)
    lengths = np.random.default_rng(0).lognormal(6.4, 1.1, 20000).astype(int) + 1
    other = whole(source([np.zeros(n) for n in lengths]), 4096)
    for some, S in ((embedded, 512), (other, 4096)):
        rows = RowPlan([some], [1.0], S, 0, True).block(1)
        assert 1 - sum(piece.length for row in rows for piece in row) / (len(rows) * S) < 0.01


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", 16)


def test_the_stream_is_the_same_for_any_workers_and_processes(small_blocks):
    s = source([[i % 250] * (i + 1) for i in range(60)])
    want = list(itertools.islice(Stream(plan(s, 64, seed=3), 4), 40))  # several epochs
    for workers in (1, 2, 8):
        stream = Stream(plan(s, 64, seed=3), 4, workers=workers)
        np.testing.assert_equal(list(itertools.islice(stream, 40)), want)
        stream.close()
    for own in ([0], [1, 3], [2, 3]):
        for batch, got in zip(want, Stream(plan(s, 64, seed=3), 4, own=own, workers=2), strict=False):
            np.testing.assert_equal(got, {name: x[own] for name, x in batch.items()})
    other = next(Stream(plan(s, 64, seed=4), 4))
    assert not np.array_equal(other["ids"], want[0]["ids"])


def test_a_position_is_all_that_a_resume_needs(small_blocks):
    """Also with another number of workers, after batches were looked at ahead, and for batches of another size."""
    s = source([[i % 250] * (i + 1) for i in range(60)])
    want = list(itertools.islice(Stream(plan(s, 64, seed=3), 4), 30))
    for stop in (0, 1, 7, 20):
        one = Stream(plan(s, 64, seed=3), 4, workers=2)
        for batch in want[:stop]:
            np.testing.assert_equal(next(one), batch)
        np.testing.assert_equal(one.peek(3), want[stop + 3])
        np.testing.assert_equal(one.peek(), want[stop])
        again = Stream(plan(s, 64, seed=3), 4, start=Position(*list(one.position)))
        np.testing.assert_equal(list(itertools.islice(again, 30 - stop)), want[stop:])
        one.close()
    stream = Stream(plan(s, 64, seed=3), 4)
    next(stream)
    two = np.concatenate([b["ids"] for b in itertools.islice(Stream(plan(s, 64, seed=3), 2, start=stream.position), 6)])
    np.testing.assert_equal(two, np.concatenate([b["ids"] for b in want[1:4]]))


def test_a_mixture_gives_each_source_its_share_of_tokens_and_its_own_epochs():
    few, many = source([[1] * 9] * 20, "few"), source([[2] * (5 + i % 50) for i in range(3000)], "many")
    mixed = RowPlan([whole(few, 16), whole(many, 16)], [0.25, 0.75], 16, 0, True)
    pieces = [piece for block in range(3) for piece in mixed._pieces(block)]
    assert len(pieces) == pytest.approx(3 * packing.BLOCK, abs=2)
    tokens = [sum(p.length for p in pieces if p.source == k) for k in (0, 1)]
    assert tokens[0] / sum(tokens) == pytest.approx(0.25, abs=0.01)
    epochs = [p.document for p in pieces if p.source == 0]
    for start in range(0, len(epochs) - 20, 20):
        assert sorted(epochs[start : start + 20]) == list(range(20))
    orders = {tuple(epochs[start : start + 20]) for start in range(0, 200, 20)}
    assert len(orders) == 10  # another order every time


def test_a_large_order_is_shuffled_without_a_table(monkeypatch):
    monkeypatch.setattr(packing, "_SMALL", 10)
    for n in (3000, 9):
        epochs = [[int(i) for i in packing._shuffled(n, 1, epoch)] for epoch in range(3)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.lists(st.floats(0, 2.5), max_size=4))
def test_stages_read_every_document_once_an_epoch(lengths, borders):
    """However rows and stages are cut: the pieces of one epoch, in whichever stages they come, are its documents."""
    s = source([[1] * n for n in lengths])
    borders = [0.0, *sorted(borders), 3.0]
    read = []
    for (begin, end), S in zip(itertools.pairwise(borders), itertools.cycle([7, 40, 16])):
        rounds = packing.Rounds(whole(s, S), begin, end, 0)
        read += [rounds[i] for i in range(int(rounds._ends[-1]) if begin < end else 0)]
    targets = collections.Counter(p.document for p in read for _ in range(p.length))
    assert targets == {i: 3 * (n + 1) for i, n in enumerate(lengths)}


def test_a_border_of_stages_belongs_to_the_later_one():
    four = whole(source([[1] * 9] * 4), 8)
    assert [list(four.between(a, a + 0.25).documents) for a in (0.0, 0.25, 0.5, 0.75)] == [[0], [1], [2], [3]]


def test_a_stage_keeps_to_its_share_of_an_epoch():
    """And goes on with whole epochs if it is longer than was said."""
    s = source([[1] * (5 + i % 9) for i in range(200)])
    rounds = packing.Rounds(whole(s, 8), 0.25, 0.5, 0)
    n, total = int(rounds._ends[-1]), 200 + sum(5 + i % 9 for i in range(200))
    assert sum(rounds[i].length for i in range(n)) == pytest.approx(total / 4, rel=0.05)
    assert len({rounds[i].document for i in range(n, n + whole(s, 8).pieces)}) == 200


def test_rows_are_padded_for_the_context_axis():
    batch = next(Stream(plan(source([[1] * 30]), 14), 2, multiple=4))
    assert batch["ids"].shape == (2, 16)
    assert (batch["segment_ids"][:, 14:] == 0).all() and (batch["targets"][:, 14:] == -1).all()


def test_a_failure_in_a_thread_reaches_the_caller():
    s = source([[1] * 30])
    broken = plan(s, 8)
    broken.parts = [None]
    stream = Stream(broken, 2, workers=2)
    with pytest.raises(AttributeError):
        next(stream)
    stream.close()


def test_held_out_documents_are_never_trained_on():
    s = open_source("", DataConfig(), Bytes())
    train, held_out = split(s, DataConfig(), 512)
    assert len(train.documents) + len(held_out.documents) == len(s.lengths) and len(held_out.documents)
    assert not set(train.documents) & set(held_out.documents)


def test_a_large_source_holds_out_a_number_of_tokens():
    """A share of a corpus of trillions of tokens would be more than any evaluation reads."""
    s = open_source("", DataConfig(), Bytes())
    share, most = split(s, DataConfig(held_out=0.2), 512)[1], s.lengths.sum() // 50
    fewer = split(s, DataConfig(held_out=0.2, held_out_tokens=int(most)), 512)[1]
    assert most / 2 < fewer.tokens < 2 * most < share.tokens
    assert set(fewer.documents) <= set(share.documents)
