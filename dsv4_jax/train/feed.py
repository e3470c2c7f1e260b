# SPDX-License-Identifier: Apache-2.0
"""Read a run's data: its sources as plans of rows, and this process's rows of every batch."""

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
        training: the endless plan of packed rows.
        evaluation: the plan of the held-out rows, once each.
        tokenizer: of both.
        identity: `SOURCES-PLAN`, a hash of the sources' documents and one of how they are planned, which differs
            between stages; a position in the training plan means the same row while both stay the same.
        line: its description for the banner.
        skipped: bad records that were left out.
    """

    training: RowPlan
    evaluation: RowPlan
    tokenizer: Tokenizer
    identity: str
    line: str
    skipped: int

    @property
    def unit(self) -> str:
        """Name the unit of the losses: a byte or a token."""
        return "byte" if self.tokenizer.name == "bytes" else "token"


def read_data(cfg: Config) -> list[Data]:
    """Open and check the sources, once for all stages, and plan each stage; touch no device.

    A stage begins in every source where the stages before it end, by the tokens that they read of it.

    Raises:
        ConfigError: if one cannot be used, or there is nothing to train or to evaluate on.
    """
    stages = cfg.resolved_stages
    paths = list(dict.fromkeys(path for stage in stages for path in stage.cfg.data.paths))
    everything = dataclasses.replace(cfg.data, path="", mixture=dict.fromkeys(paths, 1.0))
    vision = VisionLayout.of(cfg.model)
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
    """Plan a stage that begins after the epochs `seen` of every path; return the epochs seen after it too."""
    cfg = stage.cfg
    data, S, weights = cfg.data, cfg.data.seq_len, cfg.data.paths
    budget = row_budget(VisionLayout.of(cfg.model), data)
    sources = [opened[path] for path in weights]
    # The documents to train on and those held out: of the same sources, or of a source of their own.
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
    # The tokens of the stage are shared among the sources by weight; what it reads of one, in epochs of it.
    after = dict(seen)
    for p, (path, weight) in zip(training, weights.items(), strict=True):
        after[path] += stage.planned * weight / sum(weights.values()) / (p.tokens - len(p.documents))
    endless = stage.last == cfg.train.steps
    epochs = [(seen[path], math.inf if endless else after[path]) for path in weights]
    # The identity: a resume with another one would repeat or leave out documents (`check_same_data`).
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
        images = f", {sum(p.images for p in parts):,} images" if budget else ""
        tokens = sum(p.tokens for p in parts) / 1e6
        return f"{sum(len(p.documents) for p in parts):,} documents, {tokens:.2f} M tokens{images}"

    found = Data(
        RowPlan(training, list(weights.values()), S, seed, repeat=True, budget=budget, epochs=epochs),
        RowPlan([p for p in held_out if p.pieces], [], S, 0, repeat=False, budget=budget),
        tokenizer,
        f"{_hash(documents)}-{_hash(planned)}",
        f"data        {size(training)} to train on; {size(held_out)} held out; {skipped:,} bad records skipped",
        skipped,
    )
    return found, after


def row_processes(rows: int) -> list[set[int]]:
    """Return the processes that hold each row of a batch on the mesh that is set."""
    sharding = NamedSharding(jax.sharding.get_mesh(), row_spec(1))
    holders: list[set[int]] = [set() for _ in range(rows)]
    for device, (index,) in sharding.devices_indices_map((rows,)).items():
        for row in range(rows)[index]:
            holders[row].add(device.process_index)
    return holders


def counted_rows(rows: int, process: int) -> list[int]:
    """Return which of a process's rows it counts for all: those that no process of a lower number holds.

    They are numbered as in the process's own batches.
    """
    own = [processes for processes in row_processes(rows) if process in processes]
    return [number for number, processes in enumerate(own) if min(processes) == process]


def fingerprint(source: Source) -> str:
    """Hash what decides which pieces a source has: its documents' names and lengths, and where its images lie.

    Where its files lie, how their path is spelled and whether they were tokenised ahead do not count.
    """
    found = hashlib.sha256()
    tables = [] if source.spans is None else [source.spans.ends, source.spans.table]
    for table in (source.keys, source.lengths, *tables):
        found.update(np.ascontiguousarray(table).data)
    return found.hexdigest()[:16]


def check_same_data(cfg: Config, data: list[Data], step: int, host: dict[str, Any], run_dir: str = "") -> None:
    """Refuse to resume a checkpoint with other data than it was read from, unless `train.new_data` allows it.

    A checkpoint from the end of a stage may be followed by the next one, whose plan is another but whose documents
    must have the same names, lengths and tokens.

    Args:
        cfg: the run.
        data: what each of its stages reads.
        step: steps done at the checkpoint.
        host: the checkpoint's JSON values.
        run_dir: folder of the run that the checkpoint is of, if it is another one.

    Raises:
        ConfigError: with the keys of `data` that have changed.
    """
    progress, stage = History.from_host(host).progress, cfg.stage_at(step)
    identity, number = progress.identity, progress.stage
    if not identity or cfg.train.new_data:
        return
    if number == stage.number and identity == data[number].identity:
        return
    enters = number < len(data) and stage.number == number + 1 and step == stage.first
    if enters and identity.partition("-")[0] == data[number].identity.partition("-")[0]:
        return
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
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@contextlib.contextmanager
def streams(cfg: Config, data: Data, start: Position) -> Generator[tuple[Stream, list[HostBatch]]]:
    """Yield the training stream and the batches to evaluate on, each with this process's rows alone."""
    B = cfg.data.batch_size
    own = sorted(row for row, processes in enumerate(row_processes(B)) if jax.process_index() in processes)
    held_out = Stream(data.evaluation, B, own=own, multiple=cfg.mesh.context)
    evaluation = list(itertools.islice(held_out, cfg.train.eval_batches))
    stream = Stream(data.training, B, own=own, multiple=cfg.mesh.context, workers=cfg.data.workers, start=start)
    try:
        yield stream, evaluation
    finally:
        stream.close()
