# SPDX-License-Identifier: Apache-2.0
"""Update with Muon (section 2.4 of the V4 report): momentum, then the orthogonal factor of every matrix.

Head-wise Muon (section 2.5 of the V4.1 report) is the same with another `MatrixSpec`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from dsv4_jax.optim.matrices import map_matrices
from dsv4_jax.optim.newton_schulz import HYBRID, Coefficients, Precision, newton_schulz, resolve_coefficients
from dsv4_jax.optim.roles import MatrixSpec
from dsv4_jax.optim.trees import list_settings, steady

Specs = MatrixSpec | Any | Callable[[Any], Any]


def scale_by_orthogonal(
    matrices: Specs = MatrixSpec(),
    *,
    rms: float | jax.Array = 0.18,
    coefficients: Coefficients = HYBRID,
    precision: Precision | None = None,
    gram: bool = False,
    batch_size: int | None = None,
) -> optax.GradientTransformation:
    """Replace every matrix by its orthogonal factor times rms * sqrt(max(rows, columns)). There is no state.

    The entries of the result have root mean square `rms` for a matrix of full rank, and
    rms * sqrt(r / min(rows, columns)) for one of rank r.

    Args:
        matrices: one spec for all leaves, or a tree of specs, or a function from updates to such a
            tree. `optax.contrib.MuonDimensionNumbers` are specs too. By default the last two axes of every
            leaf make a matrix and the others stack matrices.
        rms: root mean square of a full-rank update.
        coefficients: steps of the iteration; see `newton_schulz`, also for the following arguments.
        precision: precision of the matrix products.
        gram: iterate on Gram matrices where that is cheaper.
        batch_size: matrices iterated at a time on a device.

    Raises:
        ValueError: for unusable coefficients; from `update`, if a spec does not fit its leaf.
    """
    steps = tuple(tuple(step) for step in resolve_coefficients(coefficients))

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        specs = list_settings(matrices, updates, (MatrixSpec, optax.contrib.MuonDimensionNumbers))
        specs = tuple(MatrixSpec(*(a if isinstance(a, int) else tuple(a) for a in spec)) for spec in specs)
        leaves = _orthogonal(leaves, specs, steps, precision, gram, batch_size)
        return treedef.unflatten([(rms * x).astype(x.dtype) for x in leaves]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# At the top level, so that updates outside of a caller's jit are compiled once and not at every call.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _orthogonal(
    leaves: Sequence[jax.Array],
    specs: Sequence[MatrixSpec],
    coefficients: Coefficients,
    precision: Precision | None,
    gram: bool,
    batch_size: int | None,
) -> list[jax.Array]:
    """Replace every matrix by its orthogonal factor times sqrt(max(rows, columns))."""

    def orthogonal(x_Nnm: jax.Array) -> jax.Array:
        y = newton_schulz(x_Nnm, coefficients, precision=precision, gram=gram, batch_size=batch_size)
        return y * x_Nnm.shape[-1] ** 0.5

    return map_matrices(orthogonal, leaves, specs)


def scale_by_muon(
    matrices: Specs = MatrixSpec(),
    *,
    momentum: float | jax.Array = 0.95,
    nesterov: bool = True,
    momentum_dtype: Any | None = None,
    rms: float | jax.Array = 0.18,
    coefficients: Coefficients = HYBRID,
    precision: Precision | None = None,
    gram: bool = False,
    batch_size: int | None = None,
) -> optax.GradientTransformation:
    """Apply Nesterov momentum, then `scale_by_orthogonal`.

    M <- momentum M + G, then the orthogonal factor of momentum M + G. The V4.1 report multiplies G by
    1 - momentum in both sums, which changes no orthogonal factor. The state is M alone.

    Args:
        matrices: see `scale_by_orthogonal`, also for the arguments not listed here.
        momentum: decay of M.
        nesterov: add G once more; otherwise the orthogonal factor is that of M.
        momentum_dtype: type in which M is stored; None: that of the parameters.
    """
    direction = scale_by_orthogonal(
        matrices, rms=rms, coefficients=coefficients, precision=precision, gram=gram, batch_size=batch_size
    )
    return optax.chain(steady(optax.trace(momentum, nesterov, momentum_dtype)), direction)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    matrices: Specs = MatrixSpec(),
    *,
    weight_decay: float | jax.Array = 0.1,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    momentum: float | jax.Array = 0.95,
    nesterov: bool = True,
    momentum_dtype: Any | None = None,
    rms: float | jax.Array = 0.18,
    coefficients: Coefficients = HYBRID,
    precision: Precision | None = None,
    gram: bool = False,
    batch_size: int | None = None,
) -> optax.GradientTransformation:
    """Update leaves that are all matrices with Muon: W <- W (1 - lr decay) - lr update.

    For a whole model see `deepseek_v4` and `grouped`, or give the other leaves to another optimizer with
    `optax.partition`. Learning rates of AdamW carry over, as the updates have the same root mean square.

    Args:
        learning_rate: a number or a schedule.
        matrices: see `scale_by_orthogonal`, also for the arguments not listed here.
        weight_decay: decoupled weight decay; it is multiplied by the learning rate only.
        mask: which leaves decay, as in `optax.add_decayed_weights`.
        momentum: decay of the momentum; see `scale_by_muon`, also for the following two.
        nesterov: add the gradient once more.
        momentum_dtype: type of the momentum.
    """
    direction = scale_by_muon(
        matrices,
        momentum=momentum,
        nesterov=nesterov,
        momentum_dtype=momentum_dtype,
        rms=rms,
        coefficients=coefficients,
        precision=precision,
        gram=gram,
        batch_size=batch_size,
    )
    return optax.chain(
        direction, optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
    )
