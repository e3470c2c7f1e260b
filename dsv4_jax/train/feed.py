# SPDX-License-Identifier: Apache-2.0
"""Read the data of a run: open the sources, plan the rows of every stage, and stream this process's rows."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from dsv4_jax.config import Config
from dsv4_jax.config.root import ResolvedStage
from dsv4_jax.data.batch import HostBatch
from dsv4_jax.data.images import row_budget
from dsv4_jax.data.packing import Part, Position, RowPlan, part, split
from dsv4_jax.data.pipeline import Stream
from dsv4_jax.data.sources import Source, open_sources
from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.mesh import row_spec
from dsv4_jax.section import ConfigError
from dsv4_jax.train.history import History


class Data(NamedTuple):
    """The data of a stage.

    Attributes:
        training: endless plan of the rows to train on.
        evaluation: plan of the held-out rows, each once.
        tokenizer: tokenizer of all sources.
        identity: two hashes, `SOURCES-PLAN`: one of the sources' documents and one of the plan, which differs between
            stages. While both are the same, a position in the training plan refers to the same row.
        line: description of the data for the banner.
        skipped: number of bad records that were left out.
    """

    training: RowPlan
    evaluation: RowPlan
    tokenizer: Tokenizer
    identity: str
    line: str
    skipped: int

    @property
    def unit(self) -> str:
        """Return the unit of the losses, which are per `byte` or per `token`."""
        return "byte" if self.tokenizer.name == "bytes" else "token"


def read_data(cfg: Config) -> list[Data]:
    """Open and check the sources once for all stages, and plan the rows of each stage; use no device.

    A stage starts reading each source where the stages before it have stopped, counted in epochs of that source.

    Raises:
        ConfigError: if a source cannot be used, or there is no document to train on or to evaluate on.
    """
    stages = cfg.resolved_stages
    paths = list(dict.fromkeys(path for stage in stages for path in stage.cfg.data.paths))
    everything = dataclasses.replace(cfg.data, path="", mixture=dict.fromkeys(paths, 1.0))
    vision = VisionLayout.of(cfg.model)
    # `other` is the separate source to evaluate on, if there is one. `seen` counts the epochs read of each source.
    sources, other, tokenizer = open_sources(everything, cfg.model.vocab_size, vision)
    opened, seen, plans = dict(zip(paths, sources, strict=True)), dict.fromkeys(paths, 0.0), []
    fingerprints = {path: fingerprint(source) for path, source in opened.items()}
    for stage in stages:
        plan, seen = _plan(stage, opened, fingerprints, other, tokenizer, seen)
        plans.append(plan)
    return plans


def _plan(
    stage: ResolvedStage,
    opened: dict[str, Source],
    fingerprints: dict[str, str],
    other: Source | None,
    tokenizer: Tokenizer,
    seen: dict[str, float],
) -> tuple[Data, dict[str, float]]:
    """Plan the rows of a stage; return its data, and the epochs of every source that are read at its end.

    Args:
        stage: the stage.
        opened: every source of the run, by its path.
        fingerprints: fingerprint of every source, by its path.
        other: separate source to evaluate on; None: documents of the training sources are held out.
        tokenizer: tokenizer of all sources.
        seen: number of epochs of every source that earlier stages have read, by its path.
    """
    cfg = stage.cfg
    data, S, weights = cfg.data, cfg.data.seq_len, cfg.data.paths
    budget = row_budget(VisionLayout.of(cfg.model), data)
    sources = [opened[path] for path in weights]
    # Choose the documents to train on and those held out, from the same sources or from the separate one.
    if other is None:
        training, held_out = zip(*(split(source, data, S, budget) for source in sources), strict=True)
    else:
        everything = lambda source: np.ones(len(source.lengths), bool)
        training = tuple(part(source, everything(source), S, budget) for source in sources)
        held_out = (part(other, everything(other), S, budget),)
    for p in training:
        if not p.pieces or not any(q.pieces for q in held_out):
            raise ConfigError(
                f"data.held_out = {data.held_out} of the {len(p.source.lengths)} documents of {p.source.name} leaves "
                f"{len(p.documents)} to train on and {sum(len(q.documents) for q in held_out)} held out in all; both "
                "need one at least: change it or give more text"
            )
    # Share the tokens of the stage among the sources by weight, and convert each share to epochs of its source.
    after = dict(seen)
    for p, (path, weight) in zip(training, weights.items(), strict=True):
        after[path] += stage.planned * weight / sum(weights.values()) / (p.tokens - len(p.documents))
    endless = stage.last == cfg.train.steps
    epochs = [(seen[path], math.inf if endless else after[path]) for path in weights]
    # The identity hashes what determines the rows: first the documents, then how they are planned. To resume with
    # another identity would repeat or omit documents (`check_same_data`).
    seed = cfg.train.seed
    documents: list[Any] = [tokenizer.fingerprint, seed]
    documents += [(fingerprints[path], p.tokens, len(p.documents)) for path, p in zip(weights, training, strict=True)]
    planned: list[Any] = [S, list(weights.values())]
    if budget:
        planned += [budget.vision._asdict(), budget[1:]]
    if stage.number or not endless:
        planned.append([(begin, 0 if endless else end) for begin, end in epochs])
    skipped = sum(source.skipped for source in [*sources, *filter(None, [other])])

    def size(parts: tuple[Part, ...]) -> str:
        """Describe the size of some parts for the banner."""
        images = f", {sum(p.images for p in parts):,} images" if budget else ""
        tokens = sum(p.tokens for p in parts) / 1e6
        return f"{sum(len(p.documents) for p in parts):,} documents, {tokens:.2f} M tokens{images}"

    planned_data = Data(
        RowPlan(training, list(weights.values()), S, seed, repeat=True, budget=budget, epochs=epochs),
        RowPlan([p for p in held_out if p.pieces], [], S, 0, repeat=False, budget=budget),
        tokenizer,
        f"{_hash(documents)}-{_hash(planned)}",
        f"data        {size(training)} to train on; {size(held_out)} held out; {skipped:,} bad records skipped",
        skipped,
    )
    return planned_data, after


def row_processes(rows: int) -> list[set[int]]:
    """Return, for each of the `rows` rows of a batch, the processes that have it on the current mesh."""
    sharding = NamedSharding(jax.sharding.get_mesh(), row_spec(1))
    holders: list[set[int]] = [set() for _ in range(rows)]
    for device, (index,) in sharding.devices_indices_map((rows,)).items():
        for row in range(rows)[index]:
            holders[row].add(device.process_index)
    return holders


def counted_rows(rows: int, process: int) -> list[int]:
    """Select the rows of a `process` for sums over all processes, so that each of the `rows` rows is counted once.

    If several processes have a row, the one with the lowest number counts it. The selected rows have the numbers of the
    process's own batches.
    """
    own = [processes for processes in row_processes(rows) if process in processes]
    return [number for number, processes in enumerate(own) if min(processes) == process]


def fingerprint(source: Source) -> str:
    """Hash all that determines the pieces of a source: names and lengths of its documents, and spans of its images.

    The hash does not depend on the path of the source or on whether it has been tokenised by the `data` command.
    """
    digest = hashlib.sha256()
    tables = [] if source.spans is None else [source.spans.ends, source.spans.table]
    for table in (source.keys, source.lengths, *tables):
        digest.update(np.ascontiguousarray(table).data)
    return digest.hexdigest()[:16]


def check_same_data(cfg: Config, data: list[Data], step: int, host: dict[str, Any], run_dir: str = "") -> None:
    """Check that a run resumes with the data of its checkpoint, unless `train.new_data` is set.

    At the end of a stage the next stage may follow. Its plan differs, but the hash of its documents must be the same.

    Args:
        cfg: configuration of the run.
        data: data of each stage.
        step: number of steps done at the checkpoint.
        host: JSON values of the checkpoint.
        run_dir: folder of the run that wrote the checkpoint, if it is another run.

    Raises:
        ConfigError: if the data differ; the message lists the keys of `data` that have changed.
    """
    # The data are the same within a stage, or when the next stage begins with the same documents.
    progress, stage = History.from_host(host).progress, cfg.stage_at(step)
    identity, number = progress.identity, progress.stage
    if not identity or cfg.train.new_data:
        return
    if number == stage.number and identity == data[number].identity:
        return
    enters = number < len(data) and stage.number == number + 1 and step == stage.first
    if enters and identity.partition("-")[0] == data[number].identity.partition("-")[0]:
        return
    # They differ: find the keys that have changed.
    before, now = host["config"]["data"], json.loads(json.dumps(dataclasses.asdict(cfg.data)))
    changed = [
        f"data.{key}: {before[key]!r} before, {value!r} now"
        for key, value in now.items()
        if key in before and before[key] != value
    ]
    lines = changed or ["no key of data has: the files have, or the stages, train.seed or the tokenizer"]
    raise ConfigError(
        "\n  ".join(
            [
                f"the data is not that of checkpoint {step} of {run_dir or cfg.train.run_dir}: going on would repeat "
                "or leave out documents. Undo what has changed, choose another train.run_dir, or start the new data "
                "at its beginning with --train.new-data. Changed:",
                *lines,
            ]
        )
    )


def _hash(values: list[Any]) -> str:
    """Hash JSON values to 16 hex digits."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@contextlib.contextmanager
def streams(cfg: Config, data: Data, start: Position) -> Generator[tuple[Stream, list[HostBatch]]]:
    """Yield the training stream from `start` and the list of evaluation batches, both with only this process's rows.

    The threads of the training stream stop at the end.
    """
    B = cfg.data.batch_size
    own = sorted(row for row, processes in enumerate(row_processes(B)) if jax.process_index() in processes)
    held_out = Stream(data.evaluation, B, own=own, multiple=cfg.mesh.context)
    evaluation = list(itertools.islice(held_out, cfg.train.eval_batches))
    stream = Stream(data.training, B, own=own, multiple=cfg.mesh.context, workers=cfg.data.workers, start=start)
    try:
        yield stream, evaluation
    finally:
        stream.close()
