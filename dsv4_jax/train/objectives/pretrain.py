# SPDX-License-Identifier: Apache-2.0
"""Pre-train: predict the next token and the one after it (MTP), keep the experts' loads even, teach the indexer."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from dsv4_jax.config import Config
from dsv4_jax.data.batch import Batch
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.ops.cross_entropy import cross_entropy
from dsv4_jax.train.custom import ExtraLoss, extra_losses, extra_weights


class Pretrain:
    """Implement `Objective`. `model.attention` = "warmup" trains the indexer alone, "dense" all but the indexer."""

    def __init__(self, cfg: Config):
        model = cfg.model
        warmup, dense = model.attention == "warmup", model.attention == "dense"
        dspark = bool(model.dspark_target_layer_ids)
        weights = {} if warmup else {"loss": 1.0, "mtp_loss": cfg.loss.mtp, "balance_loss": cfg.loss.balance}
        if not dense:
            weights["indexer_loss"] = cfg.loss.indexer
        weights |= extra_weights(cfg)
        self.extra = extra_losses(cfg)
        self.weights = {name: weight for name, weight in weights.items() if weight}
        # DSpark's draft blocks learn later, from a finished backbone (objectives/draft.py).
        self.frozen = [r"^(?!.*\bindexer\b)"] if warmup else [r"^mtp\b"] if dspark else []
        if dense and any(spec.indexed for spec in model.layer_specs):
            self.frozen.append(r"\bindexer\b")
        self.layers = range(model.n_layers + (0 if dspark else model.n_mtp_layers))
        self.balances = not warmup
        self.uniform_loss: float | None = math.log(model.vocab_size)

    def prepare(self, batch: Batch, step: jax.Array) -> Batch:
        """Return the batch as it is: nothing is drawn."""
        return batch

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Return `count_targets` of the batch."""
        return count_targets(batch)

    def losses(
        self, model: DeepSeek, batch: Batch, count: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return `compute_losses` of the batch."""
        return compute_losses(model, batch, count, self.extra)


def forced_experts(cfg: ModelConfig, batch: Batch) -> list[jax.Array | None] | None:
    """Return the experts [B, S, k] chosen ahead for every layer, None in hashed layers.

    They come from `experts` of the batch, [B, S, learned layers, k]. Without it: None.
    """
    if "experts" not in batch:
        return None
    chosen = iter(range(batch["experts"].shape[2]))
    return [None if spec.hashed else batch["experts"][:, :, next(chosen)] for spec in cfg.layer_specs]


def count_targets(batch: Batch) -> dict[str, jax.Array]:
    """Count what the losses of a batch are divided by: `targets`, `mtp_targets` and `real` tokens, 1 at least."""
    counts = {name: (batch[name] >= 0).sum() for name in ("targets", "mtp_targets")}
    counts["real"] = (batch["segment_ids"] > 0).sum()
    return {name: jnp.maximum(count, 1) for name, count in counts.items()}


def compute_losses(
    model: DeepSeek,
    batch: Batch,
    count: dict[str, jax.Array] | None = None,
    extra: Mapping[str, ExtraLoss] = MappingProxyType({}),
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Compute every loss of a batch, fp32 scalars by name, and the load of every layer's experts.

    Each loss is a sum over this batch divided by a count. Pass the whole batch's `count_targets` as `count` when
    accumulating, so that the parts add up. `extra` adds losses by name (`custom.extra_losses`). Beside the losses there
    is `moe/clamped`: the share of the activations of all experts that the SwiGLU clamps. The load is [layers, E] or, of
    text and images, [layers, 2, E] (`Block.load`).
    """
    cfg, targets, count = model.cfg, batch["targets"], count or count_targets(batch)
    forced = forced_experts(cfg, batch)
    out = model.hidden(Inputs.of(batch, following=jnp.maximum(targets, 0), forced_experts=forced))
    # The head's logits [B, S, V] are never whole in memory: `cross_entropy` makes them in pieces.
    head = whole(model.head)
    found = {"loss": cross_entropy(out.h, head, targets) / count["targets"]}
    if out.mtp is not None:
        found["mtp_loss"] = cross_entropy(out.mtp, head, batch["mtp_targets"]) / count["mtp_targets"]
    # What the layers sum over their real tokens.
    for name in ("balance", "indexer"):
        found[f"{name}_loss"] = sum((getattr(layer, name) for layer in out.layers), jnp.zeros(())) / count["real"]
    activations = len(out.layers) * (cfg.n_activated_experts + 1) * cfg.moe_inter_dim  # of a token
    found["moe/clamped"] = sum(layer.clamped for layer in out.layers) / activations / count["real"]
    found |= {name: function(model, out, batch, count) for name, function in extra.items()}
    return found, jnp.stack([layer.load for layer in out.layers])
