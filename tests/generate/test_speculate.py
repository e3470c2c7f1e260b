# SPDX-License-Identifier: Apache-2.0
"""Drafts change the speed of decoding, and neither its greedy text nor the distribution of drawn text."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.caches import kept_values
from support.golden_models import draft_configs, ruled_model

import dsv4_jax as ds
from dsv4_jax.generate import speculate
from dsv4_jax.generate.engine import Generator
from dsv4_jax.generate.request import Request
from dsv4_jax.generate.sampling import Rule, accept
from dsv4_jax.mesh import act_spec
from dsv4_jax.model.cache import commit, init_cache
from dsv4_jax.model.dspark import Anchors, propose
from dsv4_jax.model.inputs import Inputs

MODELS = draft_configs()
PROMPTS = [np.random.RandomState(i).randint(0, 16, n).tolist() for i, n in enumerate((9, 1, 4))]
SIZES = dict(chunk=5, capacity=64)


@functools.cache
def small(name: str):
    return ruled_model(MODELS[name])


def generated(model, requests, **options):
    """The ids of every request, and the generator."""
    engine, found = Generator(model, 2, **SIZES | options), {}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for token in engine.step():
            found.setdefault(token.request, []).append(token)
    return found, engine


@pytest.mark.parametrize(("name", "width"), [("mtp", 2), ("dspark", 3)])
def test_greedy_text_is_that_without_drafts(name: str, width: int):
    """In two rows, whose drafts are accepted at different times; with the log-probabilities and the experts."""
    lengths = 300, 33, 50
    requests = [Request(ids=p, max_tokens=n, temperature=0) for p, n in zip(PROMPTS, lengths, strict=True)]
    plain, _ = generated(small(name), requests, keep_experts=True, capacity=512)
    drafted, engine = generated(small(name), requests, keep_experts=True, capacity=512, draft=width)
    for number in range(3):
        want, got = plain[number], drafted[number]
        assert [t.id for t in got] == [t.id for t in want] and [t.finish for t in got] == [t.finish for t in want]
        np.testing.assert_allclose([t.logprob for t in got], [t.logprob for t in want], rtol=0, atol=1e-4)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.experts, b.experts)
    assert 0 < engine.accepted[0] < engine.drafted and (np.diff(engine.accepted) <= 0).all()
    assert engine.steps["token"] < sum(lengths)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "widths"), [("mtp", (1, 2, 3, 4)), ("dspark", (1, 2, 3))])
def test_greedy_text_of_2000_tokens_at_every_width(name: str, widths: tuple[int, ...]):
    requests = [Request(ids=p, max_tokens=2000, temperature=0) for p in PROMPTS[:2]]
    want, _ = generated(small(name), requests, capacity=2048)
    for width in widths:
        got, engine = generated(small(name), requests, capacity=2048, draft=width)
        for number in range(2):
            assert [t.id for t in got[number]] == [t.id for t in want[number]], width
        assert 0 < engine.accepted[0] < engine.drafted


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_after_drafts_is_that_of_the_text(name: str):
    """Windows, unfinished ones, entries, and what drafts are made from, at many lengths of two texts."""
    model, engine = small(name), Generator(small(name), 2, **SIZES, draft=3)
    for prompt in PROMPTS[:2]:
        engine.add(Request(ids=prompt, max_tokens=50, temperature=0.5))
    texts, lengths = [list(prompt) for prompt in PROMPTS[:2]], set()
    for _ in range(20):
        for token in engine.step():
            texts[token.request].append(token.id)
        n = np.asarray(engine.cache.length_B)
        ids = np.array([(text + [0] * 64)[:64] for text in texts])
        want = read_text(model, init_cache(model.cfg, 2, SIZES["capacity"], draft=True), ids, n)
        for got, value in zip(kept_values(engine.cache), kept_values(want), strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)
        lengths.add(tuple(n % 8))
    assert len(lengths) > 10


@pytest.mark.parametrize("name", [pytest.param("mtp", marks=pytest.mark.slow), "dspark"])
def test_bfloat16_drafts_too(name: str):
    """No array of the cache changes its type, and log-probabilities are about those of the forward pass."""
    model = ruled_model(dataclasses.replace(MODELS[name], compute_dtype="bfloat16"))
    request = Request(ids=PROMPTS[0], max_tokens=30)
    engine = Generator(model, 1, **SIZES, draft=2)
    before, made = jax.tree.map(lambda x: x.dtype, engine.cache), []
    engine.add(request)
    while engine.busy:
        made += engine.step()
    assert jax.tree.map(lambda x: x.dtype, engine.cache) == before and engine.drafted
    ids = [*request.ids, *(token.id for token in made)]
    logits = jax.jit(lambda model, ids: model(ids).logits)(model, np.array([ids]))
    logp = np.asarray(jax.nn.log_softmax(np.asarray(logits)[0]))
    want = logp[np.arange(len(request.ids) - 1, len(ids) - 1), np.array(ids[len(request.ids) :])]
    np.testing.assert_allclose([token.logprob for token in made], want, rtol=0, atol=0.1)


@jax.jit
def read_text(model, cache, ids, n):
    """A cache of the first n tokens of rows."""
    return commit(model.extend(cache, ids, n)[1], n)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_made_as_in_training(name: str):
    """After prompts of several lengths: from the streams before the head's collapse, and from the layers' features."""
    model, S = small(name), 12
    ids, lengths = np.random.RandomState(0).randint(0, 16, (3, S)), np.array([1, 6, 11])
    rule = Rule(
        np.ones(3, np.float32),
        np.zeros(3, int),
        np.ones(3, np.float32),
        np.zeros(3, np.float32),
        np.zeros(3, np.uint32),
    )

    @jax.jit
    def cached(model):
        cache = init_cache(model.cfg, 3, 32, draft=True)
        _, pending = model.extend(cache, ids, lengths)
        token = jnp.asarray(ids[np.arange(3), lengths])
        return speculate.draft(model, commit(pending, lengths), token, jnp.ones(3, bool), rule, 1)

    @jax.jit
    def trained(model):
        if name == "mtp":
            return model(ids).mtp_logits.at[np.arange(3), lengths - 1].get(out_sharding=jax.P())
        out = model.hidden(Inputs(jnp.asarray(ids)), collect=["features"])
        place = lambda x: jax.reshard(jnp.asarray(x)[:, None], act_spec(2))
        anchors = Anchors(place(ids[np.arange(3), lengths]), place(lengths), place(np.zeros(3, int)))
        return propose(model, model.draft(out, anchors), anchors).logits_BAnV[:, 0, 0]

    _, log_q = cached(model)
    np.testing.assert_allclose(log_q[:, 0], jax.nn.log_softmax(trained(model)), rtol=0, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_drawn_text_is_distributed_as_without_drafts(name: str):
    """Chi-square of the first three tokens of 20,000 texts against their exact probabilities."""
    model, prompt, N, rows = small(name), PROMPTS[0], 20_000, 500
    how = dict(max_tokens=3, temperature=1.2, top_p=0.9)
    requests = (Request(ids=prompt, seed=seed, **how) for seed in range(N))
    counts, place = np.zeros((3, 16)), {}
    for token in ds.generate(model, requests, rows=rows, chunk=9, capacity=64, draft=2):
        k = place[token.request] = place.get(token.request, -1) + 1
        counts[k, token.id] += 1
    # Exact: the probabilities of all texts of three tokens.
    texts = np.array([[*prompt, *more] for more in itertools.product(range(16), repeat=2)])
    logits = np.asarray(jax.jit(lambda model: model(texts).logits)(model), np.float64)[:, len(prompt) - 1 :]

    def p(x):
        x = np.exp((x - x.max(-1, keepdims=True)) / 1.2)
        x /= x.sum(-1, keepdims=True)
        order = np.argsort(-x, axis=-1, kind="stable")
        likelier = np.take_along_axis(np.cumsum(np.take_along_axis(x, order, -1), -1), np.argsort(order, -1), -1) - x
        x = np.where(likelier < 0.9, x, 0)
        return x / x.sum(-1, keepdims=True)

    first, second, third = p(logits[0, 0]), p(logits[::16, 1]), p(logits[:, 2])
    joint = (first[:, None] * second).reshape(-1)
    for got, want in zip(counts, (first, first @ second, joint @ third), strict=True):
        seen = want > 0
        assert got.sum() == N and got[~seen].sum() == 0
        chi = ((got - N * want)[seen] ** 2 / (N * want[seen])).sum()
        assert chi < 2 * (seen.sum() - 1) + 15, chi  # far above what 1 of 1,000 exceeds


def test_accepted_tokens_are_distributed_as_the_model_says():
    V, n = 5, 3
    p, q = np.random.RandomState(0).dirichlet(np.ones(V), size=(2, n + 1))

    def one(key):
        drafts = jax.random.categorical(jax.random.fold_in(key, 7), jnp.log(q[:n]))
        kept, instead = accept(key, drafts, jnp.asarray(q[:n]), jnp.asarray(p))
        tokens = jnp.where(jnp.arange(n + 1) < kept.sum(), jnp.pad(drafts, (0, 1)), instead)
        return tokens, kept.sum()

    tokens, kept = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 20000))
    for k in range(n + 1):
        reached = np.asarray(tokens)[np.asarray(kept) >= k, k]
        share = np.bincount(reached, minlength=V) / len(reached)
        assert np.abs(share - p[k]).max() < 5 * np.sqrt(0.25 / len(reached)), k
    overlap = np.minimum(p[:n], q[:n]).sum(1).cumprod()
    np.testing.assert_allclose([(np.asarray(kept) > k).mean() for k in range(n)], overlap, atol=0.02)


def test_wrong_widths_are_refused():
    none = dataclasses.replace(MODELS["mtp"], n_mtp_layers=0, compress_ratios=(4, 8))
    for cfg, n, words in ((none, 1, "no draft blocks"), (MODELS["dspark"], 4, "dspark_block_size = 3")):
        with pytest.raises(ds.ConfigError, match=words):
            speculate.check_width(cfg, n)


@pytest.mark.parametrize("name", [pytest.param("mtp", marks=pytest.mark.slow), "dspark"])
def test_a_text_whose_end_was_followed_by_accepted_drafts_goes_on(name: str):
    """Drafts after the last token, as a number or a stop id sets it, are in the cache: nobody may see them."""
    model = small(name)

    def converse(n: int, stop, draft: int):
        engine = Generator(model, 1, **SIZES, draft=draft)
        after, turns, cut = None, [], 0
        for prompt in PROMPTS:
            request = Request(ids=prompt, max_tokens=n, temperature=0, stop_ids=stop)
            after, made = engine.add(request, after), []
            while engine.busy:
                made += [token.id for token in engine.step()]
            cut += not engine._done[0].length  # it is to be read again
            turns.append(made)
        return turns, cut

    cuts = 0
    for n, stop in (*((n, ()) for n in range(2, 9)), (20, (3, 9)), (20, (5, 1)), (20, (0, 4))):
        want, _ = converse(n, stop, 0)
        got, cut = converse(n, stop, 3)
        assert got == want
        cuts += cut
    assert cuts > 0
