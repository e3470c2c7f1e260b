# SPDX-License-Identifier: Apache-2.0
"""Load a model from a folder of published weights.

Every process reads the bytes that its devices need, and no others. Tensors are dequantised and transposed piece by
piece, so that the memory needed beyond the model is that of one device's part of one array.
"""

import collections
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.compute import ComputeConfig
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.params import HashTable
from dsv4_jax.model.token_map import make_token_map
from dsv4_jax.section import ConfigError
from dsv4_jax.weights.configs import read_model_config
from dsv4_jax.weights.folder import Folder
from dsv4_jax.weights.names import Tensors, is_routing_table, official_shapes, walk
from dsv4_jax.weights.safetensors import chunks, transpose_into

TOKENIZER = "tokenizer.json"
TOKEN_MAP = "engram_token_map.npy"  # a token map that no tokenizer gives


def load_checkpoint(folder: str | Path, mesh: jax.sharding.Mesh | None = None, **compute: Any) -> DeepSeek:
    """Load a model from a folder of safetensors files, in any published format or a dialect of transformers.

    Args:
        folder: the folder, with `config.json` or `inference/config.json`.
        mesh: mesh to place the parameters on, which becomes the current one; None: the current one, or one device.
        compute: keys of `ComputeConfig`, such as `remat` or `compute_dtype`.

    Returns:
        The model, with fp32 parameters.

    Raises:
        ConfigError: if the folder is damaged, or its tensors are not those of its configuration. The message names the
            tensor and the file.
    """
    if mesh is not None:
        jax.set_mesh(mesh)
    return read_model(Path(folder), dataclasses.replace(read_config(Path(folder)), **compute))


def is_folder(path: Any) -> bool:
    """Return whether there is a local folder of safetensors files at a path."""
    return isinstance(path, Path) and path.is_dir() and any(path.glob("*.safetensors*"))


def check_model(folder: Path, cfg: ModelConfig) -> None:
    """Check that a model is the one whose weights a folder holds; keys of how it is computed or begins may differ.

    Raises:
        ConfigError: naming the keys that differ, or if the folder is damaged.
    """
    free = {"init_std", "hc_init_scale", "hash_seed", "engram_token_map"}
    free |= {field.name for field in dataclasses.fields(ComputeConfig)}
    made = read_config(folder)
    differ = [
        f"model.{field.name} = {getattr(cfg, field.name)!r}, but the weights are of {getattr(made, field.name)!r}"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in free and getattr(cfg, field.name) != getattr(made, field.name)
    ]
    if differ:
        raise ConfigError(f"{folder} holds the weights of another model: {'; '.join(differ)}")
    Folder(folder)


def read_model(folder: Path, cfg: ModelConfig) -> DeepSeek:
    """Make a model of a folder's weights on the current mesh (see `load_checkpoint`)."""
    files = Folder(folder)
    with ensure_mesh():
        model = nnx.eval_shape(lambda: DeepSeek(cfg, rngs=nnx.Rngs(0)))
        files.check(official_shapes(model))
        for variable, held in walk(model, model):
            variable.set_value(_load(files, variable, held))
            if isinstance(variable, HashTable):
                _check_routing(files, cfg, held)
        if model.token_map is not None:
            numbers = jax.device_put(jnp.asarray(make_token_map(cfg)), _placed(model.token_map))
            model.token_map.set_value(numbers)
    return model


def read_config(folder: Path) -> ModelConfig:
    """Read the configuration of a folder of weights; its Engrams take the token map that is beside it."""
    cfg = read_model_config(folder)
    beside = next((file for file in (folder / TOKEN_MAP, folder / TOKENIZER) if file.is_file()), None)
    if cfg.engram_layer_ids and beside:
        cfg = dataclasses.replace(cfg, engram_token_map=str(beside))
    return cfg


def _check_routing(files: Folder, cfg: ModelConfig, held: Tensors) -> None:
    for name, _ in held:
        weight = files.weights[name]
        if not is_routing_table(weight.read(), cfg.n_routed_experts):
            raise ConfigError(
                f"{weight.stored.file}: {name} must hold distinct expert ids below {cfg.n_routed_experts} in every row"
            )


def _placed(variable: Any) -> jax.NamedSharding:
    """Return the sharding, on the devices of the current mesh, of an array of the traced model."""
    return jax.NamedSharding(jax.sharding.get_mesh(), variable.get_value().sharding.spec)


def _load(files: Folder, variable: Any, held: Tensors) -> jax.Array:
    """Load one array of the model: each device's part is read once, also if several devices hold it."""
    shape = variable.get_value().shape
    sharding = _placed(variable)
    devices: dict[tuple, list[jax.Device]] = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # the device is of this process
        devices[tuple(cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True))].append(device)
    arrays = []
    for bounds, holders in devices.items():
        part = _read_part(files, variable, held, bounds)
        arrays += [jax.device_put(part, device) for device in holders]
        jax.block_until_ready(arrays)
        del part
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_part(files: Folder, variable: Any, held: Tensors, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Read the part of an array that `bounds` cut out, [first, stop) of every axis."""
    part = np.zeros([stop - first for first, stop in bounds], variable.get_value().dtype)
    # The leading axes, of layers and of experts, choose the official tensor.
    names = {tuple(i for i in index if isinstance(i, int)): name for name, index in held}
    n_lead = len(next(iter(names)))
    lead, inner = bounds[:n_lead], bounds[n_lead:]
    for place in itertools.product(*(range(first, stop) for first, stop in lead)):
        target = part[tuple(i - first for i, (first, _) in zip(place, lead, strict=True))]
        weight = files.weights[names[place]]
        if variable.transposed:
            # [*stack, in, out] here; the official rows are the outputs, stack by stack.
            *stack, (left, right), (top, bottom) = inner
            sizes, out = variable.get_value().shape[n_lead:-2], variable.get_value().shape[-1]
            for place in itertools.product(*(range(first, stop) for first, stop in stack)):
                first_row = int(np.ravel_multi_index(place, sizes)) * out if sizes else 0
                piece = target[tuple(i - first for i, (first, _) in zip(place, stack, strict=True))]
                for rows in chunks(bottom - top, 4 * (right - left)):
                    read = slice(first_row + top + rows.start, first_row + top + rows.stop)
                    transpose_into(piece[:, rows], weight.read(read, slice(left, right)))
        elif not inner:
            target[...] = weight.read()
        else:
            # Rows past the official ones are spare.
            (top, bottom), *rest = inner
            bottom = min(bottom, weight.shape[0])
            width = 4 * int(np.prod([stop - first for first, stop in rest]))
            for rows in chunks(max(bottom - top, 0), width):
                read = slice(top + rows.start, top + rows.stop)
                target[rows] = weight.read(read, *(slice(*bound) for bound in rest))
    return part
