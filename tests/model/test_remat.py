# SPDX-License-Identifier: Apache-2.0
"""Rematerialisation: the same gradients, and what each policy computes again."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx
from support.golden_models import empty_model, small_config

from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.train.objectives.pretrain import compute_losses

MODEL = small_config(compress_ratios=(4,), n_mtp_layers=0, attention_block=8, hc_mult=2)
IDS = np.random.default_rng(0).integers(0, 64, (2, 24)).astype(np.int32)
BATCH = {"ids": IDS, "segment_ids": np.ones_like(IDS), "targets": IDS, "mtp_targets": IDS}


def gradient(remat):
    """The gradient of all losses as a function of the parameters, and parameters."""
    ensure_mesh()
    rng = np.random.default_rng(0)
    graphdef, params, buffers = nnx.split(empty_model(dataclasses.replace(MODEL, remat=remat)), nnx.Param, ...)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(x.dtype) * 0.2, params)
    return jax.grad(lambda p: sum(compute_losses(nnx.merge(graphdef, p, buffers), BATCH)[0].values())), params


def products(jaxpr, times=1):
    """Multiplications of all matrix products in a program, loops unrolled where their length is known."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += times * inner * math.prod(eqn.outvars[0].aval.shape)
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += products(inner, times * length)
    return total


def test_large_products_are_never_computed_again():
    """Beside the router and the hyper-connections' projections, which are cheap; `full` repeats them all."""
    cost = {}
    for remat in ("none", "save_block_outputs", "full"):
        f, params = gradient(remat)
        cost[remat] = products(jax.make_jaxpr(f)(params).jaxpr)
    assert cost["save_block_outputs"] < 1.1 * cost["none"] and cost["full"] > 1.2 * cost["none"]


@pytest.mark.slow
def test_gradients_do_not_depend_on_it():
    found = []
    for remat in ("none", "save_block_outputs", "full"):
        f, params = gradient(remat)
        found.append(jax.device_get(jax.tree.leaves(jax.jit(f)(params))))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max() + 1e-9)
