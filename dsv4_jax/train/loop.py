# SPDX-License-Identifier: Apache-2.0
"""The training loop: set up, resume, then fetch, step, log, save; at the end evaluate and sample."""

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from rich.console import Console

from dsv4_jax.config import Config
from dsv4_jax.data.pipeline import Batch, batches
from dsv4_jax.data.text import VOCAB_SIZE, Document, read_documents, split
from dsv4_jax.mesh import act_spec, on_cpu, start_devices, use_mesh
from dsv4_jax.sample import sample
from dsv4_jax.summary import describe_model, describe_objective, describe_optimizer, describe_placement
from dsv4_jax.train.checkpoint import Checkpoints
from dsv4_jax.train.checks import start_warnings
from dsv4_jax.train.metrics import Display, MetricsWriter
from dsv4_jax.train.state import TrainState, abstract_model, abstract_state, init_state
from dsv4_jax.train.step import make_eval_step, make_train_step, objective_weights
from dsv4_jax.validate import ConfigError

PROMPT = b'"""'  # what the sample at the end starts with
# For a program that runs once XLA's optimisations cost more than they save. On CPU the steps keep some: the tiny
# model's step compiles in 43 s instead of 58 s and runs as fast (docs/results.md).
_RUNS_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_CPU_STEP = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
_RUNTIME = {  # may change in a run
    *("attention", "attention_block", "compute_dtype", "remat", "select", "yarn"),
    *("expert_matmul", "expert_exchange", "expert_waves", "expert_gradients"),
}


def run(cfg: Config, console: Console | None = None) -> None:
    """Trains to `cfg.train.steps`, from the newest checkpoint of the run directory if there is one.

    Raises:
        ConfigError: if the text or the run directory does not fit the configuration; before any
            device work.
    """
    console = console or Console(highlight=False, markup=False, soft_wrap=True)
    run_dir = Path(cfg.train.run_dir)
    data, evaluation, size = _read(cfg)
    start_devices(cfg.train.cpu_devices, cfg.train.distributed, cfg.train.deterministic)
    use_mesh(cfg.mesh.data, cfg.mesh.expert, cfg.mesh.context)
    if jax.process_index():  # the first process speaks and writes for all
        console = Console(quiet=True)
    _claim(cfg, run_dir)
    objective, (optimizer, _) = describe_objective(objective_weights(cfg)), describe_optimizer(cfg)
    for line in [*describe_model(cfg.model), objective, optimizer, size]:
        console.print(line)
    if jax.sharding.get_abstract_mesh().size > 1:
        console.print(*describe_placement(cfg), sep="\n")
    with Checkpoints(run_dir / "checkpoints", cfg.train.keep) as checkpoints:
        if checkpoints.latest is None:
            state, tokens = jax.jit(lambda: init_state(cfg), compiler_options=_RUNS_ONCE)(), 0
        else:
            state, tokens = checkpoints.restore(abstract_state(cfg), data)
            console.print(f"resumed     {run_dir} at step {int(state.step)}")
        if int(state.step) >= cfg.train.steps:
            console.print("the run is finished; raise train.steps to continue it")
            return
        state, loss = _loop(cfg, state, tokens, data, evaluation, checkpoints, console)
    _report(cfg, state, loss, evaluation, console)


def _loop(
    cfg: Config,
    state: TrainState,
    tokens: int,
    data: grain.DatasetIterator,
    evaluation: list[Batch],
    checkpoints: Checkpoints,
    console: Console,
) -> tuple[TrainState, float]:
    """Steps until `cfg.train.steps`; returns the last state and its held-out loss."""
    clock = time.monotonic()
    example = _put(evaluation[0])
    options = _CPU_STEP if on_cpu() else None
    train_step = jax.jit(make_train_step(cfg), donate_argnums=0, compiler_options=options)
    train_step = train_step.lower(state, example).compile()
    eval_step = jax.jit(make_eval_step(cfg), compiler_options=options).lower(state, example).compile()
    console.print(f"compiled    in {time.monotonic() - clock:.0f} s")

    def finished(metrics: dict[str, Any]) -> dict[str, Any]:
        """A step's scalars, once the device has them, with the host's counters."""
        nonlocal clock, tokens
        scalars = {name: np.asarray(value).item() for name, value in metrics.items()}
        if not math.isfinite(scalars["objective"]):
            raise RuntimeError(f"the objective is {scalars['objective']} at step {scalars['step']}")
        now, new = time.monotonic(), scalars["tokens"]
        tokens += new
        scalars |= {"tokens": tokens, "tokens_per_s": new / (now - clock)}
        clock = now
        return scalars

    step, loss = int(state.step), math.nan
    clock = time.monotonic()
    run_dir, steps = Path(cfg.train.run_dir), cfg.train.steps
    with (
        MetricsWriter(run_dir if jax.process_index() == 0 else None, step) as writer,
        Display(console, steps, step) as display,
    ):
        pending: dict[str, Any] | None = None  # the metrics of the last step, which the device still works on
        while step < steps:
            state, metrics = train_step(state, _put(next(data)))
            step += 1
            norms = metrics.pop("grad_norms")
            if step == 1:
                for warning in start_warnings(cfg, jax.device_get(metrics | {"grad_norms": norms}), state.buffers):
                    console.print(f"warning: {warning}", style="yellow")
            if pending is not None:
                show(finished(pending), writer, display)
            pending = {"step": step} | metrics
            evaluate = step == steps or step % cfg.train.eval_every == 0
            save = step == steps or step % cfg.train.checkpoint_every == 0
            if evaluate or save:
                scalars, pending = finished(pending), None
                if evaluate:
                    loss = scalars["eval_loss"] = _evaluate(eval_step, state, evaluation)
                    console.print(f"step {step}: held-out loss {loss:.3f} nats per byte")
                show(scalars, writer, display)
                if save:
                    checkpoints.save(state, data, tokens)
                clock = time.monotonic()
    return state, loss


def show(scalars: dict[str, Any], writer: MetricsWriter, display: Display) -> None:
    """Writes a finished step and puts it on the screen."""
    writer.write(scalars)
    display.update(scalars)


def _read(cfg: Config) -> tuple[grain.DatasetIterator, list[Batch], str]:
    """The endless training batches, the evaluation's batches, and a line about both."""
    if cfg.model.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"model.vocab_size = {cfg.model.vocab_size} must be at least {VOCAB_SIZE}: "
            "256 bytes and the document border"
        )
    train, held_out = split(read_documents(cfg.data.path), cfg.data.held_out)
    make = functools.partial(batches, seq_len=cfg.data.seq_len, rows=cfg.data.batch_size, multiple=cfg.mesh.context)
    held_out_batches = make(held_out, seed=0, repeat=False)
    evaluation = list(itertools.islice(held_out_batches, cfg.train.eval_batches))
    if not evaluation:
        raise ConfigError(
            f"the held-out text does not fill data.batch_size = {cfg.data.batch_size} rows of "
            f"data.seq_len = {cfg.data.seq_len}; give more text or raise data.held_out"
        )

    def size(documents: Sequence[Document]) -> str:
        return f"{len(documents):,} documents, {sum(len(d.text) for d in documents) / 1e6:.2f} MB"

    line = f"data        {size(train)} to train on; {size(held_out)} held out"
    return iter(make(train, seed=cfg.train.seed)), evaluation, line


def _claim(cfg: Config, run_dir: Path) -> None:
    """Writes config.json into the run directory, or refuses one that holds another model's run."""
    path = run_dir / "config.json"
    resolved = json.loads(json.dumps(dataclasses.asdict(cfg)))
    if path.exists():
        before = json.loads(path.read_text())["model"]
        changed = [
            f"model.{key}: {before.get(key)!r} there, {value!r} here"
            for key, value in resolved["model"].items()
            if before.get(key) != value and key not in _RUNTIME
        ]
        if changed:
            raise ConfigError(
                "\n  ".join([f"{run_dir} holds another model's run; choose another train.run_dir or undo", *changed])
            )
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(resolved, indent=2) + "\n")
        new.replace(path)


def _put(batch: Batch) -> dict[str, jax.Array]:
    """The batch on the devices; each process places its own part."""
    sharding = NamedSharding(jax.sharding.get_mesh(), act_spec(2))
    put = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return {name: put(value) for name, value in batch.items()}


def _evaluate(eval_step: Callable[..., Any], state: TrainState, evaluation: list[Batch]) -> float:
    """Mean cross-entropy in nats over all targets of the batches."""
    sums = jax.device_get([eval_step(state, _put(batch)) for batch in evaluation])
    return float(sum(s for s, _ in sums) / sum(n for _, n in sums))


def unigram_entropy(evaluation: list[Batch]) -> float:
    """Entropy in nats of the frequencies of the batches' targets: what a model without context can reach."""
    targets = np.concatenate([batch["targets"].reshape(-1) for batch in evaluation])
    count = np.bincount(targets[targets >= 0])
    p = count[count > 0] / count.sum()
    return float(-(p * np.log(p)).sum())


def _report(cfg: Config, state: TrainState, loss: float, evaluation: list[Batch], console: Console) -> None:
    unigram = unigram_entropy(evaluation)
    console.print(f"held-out loss     {loss:.3f} nats per byte ({loss / math.log(2):.3f} bits)")
    console.print(f"unigram entropy   {unigram:.3f} nats per byte ({unigram / math.log(2):.3f} bits)")
    if cfg.train.sample_bytes:
        model = nnx.merge(nnx.graphdef(abstract_model(cfg)), state.params, state.buffers)
        text = sample(model, PROMPT, cfg.train.sample_bytes, cfg.train.seed)
        console.print("sample:")
        console.print((PROMPT + text).decode("utf-8", errors="replace"))
