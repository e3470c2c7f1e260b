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
    """Training data: a file, a folder, a glob pattern or an address (gs://...) of text, .jsonl, .parquet,
    .array_record, .bin or .npy files, or a folder that the `data` command made. Empty: the source code of Python's
    standard library. `drawn:PATH`: lines of those texts, each as a picture followed by its characters. `drawn:`: the
    same with lines of the standard library."""
    mixture: Annotated[dict[str, float], _SHARES] = dataclasses.field(default_factory=dict)
    """Several sources instead of data.path, each with its share of the training tokens. Shares are relative: they need
    not sum to 1. Each source has its own epochs."""
    text_field: str = "text"
    """Field or column that holds the text in JSONL and Parquet records."""
    tokenizer: str = "bytes"
    """`bytes` (one token per byte of UTF-8), or the path of a Hugging Face tokenizer.json."""
    border: str = ""
    """Document separator (often EOS), as spelled in tokenizer.json, which needs one. Empty with `bytes`, where it is id
    256."""
    bin_type: Literal["uint16", "uint32"] = "uint16"
    """Integer type of the token ids in .bin files. A header of llm.c is recognised; its type must be the same."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do with a bad record (invalid UTF-8 or JSON, no text, unreadable image). `raise`: stop before the first
    step. `skip`: drop and count it."""
    prepared: str = "prepared"
    """Folder into which `python -m dsv4_jax data CONFIG` writes the tokens of texts. Runs also write the tables of
    documents of large .bin and .npy files there."""
    seq_len: int = 512
    """Row length S, in tokens. Longer documents are cut into pieces; shorter ones are packed together."""
    batch_size: int = 4
    """Number of rows in each optimizer step, over all devices. Must be a multiple of mesh.data x mesh.expert x
    train.accumulate."""
    workers: int = 1
    """Number of threads in each process that prepare batches ahead of time. 0: prepare each batch when it is needed.
    The batches are the same for any number."""
    image_field: str = "images"
    """Field or column of JSONL and Parquet records that lists the images, one for each `<image>` in the text. Read only
    if the model has a vision tower. Empty: no images."""
    row_patches: int = 0
    """Maximum number of image patches in a row. 0: room for one image of the largest size or for images on a quarter of
    the row's positions, whichever is more."""
    row_images: int = 0
    """Maximum number of images in a row. 0: row_patches divided by the patches of the smallest image
    (model.vision_min_pixels), at least 1."""
    held_out: float = 0.02
    """Fraction of the documents of each source to evaluate on and never train on. A hash of a document's name
    decides."""
    held_out_tokens: int = 2**28
    """Approximate maximum number of held-out tokens of each source. It lowers held_out for large sources, whose share
    would be more than an evaluation reads."""
    held_out_path: str = ""
    """Source to evaluate on, given like data.path; then every document of the training data is trained on. Empty:
    evaluate on the fraction held_out of the training data."""

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
    """Update rule of each kind of parameter. `deepseek_v4`: Muon for matrices, AdamW for the rest. `deepseek_v41`:
    head-wise Muon for matrices, the Sinkhorn-balanced update for tables, AdamW for the rest. `adamw`: AdamW for all."""
    make: str = ""
    """Your own optimizer instead of optim.name: `module:function` or `path/to/file.py:function`, called as
    function(rate, params), which returns an optax GradientTransformation (docs/extending.md). A configuration file may
    also give the function itself. Of the other keys of this section only clip and those of the schedule, `rate`, still
    apply. Empty: none."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    end_learning_rate: float = 3e-4
    """Learning rate at the end of the decay."""
    warmup_steps: int = 20
    """Length of the linear warm-up, in steps. Step t, counted from 1, has t / warmup_steps of the peak rate. 0: no
    warm-up."""
    decay_steps: int = 100
    """Length of the final cosine decay, in steps. It ends with the last step of the run. 0: no decay."""
    decay_tokens: tuple[int, ...] = ()
    """Two token counts at which the cosine decay begins and ends, instead of decay_steps. Tokens are counted as rows x
    data.seq_len of all steps so far. Empty: use decay_steps."""
    engram_factor: float = 5.0
    """Multiplies the learning rate of Engram's tables and matrices (deepseek_v41 only)."""
    vision_factor: float = 0.1
    """Multiplies the learning rate of the vision tower (deepseek_v41 only)."""
    momentum: float = 0.95
    """Momentum coefficient of Muon and of the Sinkhorn-balanced update."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the momentum of Muon and of the Sinkhorn-balanced update is stored."""
    coefficients: str = "deepseek_v4"
    """Muon: coefficients of the Newton-Schulz steps. `deepseek_v4` (10 steps), `keller_jordan` (5) or `polar_express`
    (8)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Muon: type of the operands of matrix products, which accumulate in fp32. `auto`: bfloat16 on accelerators,
    float32 on CPU."""
    gram: bool = False
    """Muon: iterate on the Gram matrix where one side is at least twice the other, which takes fewer operations. Needs
    precision = float32, since it diverges in bf16."""
    batch_size: int = 0
    """Muon: maximum number of matrices of one shape that a device orthogonalises at a time. Fewer take less memory. 0:
    all."""
    rms: float = 0.18
    """Root mean square of the entries of an update by Muon or the Sinkhorn-balanced rule, before the learning rate."""
    sinkhorn_iterations: int = 11
    """Sinkhorn-balanced update: number of normalisations, of rows and columns in turn. Must be odd, so that the last
    one is of rows."""
    tau: float = 1e-3
    """Sinkhorn-balanced update: rows of a table whose momentum norm is at most `tau` x the mean row norm are not
    updated. 0: update every row whose momentum is not zero."""
    b1: float = 0.9
    """AdamW: decay of the first moment."""
    b2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-20
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay; it is multiplied by the learning rate. `deepseek_v4` and `adamw` decay all parameters,
    `deepseek_v41` only matrices and norm weights. 0: none."""
    clip: float = 1.0
    """Maximum global norm of the gradient. A larger gradient is scaled down to it. 0: no clipping."""

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
    """Weights of the losses other than the cross-entropy of the next token, whose weight is 1. 0 leaves a loss out."""

    mtp: float = 0.3
    """Weight of multi-token prediction: the cross-entropy of the token after the next, from the MTP block. Must be 0
    without an MTP block."""
    balance: float = 1e-4
    """Weight of the sequence-wise balance loss of the experts, summed over layers with learned routing. Each document
    is a sequence."""
    indexer: float = 1.0
    """Weight of the lightning indexer's loss: the KL divergence from the attention's distribution to the indexer's,
    summed over layers with an indexer."""
    draft_ce: float = 0.1
    """Draft objective: weight of the drafter's cross-entropy of the true token."""
    draft_distance: float = 0.9
    """Draft objective: weight of the L1 distance between the drafter's and the backbone's distributions."""
    draft_confidence: float = 1.0
    """Draft objective: weight of the confidence head's loss, the cross-entropy with the probability that the token is
    accepted."""
    draft_decay: float = 0.0
    """Draft objective: slot k of a draft, counted from 0, has weight exp(-k / draft_decay) in the three losses. 0: use
    model.dspark_block_size."""
    draft_anchors: int = 512
    """Draft objective: number of drafts in each row, from different random positions."""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    """Weights of your own losses, each named by its function, `module:function` or `path/to/file.py:function`
    (docs/extending.md). Their values are the metrics loss/FUNCTION. Weight 0: only a metric."""

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
    """When to route by the parameters of an earlier step. `off`: never. `on`: always. `auto`: from a rollback (see
    `spikes`) until `hold` steps after the spike."""
    delay: int = 8
    """Age of the parameters that choose the experts, in steps. 0: the current parameters, as with `off`."""
    hold: int = 200
    """Number of steps after the spike at which `auto` turns anticipatory routing off again. 0: only roll back."""

    def _check(self) -> None:
        for key in ("delay", "hold"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig(Section):
    """Balance of the experts, and routing in an unstable run."""

    bias_speed: float = 1e-3
    """Amount by which an optimizer step moves a router's balance bias: up for an expert with less than the mean load,
    down for one with more. 0: biases stay."""
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
    """Number of past steps to compare with. Detection starts after a quarter of this number of steps."""
    loss: float = 10.0
    """Threshold of the loss, in spreads. A spread counts as at least 1 % of the median. 0: do not watch the loss."""
    grad_norm: float = 10.0
    """Threshold of the logarithm of the gradient norm, in spreads. A spread counts as at least 0.1. 0: do not watch the
    gradient norm."""
    steps: int = 1
    """Number of consecutive steps above the threshold that make a spike."""
    margin: int = 0
    """Roll back to a checkpoint more than `margin` steps before the first spiking step. 0: to the newest one before
    that step."""
    skip: int = 0
    """Number of batches to skip after a rollback. 0: none. -1: every batch up to and including the one that spiked."""
    limit: int = 3
    """Maximum number of rollbacks at one spike. If the run still does not get past it, it ends with an error."""

    def _check(self) -> None:
        self.need_positive("window steps limit")
        for key in ("loss", "grad_norm", "margin"):
            self.need(key, getattr(self, key) >= 0, "must be 0 or above")
        self.need("skip", self.skip >= -1, "must be -1 or above")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Number of devices along each axis. The product must be the number of all devices."""

    data: int = 1
    """Number of devices over which the rows of a batch are split. Parameters and optimizer state are split over them
    too where their sizes are divisible."""
    expert: int = 1
    """Number of devices over which the experts of every layer are split. The rows of a batch are split over them
    too."""
    context: int = 1
    """Number of devices over which the positions of every row are split. Parameters and optimizer state are split over
    them too where their sizes are divisible."""

    def _check(self) -> None:
        self.need_positive("data expert context")


OBJECTIVES = ("pretrain", "draft")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Length of the run, its files, and the processes and devices that make it."""

    steps: int = 0
    """Total number of optimizer steps. 0: up to the end of the last stage."""
    frozen: str = ""
    """Regular expression of parameter paths to freeze, in addition to those the objective freezes. Empty: none."""
    objective: str = "pretrain"
    """What to train. `pretrain`: all parameters but DSpark's draft blocks. `draft`: only the draft blocks. Or your own
    class, `module:Class` or `path/to/file.py:Class` (docs/extending.md)."""
    metrics: tuple[str, ...] = ()
    """Your own functions that compute metrics inside the training step, from parameters, gradients, updates and batch:
    `module:function` or `path/to/file.py:function` (docs/extending.md). Their values are the metrics custom/NAME."""
    init_from: str = ""
    """Start a new run with the parameters of another run, RUN (its newest checkpoint) or RUN@STEP, or of a folder of
    published weights (docs/weights.md). Optimizer state, step count, schedule and data start anew. Empty: random
    parameters."""
    fork_from: str = ""
    """Start a new run as the continuation of another run: RUN (its newest checkpoint) or RUN@STEP. It takes over
    parameters, optimizer state, step count, schedule and position in the data. Other keys may change as at a resume.
    Empty: no fork."""
    new_data: bool = False
    """Allow a resume with other data, which is then read from its beginning. False: refuse documents, row lengths or
    shares that differ from the checkpoint's. Moving the files or spelling their path differently is no change."""
    seed: int = 0
    """Seed of the initial parameters, the order of the data, the draft objective's anchors and the sample at the end of
    the run."""
    run_dir: str = "runs/default"
    """Folder of the run, or its address such as gs://BUCKET/RUN. The same command, given again, resumes the run."""
    eval_every: int = 100
    """Number of steps between evaluations on held-out documents. The last step is always followed by one."""
    eval_batches: int = 16
    """Maximum number of batches in an evaluation. Fewer are read if the held-out documents fill fewer."""
    checkpoint_every: int = 100
    """Number of steps between checkpoints. The last step is always followed by one."""
    checkpoint_minutes: float = 0.0
    """Also save a checkpoint when the last one is this many minutes old. 0: never."""
    stop_after_minutes: float = 0.0
    """Save and stop this many minutes after the start of the command, with exit status 143 as after SIGTERM. For the
    time limit of a cluster: the same command resumes. 0: never."""
    keep: int = 2
    """Number of newest checkpoints to keep. The newest one from before the learning rate's decay is kept too, so that
    the run can be continued without the decay."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this, permanently. 0: none."""
    bad_steps: int = 10
    """End the run after this many consecutive steps whose objective or gradient is not finite. Such a step does not
    change the parameters."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Destinations of the metrics in addition to metrics.jsonl: `tensorboard`, `wandb`, or your own function that makes
    a logger, `module:function` or `path/to/file.py:function` (docs/extending.md)."""
    profile_steps: str = ""
    """Range of steps to trace for xprof, FIRST:LAST without LAST itself. The trace is in the folder `profile` of the
    run. Empty: none."""
    sample_tokens: int = 256
    """Number of tokens to sample at the end of the run, as the continuation of a held-out document. 0: none."""
    accumulate: int = 1
    """Number of parts of a batch that are computed one after another, to save memory (gradient accumulation). Loss and
    gradient are those of the whole batch."""
    cpu_devices: int = 0
    """Number of CPU devices to emulate in each process. 0: use the real devices."""
    distributed: str = ""
    """Run as several processes, each started with the same command. HOST:PORT,COUNT,NUMBER: the address of process 0,
    the number of processes, and the number of this process, counted from 0. `auto`: as JAX finds them on Cloud TPU and
    under SLURM, Kubernetes or MPI. Empty: one process."""
    compile_cache: str = "~/.cache/dsv4_jax/programs"
    """Folder that keeps compiled programs, so that later starts need not compile again. If JAX has been given a folder
    itself, as by JAX_COMPILATION_CACHE_DIR, that one is used. Empty: none."""
    peak_flops: float = 0.0
    """Peak of one device in FLOP/s, for the metric `perf/mfu`. 0: by the kind of device; if it is unknown there is no
    such metric."""
    deterministic: bool = False
    """Make runs on GPUs repeat bit for bit, at some cost in speed. Runs on CPU and TPU always do."""

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
