# SPDX-License-Identifier: Apache-2.0
"""Anticipatory routing: choose experts some steps before they are used (V4 section 4.2.3).

At step t one forward pass with the parameters and biases of step t chooses the experts of the batch of step t + d.
At step t + d these are used, with weights from the scores of that step.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from dsv4_jax.config import Config
from dsv4_jax.data.batch import Batch, accumulation_parts
from dsv4_jax.mesh import act_spec
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.train.history import Routes
from dsv4_jax.train.state import TrainState, abstract_model


def learned_layers(cfg: ModelConfig) -> list[int]:
    """List the layers whose router is learned; the others look experts up by token id."""
    return [i for i, spec in enumerate(cfg.layer_specs) if not spec.hashed]


def route_type(cfg: ModelConfig) -> Any:
    """Return the smallest integer type that numbers the experts."""
    return jnp.uint8 if cfg.n_routed_experts <= 256 else jnp.uint16


def route_shape(cfg: ModelConfig, batch: Batch) -> tuple[int, ...]:
    """Return the shape of the choice for a batch: [B, S, learned layers, k]."""
    return *batch["ids"].shape, len(learned_layers(cfg)), cfg.n_activated_experts


def abstract_routes(cfg: ModelConfig, routes: Routes) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return shapes and shardings of a checkpoint's choices, on the mesh that is set.

    A choice is whole on every device if the mesh does not divide it.
    """
    shape = tuple(routes.shape)
    if not routes.steps:
        return ()
    mesh = jax.sharding.get_mesh()
    splits = shape[0] % (mesh.shape["data"] * mesh.shape["expert"]) == 0 == shape[1] % mesh.shape["context"]
    sharding = NamedSharding(mesh, act_spec(4) if splits else jax.P())
    return (jax.ShapeDtypeStruct(shape, route_type(cfg), sharding=sharding),) * len(routes.steps)


class RouteQueue:
    """The experts that were chosen ahead, for the next batches in order, with the steps done at each choice."""

    def __init__(self) -> None:
        self._entries: collections.deque[tuple[jax.Array, int]] = collections.deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each choice; empty if there is none."""
        return self._entries[0][0].shape if self._entries else ()

    def push(self, experts: jax.Array, step: int) -> None:
        """Append the experts of the batch behind the others, chosen after `step` steps."""
        self._entries.append((experts, step))

    def pop(self, step: int) -> tuple[jax.Array, int]:
        """Take the experts of the next batch, used after `step` steps; return them and their age in steps."""
        experts, chosen = self._entries.popleft()
        return experts, step - chosen

    def clear(self) -> None:
        """Remove all choices."""
        self._entries.clear()

    def to_state(self) -> tuple[tuple[jax.Array, ...], Routes]:
        """Return what a checkpoint holds of the queue: the arrays (`TrainState.routes`), and the host's values."""
        steps = [step for _, step in self._entries]
        return tuple(experts for experts, _ in self._entries), Routes(steps, list(self.shape))

    @classmethod
    def from_state(cls, arrays: tuple[jax.Array, ...], routes: Routes) -> "RouteQueue":
        """Make the queue that `to_state` described."""
        queue = cls()
        for experts, step in zip(arrays, routes.steps, strict=True):
            queue.push(experts, step)
        return queue


def make_route(cfg: Config) -> Callable[[TrainState, Batch], jax.Array]:
    """Return a function of state and batch that chooses the experts of every token, [B, S, learned layers, k].

    It uses the parameters and biases of the state. The batch is computed in the same parts as in a training step.
    """
    graphdef, layers = nnx.graphdef(abstract_model(cfg)), learned_layers(cfg.model)

    def route(state: TrainState, batch: Batch) -> jax.Array:
        model = nnx.merge(graphdef, state.params, state.buffers)

        def part(batch: Batch) -> jax.Array:
            reports = model.hidden(Inputs.of(batch), with_mtp=False).layers
            return jnp.stack([reports[i].experts for i in layers], axis=2).astype(route_type(cfg.model))

        if cfg.train.accumulate == 1:
            return part(batch)
        parts = jax.lax.map(part, accumulation_parts(batch, cfg.train.accumulate))
        # [parts, B / parts, S, layers, k] to [B, S, layers, k] on every device, without an exchange.
        spec = act_spec(4)
        join = jax.shard_map(lambda x: x.reshape(-1, *x.shape[2:]), in_specs=jax.P(None, *spec), out_specs=spec)
        return join(parts)

    return route
