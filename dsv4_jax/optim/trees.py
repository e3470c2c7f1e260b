# SPDX-License-Identifier: Apache-2.0
"""Spread settings over the leaves of a tree, and keep optimizer state on the devices of its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def list_settings(setting: Any, tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """List a setting for every leaf of `tree`; leaves masked by `optax.masked` or `optax.partition` have none.

    Args:
        setting: one setting for all leaves, a tree of settings, or a function from `tree` to such a tree.
        tree: parameters, or updates.
        kind: type of a setting.

    Raises:
        ValueError: if a tree of settings does not have a setting for every leaf.
    """
    if callable(setting):
        setting = setting(tree)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    settings = jax.tree.leaves(setting, is_leaf=lambda x: isinstance(x, (kind, optax.MaskedNode)))
    if isinstance(setting, kind):
        settings *= len(leaves)
    if len(settings) != len(leaves):
        raise ValueError(f"expected a setting for each of {len(leaves)} leaves, found {len(settings)}")
    return [s for leaf, s in zip(leaves, settings, strict=True) if not isinstance(leaf, optax.MaskedNode)]


def steady(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the state of `tx` on the devices of its parameters, and its types as `init` made them.

    In a jitted `init` on a mesh of Auto axes XLA chooses the devices of an array that depends on no input, as
    zeros do. In `optax.trace` a gradient of higher precision would change the type of the state.
    """

    def init(params: optax.Params) -> optax.OptState:
        place = lambda s, p: s + jnp.where(p == p, 0, 0).astype(s.dtype)
        return optax.tree.map_params(tx, place, tx.init(params), params)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        updates, new = tx.update(updates, state, params)
        return updates, jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)

    return optax.GradientTransformation(init, update)
