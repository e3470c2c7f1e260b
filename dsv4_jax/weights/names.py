# SPDX-License-Identifier: Apache-2.0
"""Map tensors between this model and official checkpoints by a walk over the parameters, without a table.

The path of a parameter is its official name, with three exceptions. Scanned layers are one module, whose arrays have
the layer as first axis; so are the blocks of the vision tower; and the experts of a layer are one array. Official
kernels are [out, in], ours [in, out]. A stack of kernels (`wo_a`) is official as rows below rows. Spare rows of a
table and the token map exist only here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.params import TokenMap

Tensors = list[tuple[str, tuple[int | slice, ...]]]


def walk(model: DeepSeek, tree: Any) -> Iterator[tuple[Any, Tensors]]:
    """Yield the variables of `tree` with the official names of their tensors, and the index of each in the value.

    `tree` is the model, or a state of the same layout.
    """
    path: tuple[Any, ...]
    for path, variable in nnx.to_flat_state(nnx.state(tree) if isinstance(tree, nnx.Module) else tree):
        if isinstance(variable, TokenMap):
            continue
        tensors: Tensors = [(".".join(map(str, path)) + variable.suffix, ())]
        if path[0] == "groups":
            name = ".".join(map(str, path[3:])) + variable.suffix
            tensors = [(f"layers.{i}.{name}", (row,)) for row, i in enumerate(model.layers_of(path))]
        if path[:2] == ("vision", "blocks"):
            name = ".".join(map(str, path[2:])) + variable.suffix
            tensors = [(f"vision.blocks.{i}.{name}", (i,)) for i in range(variable.get_value().shape[0])]
        if "experts" in variable.axes:
            n = variable.get_value().shape[variable.axes.index("experts")]
            tensors = [(t.replace(".experts.", f".experts.{e}."), (*i, e)) for t, i in tensors for e in range(n)]
        if "rows" in variable.axes:
            n = variable.get_value().shape[variable.axes.index("rows")] - variable.spare
            tensors = [(t, (*i, slice(n))) for t, i in tensors]
        yield variable, tensors


def _to_official(variable: Any, x: Any) -> Any:
    """Turn a kernel [..., in, out] into the official [rows of out, in]; other tensors stay."""
    if not variable.transposed:
        return x
    x = x.swapaxes(-1, -2)
    return x.reshape(-1, x.shape[-1])


def official_tensors(model: DeepSeek, tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of `tree` by official name; `tree` has the layout of the model, as its gradients have."""
    tensors = {}
    for variable, held in walk(model, tree):
        value = np.asarray(variable.get_value())
        tensors |= {name: _to_official(variable, value[index]) for name, index in held}
    return tensors


def to_official(model: DeepSeek) -> dict[str, np.ndarray]:
    """Return all tensors of the model by official name; kernels are [out, in]."""
    return official_tensors(model, model)


def official_shapes(model: DeepSeek) -> dict[str, tuple[int, ...]]:
    """Return the official names and shapes; `model` may be abstract (from `jax.eval_shape`)."""
    shapes = {}
    for variable, held in walk(model, model):
        shape = np.broadcast_to(0, variable.get_value().shape)[held[0][1]].shape
        if variable.transposed:
            *stack, rows, columns = shape
            shape = (int(np.prod(stack)) * columns, rows)
        shapes |= {name: shape for name, _ in held}
    return shapes


def is_routing_table(table: np.ndarray, experts: int) -> bool:
    """Return whether every row [tokens, k] has distinct ids of experts."""
    rows = np.sort(table, axis=1)
    return not ((rows < 0) | (rows >= experts)).any() and not (rows[:, 1:] == rows[:, :-1]).any()


def load_official(model: DeepSeek, tensors: Mapping[str, Any]) -> None:
    """Fill the model, in place, with tensors by official name.

    Raises:
        ValueError: naming missing, unexpected or misshapen tensors, and routing tables with unusable expert ids. The
            model is unchanged then.
    """
    want, have = official_shapes(model), {name: tuple(np.shape(t)) for name, t in tensors.items()}
    problems = [f"missing {n} {list(want[n])}" for n in want if n not in have]
    problems += [f"unexpected {n} {list(have[n])}" for n in have if n not in want]
    problems += [
        f"{n}: expected {list(want[n])}, found {list(have[n])}" for n in want if n in have and have[n] != want[n]
    ]
    for name in (n for n in want if n.endswith("tid2eid") and have.get(n) == want[n]):
        if not is_routing_table(np.asarray(tensors[name]), model.cfg.n_routed_experts):
            problems.append(f"{name}: rows must hold distinct expert ids below {model.cfg.n_routed_experts}")
    if problems:
        shown = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"these tensors do not fit the model:\n  {shown}{more}")
    # Everything fits: put each official tensor at its index of the stacked array, kernels transposed.
    for variable, held in walk(model, model):
        old = variable.get_value()
        new = np.zeros(old.shape, old.dtype)
        for name, index in held:
            tensor = np.asarray(tensors[name])
            if variable.transposed:
                *stack, rows, columns = new[index].shape
                tensor = tensor.reshape(*stack, columns, rows).swapaxes(-1, -2)
            new[index] = tensor
        variable.set_value(jax.device_put(new, old.sharding))
