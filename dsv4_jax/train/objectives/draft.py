# SPDX-License-Identifier: Apache-2.0
"""Train the draft blocks from random anchors, with the frozen backbone as their teacher (V4.1 section 2.4.3, DSpark).

Letters: B rows, S positions, A anchors of a row, n slots of a draft, V vocabulary.
"""

import jax
import jax.numpy as jnp

from dsv4_jax.config import Config
from dsv4_jax.data.batch import Batch
from dsv4_jax.mesh import act_spec, emulated, row_spec
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.dspark import Anchors, Drafts, compute_confidence, compute_slot_logits
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.ops.cross_entropy import head_logits


class Draft:
    """Implement `Objective`: train the draft blocks alone."""

    def __init__(self, cfg: Config):
        self.cfg, self.slots = cfg, cfg.model.dspark_block_size
        self.decay = cfg.loss.draft_decay or self.slots
        self.weights = {
            f"draft_{name}": getattr(cfg.loss, f"draft_{name}") for name in ("ce", "distance", "confidence")
        }
        self.frozen = [r"^(?!mtp\b)"]
        if cfg.model.attention == "dense" and any(spec.indexed for spec in cfg.model.layer_specs):
            self.frozen.append(r"\bindexer\b")
        self.layers = range(cfg.model.n_layers, cfg.model.n_layers + cfg.model.n_mtp_layers)
        self.balances = cfg.model.attention != "warmup"
        self.uniform_loss: float | None = None

    def prepare(self, batch: Batch, step: jax.Array) -> Batch:
        """Add `anchors` [B, A], drawn at random."""
        key = jax.random.fold_in(jax.random.key(self.cfg.train.seed), step)
        return batch | {"anchors": choose_anchors(batch["targets"], key, count_anchors(self.cfg))}

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Sum the weights of all slots that have a target: `drafts`."""
        total = weigh_slots(find_slot_targets(batch["targets"], batch["anchors"], self.slots), self.decay).sum()
        return {"drafts": jnp.where(total > 0, total, 1.0)}

    def losses(
        self, model: DeepSeek, batch: Batch, count: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return `compute_draft_losses`, divided by the weights of the whole batch's slots."""
        found, load_LE = compute_draft_losses(model, Inputs.of(batch), batch["targets"], batch["anchors"], self.decay)
        return {name: value / count["drafts"] for name, value in found.items()}, load_LE


def count_anchors(cfg: Config) -> int:
    """Return the number of anchors of a row: `loss.draft_anchors`, but at most one a position.

    It is rounded up to a multiple of `mesh.context`, whose devices share the anchors of a row.
    """
    count = min(cfg.loss.draft_anchors, cfg.data.seq_len)
    return -(-count // cfg.mesh.context) * cfg.mesh.context


def choose_anchors(targets_BS: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Draw positions int32 [B, count] without replacement from those with a target; -1 where a row has too few."""
    chance = jax.random.uniform(key, targets_BS.shape, out_sharding=row_spec(2))

    def rows(targets_BS: jax.Array, chance_BS: jax.Array) -> jax.Array:
        value, position = jax.lax.top_k(jnp.where(targets_BS >= 0, chance_BS, -1.0), min(count, targets_BS.shape[1]))
        found = jnp.where(value >= 0, position, -1)
        return jnp.pad(found, [(0, 0), (0, count - found.shape[1])], constant_values=-1)

    spec = row_spec(2)
    found = jax.shard_map(rows, in_specs=spec, out_specs=spec)(jax.reshard(targets_BS, spec), chance)
    return jax.reshard(found, act_spec(2))


def gather_from_anchors(x: jax.Array, position_BA: jax.Array, n: int) -> jax.Array:
    """Gather the n positions of x [B, S, ...] that start at each anchor: [B, A, n, ...].

    Positions outside the row are clamped to its ends.
    """

    def rows(x: jax.Array, position_BA: jax.Array) -> jax.Array:
        place = jnp.clip(position_BA[..., None] + jnp.arange(n), 0, x.shape[1] - 1)
        return jax.vmap(lambda row, at: row[at])(x, place)

    specs = row_spec(x.ndim), row_spec(2)
    whole_rows = (jax.reshard(a, spec) for a, spec in zip((x, position_BA), specs, strict=True))
    found = jax.shard_map(rows, in_specs=specs, out_specs=row_spec(x.ndim + 1))(*whole_rows)
    return jax.reshard(found, act_spec(x.ndim + 1))


def find_slot_targets(targets_BS: jax.Array, position_BA: jax.Array, n: int) -> jax.Array:
    """Return the tokens [B, A, n] that the slots of every anchor predict, -1 from the first missing target on."""
    place_BAn = position_BA[..., None] + jnp.arange(n)
    some = (position_BA[..., None] >= 0) & (place_BAn < targets_BS.shape[1])
    found = jnp.where(some, gather_from_anchors(targets_BS, position_BA, n), -1)
    return jnp.where(jax.lax.cummin(found, axis=2) < 0, -1, found)


def weigh_slots(slots_BAn: jax.Array, decay: float) -> jax.Array:
    """Return the weight exp(-k / decay) of every slot k, 0 for a slot without a target."""
    return jnp.where(slots_BAn >= 0, jnp.exp(-jnp.arange(slots_BAn.shape[2]) / decay), 0.0)


def compute_draft_losses(
    model: DeepSeek, inputs: Inputs, targets_BS: jax.Array, position_BA: jax.Array, decay: float
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Compute the drafter's three losses, weighted sums over slots, and the loads of its experts.

    `draft_ce` is the cross-entropy of the true token; `draft_distance` the L1 distance between the drafter's
    distribution and the backbone's for the same token; `draft_confidence` the cross-entropy of the confidence head with
    the probability of acceptance, which is 1 - distance / 2 and also returned, as `draft_acceptance`. The backbone gets
    no gradient.
    """
    frozen = jax.lax.stop_gradient
    backbone = frozen(model.hidden(inputs, with_mtp=False, collect=["features"]))
    # The drafts of all anchors, from the backbone's hidden states.
    n = model.cfg.dspark_block_size
    at_anchors = lambda x: gather_from_anchors(x, position_BA, 1)[..., 0]
    token_BA, first_BA = at_anchors(inputs.ids), at_anchors(backbone.tables.docs.first_BS)
    anchors = Anchors(token_BA, position_BA, first_BA)
    slots_BAn = find_slot_targets(targets_BS, position_BA, n)
    weight_BAn = weigh_slots(slots_BAn, decay)
    made: Drafts = _shared_frozen(model).draft(backbone, anchors)
    # Slot k comes after the true token k places after the anchor, and the backbone predicts from there.
    before_BAn = jnp.concatenate([anchors.token_BA[..., None], jnp.maximum(slots_BAn[..., :-1], 0)], axis=-1)
    teacher_BAnD = gather_from_anchors(backbone.h, position_BA, n)

    @jax.checkpoint
    def slot(xs: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
        h, u, teacher, before, target, weight = xs
        frozen_model = _shared_frozen(model)
        log_p = jax.nn.log_softmax(compute_slot_logits(frozen_model, h, before))
        log_q = frozen(jax.nn.log_softmax(head_logits(teacher, whole(model.head))))
        distance = jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(-1)
        accepted, c = frozen(1 - distance / 2), compute_confidence(frozen_model, u, before)
        at = jnp.maximum(target, 0)[..., None]
        found = {
            "draft_ce": -jnp.take_along_axis(log_p, at, axis=-1)[..., 0],
            "draft_distance": distance,
            "draft_confidence": jax.nn.softplus(c) - accepted * c,
            "draft_acceptance": accepted,
        }
        return {name: x * weight for name, x in found.items()}

    # One slot at a time, since logits of all slots [B, A, n, V] would not fit; the backward pass recomputes them.
    xs = (made.h_BAnD, made.u_BAnD, teacher_BAnD, before_BAn, slots_BAn, weight_BAn)
    slots = tuple(jnp.moveaxis(x, 2, 0) for x in xs)
    _, found = jax.lax.scan(lambda _, xs: (None, slot(xs)), None, slots, unroll=emulated())
    return {name: x.sum() for name, x in found.items()}, jnp.stack(made.loads)


def _shared_frozen(model: DeepSeek) -> DeepSeek:
    """Return the model with no gradient to anything but the draft blocks."""
    cut = lambda path, x: x if path[0].name == "mtp" else jax.lax.stop_gradient(x)
    return jax.tree.map_with_path(cut, model)
