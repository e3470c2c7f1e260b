# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a small state whose values follow from its step, and what damages them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from dsv4_jax.train.checkpoint import Checkpoints
from dsv4_jax.train.state import TrainState


def state_of(step, mesh=None, dim=8):
    """A small state whose values tell its step; odd bits in bfloat16, NaN among them."""
    mesh = mesh or jax.sharding.get_mesh()
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, jax.P(*spec)))
    w = place(jnp.arange(16 * dim, dtype=jnp.float32).reshape(16, dim) / 7 + step, "data", "expert")
    bits = jnp.arange(step, step + 64, dtype=jnp.uint16).reshape(4, 16) * 1021
    odd = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    b = place(jnp.where(jnp.isnan(odd), jnp.nan, odd), None, "data")  # XLA may change the payload of a NaN
    params = nnx.State({"groups": {0: {"wq": nnx.Param(w), "norm": nnx.Param(b)}}})
    buffers = nnx.State({"bias": nnx.Variable(place(jnp.full(3, step, jnp.int32)))})
    moments = jax.tree.map(jnp.copy, params)
    return TrainState(params, buffers, ((), {"mu": moments}, None), place(jnp.int32(step)), place(jnp.int32(0)))


def abstract_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def bits_of(state):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def save(folder, *steps, keep=10, keep_every=0):
    with Checkpoints(folder, keep, keep_every) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {"tokens": step * 100})


def restore(folder, like=None, **options):
    """Step and host values of what is restored, whose arrays must be the ones saved, and what was said."""
    said = []
    with Checkpoints(folder, 10) as checkpoints:
        found = checkpoints.restore(abstract_of(like or state_of(0)), said.append, **options)
    if found is None:
        return None, None, said
    step, state, host = found
    assert bits_of(state) == bits_of(state_of(step))
    assert host == {"tokens": step * 100}
    return step, state, said


def names(folder):
    return {path.name for path in folder.iterdir()}


def flip(path):
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
