# SPDX-License-Identifier: Apache-2.0
"""Generated tokens: the likeliest or drawn ones, with the log-probabilities that training computes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden_models import ruled_model, small_config

import dsv4_jax as ds
from dsv4_jax.data.tokenizer import Bytes
from dsv4_jax.generate.engine import Generator
from dsv4_jax.generate.programs import read_chunk
from dsv4_jax.generate.request import Request, find_capacity
from dsv4_jax.generate.sampling import Rule, apply_rule, draw
from dsv4_jax.generate.text import TextStream
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.ops.cross_entropy import head_logits

MODEL = small_config(
    n_layers=2, compress_ratios=(4, 8, 0), n_hash_layers=1, window_size=6, hc_sinkhorn_iters=2, remat="none",
)  # fmt: skip
PROMPTS = [np.random.RandomState(i).randint(0, 64, n).tolist() for i, n in enumerate((11, 1, 3, 9, 6))]


@functools.cache
def small():
    return ruled_model(MODEL)


@jax.jit
def forward(model, ids):
    """Log-probabilities of the token after each, by the forward pass of training; and the experts."""
    out = model.hidden(Inputs(ids), with_mtp=False)
    logits = head_logits(out.h, model.head[...])
    return jax.nn.log_softmax(logits), [report.experts for report in out.layers]


def texts(tokens):
    """The tokens of every request."""
    found = {}
    for token in tokens:
        found.setdefault(token.request, []).append(token)
    return found


def test_greedy_tokens_are_the_likeliest_of_the_whole_text():
    """More prompts than rows, read in chunks of 5, whose texts end at different times."""
    requests = [Request(ids=p, max_tokens=n, temperature=0) for p, n in zip(PROMPTS, (12, 20, 3, 1, 15), strict=True)]
    found = texts(ds.generate(small(), requests, rows=2, chunk=5, capacity=64, keep_experts=True))
    assert sorted(found) == list(range(5))
    for number, request in enumerate(requests):
        made, start = found[number], len(request.ids)
        ids = [*request.ids, *(token.id for token in made)]
        assert len(made) == request.max_tokens
        assert [token.finish for token in made] == [None] * (len(made) - 1) + ["length"]
        logp, experts = forward(small(), np.array([ids + [0] * (40 - len(ids))]))
        logp = np.asarray(logp)[0, start - 1 : len(ids) - 1]
        assert [token.id for token in made] == logp.argmax(-1).tolist()
        np.testing.assert_allclose([token.logprob for token in made], logp.max(-1), rtol=0, atol=1e-4)
        kept = np.concatenate([token.experts for token in made], axis=1)
        np.testing.assert_array_equal(kept, np.stack([np.asarray(x)[0, : len(ids) - 1] for x in experts]))


def test_log_probabilities_are_those_of_training_on_packed_texts():
    """Two texts in a row after another document, with learned and hashed layers and the experts of generation."""
    requests = [Request(ids=p, max_tokens=n, seed=n) for p, n in zip(PROMPTS[:2], (12, 9), strict=True)]
    found = texts(ds.generate(small(), requests, rows=2, chunk=5, capacity=64, keep_experts=True))
    S, k = 64, MODEL.n_activated_experts
    ids, segments = np.zeros((1, S), np.int32), np.zeros((1, S), np.int32)
    experts = np.zeros((MODEL.n_layers, 1, S, k), np.int32)
    ids[0, :7], segments[0, :7], place = 5, 1, 7
    want, at = [], []
    for number, request in enumerate(requests):
        text = [*request.ids, *(token.id for token in found[number])]
        ids[0, place : place + len(text)], segments[0, place : place + len(text)] = text, number + 2
        kept = np.concatenate([token.experts for token in found[number]], axis=1)
        experts[:, 0, place : place + kept.shape[1]] = kept
        at += range(place + len(request.ids) - 1, place + len(text) - 1)
        want += [token.logprob for token in found[number]]
        place += len(text)

    @jax.jit
    def logits(model, inputs):
        return head_logits(model.hidden(inputs, with_mtp=False).h, model.head[...])

    for forced in (None, list(experts)):
        got = logits(small(), Inputs(jnp.asarray(ids), jnp.asarray(segments), forced_experts=forced))
        logp = np.asarray(jax.nn.log_softmax(np.asarray(got)[0]))
        np.testing.assert_allclose(logp[at, ids[0, np.array(at) + 1]], want, rtol=0, atol=1e-4)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    """Bit for bit, with the same shapes: alone, beside others, and beside one that ends and one that begins."""
    how = dict(max_tokens=12, temperature=1.3, top_p=0.95, seed=3)
    run = lambda prompts, **options: texts(ds.generate(small(), prompts, rows=2, chunk=5, capacity=64, **options))
    alone = run([PROMPTS[0]], invariant=True, **how)[0]
    mine = Request(ids=PROMPTS[0], **how)
    others = [Request(ids=p, max_tokens=n, seed=n) for p, n in zip(PROMPTS[1:], (4, 7, 2, 1), strict=True)]
    together = run([mine, *others])[0]
    assert alone == together
    assert [t.id for t in run([dataclasses.replace(mine, seed=4)])[0]] != [t.id for t in alone]
    # Drawn tokens have the log-probabilities of the model, without temperature and limits.
    ids = [*PROMPTS[0], *(token.id for token in alone)]
    logp = np.asarray(forward(small(), np.array([ids + [0] * (40 - len(ids))]))[0])[0]
    want = logp[np.arange(10, 22), [token.id for token in alone]]
    np.testing.assert_allclose([token.logprob for token in alone], want, rtol=0, atol=1e-4)


def test_room_is_that_of_the_longest_prompt_with_its_text():
    asked = [Request(ids=[1] * length, max_tokens=tokens) for length, tokens in ((100, 28), (3, 10), (60, 10**6))]
    assert [find_capacity(x) for x in (asked[:1], asked[1:2], asked, [])] == [128, 64, 2048, 1024]


def test_room_doubles_and_programs_are_few():
    """A text that outgrows its room is the same, and after the first tokens of a room nothing is compiled."""
    how = dict(max_tokens=20, temperature=0, rows=2, invariant=True, chunk=5)
    wide = texts(ds.generate(small(), PROMPTS[:1], capacity=64, **how))[0]
    before = read_chunk._cache_size()
    narrow = texts(ds.generate(small(), PROMPTS[:1], capacity=16, **how))[0]
    assert [t.id for t in narrow] == [t.id for t in wide]
    np.testing.assert_allclose([t.logprob for t in narrow], [t.logprob for t in wide], rtol=0, atol=1e-5)
    assert read_chunk._cache_size() - before == 3  # the prompt and tokens with room for 16, tokens with room for 32
    list(ds.generate(small(), PROMPTS[:1], capacity=16, **how))
    assert read_chunk._cache_size() - before == 3


def probabilities(logits, temperature, top_k, top_p, min_p):
    """The rule, a token at a time."""
    p = np.exp(logits.astype(np.float64) / (temperature or 1))
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if not temperature:
        return np.eye(len(p))[order[0]]
    order = order[: top_k or None]
    share, kept = 0.0, []
    for i in order:
        if share < top_p:
            kept.append(i)
        share += p[i] / p[order].sum()
    kept = [i for i in kept if p[i] >= min_p * p.max()]
    out = np.zeros(len(p))
    out[kept] = p[kept] / p[kept].sum()
    return out


RULES = [
    (1.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.1), (0.5, 0, 1.0, 0.0), (2.0, 4, 1.0, 0.0), (1.0, 0, 0.7, 0.0),
    (1.0, 5, 0.8, 0.0), (1.0, 0, 1.0, 0.3), (0.7, 6, 0.9, 0.2), (1.0, 100, 1e-6, 0.0), (1.0, 0, 1.0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("rules", [RULES, RULES[:3]], ids=["limits", "none"])
def test_rules_of_drawing(rules):
    logits = np.random.RandomState(0).normal(0, 2, (len(rules), 9)).astype(np.float32)
    logits[:, 4] = logits[:, 2]  # equal ones count by number
    columns = [np.array(column) for column in zip(*rules, strict=True)]
    rule = Rule(*columns, np.zeros(len(rules), np.uint32))
    found = np.exp(jax.jit(apply_rule)(rule, logits))
    want = np.stack([probabilities(row, *how) for row, how in zip(logits, rules, strict=True)])
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


def test_draws_are_distributed_as_they_should_be():
    """Chi-square of 20,000 draws, by seed and by position."""
    p = np.array([0.5, 0.25, 0.15, 0.07, 0.03, 0.0])
    log_p = jnp.log(jnp.broadcast_to(p, (20_000, 6)))
    numbers, same = np.arange(20_000, dtype=np.uint32), np.zeros(20_000, np.uint32)
    for seeds, positions in ((numbers, same), (same, numbers)):
        counts = np.bincount(np.asarray(draw(log_p, seeds, positions)), minlength=6)
        assert counts[5] == 0
        assert ((counts[:5] - 20_000 * p[:5]) ** 2 / (20_000 * p[:5])).sum() < 18.5  # 0.1 % of 4 degrees


def test_stop_ids_and_strings():
    """A stop id is given, but is no text; a stop string is no text either, and ends the request."""
    how = dict(max_tokens=12, temperature=0, rows=2, invariant=True, chunk=5, capacity=64)
    ids = [t.id for t in texts(ds.generate(small(), PROMPTS[:1], **how))[0]]
    last = texts(ds.generate(small(), PROMPTS[:1], stop_ids=[ids[4]], **how))[0]
    cut = ids.index(ids[4]) + 1
    assert [t.id for t in last] == ids[:cut] and [t.finish for t in last] == [None] * (cut - 1) + ["stop"]

    class Letters(Bytes):
        size, border = 64, 63
        decode = staticmethod(lambda ids: "".join(chr(64 + i) for i in ids))

    whole = "".join(chr(64 + i) for i in ids)
    for stop in (whole[5:7], whole[11:], "never"):
        options = dict(tokenizer=Letters(), stop=[stop], stop_ids=()) | how
        made = texts(ds.generate(small(), [PROMPTS[0], PROMPTS[2], PROMPTS[1]], **options))
        at = whole.find(stop)
        assert "".join(t.text for t in made[0]) == (whole if at < 0 else whole[:at])
        assert made[0][-1].finish == ("length" if at < 0 else "stop")
        assert sorted(made) == [0, 1, 2]


def test_text_comes_in_whole_characters():
    """Bytes of a character wait for its last one; what cannot become a character does not hold up the text."""
    text = "aé€😀z"
    stream, parts = TextStream(Bytes()), []
    for byte in text.encode():
        parts.append(stream.add(byte))
    assert [p for p in parts if p] == list(text) and stream.end() == ""
    stream = TextStream(Bytes())
    assert [stream.add(b) for b in (0x61, 0xF0, 0x62)] == ["a", "", "\ufffdb"]
    assert stream.add(0xC3) == "" and stream.end() == "\ufffd"
    stream = TextStream(Bytes())
    assert "".join(stream.add(0xFF) for _ in range(20)) + stream.end() == "\ufffd" * 20
    # The start of a stop string is held back until it is one, or cannot become one.
    stream = TextStream(Bytes(), ["stop", "sto!"])
    assert [stream.add(b) for b in b"a sto s"] == ["a", " ", "", "", "", "sto ", ""]
    assert [stream.add(b) for b in b"top"] == ["", "", ""] and stream.stopped and stream.end() == ""


def test_prompts_are_taken_as_rows_are_free():
    """A source of prompts without end."""
    taken = []

    def prompts():
        for i in itertools.count():
            taken.append(i)
            yield PROMPTS[i % 5]

    made = itertools.islice(ds.generate(small(), prompts(), rows=2, chunk=5, capacity=64, max_tokens=3), 12)
    assert len({t.request for t in made}) >= 4 and len(taken) < 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(ids=[]), "ids"), (dict(max_tokens=0), "max_tokens"), (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"), (dict(top_k=-1), "top_k"), (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.1), "top_p"), (dict(min_p=-0.1), "min_p"), (dict(seed=2**32), "seed"),
        (dict(max_tokens=2.5), "max_tokens"), (dict(top_k=1.5), "top_k"), (dict(stop="ab"), "stop"),
        (dict(stop=[""]), "stop"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(change, words):
    with pytest.raises(ds.ConfigError, match=words):
        Request(**dict(ids=[1]) | change)


def test_wrong_prompts_are_refused():
    with pytest.raises(ds.ConfigError, match="must be 0 to 63, found 3 to 64"):
        Generator(small(), 1).add(Request(ids=[3, 64]))
    for prompts, options, words in ((["text"], {}, "tokenizer"), ([[1]], {"stop": ["x"]}, "tokenizer")):
        with pytest.raises(ds.ConfigError, match=words):
            next(ds.generate(small(), prompts, **options))
