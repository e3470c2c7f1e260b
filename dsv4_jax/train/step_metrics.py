# SPDX-License-Identifier: Apache-2.0
"""Compute the metrics of a training step: gradient norms, balance of the experts, sizes of the updates."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import RouterBias
from dsv4_jax.optim.groups import list_groups


def compute_gradient_norms(grads: nnx.State) -> dict[str, jax.Array]:
    """Return the norm of every gradient by the parameter's path, fp32; [layers] for stacked parameters."""
    flat = nnx.to_flat_state(grads)
    axes = [tuple(i for i, name in enumerate(variable.axes) if name != "layers") for _, variable in flat]
    norms = compute_norms([variable.get_value() for _, variable in flat], axes)
    return {".".join(map(str, path)): norm for (path, _), norm in zip(flat, norms, strict=True)}


def compute_norm(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Compute the Euclidean norm of x over `axes`, fp32; see `compute_norms`."""
    return compute_norms([x], [axes])[0]


def compute_norms(xs: Sequence[jax.Array], axes: Sequence[tuple[int, ...] | None]) -> list[jax.Array]:
    """Compute the Euclidean norm of each array over its axes, fp32; no square over- or underflows.

    An array is scaled by about its largest entry, rounded to a power of two so that the scaling changes no digit.
    Everything but the two reductions of an array is computed for all arrays at once: hundreds of operations on single
    numbers would take seconds to compile.
    """
    xs = [x.astype(jnp.float32) for x in xs]
    every = [tuple(range(x.ndim)) if a is None else a for x, a in zip(xs, axes, strict=True)]
    zero = jnp.zeros((), jnp.float32)
    largest = [jax.lax.reduce(jnp.abs(x), zero, jax.lax.max, a) for x, a in zip(xs, every, strict=True)]
    scale = jax.lax.reduce_precision(_join(largest), exponent_bits=8, mantissa_bits=0)
    scale = jnp.clip(scale, 2.0**-126, 2.0**126)  # the powers of two whose reciprocals are normal numbers
    factors = [jnp.expand_dims(f, a) for f, a in zip(_cut(1 / scale, largest), every, strict=True)]
    squares = [jnp.square(x * f).sum(a) for x, f, a in zip(xs, factors, every, strict=True)]
    return _cut(jnp.sqrt(_join(squares)) * scale, squares)


def _join(xs: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in xs])


def _cut(joined: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Cut what `_join` would make of arrays `like` these into arrays of their shapes."""
    parts = jnp.split(joined, list(itertools.accumulate(x.size for x in like))[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def measure_balance(load_LE: jax.Array, buffers: nnx.State, names: Sequence[str]) -> dict[str, jax.Array]:
    """Measure how even the experts' loads are, and how far the router biases have moved.

    - `moe/load_max/NAME`: tokens of the fullest expert over the mean, in layer NAME.
    - `moe/load_max`: the largest of them.
    - `moe/load_dead`: share of experts without a token.
    - `moe/load_entropy`: entropy of a layer's loads over that of even loads, averaged over layers.
    - `moe/bias_max`: largest router bias.

    With loads of text and images [L, 2, E] all but the last exist for image tokens too, with the suffix `_image`; they
    are NaN if the batch has none.
    """
    if load_LE.ndim == 3:
        of_images = measure_balance(load_LE[:, 1], buffers, names)
        del of_images["moe/bias_max"]
        some = load_LE[:, 1].sum() > 0
        of_images = {f"{name}_image": jnp.where(some, value, jnp.nan) for name, value in of_images.items()}
        return measure_balance(load_LE.sum(1), buffers, names) | of_images
    total = jnp.maximum(load_LE.sum(-1, keepdims=True), 1)
    entropy = jax.scipy.special.entr(load_LE / total).sum(-1) / max(math.log(load_LE.shape[-1]), 1e-9)
    biases = [v.get_value() for _, v in nnx.to_flat_state(buffers) if isinstance(v, RouterBias)]
    fullest = load_LE.max(-1) / jnp.maximum(load_LE.mean(-1), 1)
    return {f"moe/load_max/{name}": x for name, x in zip(names, fullest, strict=True)} | {
        "moe/load_max": fullest.max(),
        "moe/load_dead": (load_LE == 0).mean(),
        "moe/load_entropy": entropy.mean(),
        "moe/bias_max": jnp.stack([jnp.abs(b).max() for b in biases] or [jnp.zeros(())]).max(),
    }


def name_layers(cfg: ModelConfig, layers: range) -> list[str]:
    """Return the names of layers in metrics: numbers, and `mtp` or `mtp.0`, `mtp.1` ... of draft blocks."""
    blocks = ["mtp"] if cfg.n_mtp_layers == 1 else [f"mtp.{i}" for i in range(cfg.n_mtp_layers)]
    return [str(i) if i < cfg.n_layers else blocks[i - cfg.n_layers] for i in layers]


def compute_update_ratios(groups: Any, updates: Any, params: Any) -> dict[str, jax.Array]:
    """Return the norm of the updates over the norm of the weights, of all parameters of a rule, for every rule."""
    squares: dict[str, list[list[jax.Array]]] = {}
    for group, *pair in zip(list_groups(groups), jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        squares.setdefault(group.rule, []).append([(x.astype(jnp.float32) ** 2).sum() for x in pair])
    norms = {rule: jnp.sqrt(jnp.array(found).sum(0)) for rule, found in squares.items()}
    return {f"optim/update_ratio/{rule}": up[0] / jnp.maximum(up[1], 1e-20) for rule, up in norms.items()}


def loss_metrics(found: Mapping[str, Any]) -> dict[str, Any]:
    """Put what an objective returns beside `loss` into the group `train`, unless its name has a group already."""
    return {name if name == "loss" or "/" in name else f"train/{name}": value for name, value in found.items()}
