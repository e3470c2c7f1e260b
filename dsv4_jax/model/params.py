# SPDX-License-Identifier: Apache-2.0
"""How parameters are declared: shape, logical axes, initial value and official name, in one place.

Every module takes a `Params` and asks it for its tensors. What is declared here decides the sharding
(`mesh.RULES`), the map to the official checkpoint (`official.py`) and the rule by which the optimizer
moves the tensor (its `optim.Role`).

| declared as | shape | initial value | official tensor | role |
|---|---|---|---|---|
| `kernel` | [..., in, out] | N(0, init_std) | transposed | matrix in the last two axes, unless told otherwise |
| `table`  | [vocab, D] | N(0, init_std) | as it is, without spare rows | table |
| `ones`   | [n] | 1 (norm weights) | as it is | norm |
| `vector` | any | N(0, init_std) (learned embeddings) | as it is | vector |
| `full`   | any | a constant (biases, gates, sinks, `ape`) | as it is | vector |
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.mesh import param_spec
from dsv4_jax.optim.roles import Role

WEIGHT = ".weight"  # the official name of a linear layer's or a norm's only tensor


class RouterBias(nnx.Variable):
    """Balance bias of a router: moved by its own rule, never by the optimizer."""


class HashTable(nnx.Variable):
    """Experts of every token id in a hash-routed layer: int32, saved, never trained."""


class TokenMap(nnx.Variable):
    """Number of every token id in n-grams: int32, saved, never trained, in no official checkpoint."""


@dataclasses.dataclass(frozen=True)
class Params:
    """Makes the parameters of modules that are stacked `layers` times for a scan (0: not stacked).

    `part` goes into all their roles.
    """

    rngs: nnx.Rngs
    std: float
    layers: int = 0
    part: str = ""

    def kernel(self, *axes: tuple[str, int], suffix: str = WEIGHT, role: Role = Role("matrix")) -> nnx.Param:
        """A stack of matrices, axes given as (name, size) with input and output last."""
        return self._normal(axes, suffix, role, transposed=True)

    def table(self, *axes: tuple[str, int], role: Role = Role("table"), spare: int = 0) -> nnx.Param:
        """A table that is looked up by its first axis, whose last `spare` rows are in no official tensor."""
        return self._normal(axes, WEIGHT, role, transposed=False, spare=spare)

    def ones(self, *axes: tuple[str, int], suffix: str = WEIGHT, role: Role = Role("norm")) -> nnx.Param:
        """A norm weight."""
        return self._full(1.0, axes, suffix, role)

    def vector(self, *axes: tuple[str, int]) -> nnx.Param:
        """A learned vector that is no weight of a norm and no bias."""
        return self._normal(axes, "", Role("vector"), transposed=False)

    def full(self, value: float, *axes: tuple[str, int], kind: type = nnx.Param):
        """A tensor that starts constant."""
        return self._full(value, axes, "", Role("vector"), kind)

    def buffer(self, kind: type, value: jax.Array, *names: str):
        """A tensor that no optimizer sees; `value` has the layer axis already."""
        stack = ("layers",) if self.layers else ()
        return self._variable(kind, value, (*stack, *names), suffix="", transposed=False)

    def _stacked(self, axes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        axes = ((("layers", self.layers),) if self.layers else ()) + axes
        return tuple(name for name, _ in axes), tuple(size for _, size in axes)

    def _full(
        self, value: float, axes: tuple[tuple[str, int], ...], suffix: str, role: Role, kind: type = nnx.Param
    ) -> nnx.Param:
        names, shape = self._stacked(axes)
        role = role._replace(part=self.part or role.part)
        return self._variable(
            kind, jnp.full(shape, value, jnp.float32), names, suffix=suffix, transposed=False, role=role
        )

    def _normal(self, axes: tuple[tuple[str, int], ...], suffix: str, role: Role, **declared: Any) -> nnx.Param:
        names, shape = self._stacked(axes)
        role = role._replace(part=self.part or role.part)
        # Drawn where it belongs: without the spec every device would draw all of it.
        value = self.std * jax.random.normal(self.rngs.params(), shape, out_sharding=param_spec(names, shape))
        return self._variable(nnx.Param, value, names, suffix=suffix, role=role, **declared)

    @staticmethod
    def _variable(kind: type, value: jax.Array, names: tuple[str, ...], **declared: Any):
        return kind(jax.reshard(value, param_spec(names, value.shape)), axes=names, **declared)


def whole(w: nnx.Param) -> jax.Array:
    """A parameter gathered from the devices that share it, in fp32.

    Parameters are stored split (ZeRO-3 style); the gradient of this gather is a reduce-scatter.
    """
    return jax.reshard(w[...], jax.P())


def linear(x: jax.Array, w: nnx.Param, dtype: jnp.dtype) -> jax.Array:
    """x [..., in] times w [in, out] with operands in `dtype`; for w [G, in, out], x [..., G, in] group by group."""
    groups, rows = "g" * (w.ndim - 2), "abc"[: x.ndim - w.ndim + 1]
    return saved(_product(f"{rows}{groups}i,{groups}io->{rows}{groups}o", dtype, x, w[...]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, dtype: jnp.dtype, x: jax.Array, w: jax.Array) -> jax.Array:
    """Product with a parameter that is stored split and gathered in `dtype`.

    Its gradient is added up in fp32, over tokens and devices, whatever the `dtype` of the operands.
    """
    return jnp.einsum(equation, x.astype(dtype), jax.reshard(w.astype(dtype), jax.P()))


def _forward(equation, dtype, x, w):
    return _product(equation, dtype, x, w), (x, w)


def _backward(equation, dtype, residuals, dy):
    (x, w), (left, right, out) = residuals, re.split(",|->", equation)
    dx = jnp.einsum(f"{out},{right}->{left}", dy, jax.reshard(w.astype(dtype), jax.P()), preferred_element_type=x.dtype)
    dw = jnp.einsum(
        f"{left},{out}->{right}",
        x.astype(dtype),
        dy,
        preferred_element_type=jnp.float32,
        out_sharding=jax.typeof(w).sharding.spec,
    )
    return dx, dw.astype(w.dtype)


_product.defvjp(_forward, _backward)


def saved(product: jax.Array) -> jax.Array:
    """Marks a large product, which `remat = "save_block_outputs"` keeps for the backward pass."""
    return checkpoint_name(product, "product")


def recomputed(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`layer` with the chosen part of it (`ModelConfig.remat`) computed again in the backward pass."""
    if remat == "none":
        return layer
    names = ("product", "topk") if remat == "save_block_outputs" else ()
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))


def rms_norm(x: jax.Array, eps: float, weight: nnx.Param | None = None) -> jax.Array:
    """RMSNorm over the last axis in fp32, returned in x's type; without weight if there is none."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y if weight is None else y * whole(weight)).astype(x.dtype)
