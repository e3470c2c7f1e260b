# SPDX-License-Identifier: Apache-2.0
"""Read a folder of published weights: every tensor under its official name, dequantised, piece by piece."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dsv4_jax.ops import quantize
from dsv4_jax.ops.quantize import FP4, FP8_32, FP8_128, ROWS_32, Format
from dsv4_jax.section import ConfigError
from dsv4_jax.weights.dialects import FUSED, official_name
from dsv4_jax.weights.safetensors import Stored, find_tensors

PLAIN = ("F32", "BF16", "F16", "F64", "I64", "I32")  # types of numbers that need no scale
_FUSED = re.compile(rf"(.*\.experts)\.({'|'.join(FUSED)})$")


class Weight(NamedTuple):
    """A tensor of a folder, by its official name.

    Attributes:
        name: official name.
        stored: where its numbers are.
        shape: shape of the tensor.
        form: its quantisation; None: plain numbers.
        scale: where its scales are; None for plain numbers.
        expert: index of the first axis of `stored`, if that holds all experts.
        row: first row of the tensor in `stored`.
    """

    name: str
    stored: Stored
    shape: tuple[int, ...]
    form: Format | None = None
    scale: Stored | None = None
    expert: int | None = None
    row: int = 0

    def read(self, *index: slice) -> np.ndarray:
        """Read a piece, as fp32 or, of integers, as stored; `index` cuts the leading axes.

        Raises:
            ConfigError: if a scale of the piece is no number.
        """
        bounds = [cut.indices(n)[:2] for cut, n in zip(index, self.shape, strict=False)]
        bounds += [(0, n) for n in self.shape[len(index) :]]
        if self.form is None or self.scale is None:
            cuts = [slice(*bound) for bound in bounds]
            if cuts:
                cuts[0] = slice(cuts[0].start + self.row, cuts[0].stop + self.row)
            numbers = self.stored.read(*self._lead(), *cuts)
            numbers = numbers if self.expert is None else numbers[0]
            return numbers if numbers.dtype.kind in "iu" else numbers.astype(np.float32)
        (top, bottom), (left, right) = bounds
        rows, columns, form = range(top, bottom), range(left, right), self.form
        if form.bits == 4:  # whole bytes, which have two columns each
            codes = self.stored.read(slice(top, bottom), slice(left // 2, -(-right // 2)))
            value = quantize.unpack(codes, right - left // 2 * 2)[:, left % 2 :]
            value = quantize.from_e2m1(value)
        else:
            value = self.stored.read(slice(top, bottom), slice(left, right)).astype(np.float32)
        # Scales of the blocks that the piece touches, then of each of its numbers.
        first_row, first_column = top // form.rows, left // form.columns
        scale = self.scale.read(
            slice(first_row, -(-bottom // form.rows)), slice(first_column, -(-right // form.columns))
        )
        if not _usable(scale, form):
            raise ConfigError(
                f"{self.scale.file}: the scales of {self.name} in rows {top} to {bottom} have one that is no number"
            )
        rows = range(top - first_row * form.rows, bottom - first_row * form.rows)
        columns = range(left - first_column * form.columns, right - first_column * form.columns)
        return value * quantize.scales_of(scale, form, rows, columns)

    def _lead(self) -> list[slice]:
        return [] if self.expert is None else [slice(self.expert, self.expert + 1)]


def _usable(scale: np.ndarray, form: Format) -> bool:
    return bool((scale != 255).all() if form.scale == "e8m0" else np.isfinite(scale).all())


class Folder:
    """A folder of safetensors files in any published format, or in one of the dialects of transformers.

    The format of each tensor follows from its own type and the shape of its scales, never from the configuration.

    Attributes:
        path: the folder.
        weights: every tensor by official name.
    """

    def __init__(self, path: Path):
        """Find the tensors of a folder, and the format of each.

        Raises:
            ConfigError: if a file or the index is damaged, a tensor has two names, a scale no weight, a weight no
                scale, or the shape of a scale fits no format.
        """
        self.path = path
        if sorted(path.glob("model*-mp*.safetensors")):
            raise ConfigError(
                f"{path} holds files of the official convert.py (model0-mp1.safetensors), which are for one number of "
                "devices: take the published files that they were made of"
            )
        found: dict[str, Stored] = {}
        names: dict[str, str] = {}
        for name, stored in find_tensors(path).items():
            official = official_name(name)
            if official in found:
                raise ConfigError(f"{stored.file}: {name} is the same tensor as {names[official]}, {official}")
            found[official], names[official] = stored, name
        scales = {name: found.pop(name) for name in list(found) if _is_scale(name)}
        self.weights: dict[str, Weight] = {}
        for name, stored in found.items():
            scale = scales.pop(re.sub(r"\.weight$", ".scale", name), None)
            for weight in _make_weights(name, stored, scale):
                self.weights[weight.name] = weight
        if scales:
            name, stored = next(iter(scales.items()))
            raise ConfigError(f"{stored.file}: {name} has no weight of its own ({len(scales)} such scales)")

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of a tensor, fp32 or integers."""
        weight = self.weights[name]
        return weight.read(rows) if weight.shape else weight.read()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the folder has the tensors of a model, and no others.

        Args:
            shapes: shape of every tensor of the model by official name.

        Raises:
            ConfigError: naming missing, unexpected and misshapen tensors, and their files.
        """
        have = self.weights
        problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in have]
        for name, weight in have.items():
            place = f"{weight.stored.file.name}: {name}"
            if name not in shapes:
                problems.append(f"{place}: unexpected, {list(weight.shape)}")
            elif weight.shape != shapes[name]:
                problems.append(f"{place}: expected {list(shapes[name])}, found {list(weight.shape)}")
        if problems:
            shown = "\n  ".join(problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise ConfigError(f"{self.path} does not hold the tensors of its configuration:\n  {shown}{more}")

    def check_scales(self) -> None:
        """Check that every scale is a number; this reads all scales.

        Raises:
            ConfigError: naming the tensor and the file.
        """
        for weight in self.weights.values():
            if weight.form and weight.scale and not _usable(weight.scale.read(), weight.form):
                raise ConfigError(f"{weight.scale.file}: a scale of {weight.name} is no number")


def _is_scale(name: str) -> bool:
    return name.endswith(".scale")


def _make_weights(name: str, stored: Stored, scale: Stored | None) -> list[Weight]:
    """Make the tensor of a name, or all tensors of fused experts."""
    place = f"{stored.file}: {name}"
    if scale is not None:
        return [Weight(name, stored, *_find_format(place, stored, scale), scale)]
    if stored.dtype not in PLAIN:
        raise ConfigError(f"{place} is {stored.dtype} {list(stored.shape)} and has no scale")
    if not (fused := _FUSED.match(name)):
        return [Weight(name, stored, stored.shape)]
    # Experts [E, rows, columns]: one or two matrices above each other.
    experts, parts = fused[1], FUSED[fused[2]]
    if len(stored.shape) != 3 or stored.shape[1] % len(parts):
        raise ConfigError(f"{place} is {list(stored.shape)}, expected [experts, {len(parts)} x rows, columns]")
    E, rows, columns = stored.shape
    rows //= len(parts)
    return [
        Weight(f"{experts}.{e}.{part}.weight", stored, (rows, columns), expert=e, row=i * rows)
        for e in range(E)
        for i, part in enumerate(parts)
    ]


def _find_format(place: str, stored: Stored, scale: Stored) -> tuple[tuple[int, ...], Format]:
    """Find the shape and the format of a quantised matrix from its type and the shape of its scales."""
    shape = stored.shape
    kinds: dict[str, Literal["e8m0", "f32"]] = {"F8_E8M0": "e8m0", "U8": "e8m0", "F32": "f32"}
    if len(shape) == len(scale.shape) == 2 and scale.dtype in kinds:
        forms: tuple[Format, ...] = ()
        if stored.dtype == "I8" or (stored.dtype == "U8" and scale.dtype != "F32"):
            shape, forms = (shape[0], 2 * shape[1]), (FP4,)
        elif stored.dtype == "F8_E4M3":
            forms = (FP8_128, FP8_32, ROWS_32)
        for form in forms:
            if scale.shape == (math.ceil(shape[0] / form.rows), math.ceil(shape[1] / form.columns)):
                return shape, form._replace(scale=kinds[scale.dtype])
    raise ConfigError(
        f"{place}: {stored.dtype} {list(stored.shape)} with scales {scale.dtype} {list(scale.shape)} of "
        f"{scale.file.name} is no known format"
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: if the file is missing or holds none.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds {type(content).__name__}, expected an object")
    return content
