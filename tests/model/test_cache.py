# SPDX-License-Identifier: Apache-2.0
"""Chunks of tokens computed from a cache give what the whole rows give, whatever their lengths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.caches import kept_values
from support.golden_models import ruled_model, small_config

from dsv4_jax.config.files import load_config
from dsv4_jax.mesh import make_mesh
from dsv4_jax.model.cache import commit, count_bytes_per_token, init_cache, measure_cache
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.ops.cross_entropy import head_logits
from dsv4_jax.section import ConfigError

CLOSE = dict(rtol=0, atol=5e-5)


@functools.partial(jax.jit, static_argnames="collect")
def extend(model, cache, ids, n, embeddings=None, token_types=None, forced=None, collect=()):
    """Logits of a chunk, those of the MTP block, its layers, and the cache after it."""
    more = dict(embeddings=embeddings, token_types=token_types, forced_experts=forced, collect=collect)
    out, pending = model.extend(cache, ids, n, **more)
    mtp = None if out.mtp is None else head_logits(out.mtp, whole(model.head))
    return head_logits(out.h, whole(model.head)), mtp, out.layers, commit(pending, n)


def decode(model, ids, chunks, lengths=None, capacity=128, **arrays):
    """Logits of rows [B, S] and their MTP logits, zeros where there are none.

    `chunks` are pairs of T and the number of real tokens of each row, at most T; `arrays` are cut like the ids.
    """
    (B, S), V = ids.shape, model.cfg.vocab_size
    lengths = np.full(B, S) if lengths is None else np.asarray(lengths)
    cache, place = init_cache(model.cfg, B, capacity, draft=True), np.zeros(B, int)
    logits, mtp = (np.zeros((B, S, V), np.float32) for _ in range(2))
    for T, wanted in chunks:
        n = np.minimum(wanted, lengths - place)
        at = np.minimum(place[:, None] + np.arange(T), S - 1)  # what follows the n real tokens is padding
        cut = {name: x[np.arange(B)[:, None], at] for name, x in ({"ids": ids} | arrays).items()}
        part, after, _, cache = extend(model, cache, cut.pop("ids"), n, **cut)
        rows, tokens = np.nonzero(np.arange(T) < n[:, None])
        logits[rows, at[rows, tokens]] = np.asarray(part)[rows, tokens]
        if after is not None:
            mtp[rows, at[rows, tokens]] = np.asarray(after)[rows, tokens]
        place += n
    assert (place == lengths).all() and (np.asarray(cache.length_B) == lengths).all()
    return logits, mtp


def uneven(lengths, T, seed=0):
    """Chunks of up to T tokens, another number in every row, some rows idle, until all rows are done."""
    rng, left, chunks = np.random.RandomState(seed), np.array(lengths), []
    while left.any():
        n = np.minimum(rng.randint(0, T + 1, len(left)), left)
        left = left - n
        chunks.append((T, n))
    return chunks


def even(S, T):
    """Chunks of T tokens in every row; the last may be shorter."""
    return [(T, T)] * -(-S // T)


@pytest.mark.parametrize(
    ("name", "T"), [("flash", 1), ("flash", 7), ("pro", 7), pytest.param("pro", 70, marks=pytest.mark.slow)]
)
def test_golden_models_decode_what_they_compute(request, name: str, T: int):
    """Also the MTP block, which stands one token behind."""
    golden = request.getfixturevalue(name)
    logits, mtp = decode(golden.model, golden.ids, uneven([70, 70], 7) if T == 7 else even(70, T))
    np.testing.assert_allclose(logits, golden.arrays["logits"], **CLOSE)
    np.testing.assert_allclose(mtp[:, 1:], golden.arrays["mtp_logits"][:, :-1], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 7, 45])
def test_golden_images_decode_across_the_borders_of_chunks(v41, T: int):
    """An image of 10 positions that begins at 5: its embeddings are made once, from the whole prompt."""
    cfg, model, arrays = v41["cfg"], v41["model"], v41["arrays"]
    ids, types = arrays["ids"], arrays["token_types"]
    inputs = Inputs(jnp.asarray(ids), token_types=types, patches=arrays["patches"], image_grids=v41["grids"])
    embeddings = jax.jit(lambda model: model.embed_inputs(inputs.checked(cfg))[0])(model)
    chunks = uneven([45, 45], 7) if T == 7 else even(45, T)
    logits, _ = decode(model, ids, chunks, embeddings=np.asarray(embeddings), token_types=types)
    np.testing.assert_allclose(logits, v41["out"].logits, rtol=0, atol=1e-4)


# Every kind of layer of V4, and of V4.1 with a pool of candidates, an Engram and single-pass hyper-connections.
V4 = small_config(
    n_layers=3, compress_ratios=(4, 8, 0, 0), n_hash_layers=1, window_size=6, hc_sinkhorn_iters=2, init_std=0.5,
    attention_block=4, remat="none",
)  # fmt: skip
V41 = dataclasses.replace(
    V4, n_layers=4, compress_ratios=(2, 2, 2, 2), n_hash_layers=0, n_mtp_layers=0, kv_source_layers=(0,),
    index_source_layers=(0, 1), candidate_source_layer=0, candidate_topk_blocks=2, candidate_block_size=2,
    hc_single_pass=True, query_norm=False, engram_layer_ids=(1,), engram_vocab_size=50, engram_n_heads=2,
    engram_head_dim=8,
)  # fmt: skip
SMALL = {"v4": V4, "v41": V41}
IDS = np.random.RandomState(0).randint(0, 64, (4, 70))
LENGTHS = [1, 3, 17, 70]


@functools.cache
def small(name: str, **changes):
    """A small model, and the logits of its rows and of its MTP block."""
    model = ruled_model(dataclasses.replace(SMALL[name], **changes))
    out = jax.jit(lambda model: model(IDS))(model)
    return model, out.logits, out.mtp_logits


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "attention", ["sparse", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", "warmup"))]
)
def test_rows_of_different_lengths(name: str, attention: str):
    """Rows that end or pause while others go on; two of them are shorter than a window of either ratio."""
    model, want, want_mtp = small(name, attention=attention)
    logits, mtp = decode(model, IDS, uneven(LENGTHS, 5), LENGTHS, capacity=512)
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[b, :length], want[b, :length], **CLOSE, err_msg=f"row of {length}")
        if want_mtp is not None:
            np.testing.assert_allclose(mtp[b, 1:length], want_mtp[b, : length - 1], **CLOSE, err_msg=f"row of {length}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("T", [1, 2, 3, 4, 6, 7, 8, 9, 70])
def test_chunks_of_every_length(name: str, T: int):
    """One token, shorter than every window, as long as one, one longer, the sliding window, the whole row."""
    model, want, _ = small(name)
    logits, _ = decode(model, IDS, even(70, T))
    np.testing.assert_allclose(logits, want, **CLOSE)


# Prompts that end before, at and after the windows of a ratio of 4, the overlap of two of them, and 128.
PROMPTS = [*range(1, 10), 127, 128, 129]
REAL = dataclasses.replace(V4, n_layers=2, compress_ratios=(4, 128, 0), n_hash_layers=0, attention_block=64)


@pytest.mark.parametrize("T", [50, pytest.param(1, marks=pytest.mark.slow), pytest.param(129, marks=pytest.mark.slow)])
def test_real_ratios_and_prompts_around_them(T: int):
    """Padded prompts in one batch, then more tokens, up to the third window of 128."""
    S, B = 260, len(PROMPTS)
    model, ids = ruled_model(REAL), np.random.RandomState(0).randint(0, 64, (1, 260)).repeat(len(PROMPTS), 0)
    want = jax.jit(lambda model: model(ids[:1]))(model)
    chunks = [(T, np.clip(np.array(PROMPTS) - start, 0, T)) for start in range(0, 129, T)]
    logits, mtp = decode(model, ids, chunks + even(S, T), np.full(B, S), capacity=512)
    np.testing.assert_allclose(logits, np.broadcast_to(want.logits, logits.shape), **CLOSE)
    np.testing.assert_allclose(mtp[:, 1:], np.broadcast_to(want.mtp_logits, logits.shape)[:, :-1], **CLOSE)


@pytest.mark.parametrize("name", SMALL)
def test_rejected_tokens_leave_no_trace(name: str):
    """Chunks of 5 tokens of which 0 to 5 are kept: every number at every offset from the windows of all ratios."""
    model, _, _ = small(name)
    B, S, T = 4, 60, 5
    plain = init_cache(model.cfg, B, 64, draft=True)
    speculative, place = plain, np.zeros(B, int)
    caches = [plain]
    for t in range(S):
        _, _, _, plain = extend(model, plain, np.resize(IDS[:, t : t + 1], (B, T)), np.ones(B, int))
        caches.append(plain)
    missing, rng = {(offset, count) for offset in range(8) for count in range(T + 1)}, np.random.RandomState(1)
    while missing:
        n = np.ones(B, int)  # or the least number that is missing
        for b in range(B):
            n[b] = min((count for offset, count in missing if offset == place[b] % 8), default=1)
            missing.discard((place[b] % 8, n[b]))
        drafts = rng.randint(0, 64, (B, T))  # rejected ones, with the accepted ones before them
        for b in range(B):
            drafts[b, : n[b]] = IDS[b, place[b] : place[b] + n[b]]
        _, speculative = verify(model, speculative, drafts, n)
        place += n
        whole_rows = [kept_values(caches[at]) for at in place]
        for i, x in enumerate(kept_values(speculative)):
            want = np.stack([np.asarray(whole_rows[b][i])[:, b] for b in range(B)], axis=1)
            np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)


@jax.jit
def verify(model, cache, ids, n):
    """Compute a chunk whose tokens are all real, and keep n of them."""
    out, pending = model.extend(cache, ids, jnp.full(len(ids), ids.shape[1]))
    return out.h, commit(pending, n)


@pytest.mark.parametrize(("name", "shape"), [pytest.param("v4", (2, 2, 1), marks=pytest.mark.slow), ("v41", (1, 2, 2))])
def test_a_mesh_decodes_what_one_device_does(name: str, shape: tuple[int, int, int]):
    """Experts on two devices, rows on four or two; with `context` the chunk's positions are split between layers."""

    def run(mesh):
        with jax.set_mesh(mesh):
            model = jax.jit(lambda: DeepSeek(SMALL[name], rngs=nnx.Rngs(0)))()
            return decode(model, IDS[:, :24], uneven([24, 7, 1, 20], 4), [24, 7, 1, 20])

    for got, want in zip(run(make_mesh(*shape)), run(make_mesh()), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_forced_experts_replace_the_choice():
    """Experts of a pass over the rows, given back chunk by chunk, change nothing; others do."""
    model, want, _ = small("v41")
    out = jax.jit(lambda model: model(IDS))(model)
    cache, logits = init_cache(model.cfg, 4, 128), []
    for start in range(0, 70, 7):
        forced = [np.asarray(x)[:, start : start + 7] for x in out.experts]
        part, _, layers, cache = extend(model, cache, IDS[:, start : start + 7], np.full(4, 7), forced=forced)
        logits.append(part)
        for report, experts in zip(layers, forced, strict=True):
            np.testing.assert_array_equal(report.experts, experts)
    np.testing.assert_allclose(np.concatenate(logits, 1), want, **CLOSE)


@pytest.mark.parametrize(
    ("name", "small", "share", "plain"),
    [("v4_flash", 3514.25, 0.01995, 6880), ("v4_pro", 5031.4375, 0.02014, 9848), ("v41_flash", 890, 0.00543, 3200)],
)
def test_bytes_per_token_are_those_of_the_reports(name: str, small: float, share: float, plain: float):
    """From the shapes of real caches: in the formats of the releases, and in bf16."""
    cfg = dataclasses.replace(load_config(f"configs/{name}.py").model, attention="sparse", compute_dtype="bfloat16")
    found = count_bytes_per_token(cfg, quantised=True)
    assert found == small
    assert round(found / (2 * 8 * 128 * 2 * cfg.n_layers), 5) == share
    assert int(count_bytes_per_token(cfg)) == plain


def test_kinds_of_bytes_of_a_cache():
    """Of DeepSeek-V4-Flash, in fp32: a window of 127 keys a layer, 7 tokens before a CSA window, 127 in HCA."""
    cfg = dataclasses.replace(load_config("configs/v4_flash.py").model, attention="sparse", compute_dtype="float32")
    sizes = measure_cache(jax.eval_shape(lambda: init_cache(cfg, 1, 1 << 17)))
    assert sizes["windows"] == 43 * 127 * 512 * 4
    assert sizes["entries"] == ((1 << 15) * 21 + (1 << 10) * 20) * 512 * 4
    assert sizes["index keys"] == (1 << 15) * 21 * 128 * 4
    assert sizes["unfinished windows"] == 2 * 4 * (21 * 7 * 2 * (512 + 128) + 20 * 127 * 512)
    assert sizes["other"] == 0


def test_rows_must_fit_the_mesh():
    with jax.set_mesh(make_mesh(2, 2, 1)), pytest.raises(ConfigError, match=r"3 rows: .* = 4 must divide"):
        init_cache(V4, 3, 16)


@pytest.mark.parametrize("name", SMALL)
def test_bfloat16_decodes_what_it_computes(name: str):
    """Closer to the forward pass in bfloat16 than that is to fp32; and no part of a cache changes its type."""
    ids, lengths = IDS[:, :24], [24, 7, 1, 20]
    model, want, want_mtp = small(name, compute_dtype="bfloat16")
    _, exact, _ = small(name)
    cache = init_cache(model.cfg, 4, 32, draft=True)
    after = jax.eval_shape(lambda: commit(model.extend(cache, ids, np.array(lengths))[1], np.array(lengths)))
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert types(after) == types(cache)
    assert cache.layers[0][0].recent.window_BUK.dtype == jnp.bfloat16
    logits, mtp = decode(model, ids, uneven(lengths, 5), lengths, capacity=32)
    far = lambda x, y: np.abs(np.asarray(x, np.float32) - np.asarray(y)).mean()
    for b, length in enumerate(lengths):
        rounding = far(want[b, :length], exact[b, :length])
        assert 0 < rounding and far(logits[b, :length], want[b, :length]) < 0.1 * rounding
        if want_mtp is not None and length > 1:
            assert far(mtp[b, 1:length], want_mtp[b, : length - 1]) < 0.1 * rounding


@pytest.mark.parametrize("name", SMALL)
def test_quantised_layers_decode_what_they_compute(name: str):
    """Keys and entries are rounded once, before they are kept."""
    model, want, _ = small(name, quantize=("experts", "index", "window", "entries"))
    logits, _ = decode(model, IDS[:, :24], uneven([24, 7, 1, 20], 5), [24, 7, 1, 20])
    for b, length in enumerate([24, 7, 1, 20]):
        # A value next to the border between two codes may take the other one.
        apart = np.abs(logits[b, :length] - want[b, :length])
        assert apart.max() < 5e-3 and apart.mean() < 5e-5
