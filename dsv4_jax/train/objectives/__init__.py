# SPDX-License-Identifier: Apache-2.0
"""Define what a run trains for. The step, the loop and the plan know an objective by this interface alone."""

from collections.abc import Callable
from typing import Protocol

import jax

from dsv4_jax.config import Config
from dsv4_jax.config.plugins import call, resolve
from dsv4_jax.data.batch import Batch
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.section import ConfigError
from dsv4_jax.train.custom import extra_weights
from dsv4_jax.train.objectives.draft import Draft
from dsv4_jax.train.objectives.pretrain import Pretrain


class Objective(Protocol):
    """An objective, made from a run's configuration: `Objective(cfg)`.

    A batch may be computed in parts (`train.accumulate`) whose results are added up. So every loss is a sum over the
    positions of a part, divided by a count of the whole batch: `denominators` sees the whole batch, `losses` a part.

    Attributes:
        weights: weight of every loss in the weighted sum, by the name that `losses` gives it.
        frozen: regular expressions of the paths of the parameters that it does not train.
        layers: the layers whose experts' loads `losses` returns, numbered as in `DeepSeek.layers_of`.
        balances: whether the router biases of these layers move.
        uniform_loss: the expected `loss` of a model whose predictions are uniform; None: not known.
    """

    weights: dict[str, float]
    frozen: list[str]
    layers: range
    balances: bool
    uniform_loss: float | None

    def prepare(self, batch: Batch, step: jax.Array) -> Batch:
        """Add to the whole batch what is drawn at random for it, from the number of steps done."""

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Count in the whole prepared batch what the sums of `losses` are divided by."""

    def losses(
        self, model: DeepSeek, batch: Batch, count: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Compute the losses of a prepared batch or of a part of it.

        Args:
            model: with the parameters of this step.
            batch: arrays as in `data/batch.py` and what `prepare` added.
            count: the whole batch's `denominators`.

        Returns:
            Every loss by name, fp32 scalars, and other scalars for the metrics that add up in the same way; and the
            loads [layers, E] or, of text and images, [layers, 2, E].
        """


_NAMED: dict[str, Callable[[Config], Objective]] = {"pretrain": Pretrain, "draft": Draft}


def objective_of(cfg: Config) -> Objective:
    """Make the objective that `train.objective` names.

    Raises:
        ConfigError: for a name that leads nowhere, a class whose instance is no `Objective`, or an objective that does
            not use the losses of `loss.extra`.
    """
    name = cfg.train.objective
    if name in _NAMED:
        objective = _NAMED[name](cfg)
    else:
        objective = call(resolve(name, "train.objective"), name, "train.objective", cfg)
        needed = (*Objective.__annotations__, "prepare", "denominators", "losses")
        if missing := [part for part in needed if not hasattr(objective, part)]:
            raise ConfigError(
                f"train.objective = {name!r} must make an objective, found {type(objective).__name__} without "
                f"{', '.join(missing)} (docs/extending.md)"
            )
    if unused := extra_weights(cfg).keys() - objective.weights.keys():
        absent = ", ".join(sorted(unused))
        raise ConfigError(f"loss.extra = {cfg.loss.extra!r}: train.objective = {name!r} has no {absent} in its weights")
    return objective
