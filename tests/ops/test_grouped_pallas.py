# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels of the grouped matrix product, interpreted on CPU, against a plain loop over groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding

from dsv4_jax.mesh import AXES, make_mesh
from dsv4_jax.ops import grouped_matmul, grouped_pallas
from dsv4_jax.section import ConfigError

N, D, F = 150, 260, 130  # tiles of rows, of D and of F do not divide them
SIZES = {
    "no row": [0, 0, 0, 0],
    "one row": [0, 1, 0, 0],
    "one group has all": [0, 150, 0, 0],
    "last group has all": [0, 0, 0, 150],
    "empty groups, rows past": [0, 70, 0, 11],
    "ends on tiles": [64, 0, 64, 0],
    "around tiles": [63, 2, 64, 21],
    "several groups in a tile": [5, 6, 7, 100],
}


@pytest.fixture
def interpreted(monkeypatch) -> None:
    """Interpret the kernels on CPU, with small tiles. Memory that was not written holds NaN."""
    monkeypatch.setattr(grouped_matmul, "current_platform", lambda: "tpu")
    monkeypatch.setattr(grouped_pallas, "TILE", 64)
    monkeypatch.setattr(grouped_pallas, "PART", 16)
    monkeypatch.setattr(grouped_pallas, "_memory", lambda share: int(share * 640_000))
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


def value_and_gradients(x, w, dy, sizes, impl="pallas"):
    product = functools.partial(grouped_matmul.grouped_matmul, sizes=sizes, impl=impl)
    y, back = jax.vjp(product, x, w)
    return y, *back(dy)


# The model calls the products inside `shard_map`.
alone = jax.jit(jax.shard_map(value_and_gradients, mesh=make_mesh(), in_specs=jax.P(), out_specs=jax.P()))


def loop(x, w, dy, sizes):
    """Product and gradients, group by group in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw, end = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w), np.cumsum(sizes)
    for g, rows in enumerate(map(slice, end - sizes, end)):
        y[rows], dx[rows], dw[g] = x[rows] @ w[g], dy[rows] @ w[g].T, x[rows].T @ dy[rows]
    return y, dx, dw


def inputs(N: int, D: int, F: int, G: int, dtype=jnp.float32) -> list[jax.Array]:
    r = np.random.RandomState(N)
    return [jnp.asarray(r.standard_normal(s), dtype) for s in ((N, D), (G, D, F), (N, F))]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_a_loop_over_groups(interpreted, sizes: list[int]):
    """Rows past the last group hold NaN: they give zero rows, no gradient, and reach no weight."""
    x, w, dy = inputs(N, D, F, 4)
    want = loop(x, w, dy, sizes)
    past = (jnp.arange(N) >= sum(sizes))[:, None]
    got = alone(jnp.where(past, jnp.nan, x), w, jnp.where(past, jnp.nan, dy), jnp.array(sizes))
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4, err_msg=name)
        assert (np.asarray(a)[b == 0] == 0).all(), name


def test_bfloat16(interpreted):
    """Operands are bf16, sums fp32: one rounding of each result."""
    x, w, dy = inputs(70, 16, 8, 3, jnp.bfloat16)
    sizes = [20, 0, 45]
    for got, want in zip(alone(x, w, dy, jnp.array(sizes)), loop(x, w, dy, sizes), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8, atol=1e-4)


def test_adds_to_the_total(interpreted):
    x, _, dy = inputs(20, 6, 5, 2)
    total = jnp.arange(60.0).reshape(2, 6, 5)
    run = jax.shard_map(grouped_pallas.weight_gradient, in_specs=jax.P(), out_specs=jax.P())
    got = run(x, dy, jnp.array([7, 0]), total)
    np.testing.assert_allclose(got[0], total[0] + x[:7].T @ dy[:7], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1], total[1])


def test_a_product_is_added_to_the_total(interpreted):
    """The tile of the total is read once, however many groups have rows of it."""
    x, w, dy = inputs(150, 20, 70, 4)
    sizes = [5, 60, 0, 50]
    run = jax.shard_map(
        lambda x, w, sizes, total: grouped_matmul.rows_product(x, w, sizes, "pallas", total=total),
        in_specs=jax.P(),
        out_specs=jax.P(),
    )
    got = run(x, w, jnp.array(sizes), dy)
    np.testing.assert_allclose(got, dy + loop(x, w, dy, sizes)[0], rtol=1e-5, atol=1e-4)


def test_no_rows(interpreted):
    y, dx, dw = alone(*inputs(0, 6, 5, 2), jnp.array([0, 0]))
    assert y.shape == (0, 5) and dx.shape == (0, 6) and (dw == 0).all()


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_auto_lowers_for_tpu(kind: str):
    """Rows and sizes are each device's own, and no tile divides them; the axes they vary over are checked."""
    device = jax.sharding.AbstractDevice(kind, 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1, 1, 1), AXES, axis_types=(AxisType.Explicit,) * 3, abstract_device=device)
    own = jax.P("expert")
    specs = (own, jax.P(), own, own)
    run = functools.partial(value_and_gradients, impl="auto")
    run = jax.jit(jax.shard_map(run, in_specs=specs, out_specs=(own, own, jax.P())))
    shapes = ((1100, 200), (3, 200, 1000), (1100, 1000), (3,))
    types = (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        arrays = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in zip(shapes, types, specs, strict=True)
        ]
        text = run.trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3


def test_pallas_needs_a_tpu(monkeypatch):
    monkeypatch.setattr(grouped_matmul, "current_platform", lambda: "gpu")
    assert grouped_matmul.choose("auto") == "ragged"
    with pytest.raises(ConfigError, match="'pallas' needs TPUs, but the devices are gpu"):
        grouped_matmul.choose("pallas")
