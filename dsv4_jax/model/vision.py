# SPDX-License-Identifier: Apache-2.0
"""Images: the vision tower, the aligner, and the places of the sequence that they fill (V4.1 section 2.1.1).

Images come packed: all patches of a group one image after another, as `image_grids` says. Either there is
one group, for all rows, or there are G groups split over `mesh.BATCH` with the rows that they belong to.
The patches of a group, and its cells, are split over `context` into chunks, wherever an image ends.

Letters: G groups, P patches, N patches of all chunks, n lines of `image_grids`, D width (of the tower inside
it), H heads, K head width, C cells (squares of r x r patches that become one position), B rows, S positions.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from dsv4_jax.mesh import BATCH, emulated
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import Params, linear, recomputed, rms_norm, whole
from dsv4_jax.model.rope import Rotation, rotation
from dsv4_jax.ops.context import offset
from dsv4_jax.ops.images import Cells, Patches, attend_images, image_tables, max_cells
from dsv4_jax.optim.roles import MatrixSpec, Role

EPS = 1e-6  # of the tower's norms, whatever `norm_eps` the language model has
BLOCK = 512  # patches that attention handles at a time: an image has thousands
TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3  # token types


class Tables(NamedTuple):
    """Integer and angle tables of a batch's images, [G, ...] each, that all blocks share."""

    patches: Patches
    cells: Cells
    angles: Rotation


def angles(cfg: ModelConfig, row: jax.Array, column: jax.Array) -> Rotation:
    """Angles of patches, fp32 [..., K / 2]: the first half of the channel pairs turn by row, the others by column."""
    quarter = cfg.vision_dim // cfg.vision_n_heads // 4
    freq = cfg.vision_rope_theta ** (-np.arange(quarter, dtype=np.float64) / quarter)
    parts = rotation(freq, row), rotation(freq, column)
    return Rotation(*(jnp.concatenate(pair, axis=-1) for pair in zip(*parts, strict=True)))


def rotate_halves(x: jax.Array, at: Rotation) -> jax.Array:
    """Rotates channel pairs (j, j + K / 2) of x [..., K] by `at` [..., K / 2]; fp32 inside, x's type outside."""
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * at.cos - right * at.sin, right * at.cos + left * at.sin], axis=-1)
    return turned.astype(x.dtype)


class Affine(nnx.Module):
    """A linear layer with bias."""

    def __init__(self, make: Params, inputs: tuple[str, int], outputs: tuple[str, int], role: Role = Role("matrix")):
        self.weight = make.kernel(inputs, outputs, suffix="", role=role)
        self.bias = make.full(0.0, outputs)

    def __call__(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """x [..., in] to [..., out], in `dtype`."""
        return (linear(x, self.weight, dtype).astype(jnp.float32) + whole(self.bias)).astype(dtype)


class PatchEmbed(nnx.Module):
    """Pixels of a patch to a vector."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.proj = Affine(make, ("pixels", 3 * cfg.vision_patch_size**2), ("embed", cfg.vision_dim))


class Attention(nnx.Module):
    """Attention of every patch to all patches of its image."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.heads, D = cfg.vision_n_heads, cfg.vision_dim
        parts = Role("matrix", MatrixSpec(output_split=3))  # queries, keys and values
        self.wqkv = Affine(make, ("embed", D), ("heads", 3 * D), parts)
        self.wo = Affine(make, ("heads", D), ("embed", D))

    def __call__(self, x_GPD: jax.Array, at: Tables, dtype: jnp.dtype) -> jax.Array:
        """Output [G, P, D]."""
        G, P, D = x_GPD.shape
        qkv = self.wqkv(x_GPD, dtype).reshape(G, P, 3, self.heads, D // self.heads)
        chunks = _chunks(x_GPD)
        core = jax.shard_map(_core, in_specs=(chunks, chunks), out_specs=chunks)
        return self.wo(core(qkv, at), dtype)


def _core(qkv_GP3HK: jax.Array, at: Tables) -> jax.Array:
    """Attention of one device's chunk of its groups, which become one sequence of images: [G, P, H K]."""
    G, P, _, H, K = qkv_GP3HK.shape
    q, k, v = jnp.moveaxis(qkv_GP3HK, 2, 0)
    heads = jax.tree.map(lambda a: a[:, :, None], at.angles)  # the same angles for every head
    q, k = rotate_halves(q, heads), rotate_halves(k, heads)
    k, v = _all(k), _all(v)  # [G, N, H, K]
    before = jnp.arange(G)[:, None] * k.shape[1]
    spans = (x + before for x in (at.patches.start_P, at.patches.end_P))
    sequence = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, *spans))
    return attend_images(*sequence, block=BLOCK).reshape(G, P, H * K)


class MLP(nnx.Module):
    """SwiGLU without a clamp; gate and up are one kernel."""

    def __init__(self, cfg: ModelConfig, make: Params):
        D, F = ("embed", cfg.vision_dim), cfg.vision_inter_dim
        self.w1 = make.kernel(D, ("mlp", 2 * F), role=Role("matrix", MatrixSpec(output_split=2)))
        self.w2 = make.kernel(("mlp", F), D)

    def __call__(self, x_GPD: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Output [G, P, D]."""
        gate, up = jnp.split(linear(x_GPD, self.w1, dtype).astype(jnp.float32), 2, axis=-1)
        return linear(jax.nn.silu(gate) * up, self.w2, dtype)


class VisionBlock(nnx.Module):
    """A block of the tower, or a stack of all for a scan."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.norm1 = make.ones(("norm", cfg.vision_dim))
        self.attn = Attention(cfg, make)
        self.norm2 = make.ones(("norm", cfg.vision_dim))
        self.mlp = MLP(cfg, make)

    def __call__(self, x_GPD: jax.Array, at: Tables, dtype: jnp.dtype) -> jax.Array:
        """The patches after the block, [G, P, D]."""
        x_GPD = x_GPD + self.attn(rms_norm(x_GPD, EPS, self.norm1), at, dtype)
        return x_GPD + self.mlp(rms_norm(x_GPD, EPS, self.norm2), dtype)


class Vision(nnx.Module):
    """The vision tower: a ViT for images of any size (V4.1 section 2.1.1)."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.remat = cfg.remat
        part = dataclasses.replace(make, part="vision")
        self.patch_embed = PatchEmbed(cfg, part)
        self.blocks = VisionBlock(cfg, dataclasses.replace(part, layers=cfg.vision_n_layers))
        self.norm = make.ones(("norm", cfg.vision_dim))  # trained like the aligner, while the rest is frozen

    def __call__(self, patches: jax.Array, at: Tables, dtype: jnp.dtype) -> jax.Array:
        """Features [G, P, D] of patches [G, P, 3, p, p], zero for padding."""
        G, P = patches.shape[:2]
        real_GP1 = (at.patches.start_P < at.patches.end_P)[..., None]
        pixels = jnp.where(real_GP1, patches.reshape(G, P, math.prod(patches.shape[2:])), 0)
        block = recomputed(lambda block, x_GPD: block(x_GPD, at, dtype), self.remat)
        x_GPD = self.patch_embed.proj(pixels, dtype)
        step = lambda x_GPD, stacked: (block(stacked, x_GPD), None)
        x_GPD, _ = jax.lax.scan(step, x_GPD, self.blocks, unroll=emulated())
        return jnp.where(real_GP1, rms_norm(x_GPD, EPS, self.norm), 0)


class Aligner(nnx.Module):
    """Squares of r x r patches to one position of the language model each (V4.1 section 2.1.1)."""

    def __init__(self, cfg: ModelConfig, make: Params):
        D, features = cfg.dim, cfg.vision_dim * cfg.vision_downsample_ratio**2
        self.w1 = Affine(make, ("features", features), ("embed", D))
        self.w2 = Affine(make, ("mlp", D), ("embed", D))

    def __call__(self, x_GPD: jax.Array, at: Tables, dtype: jnp.dtype) -> jax.Array:
        """Vectors [G, C, D] of all images' cells in reading order, zero after the last one's.

        The features of a cell are those of its patches, channel by channel: D, then row, then column.
        Patches below or right of the image count as zero.
        """
        chunks = _chunks(x_GPD)
        features = jax.shard_map(_unshuffle, in_specs=(chunks, chunks), out_specs=chunks)
        hidden = self.w1(features(x_GPD, at.cells.patch_Crr), dtype).astype(jnp.float32)
        y_GCD = self.w2(jax.nn.gelu(hidden, approximate=False), dtype)
        return jnp.where((at.cells.row_C >= 0)[..., None], y_GCD, 0)


def _unshuffle(x_GPD: jax.Array, patch_GCrr: jax.Array) -> jax.Array:
    """Features [G, C, D r r] of one device's cells."""
    x_GCrrD = jax.vmap(lambda x_ND, patch: x_ND.at[patch].get(mode="fill", fill_value=0))(_all(x_GPD), patch_GCrr)
    return jnp.moveaxis(x_GCrrD, -1, 2).reshape(*patch_GCrr.shape[:2], math.prod(x_GCrrD.shape[2:]))


def _chunks(x: jax.Array) -> jax.P:
    """How groups and chunks, the first two axes of x, lie on the mesh."""
    return jax.P(*jax.typeof(x).sharding.spec[:2])


def _all(x: jax.Array) -> jax.Array:
    """The chunks [G, ...] of all devices along `context`, one after another."""
    return jax.lax.all_gather(x, "context", axis=1, tiled=True)


def delimiters(cfg: ModelConfig, make: Params) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """The learned vectors `image_start`, `image_newline` and `image_end`, [D] each."""
    start, newline, end = (make.vector(("norm", cfg.dim)) for _ in range(3))
    return start, newline, end


class Parts(Protocol):
    """What a model that sees images has."""

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
    """Embeddings with images in their places, and what made them (V4.1 section 2.1.1).

    Args:
        parts: the model.
        e_BSD: embeddings of all token ids, laid out as `mesh.act_spec`. Those of image positions are
            replaced and get no gradient.
        token_types_BS: int, laid out likewise: -1 text, 0 start, 1 image, 2 newline, 3 end.
        patches: [P, 3, p, p], all images' one after another in reading order, or in groups that are
            packed by themselves [G, P, 3, p, p]. What comes after the last image is padding.
        image_grids: int [n, 4] = (row, start position, patch rows, patch columns), or [G, n, 4]; a line
            without patch rows is padding. `row` counts the rows of the whole batch also in groups;
            group g has the images of rows g B / G to (g + 1) B / G.
        cfg: the model's configuration.
        dtype: type of the large products.

    Returns:
        e_BSD: delimiters and cells at positions of their type; an image position that no image covers
            is zero.
        told: `vision` [P, vision_dim], the tower's features, and `aligner` [C, D], the vectors of all
            cells, in groups if the patches are. Both are zero after the last image; P and C are at
            least 1. C follows from
            shapes alone: no group has more cells than its rows have positions, nor than its patches
            can make (see `max_cells`).

    Raises:
        ValueError: for arguments of the wrong shape or type, naming what was expected and found.
    """
    patches, image_grids = jnp.asarray(patches), jnp.asarray(image_grids)
    grouped = _check(e_BSD, token_types_BS, patches, image_grids, cfg)
    if not grouped:
        patches, image_grids = patches[None], image_grids[None]
    _check_grids(image_grids, patches.shape[1], e_BSD.shape[0])
    groups, positions = jax.P(BATCH) if grouped else jax.P(None), jax.P(BATCH, "context")
    chunks = jax.P(*groups, "context")
    image_grids = jax.reshard(image_grids, groups)
    (G, P), (B, S) = patches.shape[:2], token_types_BS.shape
    P = max(P, 1)  # nothing can be gathered from an empty array
    C = max(1, min(B // G * S, max_cells(P, image_grids.shape[1], cfg.vision_downsample_ratio)))
    devices = jax.sharding.get_abstract_mesh().shape["context"]
    N, cells = (-(-size // devices) * devices for size in (P, C))  # in chunks of one size

    tables = jax.shard_map(functools.partial(_tables, cfg, N, cells), in_specs=groups, out_specs=groups)
    at = jax.tree.map(lambda x: jax.reshard(x, chunks), tables(image_grids))
    if N != patches.shape[1]:  # never so in training: the data are padded
        patches = jnp.pad(jax.reshard(patches, groups), [(0, 0), (0, N - patches.shape[1])] + [(0, 0)] * 3)
    patches = jax.reshard(patches, chunks)
    with jax.named_scope("vision"):
        x_GPD = parts.vision(patches, at, dtype)
    with jax.named_scope("aligner"):
        align = recomputed(lambda aligner, x_GPD: aligner(x_GPD, at, dtype), cfg.remat)
        y_GCD = align(parts.aligner, x_GPD)
    vectors = {START: parts.image_start, NEWLINE: parts.image_newline, END: parts.image_end}
    insert = jax.shard_map(_insert, in_specs=(positions, positions, chunks, chunks, jax.P()), out_specs=positions)
    vectors = {kind: whole(vector) for kind, vector in vectors.items()}
    e_BSD = insert(e_BSD, token_types_BS, y_GCD, at.cells, vectors)
    told = {"vision": jax.reshard(x_GPD, groups)[:, :P], "aligner": jax.reshard(y_GCD, groups)[:, :C]}
    return e_BSD, told if grouped else {name: x[0] for name, x in told.items()}


def _tables(cfg: ModelConfig, P: int, C: int, grids_Gn4: jax.Array) -> Tables:
    table = functools.partial(image_tables, n_patches=P, n_cells=C, r=cfg.vision_downsample_ratio)
    patches, cells = jax.vmap(table)(grids_Gn4)
    return Tables(patches, cells, angles(cfg, patches.row_P, patches.column_P))


def _insert(
    e_BSD: jax.Array, types_BS: jax.Array, y_GCD: jax.Array, cells: Cells, vectors: dict[int, jax.Array]
) -> jax.Array:
    """Image positions of one device's rows and chunk of positions; fp32 inside, e's type outside."""
    B, S, D = e_BSD.shape
    y_GCD, cells = _all(y_GCD), jax.tree.map(_all, cells)
    cells_GC = y_GCD.shape[0] * y_GCD.shape[1]
    row_GC = cells.row_C - jax.lax.axis_index(BATCH) * B
    position_GC = cells.position_C - offset(S)
    here_GC = (row_GC >= 0) & (row_GC < B) & (position_GC >= 0) & (position_GC < S)
    place_GC = jnp.where(here_GC, row_GC * S + position_GC, B * S)
    # Which cell a position shows: integers are scattered, vectors only gathered.
    cell = jnp.full(B * S, cells_GC).at[place_GC.reshape(-1)].set(jnp.arange(cells_GC), mode="drop")
    shown_BSD = y_GCD.reshape(-1, D).at[cell.reshape(B, S)].get(mode="fill", fill_value=0).astype(jnp.float32)
    types_BS1 = types_BS[..., None]
    for kind, vector_D in vectors.items():
        shown_BSD = jnp.where(types_BS1 == kind, vector_D, shown_BSD)
    return jnp.where(types_BS1 == TEXT, e_BSD, shown_BSD).astype(e_BSD.dtype)


def _check(e_BSD: jax.Array, types_BS: jax.Array, patches: jax.Array, image_grids: jax.Array, cfg: ModelConfig) -> bool:
    """Whether the patches come in groups; refuses what fits neither form."""

    def found(x: jax.Array) -> str:
        return f"found {x.dtype}{list(x.shape)}"

    if not cfg.vision_n_layers:
        raise ValueError(
            f"the model has no vision tower (vision_n_layers = 0), but patches are given: {found(patches)}"
        )
    p = cfg.vision_patch_size
    grouped = patches.ndim == 5
    if patches.ndim not in (4, 5) or patches.shape[-3:] != (3, p, p) or not jnp.issubdtype(patches.dtype, jnp.floating):
        want = f"floats [P, 3, {p}, {p}] or [G, P, 3, {p}, {p}] (vision_patch_size = {p})"
        raise ValueError(f"patches must be {want}, {found(patches)}")
    lead = list(patches.shape[:1]) if grouped else []
    fits = image_grids.ndim == 2 + grouped and [*image_grids.shape[:-2], image_grids.shape[-1]] == [*lead, 4]
    if not fits or not jnp.issubdtype(image_grids.dtype, jnp.integer):
        want = f"integers [{lead[0]}, n, 4]" if grouped else "integers [n, 4]"
        raise ValueError(f"image_grids must be {want} for patches {list(patches.shape)}, {found(image_grids)}")
    if types_BS.shape != e_BSD.shape[:2] or not jnp.issubdtype(types_BS.dtype, jnp.integer):
        raise ValueError(f"token_types must be integers {list(e_BSD.shape[:2])} like ids, {found(types_BS)}")
    sizes = jax.sharding.get_abstract_mesh().shape
    B, devices = e_BSD.shape[0], sizes["data"] * sizes["expert"]
    if grouped and (lead[0] % devices or not lead[0] or B % lead[0]):
        raise ValueError(
            f"the groups of patches must divide the {B} rows and be a multiple of the {devices} devices of "
            f"mesh axes {BATCH}, found {lead[0]} groups"
        )
    return grouped


def _check_grids(grids_Gn4: jax.Array, P: int, B: int) -> None:
    """Refuses grids that need more patches or rows than there are; under a trace their values are unknown."""
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
