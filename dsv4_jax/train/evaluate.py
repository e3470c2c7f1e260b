# SPDX-License-Identifier: Apache-2.0
"""Evaluate on held-out documents: losses of text and of text after a right or wrong image, and recall of indexers."""

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
    """Make the function that evaluates a batch, from state and batch to sums; jit it.

    For each measure it returns (sum, number of terms):
    - `text`: next-token cross-entropies in nats; with a vision tower, only those of targets that have no image before
      them in their document.
    - `image`: with a vision tower, the cross-entropies of the other targets.
    - `recall` and `recall_random`: with an indexer, the shares that `indexer_recall` measures, over all indexers and
      over the queries that have more visible entries than the indexer selects.
    """
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, recall=True))
    graphdef = nnx.graphdef(abstract_model(cfg))

    def step(state: TrainState, batch: Batch) -> Sums:
        """Return (sum, number of terms) of each measure over a batch."""
        # Hidden states out.h [B, S, D]. Targets [B, S] of each kind; -1 is no target.
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
    """Return whether an image begins at or before each position in its document, bool [B, S].

    Args:
        token_types_BS: int32 types of the positions.
        first_BS: first position of each position's document; not split along S.
    """

    def rows(types_BS: jax.Array, first_BS: jax.Array) -> jax.Array:
        """Compute the result for the whole rows of one device."""
        # The last position of an image up to each position, -1 before the first, is compared with the document's start.
        t = jnp.arange(types_BS.shape[1])
        return jax.lax.cummax(jnp.where(types_BS != TEXT, t, -1), axis=1) >= first_BS

    spec = row_spec(2)
    after_BS = jax.shard_map(rows, in_specs=spec, out_specs=spec)(jax.reshard(token_types_BS, spec), first_BS)
    return jax.reshard(after_BS, act_spec(2))


def wrong_images(batches: list[HostBatch]) -> list[HostBatch]:
    """Replace every image by the next image of the same size in the same row number, in this or a later batch.

    The last image of a size gets the first one; an image whose size is unique stays. Only one row number is searched
    because a process has the same row numbers of every batch. So the pairs, and the loss, do not depend on the number
    of processes.
    """
    # Places (batch, row, range of patches) of all images, by row number and size.
    alike: dict[tuple[int, int, int], list[tuple[int, int, slice]]] = collections.defaultdict(list)
    for number, batch in enumerate(batches):
        for row, grids in enumerate(batch["image_grids"]):
            ends = np.cumsum(grids[:, 2] * grids[:, 3])
            for end, (_, _, height, width) in zip(ends, grids, strict=True):
                if height:
                    alike[row, height, width].append((number, row, slice(end - height * width, end)))
    # Rotate the patches of each group by one image.
    swapped = [batch | {"patches": batch["patches"].copy()} for batch in batches]
    for places in alike.values():
        for (number, row, span), (other, other_row, other_span) in zip(places, places[1:] + places[:1], strict=True):
            swapped[number]["patches"][row, span] = batches[other]["patches"][other_row, other_span]
    return swapped


def evaluate(
    eval_step: Callable[..., Sums], state: TrainState, batches: list[HostBatch], place: Callable[[HostBatch], Any]
) -> dict[str, float]:
    """Evaluate the model on all batches; return the metrics by name.

    - `eval/loss`: mean cross-entropy in nats of targets without an image before them; if there are none, of the others.
    - `eval/loss_image`: mean cross-entropy in nats of targets after an image in their document.
    - `eval/loss_wrong_image`: the same loss with every image replaced by another one of its size (`wrong_images`).
    - `eval/recall`: mean share of the attention to all visible compressed entries that the entries selected by the
      indexer have, over all indexers and over the queries that see more entries than it selects.
    - `eval/recall_random`: the share that the same number of random entries would have on average.

    Args:
        eval_step: jitted function of `make_eval_step`.
        state: state with the parameters.
        batches: rows of this process.
        place: function that puts a batch on the devices.
    """

    def means(batches: Iterable[HostBatch]) -> dict[str, float]:
        """Return the mean of each measure over all batches; a measure without terms is left out."""
        sums = jax.device_get([eval_step(state, place(batch)) for batch in batches])
        total = jax.tree.map(lambda *x: float(np.sum(x)), *sums)
        return {kind: s / n for kind, (s, n) in total.items() if n}

    # `mean` has the mean of each measure of `make_eval_step`.
    mean = means(batches)
    scalars = {"eval/loss": mean.get("text", mean.get("image", float("nan")))}
    if "image" in mean:
        scalars["eval/loss_image"] = mean["image"]
        scalars["eval/loss_wrong_image"] = means(wrong_images(batches))["image"]
    return scalars | {f"eval/{kind}": mean[kind] for kind in ("recall", "recall_random") if kind in mean}


def unigram_entropy(evaluation: list[HostBatch], rows: list[int], vocab_size: int) -> float:
    """Compute the entropy in nats of the token frequencies of all targets, the lowest loss of a model without context.

    Every process must call it.

    Args:
        evaluation: batches with this process's rows.
        rows: rows of these batches that this process counts (`feed.counted_rows`).
        vocab_size: number of token ids.
    """
    targets = np.concatenate([batch["targets"][rows].reshape(-1) for batch in evaluation])
    count = np.bincount(targets[targets >= 0], minlength=vocab_size).astype(np.int32)
    if jax.process_count() > 1:
        count = np.asarray(multihost_utils.process_allgather(count)).sum(0)
    p = count[count > 0] / count.sum()
    return float(-(p * np.log(p)).sum())
