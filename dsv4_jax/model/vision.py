# SPDX-License-Identifier: Apache-2.0
"""The vision tower and the aligner: packed patches to vectors of the language model (V4.1 section 2.1.1).

Patches come in G groups, one image after another. A group's patches and cells are split over `context` into
chunks of equal size; an image may cross the border of two chunks. `images.py` packs and places them.

Letters: G groups, P patches of a chunk, N patches of all chunks, D width (of the tower inside it), H heads, K head
width, C cells (squares of r x r patches that become one position).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax.mesh import emulated
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import Params, apply_remat, linear, rms_norm, whole
from dsv4_jax.model.rope import Rotation, compute_rotation
from dsv4_jax.ops.images import Cells, Patches, attend_images
from dsv4_jax.optim.roles import MatrixSpec, Role

EPS = 1e-6  # epsilon of the tower's norms, whatever the language model's `norm_eps`
BLOCK = 512  # patches that attention handles at a time; an image has thousands


class ImageTables(NamedTuple):
    """Integer and angle tables of a batch's images, [G, ...] each; all blocks of the tower read them."""

    patches: Patches
    cells: Cells
    angles: Rotation


def compute_angles(cfg: ModelConfig, row: jax.Array, column: jax.Array) -> Rotation:
    """Compute angles of patches, fp32 [..., K / 2]: by row for the first half of the channel pairs, else by column."""
    quarter = cfg.vision_dim // cfg.vision_n_heads // 4
    freq = cfg.vision_rope_theta ** (-np.arange(quarter, dtype=np.float64) / quarter)
    parts = compute_rotation(freq, row), compute_rotation(freq, column)
    return Rotation(*(jnp.concatenate(pair, axis=-1) for pair in zip(*parts, strict=True)))


def rotate_halves(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate channel pairs (j, j + K / 2) of x [..., K] by `rotation` [..., K / 2]; fp32 inside, x's type outside."""
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [left * rotation.cos - right * rotation.sin, right * rotation.cos + left * rotation.sin], axis=-1
    )
    return turned.astype(x.dtype)


class Affine(nnx.Module):
    """A linear layer with bias."""

    def __init__(self, make: Params, inputs: tuple[str, int], outputs: tuple[str, int], role: Role = Role("matrix")):
        self.weight = make.kernel(inputs, outputs, suffix="", role=role)
        self.bias = make.full(0.0, outputs)

    def __call__(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Map x [..., in] to [..., out] in `dtype`; the bias is added in fp32."""
        return (linear(x, self.weight, dtype).astype(jnp.float32) + whole(self.bias)).astype(dtype)


class PatchEmbed(nnx.Module):
    """Projection of a patch's pixels to the tower's width."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.proj = Affine(make, ("pixels", 3 * cfg.vision_patch_size**2), ("embed", cfg.vision_dim))


class PatchAttention(nnx.Module):
    """Attention of every patch to all patches of its image, with RoPE by row and column."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.heads, D = cfg.vision_n_heads, cfg.vision_dim
        parts = Role("matrix", MatrixSpec(output_split=3))  # queries, keys and values
        self.wqkv = Affine(make, ("embed", D), ("heads", 3 * D), parts)
        self.wo = Affine(make, ("heads", D), ("embed", D))

    def __call__(self, x_GPD: jax.Array, tables: ImageTables, dtype: jnp.dtype) -> jax.Array:
        """Compute the output [G, P, D]."""
        G, P, D = x_GPD.shape
        qkv = self.wqkv(x_GPD, dtype).reshape(G, P, 3, self.heads, D // self.heads)
        chunks = _chunk_spec(x_GPD)
        attend = jax.shard_map(_attend_patches, in_specs=(chunks, chunks), out_specs=chunks)
        return self.wo(attend(qkv, tables), dtype)


def _attend_patches(qkv_GP3HK: jax.Array, tables: ImageTables) -> jax.Array:
    """Attend from one device's chunk of patches to all patches of its groups: [G, P, H K].

    The device's groups become one sequence of images.
    """
    G, P, _, H, K = qkv_GP3HK.shape
    q, k, v = jnp.moveaxis(qkv_GP3HK, 2, 0)
    heads = jax.tree.map(lambda a: a[:, :, None], tables.angles)  # the same angles for every head
    q, k = rotate_halves(q, heads), rotate_halves(k, heads)
    k, v = gather_chunks(k), gather_chunks(v)  # [G, N, H, K]
    # One sequence of G N keys: an image's span of patches moves by the N patches of each group before its own.
    before = jnp.arange(G)[:, None] * k.shape[1]
    spans = (x + before for x in (tables.patches.start_P, tables.patches.end_P))
    sequence = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, *spans))
    return attend_images(*sequence, block=BLOCK).reshape(G, P, H * K)


class MLP(nnx.Module):
    """SwiGLU without a clamp; gate and up are one kernel."""

    def __init__(self, cfg: ModelConfig, make: Params):
        D, F = ("embed", cfg.vision_dim), cfg.vision_inter_dim
        self.w1 = make.kernel(D, ("mlp", 2 * F), role=Role("matrix", MatrixSpec(output_split=2)))
        self.w2 = make.kernel(("mlp", F), D)

    def __call__(self, x_GPD: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Compute the output [G, P, D]."""
        gate, up = jnp.split(linear(x_GPD, self.w1, dtype).astype(jnp.float32), 2, axis=-1)
        return linear(jax.nn.silu(gate) * up, self.w2, dtype)


class VisionBlock(nnx.Module):
    """A block of the tower, or all blocks stacked for a scan."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.norm1 = make.ones(("norm", cfg.vision_dim))
        self.attn = PatchAttention(cfg, make)
        self.norm2 = make.ones(("norm", cfg.vision_dim))
        self.mlp = MLP(cfg, make)

    def __call__(self, x_GPD: jax.Array, tables: ImageTables, dtype: jnp.dtype) -> jax.Array:
        """Compute the patches after the block, [G, P, D]."""
        x_GPD = x_GPD + self.attn(rms_norm(x_GPD, EPS, self.norm1), tables, dtype)
        return x_GPD + self.mlp(rms_norm(x_GPD, EPS, self.norm2), dtype)


class Vision(nnx.Module):
    """The vision tower: a ViT for images of any size (V4.1 section 2.1.1)."""

    def __init__(self, cfg: ModelConfig, make: Params):
        self.remat = cfg.remat
        part = dataclasses.replace(make, part="vision")
        self.patch_embed = PatchEmbed(cfg, part)
        self.blocks = VisionBlock(cfg, dataclasses.replace(part, layers=cfg.vision_n_layers))
        self.norm = make.ones(("norm", cfg.vision_dim))  # trained like the aligner, while the rest is frozen

    def __call__(self, patches: jax.Array, tables: ImageTables, dtype: jnp.dtype) -> jax.Array:
        """Compute features [G, P, D] of patches [G, P, 3, p, p]; zero for padding."""
        G, P = patches.shape[:2]
        real_GP1 = (tables.patches.start_P < tables.patches.end_P)[..., None]
        pixels = jnp.where(real_GP1, patches.reshape(G, P, math.prod(patches.shape[2:])), 0)
        block = apply_remat(lambda block, x_GPD: block(x_GPD, tables, dtype), self.remat)
        x_GPD = self.patch_embed.proj(pixels, dtype)
        step = lambda x_GPD, stacked: (block(stacked, x_GPD), None)
        x_GPD, _ = jax.lax.scan(step, x_GPD, self.blocks, unroll=emulated())
        return jnp.where(real_GP1, rms_norm(x_GPD, EPS, self.norm), 0)


class Aligner(nnx.Module):
    """Aligner of squares of r x r patches to positions of the language model (V4.1 section 2.1.1)."""

    def __init__(self, cfg: ModelConfig, make: Params):
        D, features = cfg.dim, cfg.vision_dim * cfg.vision_downsample_ratio**2
        self.w1 = Affine(make, ("features", features), ("embed", D))
        self.w2 = Affine(make, ("mlp", D), ("embed", D))

    def __call__(self, x_GPD: jax.Array, tables: ImageTables, dtype: jnp.dtype) -> jax.Array:
        """Compute vectors [G, C, D] of all cells in reading order; zero after the last image.

        The features of a cell are those of its patches, channel by channel: D, then row, then column. Patches below
        or right of the image count as zero.
        """
        chunks = _chunk_spec(x_GPD)
        features = jax.shard_map(_unshuffle, in_specs=(chunks, chunks), out_specs=chunks)
        hidden = self.w1(features(x_GPD, tables.cells.patch_Crr), dtype).astype(jnp.float32)
        y_GCD = self.w2(jax.nn.gelu(hidden, approximate=False), dtype)
        return jnp.where((tables.cells.row_C >= 0)[..., None], y_GCD, 0)


def _unshuffle(x_GPD: jax.Array, patch_GCrr: jax.Array) -> jax.Array:
    """Gather the features [G, C, D r r] of one device's cells from the patches of all devices."""
    x_GCrrD = jax.vmap(lambda x_ND, patch: x_ND.at[patch].get(mode="fill", fill_value=0))(
        gather_chunks(x_GPD), patch_GCrr
    )
    return jnp.moveaxis(x_GCrrD, -1, 2).reshape(*patch_GCrr.shape[:2], math.prod(x_GCrrD.shape[2:]))


def _chunk_spec(x: jax.Array) -> jax.P:
    """Return the spec of the first two axes of x, groups and chunks."""
    return jax.P(*jax.typeof(x).sharding.spec[:2])


def gather_chunks(x: jax.Array) -> jax.Array:
    """Gather the chunks [G, ...] of all devices along `context`, one after another on axis 1."""
    return jax.lax.all_gather(x, "context", axis=1, tiled=True)
