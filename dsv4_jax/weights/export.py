# SPDX-License-Identifier: Apache-2.0
"""Write published weights: a model, or the tensors of another folder, as a folder of safetensors files."""

import collections
import functools
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np

from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.token_map import make_token_map
from dsv4_jax.ops.quantize import FP4, FP8_32, FP8_128, ROWS_32, Format, fp4_to_fp8, quantize
from dsv4_jax.section import ConfigError, RunError
from dsv4_jax.weights.checkpoint import TOKEN_MAP, TOKENIZER
from dsv4_jax.weights.configs import flat_fields, hf_fields, model_config_from_official
from dsv4_jax.weights.dialects import FUSED, hf_name
from dsv4_jax.weights.folder import Folder, Weight
from dsv4_jax.weights.names import official_shapes, walk
from dsv4_jax.weights.safetensors import DTYPES, Output, Stored, chunks, transpose_into, write_folder

Storage = Literal["f32", "bf16", "fp8", "fp4", "hf"]
FILE_BYTES = 4 << 30  # largest size of a file, unless a tensor is larger
MARK = "unfinished.json"  # of what an unfinished folder is made; deleted when it is complete

# Tensors by name: those that stay fp32, the matrices in 8 bits, the routed experts, and the Engram tables.
_FP32 = re.compile(r"(^|\.)(hc_\w+|attn_sink|ape|gate\.bias(_vl)?)$")
_EIGHT = re.compile(
    r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w\d|[eh]_proj|main_proj|engram\.wkv)\.weight$"
)
_EXPERTS = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w\d)\.weight$")
_TABLE = re.compile(r"\.engram\.embed\.weight$")


def storage_of(name: str, shape: tuple[int, ...], storage: Storage, single_pass: bool) -> str | Format:
    """Return how a tensor is stored: the name of a plain type, or a quantised format.

    Args:
        name: official name.
        shape: shape of the tensor.
        storage: form of the whole folder.
        single_pass: whether the model is of V4.1's kind, whose 8-bit blocks are smaller.
    """
    if name.endswith("tid2eid"):
        return "I64"
    if storage == "f32" or _FP32.search(name):
        return "F32"
    eight = FP8_32 if single_pass else FP8_128
    if storage in ("fp8", "fp4"):
        if _EXPERTS.match(name):
            # Two numbers share a byte, so that an odd width cannot be stored in 4 bits.
            return FP4 if storage == "fp4" and shape[1] % 2 == 0 else eight
        if _EIGHT.search(name):
            return eight
        if _TABLE.search(name):
            return ROWS_32
    return "BF16"


class Model:
    """The tensors of a model in memory, by official name.

    Attributes:
        weights: how tensors are stored in files: none is.
    """

    def __init__(self, model: DeepSeek):
        """Take the tensors of a model whose parameters are all on devices of this process.

        Raises:
            ConfigError: if other processes hold some.
        """
        self.weights: dict[str, Weight] = {}
        self._places: dict[str, tuple[Any, tuple[int | slice, ...]]] = {}
        for variable, held in walk(model, model):
            if not variable.get_value().is_fully_addressable:
                raise ConfigError("the model is spread over several processes; save it from one: `convert RUN`")
            self._places |= {name: (variable, index) for name, index in held}

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of a tensor, fp32 or int32."""
        variable, index = self._places[name]
        lead = tuple(i for i in index if isinstance(i, int))
        value = variable.get_value()
        if not variable.transposed:
            return _gather(value, (*lead, rows) if value.ndim > len(lead) else lead)
        # The official rows are the outputs [*stack, out], one stack after another.
        *stack, _, out = value.shape[len(lead) :]
        pieces = []
        for g in range(rows.start // out, -(-rows.stop // out)):
            place = tuple(map(int, np.unravel_index(g, stack))) if stack else ()
            cut = slice(max(rows.start - g * out, 0), min(rows.stop - g * out, out))
            piece = _gather(value, (*lead, *place, slice(None), cut))
            pieces.append(np.empty(piece.shape[::-1], piece.dtype))
            transpose_into(pieces[-1], piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _gather(x: jax.Array, index: tuple[int | slice, ...]) -> np.ndarray:
    """Return a piece of an array from the devices that hold it, without a program for each index."""
    full = [range(n)[i] if isinstance(i, slice) else range(i, i + 1) for i, n in zip(index, x.shape, strict=False)]
    full += [range(n) for n in x.shape[len(index) :]]
    piece = np.empty([len(cut) for cut in full], x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id:
            continue
        held = [range(*cut.indices(n)[:2]) for cut, n in zip(shard.index, x.shape, strict=True)]
        both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(full, held, strict=True)]
        if all(len(cut) for cut in both) or not both:
            there = tuple(slice(c.start - h.start, c.stop - h.start) for c, h in zip(both, held, strict=True))
            here = tuple(slice(c.start - f.start, c.stop - f.start) for c, f in zip(both, full, strict=True))
            piece[here] = np.asarray(shard.data)[there]
    return piece.reshape([len(cut) for cut, i in itertools.zip_longest(full, index) if not isinstance(i, int)])


def save_checkpoint(
    model: DeepSeek, folder: str | Path, format: Storage = "bf16", file_bytes: int = FILE_BYTES
) -> None:
    """Save a model as a folder of safetensors files with their index and both configuration files.

    The folder is complete when it has its index, which is written last. Reading it back gives the stored values
    exactly; `bf16`, `fp8` and `fp4` round the fp32 parameters.

    Args:
        model: the model, with all parameters on devices of this process. Its shapes in host memory are needed once.
        folder: folder to make, which must be empty or absent.
        format: `f32`; `bf16`: a few small tensors in fp32, all others in bf16; `fp8`: matrices of attention and experts
            in 8 bits; `fp4`: also, and routed experts in 4 bits, as DeepSeek publishes them; `hf`: as `bf16`, with the
            names of transformers (V4 only).
        file_bytes: largest size of a file, unless a single tensor is larger.

    Raises:
        ConfigError: if the folder is not empty, the format is unknown or does not fit the model.
        RunError: if a file cannot be written.
    """
    write_weights(Model(model), model.cfg, official_shapes(model), Path(folder), format, file_bytes=file_bytes)


def write_weights(
    source: "Model | Folder",
    cfg: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    folder: Path,
    storage: Storage,
    *,
    identity: str = "",
    beside: Iterable[Path] = (),
    carried: dict[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
    advance: Callable[[int], None] = lambda _: None,
    begin: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the tensors of `source` into a folder (see `save_checkpoint`).

    Args:
        source: where the tensors are read.
        cfg: the model.
        shapes: shape of every tensor by official name.
        folder: folder to make.
        storage: form of the folder.
        identity: of what is written, by which an interrupted call is taken up again; empty: by nothing.
        beside: other files to copy into the folder, such as a tokenizer.
        carried: fields of the source's `config.json` that say nothing of the model.
        file_bytes: largest size of a file.
        advance: called with numbers of bytes that have been written.
        begin: called with the number of bytes to write, before the first.
    """
    if storage not in get_args(Storage):
        raise ConfigError(f"format = {storage!r}, expected {', '.join(get_args(Storage))}")
    if storage == "hf" and (cfg.kv_source_layers or cfg.vision_n_layers or cfg.engram_layer_ids):
        raise ConfigError("format = 'hf': transformers has no V4.1; take bf16, whose names are the official ones")
    fields = flat_fields(cfg)
    _check_fields(cfg, fields)
    mark = json.dumps({"source": identity, "format": storage, "file_bytes": file_bytes})
    _claim(folder, mark, resumable=bool(identity))
    outputs = list(_outputs(source, cfg, shapes, storage))
    begin(sum(output.size for output in outputs))
    try:
        for file in beside:
            if file.is_dir():
                shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, folder / file.name)
        _write_configs(folder, cfg, fields, storage, carried or {})
        write_folder(folder, outputs, file_bytes, advance)
        (folder / MARK).unlink()
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}; the same command goes on where it stopped") from error


def _check_fields(cfg: ModelConfig, fields: dict[str, Any]) -> None:
    """Check that the fields of the files give the model back."""
    back = model_config_from_official(fields)
    for key in fields:
        if hasattr(back, key) and getattr(back, key) != getattr(cfg, key):
            raise ConfigError(f"model.{key} = {getattr(cfg, key)!r} cannot be written into the official configuration")


def _claim(folder: Path, mark: str, resumable: bool) -> None:
    """Make the folder, or take an unfinished one of the same mark; an unfinished one without identity is emptied."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            file = folder / MARK
            if not file.is_file():
                raise ConfigError(f"{folder} is not empty; name a new folder")
            if file.read_text() != mark:
                raise ConfigError(f"{folder} holds an unfinished folder of other weights ({file}): delete it")
            if not resumable:
                shutil.rmtree(folder)
                folder.mkdir()
        (folder / MARK).write_text(mark)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}") from error


def _write_configs(
    folder: Path, cfg: ModelConfig, fields: dict[str, Any], storage: Storage, carried: dict[str, Any]
) -> None:
    """Write both configuration files, and the token map of Engrams unless it is that of the tokenizer beside."""
    single = bool(cfg.hc_single_pass)
    stored: dict[str, Any] = {"torch_dtype": "float32" if storage == "f32" else "bfloat16"}
    flat: dict[str, Any] = {"dtype": {"f32": "fp32", "fp8": "fp8", "fp4": "fp8"}.get(storage, "bf16")}
    if storage in ("fp8", "fp4"):
        block = [32, 32] if single else [128, 128]
        stored["quantization_config"] = {
            **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
            **{"weight_block_size": block, "scale_fmt": "ue8m0"},
        }
        flat["scale_fmt"] = "ue8m0"
        if storage == "fp4":
            stored["expert_dtype"] = flat["expert_dtype"] = "fp4"
    (folder / "inference").mkdir(exist_ok=True)
    (folder / "inference" / "config.json").write_text(json.dumps({**fields, **flat}, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(hf_fields(cfg, {**carried, **stored}), indent=2) + "\n")
    numbers = make_token_map(cfg) if cfg.engram_layer_ids else None
    if numbers is not None and not (folder / TOKENIZER).exists() and not (folder / TOKEN_MAP).exists():
        np.save(folder / TOKEN_MAP, numbers)


def _outputs(
    source: "Model | Folder", cfg: ModelConfig, shapes: dict[str, tuple[int, ...]], storage: Storage
) -> Iterator[Output]:
    """Yield all tensors to write: embedding first, then layer by layer, the head last."""
    fused: dict[str, None] = {}  # layers whose experts are written as one tensor
    for name in sorted(shapes, key=_order):
        target = storage_of(name, shapes[name], storage, cfg.hc_single_pass)
        if storage != "hf":
            yield from _make_outputs(source, name, shapes[name], target)
        elif not (expert := _EXPERTS.match(name)) or name.startswith("mtp."):
            for output in _make_outputs(source, name, shapes[name], target):
                yield output._replace(name=hf_name(name))
        else:
            fused[expert[1]] = None
    for experts in fused:
        for joined, parts in FUSED.items():
            names = [f"{experts}.{e}.{part}.weight" for e in range(cfg.n_routed_experts) for part in parts]
            rows, columns = shapes[names[0]]
            shape = (cfg.n_routed_experts, rows * len(parts), columns)
            yield Output(hf_name(f"{experts}.{joined}"), "BF16", shape, functools.partial(_join, source, names, shapes))


def _join(source: "Model | Folder", names: list[str], shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Yield several tensors one after another, bf16."""
    for name in names:
        yield from _plain(source, name, shapes[name], "BF16")


def _order(name: str) -> tuple[int, int]:
    """Return the place of a tensor in the files."""
    first, _, rest = name.partition(".")
    places = {"embed": 0, "vision": 1, "aligner": 1, "layers": 2, "mtp": 3, "head": 5}
    number = int(rest.partition(".")[0]) if first in ("layers", "mtp") else 0
    return places.get(first, 4), number


def _make_outputs(
    source: "Model | Folder", name: str, shape: tuple[int, ...], target: str | Format
) -> Iterator[Output]:
    """Yield a tensor and, if it is quantised, its scales. What is stored as `target` already is copied."""
    weight = source.weights.get(name)
    scale_name = re.sub(r"weight$", "scale", name)
    if weight and weight.expert is None and _is_stored_as(weight, target):
        for output, stored in ((name, weight.stored), (scale_name, weight.scale)):
            if stored is not None:
                yield Output(output, stored.dtype, stored.shape, functools.partial(_copy, stored))
    elif isinstance(target, str):
        yield Output(name, target, shape, functools.partial(_plain, source, name, shape, target))
    else:
        held: list[np.ndarray] = []  # scales of the numbers that have been written
        rows, columns = shape
        width = -(-columns // 2) if target.bits == 4 else columns
        blocks = -(-rows // target.rows), -(-columns // target.columns)
        yield Output(
            name,
            "I8" if target.bits == 4 else "F8_E4M3",
            (rows, width),
            functools.partial(_quantized, source, name, shape, target, held),
        )
        yield Output(scale_name, "F8_E8M0", blocks, functools.partial(_scales, source, name, shape, target, held))


def _is_stored_as(weight: Weight, target: str | Format) -> bool:
    """Return whether a stored tensor has the wanted format; a matrix of a single block fits blocks of any size."""
    if weight.form is None or weight.scale is None or isinstance(target, str):
        return weight.form is None and target == weight.stored.dtype
    blocks = -(-weight.shape[0] // target.rows), -(-weight.shape[1] // target.columns)
    return weight.form[::3] == target[::3] and weight.scale.shape == blocks


def _copy(stored: Stored) -> Iterator[np.ndarray]:
    """Yield a stored tensor as it is, in pieces of rows."""
    rows = stored.shape[0] if stored.shape else 0
    yield from (stored.read(cut) for cut in chunks(rows, stored.size // rows)) if rows else (stored.read(),)


def _plain(source: "Model | Folder", name: str, shape: tuple[int, ...], dtype: str) -> Iterator[np.ndarray]:
    """Yield a tensor in pieces of rows, as plain numbers of a type."""
    for cut in chunks(shape[0] if shape else 1, 4 * int(np.prod(shape[1:]))):
        yield source.read(name, cut).astype(DTYPES[dtype])


def _quantized(
    source: "Model | Folder", name: str, shape: tuple[int, ...], form: Format, held: list[np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield a quantised matrix in pieces of whole blocks of rows; append the scales of each to `held`."""
    held.clear()
    weight = source.weights.get(name)
    for blocks in chunks(-(-shape[0] // form.rows), 4 * shape[1] * form.rows):
        rows = slice(blocks.start * form.rows, min(blocks.stop * form.rows, shape[0]))
        if weight and weight.form == FP4 and weight.scale and form.rows > 1:
            try:  # 4 bits fit into 8 without an error
                stored, scale = fp4_to_fp8(weight.stored.read(rows), weight.scale.read(rows), shape[1], form)
            except ValueError as error:
                raise ConfigError(f"{weight.stored.file}: {name}, rows from {rows.start}: {error}; keep fp4") from error
        else:
            stored, scale = quantize(source.read(name, rows), form)
        held.append(scale)
        yield stored


def _scales(
    source: "Model | Folder", name: str, shape: tuple[int, ...], form: Format, held: list[np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the scales of a quantised matrix: those held, or computed again if its numbers were written before."""
    if not held:
        collections.deque(_quantized(source, name, shape, form, held), maxlen=0)
    yield from held
    held.clear()


def fingerprint(folder: Path) -> str:
    """Return a hash of the names, sizes and times of a folder's files, to recognise the same source again."""
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.glob("*.safetensors*"))
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
