# SPDX-License-Identifier: Apache-2.0
"""The optimizers on every mesh: the numbers of one device, state where the parameters are, few bytes moved."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.golden_models import small_config
from support.hlo import collectives as read_collectives

import dsv4_jax as ds
from dsv4_jax import optim
from dsv4_jax.mesh import make_mesh
from dsv4_jax.optim import MatrixSpec, Role

RNG = np.random.default_rng(0)
FIVE = "keller_jordan"  # five steps compile faster than ten

# Stacks that do not divide, experts and layers, heads that do and do not divide, unequal parts, a table.
PARAMS = {
    "layers": RNG.normal(size=(5, 8, 16)),
    "experts": RNG.normal(size=(8, 8, 16, 8)),
    "heads": RNG.normal(size=(8, 8 * 4)),
    "six": RNG.normal(size=(8, 6 * 8)),
    "fused": RNG.normal(size=(16, 24)),
    "alone": RNG.normal(size=(16, 8)),
    "split": RNG.normal(size=(8, 8, 2, 8)),
    "table": RNG.normal(size=(32, 8)) * (RNG.random((32, 1)) < 0.7),
    "norm": RNG.normal(size=8),
}
PARAMS = {name: x.astype(np.float32) for name, x in PARAMS.items()}
RULES = [
    ("heads", Role("matrix", heads=8)),
    ("six", Role("matrix", heads=6)),
    ("fused", Role("matrix", MatrixSpec(0, 1, 1, (16, 8)))),
    ("split", Role("matrix", MatrixSpec(0, (1, 3)))),
    ("table", Role("table")),
    ("norm", Role("norm")),
    ("", Role("matrix")),
]
# Where each lies on a mesh of axes (a, b), in the order above; one of size 1 may be among them.
PLACES = {
    "rows": "-a -ba a a a a a a -",
    "columns": "--a -(ba) -a -a -a -a -a -a a",
    "both": "-ab ab ba ba ab ab -a-b ab b",
    "copies": "- - - - - - - - -",
    "one axis": "-(ab) --(ab) -(ba) (ab) -(ab) (ba) b (ab) a",
}


def spec(place):
    """A PartitionSpec from one character an axis, or several mesh axes in parentheses."""
    axes = re.findall(r"\((\w+)\)|(.)", place)
    return P(*(tuple(several) if several else (None if one == "-" else one) for several, one in axes))


@pytest.fixture(scope="module")
def expected():
    """Updates of two steps on one device."""
    return two_steps(PARAMS)[0]


def two_steps(params):
    tx = optim.deepseek_v41(0.1, params, RULES, coefficients=FIVE)
    state = jax.jit(tx.init)(params)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(params, state, params)
    return updates, state


def meshes():
    for shape in ((8, 1), (2, 4), (2, 2)):
        yield pytest.param(
            jax.make_mesh(shape, ("a", "b"), devices=jax.devices()[: np.prod(shape)]), id=f"explicit {shape}"
        )
    yield pytest.param(Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")), id="auto")


@pytest.mark.parametrize("mesh", [*meshes()])
@pytest.mark.parametrize("place", PLACES)
def test_any_mesh_gives_the_same_updates(mesh, place, expected):
    auto = jax.sharding.AxisType.Auto in mesh.axis_types
    specs = dict(zip(PARAMS, map(spec, PLACES[place].split()), strict=True))
    with jax.set_mesh(mesh):
        params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in PARAMS.items()}
        updates, state = two_steps(params)
        for name, x in updates.items():
            np.testing.assert_allclose(x, expected[name], atol=1e-5, err_msg=name)
        # The state lies where its parameters lie, also out of a jitted init. Where a jitted update of Auto axes
        # leaves it is for the out_shardings to say.
        fresh = jax.jit(optim.deepseek_v41(0.1, params, RULES).init)(params)
        for tree in (fresh,) if auto else (state, fresh):
            for path, leaf in jax.tree.leaves_with_path(tree):
                name = next((str(k.key) for k in path if getattr(k, "key", None) in PARAMS), None)
                if name and leaf.ndim:
                    assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim), jax.tree_util.keystr(path)


def collectives(program):
    """(operation, bytes of a device's result) of every collective in a compiled program."""
    return [(kind, size) for kind, size, _ in read_collectives(program.as_text())]


@pytest.mark.parametrize("spec", [P(None, "d"), P(None, None, "d")])
@pytest.mark.parametrize("leaves", [1, 16])
def test_bytes_moved_for_sixteen_matrices(spec, leaves):
    """Sixteen matrices split over eight devices, stacked or apart: a few exchanges of the stack's shard."""
    with jax.set_mesh(mesh := jax.make_mesh((8,), ("d",))):
        shape = (16, 128, 256) if leaves == 1 else (128, 256)
        spec = spec if leaves == 1 else P(*spec[1:])
        x = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for _ in range(leaves)]
        update = jax.jit(lambda x: optim.scale_by_orthogonal(coefficients=FIVE).update(x, optax.EmptyState())[0])
        moved = collectives(update.lower(x).compile())
    shard = 16 * 128 * 256 * 4 / 8
    assert 1 <= len(moved) <= 4, moved
    assert sum(size for _, size in moved) <= 2.5 * shard, moved


def test_heads_on_their_own_devices_move_nothing():
    with jax.set_mesh(mesh := jax.make_mesh((8,), ("d",))):
        x = jax.ShapeDtypeStruct((64, 16 * 32), jnp.float32, sharding=NamedSharding(mesh, P(None, "d")))
        tx = optim.scale_by_orthogonal(MatrixSpec(output_split=16), coefficients=FIVE)
        assert collectives(jax.jit(tx.update).lower(x, optax.EmptyState()).compile()) == []


@pytest.mark.parametrize("spec, bytes_moved", [(P("d"), 4 * 6 * 64), (P(None, "d"), 4 * 7 * 4000)])
def test_sinkhorn_reduces_vectors_only(spec, bytes_moved):
    with jax.set_mesh(mesh := jax.make_mesh((8,), ("d",))):
        x = jax.ShapeDtypeStruct((4000, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
        moved = collectives(jax.jit(optim.scale_by_sinkhorn().update).lower(x, optax.EmptyState()).compile())
    assert {kind for kind, _ in moved} == {"all-reduce"} and sum(size for _, size in moved) <= bytes_moved


def test_multi_steps_on_a_mesh():
    """Accumulation by optax inside the mesh, without turning any check off."""
    with jax.set_mesh(mesh := make_mesh(2, 2, 2)):
        put = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "data", "expert")))
        w, g = PARAMS["layers"], RNG.normal(size=(4, 5, 8, 16)).astype(np.float32)
        tx = optax.MultiSteps(optim.muon(0.1, coefficients=FIVE), 4)
        state = jax.jit(tx.init)(put(w))
        for x in g:
            updates, state = jax.jit(tx.update)(put(x), state, put(w))
    want = optim.muon(0.1, coefficients=FIVE)
    np.testing.assert_allclose(updates, want.update(g.mean(0), want.init(w), w)[0], atol=1e-6)


@pytest.mark.parametrize("table", [optim.deepseek_v4, optim.deepseek_v41])
def test_the_model_on_a_mesh_of_all_axes(table):
    """Every parameter of the model, sharded as it declares, with a gradient equal to itself."""
    cfg = small_config()

    def first(mesh):
        rng = np.random.default_rng(0)
        with jax.set_mesh(mesh):
            shapes = nnx.state(jax.eval_shape(lambda: ds.DeepSeek(cfg, rngs=nnx.Rngs(0))), nnx.Param)
            normal = lambda s: jax.device_put(
                rng.normal(size=s.shape).astype(s.dtype), NamedSharding(mesh, s.sharding.spec)
            )
            params = jax.tree.map(normal, shapes)
            tx = table(0.1, params, coefficients=FIVE)
            updates, state = jax.jit(lambda p: tx.update(p, tx.init(p), p))(params)
            assert {x.sharding.mesh.devices.size for x in jax.tree.leaves(state)} == {mesh.devices.size}
            return [np.asarray(x) for x in jax.tree.leaves(updates)]

    for got, want in zip(first(make_mesh(2, 2, 2)), first(make_mesh()), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
