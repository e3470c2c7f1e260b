# SPDX-License-Identifier: Apache-2.0
"""Compute the metrics of a training step: gradient norms, balance of the experts, sizes of the updates."""

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
    norms = {}
    for path, variable in nnx.to_flat_state(grads):
        axes = tuple(i for i, name in enumerate(variable.axes) if name != "layers")
        norms[".".join(map(str, path))] = compute_norm(variable.get_value(), axes)
    return norms


def compute_norm(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Compute the Euclidean norm of x over `axes`, fp32; no square over- or underflows.

    x is divided by about its largest entry, rounded to a power of two so that the division changes no digit.
    """
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axes, keepdims=True, initial=0)
    scale = jax.lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=0)
    scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1)
    return jnp.sqrt(jnp.square(x / scale).sum(axes)) * scale.squeeze(axes)


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
    norms: dict[str, list[jax.Array]] = {}
    for group, u, p in zip(list_groups(groups), jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        squares = jnp.stack([(x.astype(jnp.float32) ** 2).sum() for x in (u, p)])
        norms.setdefault(group.rule, []).append(squares)
    sums = {rule: jnp.sqrt(sum(found)) for rule, found in norms.items()}
    return {f"optim/update_ratio/{rule}": up[0] / jnp.maximum(up[1], 1e-20) for rule, up in sums.items()}


def loss_metrics(found: Mapping[str, Any]) -> dict[str, Any]:
    """Put what an objective returns beside `loss` into the group `train`, unless its name has a group already."""
    return {name if name == "loss" or "/" in name else f"train/{name}": value for name, value in found.items()}
