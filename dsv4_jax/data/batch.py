# SPDX-License-Identifier: Apache-2.0
"""Define a batch: the names, shapes and types of its arrays, their placement on the mesh, and how it is cut in parts.

A batch of packed rows is a dict of int32 arrays [B, S]:
- `ids`: token ids;
- `segment_ids`: 0 padding, 1, 2, ... the documents of the row;
- `targets`: the token after each one, -1 where there is none. Targets come from whole documents, so a document longer
  than a row loses none where it is cut;
- `mtp_targets`: the token after that, -1 where there is none.

For a model with vision there are also
- `token_types` [B, S]: 0 START, 1 IMAGE, 2 NEWLINE, 3 END of an image, -1 text and padding;
- `patches`, float32 [B, P, 3, p, p]: those of each row's images, in reading order, one image after another; then 0;
- `image_grids`, int32 [B, n, 4]: for each image of a row (number of the row in the batch, position of its START,
  rows, columns of its patches), in order; then lines of 0.
P patches and n images are the row's budget, P padded like S. The id of images is never a target: a position before
START and all of an image but its END have target -1; the END has the text that follows. `mtp_targets` are -1 also
where `targets` are, since the block that predicts them reads those.

The training loop and an objective may add arrays with rows and positions: `engram_rows` [B, S, Engrams, columns],
`experts` [B, S, learned layers, k] (anticipatory routing), `anchors` [B, A] (training of draft blocks).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dsv4_jax.config import Config
from dsv4_jax.data.images import Budget, row_budget
from dsv4_jax.data.vision_layout import VisionLayout
from dsv4_jax.mesh import BATCH, act_spec, current_mesh, row_spec
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.token_types import TEXT

HostBatch = dict[str, np.ndarray]
Batch = dict[str, jax.Array]

# The value that stands where a row has no token, patch or image, by array.
EMPTY = {
    "ids": 0, "segment_ids": 0, "targets": -1, "mtp_targets": -1,
    "token_types": TEXT, "patches": 0, "image_grids": 0,
}  # fmt: skip


def row_shapes(S: int, budget: Budget | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of one row of S positions, by name."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("ids", "segment_ids", "targets", "mtp_targets"), (S,))
    if budget:
        shapes["token_types"] = (S,)
        shapes["patches"] = budget.patches, 3, *(budget.vision.patch_size,) * 2
        shapes["image_grids"] = budget.images, 4
    return shapes


def array_type(name: str) -> type[np.number]:
    """Return the type of an array of a batch."""
    return np.float32 if name == "patches" else np.int32


def empty_row(S: int, budget: Budget | None) -> HostBatch:
    """Make the arrays of one row of padding."""
    return {name: np.full(shape, EMPTY[name], array_type(name)) for name, shape in row_shapes(S, budget).items()}


def batch_spec(name: str, rank: int) -> jax.P:
    """Return the spec of an array of a batch: rows are split, and positions and patches; tables of images are not."""
    return row_spec(rank) if name == "image_grids" else act_spec(rank)


def abstract_batch(cfg: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, types and shardings of a batch of `rows` rows, on the mesh that is set."""
    padded = lambda size: size + -size % cfg.mesh.context
    budget = row_budget(VisionLayout.of(cfg.model), cfg.data)
    shapes = row_shapes(padded(cfg.data.seq_len), budget and budget._replace(patches=padded(budget.patches)))

    def struct(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(current_mesh(), batch_spec(name, 1 + len(shape)))
        return jax.ShapeDtypeStruct((rows, *shape), array_type(name), sharding=sharding)

    return {name: struct(name, shape) for name, shape in shapes.items()}


def with_engram_rows(batch: dict[str, jax.ShapeDtypeStruct], model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Add the rows of the Engrams' tables to an abstract batch, so that tracing the model needs no token map."""
    if not model.engram_layer_ids:
        return batch
    columns = (model.engram_max_ngram_size - 1) * model.engram_n_heads
    shape = *batch["ids"].shape, len(model.engram_layer_ids), columns
    sharding = NamedSharding(current_mesh(), act_spec(4))
    return batch | {"engram_rows": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)}


def accumulation_parts(batch: Batch, parts: int) -> Batch:
    """Cut a batch into parts [parts, B / parts, ...], with an equal share of every device's rows in each.

    The row numbers in `image_grids` become those in the part.
    """

    def split(batch: Batch) -> Batch:
        found = {name: x.reshape(parts, -1, *x.shape[1:]) for name, x in batch.items()}
        if "image_grids" in found:
            # A row's number counts the rows of all devices before it, of this part alone.
            grids = found["image_grids"]
            rows = grids.shape[1]
            numbers = jax.lax.axis_index(BATCH) * rows + jnp.arange(rows)
            number = jnp.where(grids[..., 2] > 0, numbers[:, None], 0)
            found["image_grids"] = jnp.concatenate([number[..., None], grids[..., 1:]], -1)
        return found

    specs = {name: batch_spec(name, x.ndim) for name, x in batch.items()}
    out_specs = {name: jax.P(None, *spec) for name, spec in specs.items()}
    return jax.shard_map(split, in_specs=(specs,), out_specs=out_specs)(batch)


def put_batch(batch: HostBatch, own: list[int], rows: int) -> Batch:
    """Put a batch of `rows` rows on the devices, from the rows `own` that this process has."""

    def put(name: str, x: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # every device has a part
            numbers = range(rows)[index[0]]
            first = own.index(numbers[0])
            return x[first : first + len(numbers), *index[1:]]

        sharding = NamedSharding(jax.sharding.get_mesh(), batch_spec(name, x.ndim))
        return jax.make_array_from_callback((rows, *x.shape[1:]), sharding, part)

    return {name: put(name, value) for name, value in batch.items()}
