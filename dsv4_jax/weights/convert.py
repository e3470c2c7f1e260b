# SPDX-License-Identifier: Apache-2.0
"""Convert a run or a folder of weights into a folder of weights: `python -m dsv4_jax convert FROM TO`."""

from pathlib import Path
from typing import Any, get_args

from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.section import ConfigError
from dsv4_jax.weights.checkpoint import TOKEN_MAP, TOKENIZER, read_config
from dsv4_jax.weights.configs import CARRIED
from dsv4_jax.weights.export import FILE_BYTES, Model, Storage, fingerprint, write_weights
from dsv4_jax.weights.folder import Folder, read_json
from dsv4_jax.weights.names import official_shapes

FORMATS = get_args(Storage)
# What a published folder holds beside its weights, and a converted one takes over.
_BESIDE = (TOKENIZER, TOKEN_MAP, "tokenizer_config.json", "generation_config.json", "encoding")


def convert_folder(
    source: Path, target: Path, storage: Storage, console: Console, file_bytes: int = FILE_BYTES
) -> None:
    """Convert a folder of weights into another format; no model is made, and pieces of tensors are held one at a time.

    Tensors that have the wanted format already are copied byte by byte. The same call goes on where it was stopped.

    Raises:
        ConfigError: if the source is damaged, or its tensors are not those of its configuration. Nothing is written.
        RunError: if a file cannot be written.
    """
    cfg, files = read_config(source), Folder(source)
    with ensure_mesh():
        shapes = official_shapes(nnx.eval_shape(lambda: DeepSeek(cfg, rngs=nnx.Rngs(0))))
    files.check(shapes)
    files.check_scales()
    config = source / "config.json"
    fields = read_json(config) if config.is_file() else {}
    carried = {key: value for key, value in fields.items() if key in CARRIED}
    beside = [source / name for name in _BESIDE if (source / name).exists()]
    identity = f"{source.resolve()} {fingerprint(source)}"
    _write(files, cfg, shapes, target, storage, console, file_bytes, identity, beside, carried)


def convert_model(
    model: DeepSeek, identity: str, tokenizer: Path | None, target: Path, storage: Storage, console: Console
) -> None:
    """Write the model of a run as a folder of weights, with its tokenizer.

    Args:
        model: the model.
        identity: run and step, by which an interrupted call is taken up again.
        tokenizer: file of the tokenizer; None: bytes.
        target: folder to make.
        storage: form of the folder.
        console: console of the progress bar.
    """
    beside = [tokenizer] if tokenizer else []
    if tokenizer and tokenizer.name != TOKENIZER:
        raise ConfigError(f"data.tokenizer = {str(tokenizer)!r}: the file must be named {TOKENIZER} to be published")
    _write(Model(model), model.cfg, official_shapes(model), target, storage, console, FILE_BYTES, identity, beside, {})


def _write(
    source: Model | Folder,
    cfg: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    target: Path,
    storage: Storage,
    console: Console,
    file_bytes: int,
    identity: str,
    beside: list[Path],
    carried: dict[str, Any],
) -> None:
    """Write with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(compact=True), console=console, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(f"writing {target}", total=None)
        write_weights(
            source,
            cfg,
            shapes,
            target,
            storage,
            identity=identity,
            beside=beside,
            carried=carried,
            file_bytes=file_bytes,
            begin=lambda total: bar.update(task, total=total),
            advance=lambda size: bar.advance(task, size),
        )
    total = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    console.print(f"wrote {target}: {len(shapes):,} tensors, {total:,} bytes, format {storage}")
