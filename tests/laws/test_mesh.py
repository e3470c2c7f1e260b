# SPDX-License-Identifier: Apache-2.0
"""The model on every mesh: losses and every gradient are those of one device."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from support.golden_models import small_config
from support.hlo import collectives, loops

import dsv4_jax as ds
from dsv4_jax.config import Config, DataConfig, LossConfig, MeshConfig, OptimConfig, TrainConfig
from dsv4_jax.data.batch import abstract_batch, batch_spec
from dsv4_jax.mesh import BATCH, make_mesh
from dsv4_jax.train.objectives.pretrain import compute_losses
from dsv4_jax.train.state import abstract_state, init_state
from dsv4_jax.train.step import make_train_step

B, S = 8, 40
# Chunks of 5 positions on 8 devices are shorter than the window, than both ratios and than an overlap.
MODEL = small_config(
    n_layers=2, compress_ratios=(4, 8, 0), n_hash_layers=1, window_size=7, n_routed_experts=8, index_topk=2,
    attention_block=3, hc_mult=2, remat="none",
)  # fmt: skip
# Everything of V4.1: CSA2 with a pool of candidates, single-pass hyper-connections, Engram, images. No axis of devices
# divides the vocabulary, all of them divide the Engram's 384 rows.
MODEL41 = small_config(
    vocab_size=67, n_layers=3, compress_ratios=(2, 2, 2), kv_source_layers=(0,), index_source_layers=(0, 1),
    candidate_source_layer=0, candidate_topk_blocks=2, candidate_block_size=2, window_size=7, n_routed_experts=8,
    index_topk=2, n_mtp_layers=0, hc_single_pass=True, query_norm=False, modality_bias=True, engram_layer_ids=(1,),
    engram_vocab_size=50, engram_n_heads=2, engram_head_dim=8, vision_n_layers=1, vision_dim=16, vision_n_heads=2,
    vision_inter_dim=16, vision_patch_size=2, vision_downsample_ratio=2, image_token_id=63, attention_block=3,
    hc_mult=2, remat="none", swiglu_limit=1.0,
)  # fmt: skip
WEIGHTS = {"loss": 1.0, "mtp_loss": 0.3, "balance_loss": 0.1, "indexer_loss": 1.0}
REST = [(1, 1, 8), (1, 8, 1), (8, 1, 1), (4, 2, 1), (1, 4, 2)]


def packed_batch(rng):
    """Documents of awkward lengths, a row of padding, and a row that has most of the targets."""
    lengths = [[40], [1, 3, 4, 5, 7, 15], [16, 17], [], [39, 1], [8, 8, 8, 8, 8], [2] * 20, [13, 9, 18]]
    segments = np.zeros((B, S), np.int32)
    for row, documents in zip(segments, lengths, strict=True):
        ends = np.cumsum(documents)
        for number, (end, length) in enumerate(zip(ends, documents, strict=True), 1):
            row[end - length : end] = number
    segments[1, :4], segments[1, 4:35] = 0, segments[1, :31].copy()  # padding may come first
    targets = np.where(segments > 0, rng.integers(0, MODEL.vocab_size, (B, S)), -1).astype(np.int32)
    targets[2:, ::2] = -1
    ids = rng.integers(0, MODEL.vocab_size, (B, S)).astype(np.int32)
    return {"ids": ids, "segment_ids": segments, "targets": targets, "mtp_targets": np.roll(targets, 3, 0)}


def with_images(batch, rng):
    """The batch with an image across two devices' positions, and one of a single patch."""
    types = np.full((B, S), -1, np.int32)
    grids, patches = np.zeros((B, 1, 4), np.int32), np.zeros((B, 24, 3, 2, 2), np.float32)
    patches[:, :20] = rng.normal(size=(B, 20, 3, 2, 2))
    for row, start, height, width in ((0, 4, 3, 5), (4, 20, 1, 1)):
        grids[row] = row, start, height, width
        lines, columns = -(-height // 2), -(-width // 2)
        span = [0, *([1] * columns + [2]) * lines, 3]
        types[row, start : start + len(span)] = span
    ids = np.where(types >= 0, MODEL41.image_token_id, batch["ids"])
    targets = np.where(types >= 0, -1, batch["targets"])
    return batch | {"ids": ids, "targets": targets, "token_types": types, "patches": patches, "image_grids": grids}


def on_mesh(mesh, model=MODEL, change=lambda name, x: x, run=None):
    """Losses, loads and gradients (or what `run` makes of model and batch) on a mesh, as numpy."""
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: ds.DeepSeek(model, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(shapes)
        flat = []
        for path, v in nnx.to_flat_state(state):
            spec, value = v.get_value().sharding.spec, v.get_value()
            name = ".".join(map(str, path))
            if np.issubdtype(value.dtype, np.integer):
                x = rng.integers(0, model.n_routed_experts - 1, value.shape[:-1])[..., None] + np.arange(
                    value.shape[-1]
                )
            else:
                # Scales of hyper-connections around 1: near 0 their gradients are mostly rounding, on one device too.
                x = 0.3 * rng.normal(size=value.shape) + name.endswith("_scale")
            x = change(name, x).astype(value.dtype)
            flat.append((path, v.replace(jax.device_put(x, NamedSharding(mesh, spec)))))
        params, buffers = nnx.split_state(nnx.from_flat_state(flat), nnx.Param, ...)
        batch = packed_batch(rng)
        if model.vision_n_layers:
            batch = with_images(batch, rng)
        batch = {n: jax.device_put(x, NamedSharding(mesh, batch_spec(n, x.ndim))) for n, x in batch.items()}

        def objective(params):
            found, load = compute_losses(nnx.merge(graphdef, params, buffers), batch)
            return sum(weight * found.get(name, 0.0) for name, weight in WEIGHTS.items()), (found, load)

        program = jax.jit(jax.grad(objective, has_aux=True)).lower(params).compile()
        assert not loops(program.as_text())  # no layer is repeated, and no other loop needs exchanges
        grads, (found, load) = program(params)
        names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(grads)]
        specs = [x.sharding.spec for x in jax.tree.leaves(grads)]
        assert specs == [x.sharding.spec for x in jax.tree.leaves(params)]
        return jax.device_get((found, load, dict(zip(names, jax.tree.leaves(grads), strict=True))))


@pytest.fixture(scope="module")
def one():
    return on_mesh(make_mesh())


def same(got, want):
    (found, load, grads), (found_1, load_1, grads_1) = got, want
    for name, value in found.items():
        np.testing.assert_allclose(value, found_1[name], rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(load, load_1)
    for name, g in grads.items():
        near = 1e-4 if name.endswith("_scale") else 1e-5  # three sums over everything, whose terms nearly cancel
        if name.endswith(("engram.q_weight", "engram.k_weight")):
            near = 3e-5  # behind a root, which is steep at 0
        scale = np.abs(grads_1[name]).max()
        np.testing.assert_allclose(g, grads_1[name], rtol=0, atol=near * scale + 1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), *REST])
def test_losses_and_gradients_on_any_mesh(shape, one):
    same(on_mesh(make_mesh(*shape)), one)


@pytest.fixture(scope="module")
def one41():
    return on_mesh(make_mesh(), MODEL41)


@pytest.mark.parametrize("shape", [(2, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in REST)])
def test_v41_on_any_mesh(shape, one41):
    assert all(np.asarray(g).any() for name, g in one41[2].items() if "bias" not in name)
    assert 0 < one41[0]["moe/clamped"] < 1
    assert one41[1][:, 1].sum() == 3 * 2 * (2 * 4 + 2 + 4)  # layers, experts of a token, positions of images
    same(on_mesh(make_mesh(*shape), MODEL41), one41)


SCALES = dict(init_std=0.3, hc_init_scale=1.0)


def steps(shape, optim="deepseek_v41"):
    """Three steps of training on a mesh, twice: [(states, metrics)] of all of them, and the compiled text."""
    lengths = dict(zip(("data", "expert", "context"), shape, strict=True))
    cfg = Config(
        model=dataclasses.replace(MODEL, n_layers=1, compress_ratios=(4, 0), n_hash_layers=0, **SCALES),
        data=DataConfig(seq_len=4 * S, batch_size=B),
        # Large enough an eps that AdamW does not turn the rounding of a vanishing gradient into a whole step.
        optim=OptimConfig(name=optim, eps=1e-4, warmup_steps=0, decay_steps=0, weight_decay=0.1),
        mesh=MeshConfig(**lengths),
        train=TrainConfig(steps=3, run_dir=""),
    )
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        init = jax.jit(lambda: init_state(cfg)).lower().compile()
        step = jax.jit(make_train_step(cfg)).lower(abstract_state(cfg), abstract_batch(cfg, B)).compile()
        runs = []
        for _ in range(2):
            state, rng = init(), np.random.default_rng(1)
            states, found = [jax.device_get(state)], []
            for number in range(3):
                parts = [packed_batch(rng) for _ in range(4)]  # the same segment number may come again in a row
                batch = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
                if number == 2:  # all targets on one device
                    alone = (np.arange(B)[:, None] == 7) & (np.arange(4 * S) < 20)
                    batch |= {name: np.where(alone, batch[name], -1) for name in ("targets", "mtp_targets")}
                state, metrics = step(state, jax.device_put(batch, NamedSharding(mesh, jax.P(BATCH, "context"))))
                states.append(jax.device_get(state))
                found.append(jax.device_get(metrics))
            nothing = {name: np.full_like(x, -1 if "targets" in name else 0) for name, x in batch.items()}
            _, metrics = step(state, jax.device_put(nothing, NamedSharding(mesh, jax.P(BATCH, "context"))))
            found.append(jax.device_get(metrics))
            runs.append((states, found))
    return runs, step.as_text()


@pytest.fixture(scope="module")
def one_run():
    return steps((1, 1, 1))


@pytest.mark.parametrize("shape", [(2, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in REST)])
def test_three_steps_on_any_mesh(shape, one_run, capfd):
    """Muon, head-wise Muon, Sinkhorn and AdamW; two runs have the same bits; nothing is gathered that need not be."""
    jax.config.update("jax_enable_compilation_cache", False)  # XLA says what it thinks of a program only once
    try:
        (run, again), text = steps(shape)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    jax.tree.map(np.testing.assert_array_equal, run, again)

    ((states_1, metrics_1), _), _ = one_run
    states, metrics = run
    jax.tree.map(np.testing.assert_array_equal, states[0], states_1[0])
    *metrics, nothing = metrics  # a batch of padding has no loss and no gradient
    assert nothing["finite"] and nothing["train/objective"] == 0 == nothing["grad_norm"]
    for found, want in zip(metrics, metrics_1[:3], strict=True):
        for name in ("loss", "train/mtp_loss", "train/balance_loss", "train/indexer_loss", "grad_norm"):
            np.testing.assert_allclose(found[name], want[name], rtol=1e-5, err_msg=name)
        assert found["tokens"] == want["tokens"] and found["moe/load_max"] == want["moe/load_max"]
    jax.tree.map(np.testing.assert_array_equal, states[3].buffers, states_1[3].buffers)
    # The moments after one step are the gradients, or their squares.
    for (path, got), want in zip(
        jax.tree.leaves_with_path(states[1].opt_state), jax.tree.leaves(states_1[1].opt_state), strict=True
    ):
        name = jax.tree_util.keystr(path)
        # Streams are nearly equal after one layer, so that what weighs them has a gradient of nearly nothing.
        cancels = name.endswith(("_scale'].value", "hc_head_base'].value"))
        near = 2e-4 if cancels else 2e-5 if ".nu[" in name else 1e-5
        np.testing.assert_allclose(got, want, rtol=0, atol=near * np.abs(want).max() + 1e-12, err_msg=name)
    trees = (nnx.to_flat_state(states.params) for states in (states_1[0], states_1[3], states[3]))
    for (path, old), (_, want), (_, got) in zip(*trees, strict=True):
        name = ".".join(map(str, path))
        if name == "groups.0.0.hc_attn_fn":
            continue  # its streams are still equal, so that mixing them has no gradient but rounding's
        # Orthogonal directions depend on the least singular values, most so in the small hyper-connection matrices.
        near, moved = 2e-2 if name.endswith("_fn") else 1e-3, np.abs(want[...] - old[...]).max()
        np.testing.assert_allclose(got[...], want[...], rtol=0, atol=near * moved + 1e-9, err_msg=name)

    assert "ematerialization" not in capfd.readouterr().err
    assert not loops(text)
    model = "\n".join(line for line in text.splitlines() if "/optimizer/" not in line)
    _, _, largest = max(collectives(model), key=lambda found: math.prod(found[2]))
    rows = B * 4 * S * MODEL.dim // (shape[0] * shape[2])  # those that the devices of an expert axis share
    assert math.prod(largest) <= max(rows, *(x.size for x in jax.tree.leaves(states[0].params)))


DEEP = dataclasses.replace(MODEL, n_layers=7, compress_ratios=(0, 4, 8, 4, 8, 4, 8, 0))
DEEP41 = dataclasses.replace(MODEL41, n_layers=6, compress_ratios=(2,) * 6, engram_layer_ids=(1, 4), vision_n_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)])
@pytest.mark.parametrize("model, count", [(DEEP, 3), (DEEP41, 1)])
def test_layers_and_parts_of_a_batch_in_loops(model, count, shape):
    """Nothing runs beside the loops over parts of a batch and, forwards and backwards, over layers that repeat."""
    lengths = dict(zip(("data", "expert", "context"), shape, strict=True))
    cfg = Config(
        model=model,
        data=DataConfig(path="drawn:" if model.vision_n_layers else "", seq_len=4 * S, batch_size=B),
        loss=LossConfig(mtp=0.1 * model.n_mtp_layers),
        mesh=MeshConfig(**lengths),
        train=TrainConfig(steps=200, run_dir="", accumulate=2),
    )
    with jax.set_mesh(make_mesh(*shape)):
        step = jax.jit(make_train_step(cfg)).lower(abstract_state(cfg), abstract_batch(cfg, B)).compile()
    beside = loops(step.as_text())
    assert len(beside) == count and not any(beside.values())


def one_expert(name, x):
    """Routers that send every token to experts 2 and 5."""
    return x + 100 * np.isin(np.arange(x.shape[-1]), [2, 5]) if name.endswith("gate.bias") else x


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 4, 1)])
def test_all_tokens_to_the_experts_of_two_devices(shape):
    """Nothing is dropped, and experts without a token have a gradient of exactly zero."""
    model = dataclasses.replace(MODEL, n_hash_layers=0)
    want, got = (on_mesh(make_mesh(*s), model, one_expert) for s in ((1, 1, 1), shape))
    same(got, want)
    for name, g in got[2].items():
        if "experts.w" in name and "shared" not in name:
            used = np.abs(g).reshape(-1, 8, g.shape[-2] * g.shape[-1]).max((0, 2)) > 0
            assert used.tolist() == [False, False, True, False, False, True, False, False], name
