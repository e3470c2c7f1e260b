# SPDX-License-Identifier: Apache-2.0
"""Give every tensor an update rule, its weight decay and its factor on the learning rate.

Every tensor has a `Role`. Our model declares one with each parameter; for other trees an ordered list of path
patterns assigns them. `v4_groups` and `v41_groups` map the roles to a `Group` for each leaf, and `grouped` makes
the optimizer.
"""

import collections
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dsv4_jax.optim.matrices import list_matrices
from dsv4_jax.optim.muon import scale_by_muon
from dsv4_jax.optim.newton_schulz import HYBRID, Coefficients, Precision
from dsv4_jax.optim.roles import MatrixSpec, Role
from dsv4_jax.optim.sinkhorn import scale_by_sinkhorn
from dsv4_jax.optim.trees import steady


class Group(NamedTuple):
    """Configure the update of a leaf: W <- W (1 - lr factor decay) - lr factor direction.

    Attributes:
        rule: "muon", "sinkhorn" or "adamw"; "frozen": no change and no state; "custom": updated by the caller's
            own optimizer (refused by `grouped`).
        decay: weight decay.
        factor: multiplies the learning rate; a number or a schedule.
        matrix: axes of the matrices that Muon orthogonalises.
        rows: axis of a table that is looked up, for the Sinkhorn-balanced update.
    """

    rule: Literal["muon", "sinkhorn", "adamw", "frozen", "custom"]
    decay: float = 0.0
    factor: float | optax.Schedule = 1.0
    matrix: MatrixSpec = MatrixSpec()
    rows: int = -2


Rules = Sequence[tuple[str, Role]]


def find_roles(params: Any, rules: Rules | None = None) -> list[tuple[str, Role]]:
    """Find the path and role of every leaf, in the order of `jax.tree.leaves`.

    Args:
        params: a pytree. Leaves declare their role as an attribute `role`, as the model's variables
            do, or get it from `rules`.
        rules: pairs (regular expression, role). A leaf takes the first whose expression is found in its path,
            written `a.0.b`.

    Raises:
        ValueError: for a leaf without a role, or a rule that no leaf takes.
    """
    declares = lambda x: hasattr(x, "role")
    leaves = jax.tree.leaves_with_path(params, is_leaf=declares)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
    if rules is None:
        missing = [path for path, leaf in named if not declares(leaf)]
        if missing:
            raise ValueError(f"no role is declared for {_some(missing)}; give rules = [(path pattern, Role), ...]")
        return [(path, leaf.role) for path, leaf in named]
    first = [next((i for i, (pattern, _) in enumerate(rules) if re.search(pattern, path)), None) for path, _ in named]
    unmatched = [path for (path, _), i in zip(named, first, strict=True) if i is None]
    unused = [pattern for i, (pattern, _) in enumerate(rules) if i not in first]
    if unmatched or unused:
        problems = [f"no rule matches {_some(unmatched)}"] * bool(unmatched)
        problems += [f"no leaf is left for the rule {_some(unused)}"] * bool(unused)
        raise ValueError("; ".join(problems))
    return [(path, rules[i][1]) for (path, _), i in zip(named, first, strict=True) if i is not None]


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + f" and {len(names) - 5} more" * (len(names) > 5)


def v4_groups(params: Any, rules: Rules | None = None, *, frozen: str | None = None, weight_decay: float = 0.1) -> Any:
    """Make the groups of V4 (section 2.4): a tree of `Group` like `params`.

    Muon for all matrices, AdamW for the rest, all with weight decay. The queries of all heads are one matrix. The
    report does not mention the decay of biases and gates; it names one AdamW without exceptions.

    Args:
        params: see `find_roles`.
        rules: roles of trees that do not declare them; see `find_roles`.
        frozen: regular expression of the paths of leaves that are not updated.
        weight_decay: weight decay of all leaves.

    Raises:
        ValueError: see `find_roles`; or if nothing matches `frozen`.
    """

    def group(role: Role) -> Group:
        if role.kind == "matrix":
            return Group("muon", weight_decay, matrix=role.matrix)
        return Group("adamw", weight_decay)

    return _groups(params, rules, frozen, group)


def v41_groups(
    params: Any,
    rules: Rules | None = None,
    *,
    frozen: str | None = None,
    weight_decay: float = 0.1,
    engram_factor: float = 5.0,
    vision_factor: float | optax.Schedule = 0.1,
) -> Any:
    """Make the groups of V4.1 (section 2.5): a tree of `Group` like `params`.

    | role | rule | decays |
    |---|---|---|
    | matrix | Muon, head-wise where it has heads; Engram's with its factor | yes |
    | table | Sinkhorn-balanced; Engram's with its factor | no |
    | norm | AdamW | yes |
    | vector | AdamW | no |

    Args:
        params: see `find_roles`.
        rules: roles of trees that do not declare them; see `find_roles`.
        frozen: regular expression of the paths of leaves that are not updated: the vision tower, until the
            learning rate decays.
        weight_decay: weight decay of matrices and norm weights; tables and vectors have none.
        engram_factor: multiplies the learning rate of Engram's table and matrices.
        vision_factor: multiplies the learning rate of the vision tower. The report gives only that it is
            smaller than 1; the number is our choice.

    Raises:
        ValueError: see `find_roles`; or if nothing matches `frozen`.
    """

    def group(role: Role) -> Group:
        scaled = {"engram": engram_factor if role.kind in ("matrix", "table") else 1.0, "vision": vision_factor}
        factor = scaled.get(role.part, 1.0)
        if role.kind == "matrix":
            matrix = role.matrix._replace(output_split=role.heads) if role.heads > 1 else role.matrix
            return Group("muon", weight_decay, factor, matrix=matrix)
        if role.kind == "table":
            return Group("sinkhorn", 0.0, factor, rows=role.rows)
        return Group("adamw", weight_decay if role.kind == "norm" else 0.0, factor)

    return _groups(params, rules, frozen, group)


def adamw_groups(
    params: Any, rules: Rules | None = None, *, frozen: str | None = None, weight_decay: float = 0.1
) -> Any:
    """Make groups with AdamW for every leaf, the baseline: a tree of `Group` like `params`; see `v4_groups`."""
    return _groups(params, rules, frozen, lambda role: Group("adamw", weight_decay))


def custom_groups(params: Any, *, frozen: str | None = None) -> Any:
    """Make the groups that descriptions and metrics show where the caller's optimizer updates all but `frozen`."""
    return _groups(params, None, frozen, lambda role: Group("custom"))


def _groups(params: Any, rules: Rules | None, frozen: str | None, group: Callable[[Role], Group]) -> Any:
    """Map the role of every leaf to its group, and check that the group fits the leaf's shape."""
    roles = find_roles(params, rules)
    stays = [frozen is not None and re.search(frozen, path) is not None for path, _ in roles]
    if frozen is not None and not any(stays):
        raise ValueError(f"frozen = {frozen!r} matches no path, such as {_some([path for path, _ in roles])}")
    groups = [Group("frozen") if stay else group(role) for stay, (_, role) in zip(stays, roles, strict=True)]
    for (path, role), group_, x in zip(roles, groups, jax.tree.leaves(params), strict=True):
        _check_shape(path, role, group_, x.shape)
    return jax.tree.structure(params).unflatten(groups)


def _check_shape(path: str, role: Role, group: Group, shape: tuple[int, ...]) -> None:
    """Refuse, by name and before any step, a leaf that its rule cannot update."""
    problem = ""
    if group.rule == "muon":
        try:
            list_matrices(group.matrix, shape)
        except ValueError as error:
            problem = str(error)
    elif group.rule == "sinkhorn" and not (len(shape) >= 2 and -len(shape) <= group.rows < len(shape)):
        problem = f"a table needs two axes, the axis of rows ({group.rows}) among them"
    if problem:
        raise ValueError(
            f"leaf {path!r} of shape {shape} does not fit its role {role.kind!r}: {problem}; Role('vector') is for "
            "leaves that are no matrix"
        )


def grouped(
    learning_rate: optax.ScalarOrSchedule,
    groups: Any,
    *,
    momentum: float = 0.95,
    momentum_dtype: Any | None = None,
    rms: float = 0.18,
    coefficients: Coefficients = HYBRID,
    precision: Precision | None = None,
    gram: bool = False,
    batch_size: int | None = None,
    tau: float = 1e-3,
    iterations: int = 11,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-20,
) -> optax.GradientTransformation:
    """Make one optimizer for a tree whose leaves belong to groups.

    Args:
        learning_rate: a number or a schedule, before the groups' factors.
        groups: a tree of `Group` like the parameters.
        momentum: decay of the momentum of Muon and of the Sinkhorn-balanced update.
        momentum_dtype: type of that momentum; None: that of the parameters.
        rms: root mean square of the updates of Muon and of the Sinkhorn-balanced update.
        coefficients: Muon: steps of the iteration; see `newton_schulz`, also for the following three.
        precision: Muon: precision of the matrix products.
        gram: Muon: iterate on Gram matrices where that is cheaper.
        batch_size: Muon: matrices iterated at a time.
        tau: Sinkhorn-balanced update: threshold of the rows that move; see `scale_by_sinkhorn`.
        iterations: Sinkhorn-balanced update: number of normalisations, K.
        b1: AdamW: decay of the first moment; without Nesterov's form.
        b2: AdamW: decay of the second moment.
        eps: AdamW: added to the root of the second moment.

    AdamW counts steps for all leaves together, and corrects the bias of their moments by that count. A leaf that
    a later stage begins to train starts with moments of 0 but is corrected as if it had been trained from the
    start. Its first step is (1 - b1) / sqrt(1 - b2) learning rates, 0.45 at the defaults (3.2 at b2 = 0.999); in
    a new run it is 1.
    """
    leaves = list_groups(groups)
    labels = _like(groups, [group.rule for group in leaves])
    muon = scale_by_muon(
        _like(groups, [group.matrix for group in leaves]),
        momentum=momentum,
        momentum_dtype=momentum_dtype,
        rms=rms,
        coefficients=coefficients,
        precision=precision,
        gram=gram,
        batch_size=batch_size,
    )
    sinkhorn = optax.chain(
        steady(optax.trace(momentum, True, momentum_dtype)),
        scale_by_sinkhorn(_like(groups, [group.rows for group in leaves]), scale=rms, iterations=iterations, tau=tau),
    )
    rules: dict[Hashable, optax.GradientTransformation] = {
        "muon": muon,
        "sinkhorn": sinkhorn,
        "adamw": steady(optax.scale_by_adam(b1, b2, eps, eps_root=_least_square(b2))),
        "frozen": optax.set_to_zero(),
    }
    return optax.chain(optax.partition(rules, labels), _scale_by_group(learning_rate, leaves))


def _least_square(b2: float) -> float:
    """Return the mean square g^2 below which (1 - b2) g^2 is no normal fp32 number and is rounded to 0.

    Added under AdamW's root, it replaces what the second moment lost to rounding. Without it a gradient of 1e-19
    makes a step of 10 learning rates at eps = 1e-20, since only eps is left to divide by. With it steps are at most
    about those of exact arithmetic. It changes the steps of gradients of 1e-17 by 0.1 %, and of 1e-15 by less than fp32
    resolves. Exact steps below that need a state with other numbers in it (roots of the second moment, or moments
    of scaled gradients), which could not continue from a checkpoint of this one.
    """
    return float(jnp.finfo(jnp.float32).tiny) / (1 - b2)


def list_groups(groups: Any) -> list[Group]:
    """List the groups of a tree, in the order of its leaves."""
    return jax.tree.leaves(groups, is_leaf=lambda x: isinstance(x, Group))


def _like(groups: Any, values: Sequence[Any]) -> Any:
    """Arrange a value for each group as a tree like `groups`."""
    return jax.tree.structure(groups, is_leaf=lambda x: isinstance(x, Group)).unflatten(values)


def _scale_by_group(learning_rate: optax.ScalarOrSchedule, groups: Sequence[Group]) -> optax.GradientTransformation:
    """Compute -lr factor (update + decay parameter); the state counts steps, for the schedules."""

    def init(params: optax.Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None):
        if params is None:
            raise ValueError("weight decay needs the parameters: call update(updates, state, params)")
        now = lambda value: value(state.count) if callable(value) else value
        rate, leaves, treedef = now(learning_rate), *jax.tree.flatten(updates)
        scaled = [
            (-(rate * now(g.factor)) * (u + g.decay * p if g.decay else u)).astype(u.dtype)
            for u, p, g in zip(leaves, jax.tree.leaves(params), groups, strict=True)
        ]
        return treedef.unflatten(scaled), optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def deepseek_v4(
    learning_rate: optax.ScalarOrSchedule,
    params: Any,
    rules: Rules | None = None,
    *,
    frozen: str | None = None,
    weight_decay: float = 0.1,
    **settings: Any,
) -> optax.GradientTransformation:
    """Make V4's optimizer: `grouped` with `v4_groups`.

    Args:
        learning_rate: a number or a schedule.
        params: the parameters or their shapes; see `v4_groups`, also for the following three.
        rules: roles of trees that do not declare them.
        frozen: regular expression of the paths of leaves that are not updated.
        weight_decay: weight decay of all leaves.
        settings: other arguments of `grouped`.
    """
    groups = v4_groups(params, rules, frozen=frozen, weight_decay=weight_decay)
    return grouped(learning_rate, groups, **settings)


def deepseek_v41(
    learning_rate: optax.ScalarOrSchedule,
    params: Any,
    rules: Rules | None = None,
    *,
    frozen: str | None = None,
    weight_decay: float = 0.1,
    engram_factor: float = 5.0,
    vision_factor: float | optax.Schedule = 0.1,
    **settings: Any,
) -> optax.GradientTransformation:
    """Make V4.1's optimizer: `grouped` with `v41_groups`.

    Args:
        learning_rate: a number or a schedule.
        params: the parameters or their shapes; see `v41_groups`, also for the following five.
        rules: roles of trees that do not declare them.
        frozen: regular expression of the paths of leaves that are not updated.
        weight_decay: weight decay of matrices and norm weights.
        engram_factor: multiplies the learning rate of Engram.
        vision_factor: multiplies the learning rate of the vision tower.
        settings: other arguments of `grouped`.
    """
    groups = v41_groups(
        params,
        rules,
        frozen=frozen,
        weight_decay=weight_decay,
        engram_factor=engram_factor,
        vision_factor=vision_factor,
    )
    return grouped(learning_rate, groups, **settings)


def describe(params: Any, groups: Any, rms: float = 0.18) -> str:
    """Print a line for each leaf: path, shape, rule, matrices, decay, factor and expected update.

    The update is the root mean square of the first step, before decay and divided by the learning rate, of a
    gradient of full rank; in a table, of the rows that move.
    """
    lines = [("parameter", "shape", "rule", "matrices", "decay", "factor", "update")]
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda x: hasattr(x, "role"))
    for (path, _), x, group in zip(leaves, jax.tree.leaves(params), list_groups(groups), strict=True):
        factor = "schedule" if callable(group.factor) else f"{group.factor:g}"
        update = {"muon": rms, "sinkhorn": rms, "adamw": 1.0, "frozen": 0.0, "custom": math.nan}[group.rule]
        if not callable(group.factor):
            update *= group.factor
        lines.append(
            (
                jax.tree_util.keystr(path, simple=True, separator="."),
                " x ".join(map(str, x.shape)),
                group.rule,
                " + ".join(f"{n} of {a} x {b}" for (a, b), n in count_matrices(group, x.shape).items()) or "-",
                f"{group.decay:g}",
                factor,
                "-" if math.isnan(update) else f"{update:g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def count_matrices(group: Group, shape: tuple[int, ...]) -> collections.Counter[tuple[int, int]]:
    """Count the matrices of each shape that Muon finds in a leaf of `shape`; none for other rules."""
    return collections.Counter(list_matrices(group.matrix, shape) if group.rule == "muon" else ())
