# SPDX-License-Identifier: Apache-2.0
"""Define a batch: names, shapes and types of its arrays, their placement on the mesh, and its parts for accumulation.

A batch holds B packed rows of S positions, as a dict of int32 arrays [B, S]:
- `ids`: token ids.
- `segment_ids`: 0 for padding; 1, 2, ... for the pieces of documents in the row.
- `targets`: the next token of the same document; -1 where there is none. A document that is cut into pieces keeps the
  target at each cut.
- `mtp_targets`: the token after the target; -1 where there is none.

A model with vision has three more arrays:
- `token_types`, int32 [B, S]: 0 START, 1 IMAGE, 2 NEWLINE and 3 END inside an image, -1 for text and padding.
- `patches`, float32 [B, P, 3, p, p]: the patches of the row's images, in reading order, image after image; then 0.
- `image_grids`, int32 [B, n, 4]: (row of the batch, position of START, patch rows, patch columns) of each image of the
  row, in order; then lines of 0.
P and n are the row's budget of patches and images; P is padded like S. The id of images is never a target. Therefore
the position before START and every position of an image except END have target -1; END has the text that follows.
Where `targets` is -1, `mtp_targets` is -1 too, because the MTP block reads the target as its input.

The training loop and an objective may add `engram_rows` [B, S, Engrams, columns], `experts` [B, S, learned layers, k]
for anticipatory routing, and `anchors` [B, A] for the training of draft blocks.
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

# Value of the unused entries of each array: positions without a token, patches and images that a row does not use.
EMPTY = {
    "ids": 0, "segment_ids": 0, "targets": -1, "mtp_targets": -1,
    "token_types": TEXT, "patches": 0, "image_grids": 0,
}  # fmt: skip


def row_shapes(S: int, budget: Budget | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of one row of S positions, by the array's name."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("ids", "segment_ids", "targets", "mtp_targets"), (S,))
    if budget:
        shapes["token_types"] = (S,)
        shapes["patches"] = budget.patches, 3, *(budget.vision.patch_size,) * 2
        shapes["image_grids"] = budget.images, 4
    return shapes


def array_type(name: str) -> type[np.number]:
    """Return the dtype of the array `name` of a batch."""
    return np.float32 if name == "patches" else np.int32


def empty_row(S: int, budget: Budget | None) -> HostBatch:
    """Make the arrays of one row without tokens and images."""
    return {name: np.full(shape, EMPTY[name], array_type(name)) for name, shape in row_shapes(S, budget).items()}


def batch_spec(name: str, rank: int) -> jax.P:
    """Return the partition spec of the array `name` of a batch, which has `rank` axes with that of the rows.

    Rows are split in every array. The second axis, positions or patches, is split too, except in `image_grids`.
    """
    return row_spec(rank) if name == "image_grids" else act_spec(rank)


def abstract_batch(cfg: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of a batch of `rows` rows on the current mesh."""
    padded = lambda size: size + -size % cfg.mesh.context
    budget = row_budget(VisionLayout.of(cfg.model), cfg.data)
    shapes = row_shapes(padded(cfg.data.seq_len), budget and budget._replace(patches=padded(budget.patches)))

    def struct(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(current_mesh(), batch_spec(name, 1 + len(shape)))
        return jax.ShapeDtypeStruct((rows, *shape), array_type(name), sharding=sharding)

    return {name: struct(name, shape) for name, shape in shapes.items()}


def with_engram_rows(batch: dict[str, jax.ShapeDtypeStruct], model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Add `engram_rows` to an abstract batch if the model has Engrams, so that tracing needs no token map."""
    if not model.engram_layer_ids:
        return batch
    columns = (model.engram_max_ngram_size - 1) * model.engram_n_heads
    shape = *batch["ids"].shape, len(model.engram_layer_ids), columns
    sharding = NamedSharding(current_mesh(), act_spec(4))
    return batch | {"engram_rows": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)}


def accumulation_parts(batch: Batch, parts: int) -> Batch:
    """Reshape every array [B, ...] of a batch to [parts, B / parts, ...], for gradient accumulation.

    Each device cuts its own rows, so that no row moves and every part has the same number of rows on every device. The
    row numbers in `image_grids` are changed to those within the part.
    """

    def split(batch: Batch) -> Batch:
        """Cut one device's rows of every array into parts: [parts, rows of a part, ...]."""
        cut = {name: x.reshape(parts, -1, *x.shape[1:]) for name, x in batch.items()}
        if "image_grids" in cut:
            # Within a part, device d of the batch axes has rows d * rows to (d + 1) * rows. Unused lines keep row 0.
            grids = cut["image_grids"]
            rows = grids.shape[1]
            numbers = jax.lax.axis_index(BATCH) * rows + jnp.arange(rows)
            number = jnp.where(grids[..., 2] > 0, numbers[:, None], 0)
            cut["image_grids"] = jnp.concatenate([number[..., None], grids[..., 1:]], -1)
        return cut

    specs = {name: batch_spec(name, x.ndim) for name, x in batch.items()}
    out_specs = {name: jax.P(None, *spec) for name, spec in specs.items()}
    return jax.shard_map(split, in_specs=(specs,), out_specs=out_specs)(batch)


def put_batch(batch: HostBatch, own: list[int], rows: int) -> Batch:
    """Put a batch on the devices of the current mesh.

    Args:
        batch: the rows of this process.
        own: numbers of these rows in the whole batch, ascending.
        rows: number of rows of the whole batch.
    """

    def put(name: str, x: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            """Return one device's part, whose rows `index[0]` gives in numbers of the whole batch."""
            assert index is not None  # JAX gives an index for every device of this process
            numbers = range(rows)[index[0]]
            first = own.index(numbers[0])
            return x[first : first + len(numbers), *index[1:]]

        sharding = NamedSharding(jax.sharding.get_mesh(), batch_spec(name, x.ndim))
        return jax.make_array_from_callback((rows, *x.shape[1:]), sharding, part)

    return {name: put(name, value) for name, value in batch.items()}
