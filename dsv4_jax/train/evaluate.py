# SPDX-License-Identifier: Apache-2.0
"""Evaluate on held-out documents: text, text after an image, text after a wrong image, and the indexer's recall."""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from dsv4_jax.config import Config
from dsv4_jax.data.batch import Batch, HostBatch
from dsv4_jax.mesh import act_spec, row_spec
from dsv4_jax.model.inputs import Inputs
from dsv4_jax.model.params import whole
from dsv4_jax.model.token_types import TEXT
from dsv4_jax.ops.cross_entropy import cross_entropy
from dsv4_jax.train.state import TrainState, abstract_model

Sums = dict[str, tuple[jax.Array, jax.Array]]


def make_eval_step(cfg: Config) -> Callable[[TrainState, Batch], Sums]:
    """Return the evaluation of a batch as a function of state and batch, to be jitted.

    It returns sums and the numbers of their terms: the next-token cross-entropies in nats of `text` and, with a vision
    tower, of the targets after an `image` in their document; with an indexer that has to choose, `recall` and
    `recall_random` over its queries (`indexer_recall`).
    """
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, recall=True))
    graphdef = nnx.graphdef(abstract_model(cfg))

    def step(state: TrainState, batch: Batch) -> Sums:
        model = nnx.merge(graphdef, state.params, state.buffers)
        out = model.hidden(Inputs.of(batch), with_mtp=False)
        targets = {"text": batch["targets"]}
        if "token_types" in batch:
            after = after_image(batch["token_types"], out.tables.docs.first_BS)
            targets = {"text": jnp.where(after, -1, batch["targets"]), "image": jnp.where(after, batch["targets"], -1)}
        sums = {kind: (cross_entropy(out.h, whole(model.head), t), (t >= 0).sum()) for kind, t in targets.items()}
        if recalls := [report.recall for report in out.layers if report.recall is not None]:
            covered, chance, queries = sum(recalls)
            sums |= {"recall": (covered, queries), "recall_random": (chance, queries)}
        return sums

    return step


def after_image(token_types_BS: jax.Array, first_BS: jax.Array) -> jax.Array:
    """Return for every position [B, S] whether an image begins at or before it in its document.

    `first_BS` is the first position of its document, with whole rows on every device.
    """

    def rows(types_BS: jax.Array, first_BS: jax.Array) -> jax.Array:
        t = jnp.arange(types_BS.shape[1])
        return jax.lax.cummax(jnp.where(types_BS != TEXT, t, -1), axis=1) >= first_BS

    spec = row_spec(2)
    found = jax.shard_map(rows, in_specs=spec, out_specs=spec)(jax.reshard(token_types_BS, spec), first_BS)
    return jax.reshard(found, act_spec(2))


def wrong_images(batches: list[HostBatch]) -> list[HostBatch]:
    """Replace every image by the next image of the same size in the same row of all batches, if there is another.

    Images of other rows do not count because a process holds the same rows of every batch: so the pairs, and the loss,
    are the same for any number of processes.
    """
    alike: dict[tuple[int, int, int], list[tuple[int, int, slice]]] = collections.defaultdict(list)
    for number, batch in enumerate(batches):
        for row, grids in enumerate(batch["image_grids"]):
            ends = np.cumsum(grids[:, 2] * grids[:, 3])
            for end, (_, _, height, width) in zip(ends, grids, strict=True):
                if height:
                    alike[row, height, width].append((number, row, slice(end - height * width, end)))
    swapped = [batch | {"patches": batch["patches"].copy()} for batch in batches]
    for places in alike.values():
        for (number, row, span), (other, other_row, other_span) in zip(places, places[1:] + places[:1], strict=True):
            swapped[number]["patches"][row, span] = batches[other]["patches"][other_row, other_span]
    return swapped


def evaluate(
    eval_step: Callable[..., Sums], state: TrainState, batches: list[HostBatch], place: Callable[[HostBatch], Any]
) -> dict[str, float]:
    """Evaluate all batches; return the metrics by name.

    - `eval/loss`: mean cross-entropy of text in nats; of all targets if every document has an image.
    - `eval/loss_image`, `eval/loss_wrong_image`: that of text after an image, and after another image of its size.
    - `eval/recall`: the share of the attention to compressed entries that the indexer's choice covers, over all
      indexers and all queries that see more entries than it may choose.
    - `eval/recall_random`: the share that a random choice would cover.
    """

    def means(batches: Iterable[HostBatch]) -> dict[str, float]:
        sums = jax.device_get([eval_step(state, place(batch)) for batch in batches])
        total = jax.tree.map(lambda *x: float(np.sum(x)), *sums)
        return {kind: s / n for kind, (s, n) in total.items() if n}

    found = means(batches)
    scalars = {"eval/loss": found.get("text", found.get("image", float("nan")))}
    if "image" in found:
        scalars["eval/loss_image"] = found["image"]
        scalars["eval/loss_wrong_image"] = means(wrong_images(batches))["image"]
    return scalars | {f"eval/{kind}": found[kind] for kind in ("recall", "recall_random") if kind in found}


def unigram_entropy(evaluation: list[HostBatch], rows: list[int], vocab_size: int) -> float:
    """Return the entropy in nats of the frequencies of all targets: the loss that a model without context can reach.

    Every process must call it, with the `rows` of its batches that no other process counts.
    """
    targets = np.concatenate([batch["targets"][rows].reshape(-1) for batch in evaluation])
    count = np.bincount(targets[targets >= 0], minlength=vocab_size).astype(np.int32)
    if jax.process_count() > 1:
        count = np.asarray(multihost_utils.process_allgather(count)).sum(0)
    p = count[count > 0] / count.sum()
    return float(-(p * np.log(p)).sum())
