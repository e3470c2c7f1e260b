# SPDX-License-Identifier: Apache-2.0
"""Declare parameters: shape, logical axes, initial value, official name and role, in one place.

Every module takes a `Params` and makes its tensors with it. The declaration decides the sharding (`mesh.RULES`), the
map to the official checkpoint (`weights/names.py`) and the rule by which the optimizer updates the tensor (its
`optim.Role`).

| declared as | shape | initial value | official tensor | role |
|---|---|---|---|---|
| `kernel` | [..., in, out] | N(0, init_std) | transposed | matrix in the last two axes, unless given |
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

WEIGHT = ".weight"  # ends the official name of the only tensor of a linear layer or a norm


class RouterBias(nnx.Variable):
    """Balance bias of a router: updated by its own rule, never by the optimizer."""


class HashTable(nnx.Variable):
    """Experts of every token id in a hash-routed layer: int32, saved, never trained."""


class TokenMap(nnx.Variable):
    """Number of every token id in n-grams (`token_map.py`): int32, saved, never trained, in no official checkpoint."""


@dataclasses.dataclass(frozen=True)
class Params:
    """Make the parameters of modules.

    Attributes:
        rngs: random keys of the initial values.
        std: standard deviation of initial matrices and tables.
        layers: number of equal layers that are stacked for a scan, in a first axis `layers`; 0 for no such axis.
        part: part of the model (`Role.part`) that all roles get.
    """

    rngs: nnx.Rngs
    std: float
    layers: int = 0
    part: str = ""

    def kernel(self, *axes: tuple[str, int], suffix: str = WEIGHT, role: Role = Role("matrix")) -> nnx.Param:
        """Make a stack of matrices from axes (name, size), of which the last two are input and output."""
        return self._normal(axes, suffix, role, transposed=True)

    def table(self, *axes: tuple[str, int], role: Role = Role("table"), spare: int = 0) -> nnx.Param:
        """Make a table that is looked up by its first axis. Its last `spare` rows are in no official tensor."""
        return self._normal(axes, WEIGHT, role, transposed=False, spare=spare)

    def ones(self, *axes: tuple[str, int], suffix: str = WEIGHT, role: Role = Role("norm")) -> nnx.Param:
        """Make the weight of a norm, all ones."""
        return self._full(1.0, axes, suffix, role)

    def vector(self, *axes: tuple[str, int]) -> nnx.Param:
        """Make a learned vector that is no weight of a norm and no bias."""
        return self._normal(axes, "", Role("vector"), transposed=False)

    def full(self, value: float, *axes: tuple[str, int], kind: type = nnx.Param):
        """Make a tensor that starts as a constant."""
        return self._full(value, axes, "", Role("vector"), kind)

    def buffer(self, kind: type, value: jax.Array, *names: str):
        """Make a tensor that no optimizer gets. `value` has the layer axis already."""
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
    """Gather a parameter from the devices that hold its parts, in fp32.

    Parameters are stored split (ZeRO-3 style). The gradient of this gather is a reduce-scatter.
    """
    return jax.reshard(w[...], jax.P())


def linear(x: jax.Array, w: nnx.Param, dtype: jnp.dtype) -> jax.Array:
    """Multiply x [..., in] by w [in, out], operands in `dtype`; or x [..., G, in] by w [G, in, out], group by group."""
    groups, rows = "g" * (w.ndim - 2), "abc"[: x.ndim - w.ndim + 1]
    return mark_saved(_product(f"{rows}{groups}i,{groups}io->{rows}{groups}o", dtype, x, w[...]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, dtype: jnp.dtype, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply by a parameter that is stored split, and gathered here in `dtype`.

    The parameter's gradient is summed in fp32, over tokens and devices, whatever the `dtype` of the operands.
    """
    return jnp.einsum(equation, x.astype(dtype), jax.reshard(w.astype(dtype), jax.P()))


def _forward(equation, dtype, x, w):
    return _product(equation, dtype, x, w), (x, w)


def _backward(equation, dtype, residuals, dy):
    (x, w), (left, right, out) = residuals, re.split(",|->", equation)
    # dx gathers w again in `dtype`; dw is reduced over devices to the stored split of w.
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


def mark_saved(product: jax.Array) -> jax.Array:
    """Mark a large product, so that `remat = "save_block_outputs"` keeps it for the backward pass."""
    return checkpoint_name(product, "product")


def apply_remat(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Wrap `layer` so that its backward pass recomputes what `remat` (`ComputeConfig.remat`) does not keep."""
    if remat == "none":
        return layer
    names = ("product", "topk") if remat == "save_block_outputs" else ()
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))


def rms_norm(x: jax.Array, eps: float, weight: nnx.Param | None = None) -> jax.Array:
    """Apply RMSNorm over the last axis in fp32; return the type of x. Without `weight` it only normalises."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y if weight is None else y * whole(weight)).astype(x.dtype)
