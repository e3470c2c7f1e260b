# SPDX-License-Identifier: Apache-2.0
"""The model on every mesh: losses and every gradient are those of one device."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from golden_models import small_config
from jax.sharding import NamedSharding

import dsv4_jax as ds
from dsv4_jax.mesh import BATCH, make_mesh
from dsv4_jax.train.step import losses

B, S = 8, 40
# Chunks of 5 positions on 8 devices are shorter than the window, than both ratios and than an overlap.
MODEL = small_config(
    n_layers=3, compress_ratios=(0, 4, 8, 0), n_hash_layers=1, window_size=7, n_routed_experts=8, index_topk=2,
    attention_block=3, remat="none",
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
        batch = jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, jax.P(BATCH, "context"))), packed_batch(rng)
        )

        def objective(params):
            found, load = losses(nnx.merge(graphdef, params, buffers), batch)
            return sum(WEIGHTS[name] * value for name, value in found.items()), (found, load)

        grads, (found, load) = jax.jit(jax.grad(objective, has_aux=True))(params)
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
        scale = np.abs(grads_1[name]).max()
        np.testing.assert_allclose(g, grads_1[name], rtol=0, atol=near * scale + 1e-9, err_msg=name)


@pytest.mark.parametrize("shape", [(2, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in REST)])
def test_losses_and_gradients_on_any_mesh(shape, one):
    same(on_mesh(make_mesh(*shape)), one)


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
