# SPDX-License-Identifier: Apache-2.0
"""Define tasks that are small enough to tune every optimizer on two cores.

A `Task` has parameters, batches, a loss and an evaluation. It does not depend on the optimizer.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.optim import MatrixSpec, Role


class Task(Protocol):
    """Declare what a lab needs of a task, which is a frozen dataclass.

    The lab writes the fields of the task beside the results, and refuses a folder of results with other fields.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def init(self, seed: int) -> Any:
        """Make the parameters, a pytree."""

    def batches(self, seed: int, first: int, count: int) -> Any:
        """Make the batches of steps `first` to `first + count - 1`, stacked; the same for the same arguments."""

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Compute the scalar to minimise."""

    def evaluate(self, params: Any) -> dict[str, jax.Array]:
        """Compute the final measures by name; lower is better. Called under jit."""


def _rng(seed: int, step: int) -> np.random.Generator:
    return np.random.default_rng((seed, step))


def _normal(rng: np.random.Generator, *shape: int, std: float = 1.0) -> np.ndarray:
    return (std * rng.standard_normal(shape)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class CharLM:
    """Train a small GPT on characters: pre-norm, learned positions, GELU, tied embedding, no biases, no dropout.

    The defaults are the smallest recipe. Width 128, four layers and batches of 12 give nanoGPT's recipe for
    CPUs. The last tenth of the text is the validation text. Only its whole batches are read (704 of 725 rows
    with the defaults).

    Attributes:
        text: path of a text file; empty: the Python language reference that comes with the interpreter.
        layers: number of blocks.
        heads: attention heads per block.
        width: width of the model.
        block: context length in characters.
        batch: rows per step.
    """

    text: str = ""
    layers: int = 2
    heads: int = 4
    width: int = 64
    block: int = 64
    batch: int = 32

    roles = (
        ("wte", Role("table")),
        ("wpe", Role("vector")),
        ("norm", Role("norm")),
        (r"\.[qkv]$", Role("matrix", MatrixSpec(1, (2, 3)))),  # [layers, D, H, K]
        ("proj", Role("matrix", MatrixSpec((1, 2), 3))),
        ("up|down", Role("matrix")),
    )
    """Roles with queries, keys and values as one matrix each; in `headwise` each head is a matrix."""

    headwise = tuple(
        (pattern, Role("matrix", MatrixSpec(1, 3))) if "qkv" in pattern else (pattern, role) for pattern, role in roles
    )

    @functools.cached_property
    def _ids(self) -> tuple[np.ndarray, np.ndarray, int]:
        if self.text:
            text = Path(self.text).read_text()
        else:
            from pydoc_data.topics import topics

            text = "\n".join(topics[name] for name in sorted(topics))
        characters, ids = np.unique(np.array(list(text)), return_inverse=True)
        cut = int(0.9 * len(ids))
        return ids[:cut].astype(np.int32), ids[cut:].astype(np.int32), len(characters)

    def init(self, seed: int) -> Any:
        """Draw from N(0, 0.02), divided by sqrt(2 layers) for projections into the residual; norm weights are 1."""
        rng, D, L, K = _rng(seed, 0), self.width, self.layers, self.width // self.heads
        small = 0.02 / np.sqrt(2 * L)
        return {
            "wte": _normal(rng, self._ids[2], D, std=0.02),
            "wpe": _normal(rng, self.block, D, std=0.02),
            "layers": {
                **{name: _normal(rng, L, D, self.heads, K, std=0.02) for name in "qkv"},
                "proj": _normal(rng, L, self.heads, K, D, std=small),
                "up": _normal(rng, L, D, 4 * D, std=0.02),
                "down": _normal(rng, L, 4 * D, D, std=small),
                "norm_1": np.ones((L, D), np.float32),
                "norm_2": np.ones((L, D), np.float32),
            },
            "norm": np.ones(D, np.float32),
        }

    def batches(self, seed: int, first: int, count: int) -> np.ndarray:
        """Cut rows of `block` + 1 characters at random places, [count, batch, block + 1]."""
        text = self._ids[0]
        starts = [
            _rng(seed, 1 + step).integers(0, len(text) - self.block, self.batch) for step in range(first, first + count)
        ]
        return text[np.array(starts)[..., None] + np.arange(self.block + 1)]

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        """Compute the mean cross-entropy of the next character in nats."""
        ids, targets = batch[:, :-1], batch[:, 1:]
        x = params["wte"][ids] + params["wpe"][: ids.shape[1]]
        x = jax.lax.scan(self._layer, x, params["layers"])[0]
        logits = _layer_norm(x, params["norm"]) @ params["wte"].T
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).mean()

    def _layer(self, x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = _layer_norm(x, w["norm_1"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
        x = x + jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), w["proj"])
        return x + jax.nn.gelu(_layer_norm(x, w["norm_2"]) @ w["up"]) @ w["down"], None

    def evaluate(self, params: Any) -> dict[str, jax.Array]:
        """Compute the mean cross-entropy over the whole batches of the validation text, in nats."""
        text = self._ids[1]
        rows = len(text) // self.block - 1
        places = np.arange(rows)[:, None] * self.block + np.arange(self.block + 1)
        cut = rows - rows % 32
        losses = jax.lax.map(lambda batch: self.loss(params, batch), text[places[:cut]].reshape(-1, 32, self.block + 1))
        return {"validation loss": losses.mean()}


def _layer_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


@dataclasses.dataclass(frozen=True)
class ZipfRegression:
    """Fit an embedding table to random rows of root mean square 1 that are looked up with Zipf frequencies.

    Attributes:
        vocab: rows of the table.
        width: columns of the table.
        batch: rows looked up per step.
        alpha: exponent: the row of rank r is looked up with a frequency proportional to r^-alpha.
    """

    vocab: int = 4096
    width: int = 128
    batch: int = 128
    alpha: float = 1.1

    roles = (("table", Role("table")),)

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        target = _normal(_rng(0, 0), self.vocab, self.width)
        target /= np.sqrt((target**2).mean(-1, keepdims=True))
        frequency = np.arange(1, self.vocab + 1) ** -self.alpha
        return target, frequency / frequency.sum()

    def init(self, seed: int) -> Any:
        """Draw from N(0, 0.02)."""
        return {"table": _normal(_rng(seed, 0), self.vocab, self.width, std=0.02)}

    def batches(self, seed: int, first: int, count: int) -> np.ndarray:
        """Draw the numbers of the rows that are looked up, [count, batch]."""
        draw = lambda step: _rng(seed, 1 + step).choice(self.vocab, self.batch, p=self._tables[1])
        return np.array([draw(step) for step in range(first, first + count)], np.int32)

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        """Compute the mean squared error of the rows that are looked up."""
        return ((params["table"][batch] - jnp.asarray(self._tables[0])[batch]) ** 2).mean()

    def evaluate(self, params: Any) -> dict[str, jax.Array]:
        """Compute the mean squared error weighted by frequency, and that of the rarer half of the rows."""
        error = ((params["table"] - self._tables[0]) ** 2).mean(-1)
        return {"weighted error": (error * self._tables[1]).sum(), "rare half": error[self.vocab // 2 :].mean()}
