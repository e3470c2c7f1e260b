# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's configuration, each a frozen dataclass that checks itself. The model's is `ModelConfig`."""

import dataclasses
import math
import re
from typing import Annotated, Literal

import tyro

from dsv4_jax.config.plugins import EXPECTED, reference
from dsv4_jax.optim import COEFFICIENTS
from dsv4_jax.section import Section


def _shares(words: list[str]) -> dict[str, float]:
    if len(words) % 2:
        raise ValueError(f"expected pairs of PATH and SHARE, found {len(words)} words")
    return {path: float(share) for path, share in zip(words[::2], words[1::2], strict=True)}


# A flag gives the whole mixture: tyro alone would take the paths of the file's mixture for the only possible ones.
_SHARES = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="PATH SHARE [PATH SHARE ...]",
    instance_from_str=_shares,
    is_instance=lambda x: isinstance(x, dict),
    str_from_instance=lambda mixture: [word for path, share in mixture.items() for word in (path, str(share))],
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What the model reads."""

    path: str = ""
    """What to train on: a file, folder or glob pattern of text, .jsonl, .parquet, .array_record, .bin or .npy, or a
    folder that the `data` command made; empty: the Python standard library's source. drawn: or drawn:PATH: lines of
    it, or of those texts, each as a picture followed by its characters."""
    mixture: Annotated[dict[str, float], _SHARES] = dataclasses.field(default_factory=dict)
    """Several such paths and the share of tokens that each gives; each has its own epochs. Instead of path."""
    text_field: str = "text"
    """Field or column of JSONL and Parquet records that holds the text."""
    tokenizer: str = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json."""
    border: str = ""
    """Document separator (often EOS), as spelled in the tokenizer; the byte tokenizer uses id 256."""
    bin_type: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in .bin files, which may begin with llm.c's header."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do with a bad record (invalid UTF-8 or JSON, no text): raise stops before the first step, skip drops and
    counts it."""
    prepared: str = "prepared"
    """Folder of the tokens that `python -m dsv4_jax data CONFIG` makes, and of the indexes of large files of ids."""
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
    """Maximum image patches per row. 0: room for one image of the largest size or for a quarter of the row's positions,
    whichever is more."""
    row_images: int = 0
    """Maximum images per row. 0: as many of the smallest images as `row_patches` allows."""
    held_out: float = 0.02
    """Share of the documents, chosen by a hash of their names, that evaluation reads and training does not."""
    held_out_tokens: int = 2**28
    """Tokens of each source to hold out at most, about: a share of a large source is more than an evaluation reads."""
    held_out_path: str = ""
    """Evaluate on this source instead of a share of the training documents."""

    @property
    def paths(self) -> dict[str, float]:
        """Every source to train on and its weight."""
        return self.mixture or {self.path: 1.0}

    def _check(self) -> None:
        self.need_positive("seq_len batch_size held_out_tokens")
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
    make: str = ""
    """Your own optimizer instead of name's: `module:function` or `path/to/file.py:function`, called as function(rate,
    params), which returns an optax GradientTransformation (docs/extending.md). A configuration file may also give the
    function itself. Empty: none."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    end_learning_rate: float = 3e-4
    """Learning rate that the decay ends with."""
    warmup_steps: int = 20
    """Steps of linear warm-up: step t of these, from 1, has t / warmup_steps of the peak rate."""
    decay_steps: int = 100
    """Length of the final cosine decay, in steps."""
    decay_tokens: tuple[int, ...] = ()
    """Instead of decay_steps, two counts of tokens (rows x data.seq_len of all steps so far) at which the cosine
    begins and ends."""
    engram_factor: float = 5.0
    """Multiplies the learning rate of Engram's tables and matrices (deepseek_v41 only)."""
    vision_factor: float = 0.1
    """Multiplies the learning rate of the vision tower (deepseek_v41 only)."""
    momentum: float = 0.95
    """Decay of the momentum of Muon and of the Sinkhorn-balanced update."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which that momentum is kept."""
    coefficients: str = "deepseek_v4"
    """Newton-Schulz steps of Muon, a name of `dsv4_jax.optim.COEFFICIENTS`."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Operands of Muon's matrix products, which sum in fp32. auto: bfloat16 on accelerators, float32 on CPU."""
    gram: bool = False
    """Iterate on Gram matrices where that takes fewer operations (Muon); needs precision = float32."""
    batch_size: int = 0
    """Matrices of a shape that a device orthogonalises at a time, which bounds Muon's memory; 0: all."""
    rms: float = 0.18
    """Root mean square of the updates of Muon and of the Sinkhorn-balanced update, before the learning rate."""
    sinkhorn_iterations: int = 11
    """Normalisations of rows and columns in turn of the Sinkhorn-balanced update; odd, so that rows come last."""
    tau: float = 1e-3
    """Sinkhorn-balanced update: rows of a table whose momentum norm is at most `tau` x the mean row norm are not
    updated."""
    b1: float = 0.9
    """Decay of AdamW's first moment."""
    b2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-20
    """Added to the root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate, of what the table decays."""
    clip: float = 1.0
    """Largest global norm of the gradient; a larger one is scaled down to it. 0: no clipping."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "make", reference(self.make, "optim.make"))  # text, which config.json can hold
        super().__post_init__()

    def _check(self) -> None:
        self.need_positive("learning_rate eps rms")
        whole = not self.gram or self.precision == "float32"
        self.need("gram", whole, f"needs optim.precision = 'float32', found {self.precision!r}: it diverges in bf16")
        odd = self.sinkhorn_iterations > 0 and self.sinkhorn_iterations % 2 == 1
        self.need("sinkhorn_iterations", odd, "must be odd and above 0")
        for key in (
            *("end_learning_rate", "warmup_steps", "decay_steps", "weight_decay", "tau", "clip"),
            *("engram_factor", "vision_factor", "batch_size"),
        ):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        at = self.decay_tokens
        self.need(
            "decay_tokens", not at or (len(at) == 2 and 0 <= at[0] <= at[1]), "must be empty or two counts, ascending"
        )
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
    """KL divergence from attention to the lightning indexer, summed over layers with an indexer."""
    draft_ce: float = 0.1
    """Draft objective: cross-entropy of the drafted token."""
    draft_distance: float = 0.9
    """Draft objective: L1 distance from the drafter's distribution to the backbone's."""
    draft_confidence: float = 1.0
    """Draft objective: cross-entropy of the confidence head with the probability of acceptance."""
    draft_decay: float = 0.0
    """Draft objective: slot k of a draft has weight exp(-k / decay); 0: model.dspark_block_size."""
    draft_anchors: int = 512
    """Draft objective: drafts of a row."""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    """Weights of your own losses by the name of the function, `module:function` or `path/to/file.py:function`
    (docs/extending.md). Their values are the metrics loss/FUNCTION. Weight 0: a metric alone."""

    def __post_init__(self) -> None:
        extra = {reference(function, "loss.extra"): weight for function, weight in self.extra.items()}
        object.__setattr__(self, "extra", extra)  # text, which config.json can hold
        super().__post_init__()

    def _check(self) -> None:
        names = [name.rpartition(":")[2] for name in self.extra]
        self.need("extra", all(w >= 0 for w in self.extra.values()), "must have weights of 0 or above")
        self.need("extra", len(set(names)) == len(names), "names two functions alike, and so two metrics")
        for key in ("mtp", "balance", "indexer", "draft_ce", "draft_distance", "draft_confidence", "draft_decay"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        self.need_positive("draft_anchors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnticipationConfig(Section):
    """Anticipatory routing (V4 section 4.2.3): choose the experts of a batch with the parameters of an earlier step."""

    prefix = "routing.anticipation."

    mode: Literal["off", "on", "auto"] = "off"
    """`auto`: off until a spike (`spikes`) rolls the run back, then on up to `hold` steps after it."""
    delay: int = 8
    """Age of the parameters that choose the experts, in steps. 0 is the same as `off`."""
    hold: int = 200
    """Steps after the spike until `auto` turns anticipatory routing off again. 0: only roll back."""

    def _check(self) -> None:
        for key in ("delay", "hold"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig(Section):
    """Balance of the experts, and routing in an unstable run."""

    bias_speed: float = 1e-3
    """Change of a router bias in every optimizer step: up if its expert had less than the mean load, down if more."""
    anticipation: AnticipationConfig = AnticipationConfig()

    def _check(self) -> None:
        self.need("bias_speed", self.bias_speed >= 0, "must be 0 or above")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikesConfig(Section):
    """Detection of spikes, and rollback from them (routing.anticipation.mode = auto; otherwise they are only recorded).

    A step is above the threshold if its value exceeds the median of the last `window` steps by more than `loss` or
    `grad_norm` spreads. A spread is 1.48 times the median distance from that median, which is the standard deviation
    of a normal distribution.
    """

    window: int = 128
    """Number of past steps to compare with. Detection starts when a quarter of them is filled."""
    loss: float = 10.0
    """Threshold of the loss, in spreads; a spread is at least 1 % of the median. 0: do not watch the loss."""
    grad_norm: float = 10.0
    """Threshold of the logarithm of the gradient norm, in spreads; a spread is at least 0.1. 0: do not watch it."""
    steps: int = 1
    """Consecutive steps above the threshold that make a spike."""
    margin: int = 0
    """Roll back to a checkpoint more than `margin` steps before the first spiking step."""
    skip: int = 0
    """Batches to skip after a rollback. -1: every batch up to and including the one that spiked."""
    limit: int = 3
    """Rollbacks allowed at one spike; if the run still does not get past it, it ends with an error."""

    def _check(self) -> None:
        self.need_positive("window steps limit")
        for key in ("loss", "grad_norm", "margin"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        self.need("skip", self.skip >= -1, "must be -1 or above")


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


OBJECTIVES = ("pretrain", "draft")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Length of the run, its files, and the processes and devices that make it."""

    steps: int = 0
    """Total number of optimizer steps. 0: those of the stages."""
    frozen: str = ""
    """Regular expression of parameter paths to freeze, in addition to those the objective freezes."""
    objective: str = "pretrain"
    """What to train for: `pretrain` trains all but DSpark's draft blocks, `draft` the draft blocks alone; or your
    own class, `module:Class` or `path/to/file.py:Class` (docs/extending.md)."""
    metrics: tuple[str, ...] = ()
    """Your own functions that compute metrics inside the training step, from parameters, gradients, updates and batch:
    `module:function` or `path/to/file.py:function` (docs/extending.md). Their values are the metrics custom/NAME."""
    init_from: str = ""
    """Start a new run from the parameters of another, RUN (its newest checkpoint) or RUN@STEP. Optimizer state, step
    count, schedule and data start anew. Empty: random parameters."""
    fork_from: str = ""
    """Start a new run as the continuation of another, RUN or RUN@STEP: with its parameters, optimizer state, step
    count, schedule and position in the data. Other keys may change as at a resume. Empty: no fork."""
    new_data: bool = False
    """Resume with other data, from its beginning. False: refuse documents, row lengths or shares that differ from the
    checkpoint's. The spelling and place of a path do not count."""
    seed: int = 0
    """Seed of the initial parameters, the order of the data and the samples."""
    run_dir: str = "runs/default"
    """Folder of the run, or its address such as gs://BUCKET/RUN. The same command resumes the run in it."""
    eval_every: int = 100
    """Steps between evaluations on held-out documents. There is one after the last step too."""
    eval_batches: int = 16
    """Maximum number of batches of an evaluation; fewer if there is less held-out text."""
    checkpoint_every: int = 100
    """Steps between checkpoints. There is one after the last step too."""
    checkpoint_minutes: float = 0.0
    """Also save a checkpoint when the last one is this many minutes old. 0: by steps alone."""
    stop_after_minutes: float = 0.0
    """Save and stop this many minutes after the start of the command, with exit status 143 as after SIGTERM: for the
    time limit of a cluster. The same command resumes. 0: never."""
    keep: int = 2
    """Number of newest checkpoints to keep. The newest one from before the learning rate's decay stays too."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this, permanently. 0: none."""
    bad_steps: int = 10
    """End the run after this many consecutive steps without a finite objective or gradient. Each changes nothing."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Destinations of the metrics beside metrics.jsonl: `tensorboard`, `wandb`, or your own function that makes a
    logger, `module:function` or `path/to/file.py:function` (docs/extending.md)."""
    profile_steps: str = ""
    """Steps to trace for xprof, FIRST:LAST without LAST itself, into the folder `profile` of the run. Empty: none."""
    sample_tokens: int = 256
    """Number of tokens to sample at the end, as the continuation of a held-out document. 0: none."""
    accumulate: int = 1
    """Number of parts of a batch that are computed one after another, to save memory. The loss is the whole batch's."""
    cpu_devices: int = 0
    """Emulate this many devices per process on the CPU. 0: use the devices that there are."""
    distributed: str = ""
    """Run as several processes, each started with the same command. HOST:PORT,COUNT,NUMBER: the address of process 0,
    the number of processes, and the number of this one. `auto`: as JAX finds them on Cloud TPU and under SLURM,
    Kubernetes or MPI. Empty: one process."""
    compile_cache: str = "~/.cache/dsv4_jax/programs"
    """Folder that keeps compiled programs, so that later starts need not compile again. A folder given to JAX itself,
    as by JAX_COMPILATION_CACHE_DIR, takes precedence. Empty: none."""
    peak_flops: float = 0.0
    """Peak of one device in FLOP/s, for the metric `perf/mfu`. 0: by the kind of device, where known."""
    deterministic: bool = False
    """Make runs on GPUs repeat bit for bit, at some cost in speed. Those on CPU and TPU always do."""

    def __post_init__(self) -> None:
        names = (n if n in ("tensorboard", "wandb") else reference(n, "train.loggers") for n in self.loggers)
        object.__setattr__(self, "loggers", tuple(names))  # text, which config.json can hold
        object.__setattr__(self, "metrics", tuple(reference(name, "train.metrics") for name in self.metrics))
        if self.objective not in OBJECTIVES:
            named = not isinstance(self.objective, str) or ":" in self.objective
            self.need("objective", named, f"must be {' or '.join(OBJECTIVES)}, or name a class: {EXPECTED}")
            object.__setattr__(self, "objective", reference(self.objective, "train.objective"))
        super().__post_init__()

    def _check(self) -> None:
        self.need_positive("eval_every eval_batches checkpoint_every keep bad_steps accumulate")
        for key in ("steps", "seed", "sample_tokens", "cpu_devices", "keep_every", "peak_flops"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        for key in ("checkpoint_minutes", "stop_after_minutes"):
            self.need(key, 0 <= getattr(self, key) < math.inf, "must be 0 or above")
        shared = "://" not in self.run_dir or not self.distributed
        self.need("run_dir", shared, "is an address, which one process alone can use: several need a shared folder")
        alone = not (self.init_from and self.fork_from)
        self.need("fork_from", alone, f"cannot stand beside train.init_from = {self.init_from!r}: give one of them")
        try:
            re.compile(self.frozen)
        except re.error as error:
            self.need("frozen", False, f"is no regular expression: {error}")
        span = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        right = not self.profile_steps or (span is not None and 0 < int(span[1]) < int(span[2]))
        self.need("profile_steps", right, "must be empty or FIRST:LAST with 0 < FIRST < LAST")
        form = re.fullmatch(r"|auto|[^,\s]+:\d+,(\d+),(\d+)", self.distributed)
        right = form is not None and (form[1] is None or int(form[2]) < int(form[1]))
        self.need("distributed", right, "must be empty, auto, or HOST:PORT,COUNT,NUMBER with NUMBER below COUNT")
