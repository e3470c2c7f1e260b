# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: one tree of frozen dataclasses, from a Python file and typed flags."""

import contextlib
import dataclasses
import io
import re
import runpy
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from dsv4_jax.model.config import ModelConfig
from dsv4_jax.optim import COEFFICIENTS
from dsv4_jax.validate import ConfigError, Section, from_fields, nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What the model reads."""

    path: str = ""
    """What to train on: a file, folder or glob pattern of text, .jsonl, .parquet, .array_record, .bin or .npy, or a
    folder that the `data` command made; empty: the Python standard library's source. drawn: or drawn:PATH: lines of
    it, or of those texts, each as a picture followed by its characters."""
    mixture: dict[str, float] = dataclasses.field(default_factory=dict)
    """Several such paths and the share of tokens that each gives; each has its own epochs. Instead of path."""
    text_field: str = "text"
    """Field or column of JSONL and Parquet records that holds the text."""
    tokenizer: str = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json."""
    border: str = ""
    """Token between documents, as the tokenizer writes it; with bytes it is 256."""
    bin_type: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in .bin files."""
    on_error: Literal["raise", "skip"] = "raise"
    """What a bad record does (invalid UTF-8 or JSON, no text): end the run at its start, or be skipped and counted."""
    prepared: str = "prepared"
    """Folder where `python -m dsv4_jax data CONFIG` puts tokens, and where training finds them."""
    seq_len: int = 512
    """Positions S of a row, in tokens."""
    batch_size: int = 4
    """Rows of a step."""
    workers: int = 1
    """Threads that make batches ahead of time; 0 makes each when it is needed. They do not change the data."""
    image_field: str = "images"
    """Field or column of JSONL and Parquet records with the images that each <image> in the text stands for; read
    if the model has vision. Empty: none."""
    row_patches: int = 0
    """Patches that the images of a row have at most; 0: those of the largest image, or of a quarter of the row."""
    row_images: int = 0
    """Images that a row holds at most; 0: as many small ones as the patches allow."""
    held_out: float = 0.02
    """Share of the documents, chosen by a hash of their names, that evaluation reads and training does not."""
    held_out_path: str = ""
    """Evaluate on this source instead of a share of the training documents."""

    @property
    def paths(self) -> dict[str, float]:
        """Every source to train on and its weight."""
        return self.mixture or {self.path: 1.0}

    def _check(self) -> None:
        self.need_positive("seq_len batch_size")
        for key in ("workers", "row_patches", "row_images"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        self.need("image_field", self.image_field != self.text_field, "must be another than data.text_field")
        self.need("held_out", 0 < self.held_out < 1, "must be between 0 and 1")
        self.need("mixture", all(w > 0 for w in self.mixture.values()), "must have weights above 0")
        self.need("mixture", not (self.mixture and self.path), f"cannot stand beside data.path = {self.path!r}")
        self.need("border", not self.border or self.tokenizer != "bytes", "needs a data.tokenizer that has it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer, with linear warm-up, constant rate and cosine decay."""

    name: Literal["deepseek_v4", "deepseek_v41", "adamw"] = "deepseek_v4"
    """Which rule moves which parameter: a published table (`dsv4_jax.optim`), or AdamW for all."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    end_learning_rate: float = 3e-4
    """Learning rate that the decay ends with."""
    warmup_steps: int = 20
    """Steps of linear warm-up: step t of these, from 1, has t / warmup_steps of the peak rate."""
    decay_steps: int = 100
    """Last steps, in which the rate falls along a cosine."""
    momentum: float = 0.95
    """Decay of the momentum of Muon and of the Sinkhorn-balanced update."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which that momentum is kept."""
    coefficients: str = "deepseek_v4"
    """Newton-Schulz steps of Muon, a name of `dsv4_jax.optim.COEFFICIENTS`."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Operands of Muon's matrix products, which sum in fp32. auto: bfloat16 on accelerators, float32 on CPU."""
    tau: float = 1e-3
    """Rows of a table whose momentum is below this part of the mean do not move (Sinkhorn-balanced update)."""
    b1: float = 0.9
    """Decay of AdamW's first moment."""
    b2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-20
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate, of what the table decays."""
    clip: float = 1.0
    """Largest global norm of the gradient."""

    def _check(self) -> None:
        self.need_positive("learning_rate eps clip")
        for key in ("end_learning_rate", "warmup_steps", "decay_steps", "weight_decay", "tau"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        self.need("coefficients", self.coefficients in COEFFICIENTS, f"must be one of {', '.join(COEFFICIENTS)}")
        for key in ("b1", "b2", "momentum"):
            self.need(key, 0 <= getattr(self, key) < 1, "must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """Weights of the losses beside the cross-entropy of the next token, whose weight is 1."""

    mtp: float = 0.3
    """Cross-entropy of the token after the next, from the MTP block."""
    balance: float = 1e-4
    """Sequence-wise balance of the experts, summed over learned layers."""
    indexer: float = 1.0
    """KL divergence from attention to the lightning indexer, summed over CSA layers."""

    def _check(self) -> None:
        for key in ("mtp", "balance", "indexer"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig(Section):
    """How the experts are kept balanced."""

    bias_speed: float = 1e-3
    """Step of the router biases after every optimizer step, against the sign of an expert's excess load."""

    def _check(self) -> None:
        self.need("bias_speed", self.bias_speed >= 0, "must be 0 or above")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Devices along each axis; their product is the number of all devices."""

    data: int = 1
    """Splits the rows of a batch, and parameters and optimizer state where it divides them."""
    expert: int = 1
    """Splits the rows too, and the experts of every layer."""
    context: int = 1
    """Splits the positions of every row."""

    def _check(self) -> None:
        self.need_positive("data expert context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """How long to run, and what to write when."""

    steps: int = 200
    """Optimizer steps in all."""
    seed: int = 0
    """Seed of the initial parameters, of the data's order and of the samples."""
    run_dir: str = "runs/default"
    """Folder of the run. The same command again resumes it."""
    eval_every: int = 100
    """Steps between evaluations on held-out documents; there is one at the end too."""
    eval_batches: int = 16
    """Batches of an evaluation; fewer if there is less held-out text."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is one at the end too."""
    keep: int = 2
    """Newest checkpoints to keep."""
    keep_every: int = 0
    """Checkpoints at multiples of so many steps are kept for ever; 0: none."""
    bad_steps: int = 10
    """Steps in a row with an objective or gradient that is not finite, each skipped whole, after which the run ends."""
    profile_steps: str = ""
    """FIRST:LAST writes a trace of the steps from FIRST up to but without LAST into the run's `profile`, for xprof."""
    sample_tokens: int = 256
    """Tokens to sample from the trained model at the end; 0: none."""
    accumulate: int = 1
    """Parts of a batch that are computed one after another; the result is that of the whole batch."""
    cpu_devices: int = 0
    """Run on the CPU as this many devices (of each process); 0: the devices that there are."""
    distributed: str = ""
    """Several processes, each started with the same command. HOST:PORT,COUNT,NUMBER: where process 0 listens, how
    many there are, which this is. auto: as SLURM, Kubernetes or MPI say. Empty: one process."""
    deterministic: bool = False
    """Have a GPU give the same bits every time, at some cost. CPU and TPU do so anyway."""

    def _check(self) -> None:
        self.need_positive("steps eval_every eval_batches checkpoint_every keep bad_steps accumulate")
        for key in ("seed", "sample_tokens", "cpu_devices", "keep_every"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        span = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        right = not self.profile_steps or (span is not None and 0 < int(span[1]) < int(span[2]))
        self.need("profile_steps", right, "must be empty or FIRST:LAST with 0 < FIRST < LAST")
        form = re.fullmatch(r"|auto|[^,\s]+:\d+,(\d+),(\d+)", self.distributed)
        right = form is not None and (form[1] is None or int(form[2]) < int(form[1]))
        self.need("distributed", right, "must be empty, auto, or HOST:PORT,COUNT,NUMBER with NUMBER below COUNT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """A whole run."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    routing: RoutingConfig = RoutingConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()

    def _check(self) -> None:
        model, optim, steps, mesh = self.model, self.optim, self.train.steps, self.mesh
        parts = mesh.data * mesh.expert * self.train.accumulate
        if self.data.batch_size % parts:
            raise ConfigError(
                f"data.batch_size = {self.data.batch_size} must be a multiple of mesh.data x mesh.expert x "
                f"train.accumulate = {parts}"
            )
        experts, waves = model.n_routed_experts, model.expert_waves
        if experts % mesh.expert == 0 and experts // mesh.expert % waves:
            raise ConfigError(
                f"model.expert_waves = {waves} must divide the {experts // mesh.expert} experts of a device: "
                f"model.n_routed_experts = {experts} over mesh.expert = {mesh.expert}"
            )
        if self.loss.mtp and not model.n_mtp_layers:
            raise ConfigError(f"loss.mtp = {self.loss.mtp} needs an MTP block; set it to 0 or model.n_mtp_layers to 1")
        if optim.warmup_steps + optim.decay_steps > steps:
            raise ConfigError(
                f"optim.warmup_steps + optim.decay_steps = {optim.warmup_steps + optim.decay_steps} "
                f"exceeds train.steps = {steps}; shorten them or train longer"
            )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that the Python file at `path` makes, with command-line overrides.

    Args:
        path: a file that defines `config()`, which returns a `Config`.
        overrides: `--section.key value` pairs, typed like the fields.

    Raises:
        ConfigError: for a file that does not give a `Config`, an unknown key (naming the nearest valid
            one), a value of the wrong type or one that breaks a rule.
    """
    config = made_by(path, "config")
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: config() must return a dsv4_jax.config.Config, found {type(config).__name__}")
    return _override(config, overrides)


def made_by(path: str | Path, function: str) -> Any:
    """What the function of that name in the Python file at `path` returns.

    Raises:
        ConfigError: naming the file, if there is none, or it fails.
    """
    try:
        return runpy.run_path(str(path))[function]()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except TypeError as error:
        unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        sections = {c.__name__: c for c in (ModelConfig, *Section.__subclasses__())}
        if unknown and unknown[1] in sections:
            valid = [f.name for f in dataclasses.fields(sections[unknown[1]])]
            what = f"unknown field {unknown[2]!r} of {unknown[1]}{nearest(unknown[2], valid)}"
            raise ConfigError(f"{path}: {what}") from None
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error


def config_from_json(tree: dict[str, Any]) -> Config:
    """The configuration that a run directory's config.json holds.

    Raises:
        ConfigError: if a field is unknown, missing or unusable.
    """
    sections: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(Config).items():
        if name in tree:
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in tree[name].items()}
            sections[name] = from_fields(hint, values, f"{name} of config.json")
    return from_fields(Config, sections | {k: v for k, v in tree.items() if k not in sections}, "config.json")


def keys(node: Any, prefix: str = "") -> list[str]:
    """Every leaf key of a configuration, `section.key`."""
    found: list[str] = []
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), prefix + field.name
        found += keys(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return found


def _override(config: Config, overrides: Sequence[str]) -> Config:
    if not {"-h", "--help"} & set(overrides):
        valid = keys(config)
        for flag in (o for o in overrides if o.startswith("--")):
            key = flag[2:].partition("=")[0].replace("-", "_")
            negated = key.rpartition(".")[0] + "." + key.rpartition(".")[2].removeprefix("no_")
            if key not in valid and negated not in valid:
                raise ConfigError(f"unknown key {key!r}{nearest(key, valid)}")
        # tyro prints its errors and exits; the text becomes the error of a library call.
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                return tyro.cli(type(config), default=config, args=list(overrides))
        except SystemExit:
            words = re.sub(r"[─│╭╮╰╯]+|-{3,}", " ", said.getvalue())
            words = re.split(r"Argument helptext|For full helptext", words)[0]
            words = re.sub(r"^(Value error )?Error parsing \w+: ", "", " ".join(words.split()))
            raise ConfigError(words) from None
    return tyro.cli(type(config), default=config, args=list(overrides))
