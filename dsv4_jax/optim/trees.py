# SPDX-License-Identifier: Apache-2.0
"""Trees of parameters: a setting for each leaf, and state that lies where its parameters lie."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def leaf_settings(setting: Any, tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """The setting of every leaf of `tree`: one for all, a tree of them, or a function that makes one.

    `kind` is the type of a setting. Leaves masked by `optax.masked` or `optax.partition` have none.

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
    """`tx` with its state where its parameters are, and of one type throughout.

    In a jitted `init` on a mesh of Auto axes XLA places an array that depends on no input wherever it
    likes, and zeros depend on none. `optax.trace` lets a gradient of higher precision change its type.
    """

    def init(params: optax.Params) -> optax.OptState:
        place = lambda s, p: s + jnp.where(p == p, 0, 0).astype(s.dtype)
        return optax.tree.map_params(tx, place, tx.init(params), params)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        updates, new = tx.update(updates, state, params)
        return updates, jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)

    return optax.GradientTransformation(init, update)
