# SPDX-License-Identifier: Apache-2.0
"""Images in the sequence: their vectors take the places that `image_grids` gives them (V4.1 section 2.1.1).

Images come packed: all patches of a group, one image after another. Either there is one group for all rows, or
there are G groups, split over `mesh.BATCH` with the rows that they belong to.

Letters: G groups, P patches, N patches of all chunks, n lines of `image_grids`, D width, C cells (squares of r x r
patches that become one position), B rows, S positions.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from dsv4_jax.mesh import BATCH
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import Params, apply_remat, whole
from dsv4_jax.model.token_types import END, NEWLINE, START, TEXT
from dsv4_jax.model.vision import ImageTables, compute_angles, gather_chunks
from dsv4_jax.ops.context import chunk_start
from dsv4_jax.ops.images import Cells, make_image_tables, max_cells


def make_delimiters(cfg: ModelConfig, make: Params) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """Make the learned vectors `image_start`, `image_newline` and `image_end`, [D] each."""
    start, newline, end = (make.vector(("norm", cfg.dim)) for _ in range(3))
    return start, newline, end


class Parts(Protocol):
    """Parts of a model that reads images."""

    vision: Any
    aligner: Any
    image_start: Any
    image_newline: Any
    image_end: Any


def embed_images(
    parts: Parts,
    e_BSD: jax.Array,
    token_types_BS: jax.Array,
    patches: jax.Array,
    image_grids: jax.Array,
    cfg: ModelConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Put images into the embeddings of a batch (V4.1 section 2.1.1).

    Args:
        parts: the model.
        e_BSD: embeddings of all token ids, laid out as `mesh.act_spec`. Those of image positions are replaced and get
            no gradient.
        token_types_BS: int, laid out likewise: -1 text, 0 start, 1 image, 2 newline, 3 end.
        patches: [P, 3, p, p], the patches of all images one after another in reading order; or [G, P, 3, p, p], in
            groups that are packed by themselves. Patches after the last image are padding.
        image_grids: int [n, 4] = (row, start position, patch rows, patch columns), or [G, n, 4]. A line without patch
            rows is padding. `row` counts the rows of the whole batch, also in groups; group g has the images of rows
            g B / G to (g + 1) B / G.
        cfg: the model's configuration.
        dtype: type of the matrix products.

    Returns:
        The embeddings, with delimiters and cells at positions of their type (zero at an image position that no image
        covers); and the outputs of the tower, `vision` [P, vision_dim], and of the aligner, `aligner` [C, D], in
        groups if the patches are. Both are zero after the last image; P and C are at least 1. C follows from shapes
        alone: a group has at most one cell for each position of its rows, and at most `max_cells` of its patches.

    Raises:
        ValueError: for arguments of the wrong shape or type, naming what was expected and found.
    """
    patches, image_grids = jnp.asarray(patches), jnp.asarray(image_grids)
    grouped = _check_inputs(e_BSD, token_types_BS, patches, image_grids, cfg)
    if not grouped:
        patches, image_grids = patches[None], image_grids[None]
    _check_grids(image_grids, patches.shape[1], e_BSD.shape[0])
    # Sizes of a group in chunks of one size over `context`: N patches and `cells` cells.
    groups, positions = jax.P(BATCH) if grouped else jax.P(None), jax.P(BATCH, "context")
    chunks = jax.P(*groups, "context")
    image_grids = jax.reshard(image_grids, groups)
    (G, P), (B, S) = patches.shape[:2], token_types_BS.shape
    P = max(P, 1)  # nothing can be gathered from an empty array
    C = max(1, min(B // G * S, max_cells(P, image_grids.shape[1], cfg.vision_downsample_ratio)))
    devices = jax.sharding.get_abstract_mesh().shape["context"]
    N, cells = (-(-size // devices) * devices for size in (P, C))

    # Tables [G, N] and [G, cells], made from whole grids; then tables and patches are cut into chunks.
    make = jax.shard_map(functools.partial(_make_tables, cfg, N, cells), in_specs=groups, out_specs=groups)
    tables = jax.tree.map(lambda x: jax.reshard(x, chunks), make(image_grids))
    if N != patches.shape[1]:  # not in training, whose data are padded
        patches = jnp.pad(jax.reshard(patches, groups), [(0, 0), (0, N - patches.shape[1])] + [(0, 0)] * 3)
    patches = jax.reshard(patches, chunks)
    # Patches to the tower's features [G, N, vision_dim], those to cells [G, cells, D].
    with jax.named_scope("vision"):
        x_GPD = parts.vision(patches, tables, dtype)
    with jax.named_scope("aligner"):
        align = apply_remat(lambda aligner, x_GPD: aligner(x_GPD, tables, dtype), cfg.remat)
        y_GCD = align(parts.aligner, x_GPD)
    # Cells and delimiters to the positions of their type.
    vectors = {START: parts.image_start, NEWLINE: parts.image_newline, END: parts.image_end}
    insert = jax.shard_map(_insert, in_specs=(positions, positions, chunks, chunks, jax.P()), out_specs=positions)
    vectors = {kind: whole(vector) for kind, vector in vectors.items()}
    e_BSD = insert(e_BSD, token_types_BS, y_GCD, tables.cells, vectors)
    outputs = {"vision": jax.reshard(x_GPD, groups)[:, :P], "aligner": jax.reshard(y_GCD, groups)[:, :C]}
    return e_BSD, outputs if grouped else {name: x[0] for name, x in outputs.items()}


def _make_tables(cfg: ModelConfig, P: int, C: int, grids_Gn4: jax.Array) -> ImageTables:
    table = functools.partial(make_image_tables, n_patches=P, n_cells=C, r=cfg.vision_downsample_ratio)
    patches, cells = jax.vmap(table)(grids_Gn4)
    return ImageTables(patches, cells, compute_angles(cfg, patches.row_P, patches.column_P))


def _insert(
    e_BSD: jax.Array, types_BS: jax.Array, y_GCD: jax.Array, cells: Cells, vectors: dict[int, jax.Array]
) -> jax.Array:
    """Replace the image positions of one device's rows and chunk of positions; fp32 inside, e's type outside."""
    B, S, D = e_BSD.shape
    # All cells of the device's groups, and the place [G, C] of each in its B x S positions; B S for those elsewhere.
    y_GCD, cells = gather_chunks(y_GCD), jax.tree.map(gather_chunks, cells)
    cells_GC = y_GCD.shape[0] * y_GCD.shape[1]
    row_GC = cells.row_C - jax.lax.axis_index(BATCH) * B
    position_GC = cells.position_C - chunk_start(S)
    here_GC = (row_GC >= 0) & (row_GC < B) & (position_GC >= 0) & (position_GC < S)
    place_GC = jnp.where(here_GC, row_GC * S + position_GC, B * S)
    # The cell of each position, [B S]. Integers are scattered so that vectors need only be gathered: [B, S, D].
    cell = jnp.full(B * S, cells_GC).at[place_GC.reshape(-1)].set(jnp.arange(cells_GC), mode="drop")
    shown_BSD = y_GCD.reshape(-1, D).at[cell.reshape(B, S)].get(mode="fill", fill_value=0).astype(jnp.float32)
    # Delimiters replace what was gathered at their positions; text keeps its embedding.
    types_BS1 = types_BS[..., None]
    for kind, vector_D in vectors.items():
        shown_BSD = jnp.where(types_BS1 == kind, vector_D, shown_BSD)
    return jnp.where(types_BS1 == TEXT, e_BSD, shown_BSD).astype(e_BSD.dtype)


def _check_inputs(
    e_BSD: jax.Array, types_BS: jax.Array, patches: jax.Array, image_grids: jax.Array, cfg: ModelConfig
) -> bool:
    """Check shapes and types, and return whether the patches come in groups.

    Raises:
        ValueError: for arguments that fit neither form.
    """

    def shown(x: jax.Array) -> str:
        return f"found {x.dtype}{list(x.shape)}"

    if not cfg.vision_n_layers:
        raise ValueError(
            f"the model has no vision tower (vision_n_layers = 0), but patches are given: {shown(patches)}"
        )
    p = cfg.vision_patch_size
    grouped = patches.ndim == 5
    if patches.ndim not in (4, 5) or patches.shape[-3:] != (3, p, p) or not jnp.issubdtype(patches.dtype, jnp.floating):
        want = f"floats [P, 3, {p}, {p}] or [G, P, 3, {p}, {p}] (vision_patch_size = {p})"
        raise ValueError(f"patches must be {want}, {shown(patches)}")
    lead = list(patches.shape[:1]) if grouped else []
    fits = image_grids.ndim == 2 + grouped and [*image_grids.shape[:-2], image_grids.shape[-1]] == [*lead, 4]
    if not fits or not jnp.issubdtype(image_grids.dtype, jnp.integer):
        want = f"integers [{lead[0]}, n, 4]" if grouped else "integers [n, 4]"
        raise ValueError(f"image_grids must be {want} for patches {list(patches.shape)}, {shown(image_grids)}")
    if types_BS.shape != e_BSD.shape[:2] or not jnp.issubdtype(types_BS.dtype, jnp.integer):
        raise ValueError(f"token_types must be integers {list(e_BSD.shape[:2])} like ids, {shown(types_BS)}")
    sizes = jax.sharding.get_abstract_mesh().shape
    B, devices = e_BSD.shape[0], sizes["data"] * sizes["expert"]
    if grouped and (lead[0] % devices or not lead[0] or B % lead[0]):
        raise ValueError(
            f"the groups of patches must divide the {B} rows and be a multiple of the {devices} devices of "
            f"mesh axes {BATCH}, found {lead[0]} groups"
        )
    return grouped


def _check_grids(grids_Gn4: jax.Array, P: int, B: int) -> None:
    """Check that P patches and B rows are enough for the grids; not under a trace, where values are unknown.

    Raises:
        ValueError: if they are not.
    """
    if isinstance(grids_Gn4, Tracer):
        return
    grids = np.asarray(grids_Gn4)
    grids = np.where(grids[..., 2:3] > 0, grids, 0)
    need = int((grids[..., 2] * grids[..., 3]).sum(1).max(initial=0))
    if need > P:
        raise ValueError(f"image_grids need {need} patches, found {P}")
    if grids.size and not 0 <= grids[..., 0].min() <= grids[..., 0].max() < B:
        rows = sorted({*grids[..., 0].flat})
        raise ValueError(f"the rows in image_grids must be 0 to {B - 1}, found {list(map(int, rows))}")
