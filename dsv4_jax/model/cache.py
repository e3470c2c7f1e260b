# SPDX-License-Identifier: Apache-2.0
"""Keep what later tokens of a row read of earlier ones, so that every token is computed once.

A cache holds `rows` texts of any lengths. `DeepSeek.extend` computes a chunk of T tokens of every row, of which `n` are
real. It leaves the cache as it is and returns what the chunk adds. `commit` takes over the first tokens of that, as
many as are wanted of each row: all of them, fewer where drafted tokens were rejected, or none.

All arrays are stacked over the layers of a scan, [R, B, ...], and split over `mesh.BATCH`. Letters: R layers of a
stack, B rows, T tokens of the chunk, G longest n-gram, W window, h kept tokens, U = h + T, K head width, N streams,
D width.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import BATCH, row_spec
from dsv4_jax.model.config import LayerSpec, ModelConfig
from dsv4_jax.model.place import (
    Entries,
    Gated,
    LayerCache,
    LayerUpdate,
    Recent,
    count_channels,
    count_tail,
    put_entries,
)
from dsv4_jax.model.scan_groups import find_scan_groups
from dsv4_jax.section import ConfigError

_STACK = jax.P(None, BATCH)


class Ngrams(NamedTuple):
    """Last tokens that n-grams reach back to, U = G - 1 in a cache: ids, and whether each is text."""

    ids_RBU: jax.Array
    text_RBU: jax.Array


class Behind(NamedTuple):
    """Last tokens of the MTP block, which is one token behind the layers.

    Attributes:
        streams_RBUND: streams after the last layer, U = 1 in a cache.
        recent: keys of the block's window.
    """

    streams_RBUND: jax.Array
    recent: Recent


class History(NamedTuple):
    """The last tokens that parts of the model outside its layers read again; None for a part that there is not.

    Attributes:
        ngrams: for Engrams.
        mtp: for the MTP block.
        drafts_RBUK: keys of the context of every draft block (DSpark), rotated, U = W in a cache.
    """

    ngrams: Ngrams | None
    mtp: Behind | None
    drafts_RBUK: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What is kept of the tokens of B rows.

    Attributes:
        length_B: tokens of each row.
        layers: cache of every layer, stacked like `DeepSeek.groups`.
        history: last tokens outside the layers.
        capacity: tokens that a row has room for.
    """

    length_B: jax.Array
    layers: list[list[LayerCache]]
    history: History
    capacity: int = dataclasses.field(metadata={"static": True})


class Pending(NamedTuple):
    """A chunk that `commit` can add to a cache.

    Attributes:
        cache: the cache before the chunk.
        layers: what each layer adds, stacked like `Cache.layers`.
        history: `Cache.history` followed by the tokens of the chunk.
    """

    cache: Cache
    layers: list[list[LayerUpdate]]
    history: History


def init_cache(cfg: ModelConfig, rows: int, capacity: int, *, draft: bool = False) -> Cache:
    """Make the cache of rows without tokens.

    Args:
        cfg: the model.
        rows: number of rows, a multiple of the mesh's data x expert.
        capacity: tokens that a row has room for.
        draft: also keep what the MTP block or the draft blocks read.

    Raises:
        ConfigError: if the mesh's devices do not divide `rows`.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    if rows % (devices := math.prod(sizes[axis] for axis in BATCH)):
        raise ConfigError(f"a cache of {rows} rows: mesh.data x mesh.expert = {devices} must divide them")
    B, W, K, dtype = rows, cfg.window_size, cfg.head_dim, cfg.dtype

    def zeros(*shape: int, dtype: jnp.dtype = dtype) -> jax.Array:
        return jnp.zeros(shape, dtype, out_sharding=_STACK)

    def recent(R: int, spec: LayerSpec) -> Recent:
        def gated(width: int) -> Gated:
            shape = R, B, count_tail(spec), count_channels(spec, width)
            return Gated(zeros(*shape), zeros(*shape))

        makes = spec.mode in ("csa", "hca", "full")
        index = spec.mode == "csa" and cfg.attention != "dense"
        window = zeros(R, B, W - 1, K)
        return Recent(window, gated(K) if makes else None, gated(cfg.index_head_dim) if index else None)

    def layer(R: int, spec: LayerSpec) -> LayerCache:
        entries = None
        if spec.mode in ("csa", "hca", "full"):
            M, indexed = -(-capacity // spec.ratio), spec.indexed and cfg.attention != "dense"
            entries = Entries(zeros(R, B, M, K), zeros(R, B, M, cfg.index_head_dim) if indexed else None)
        return LayerCache(recent(R, spec), entries)

    layers = [
        [layer(group.repeats, cfg.layer_specs[group.start + j]) for j in range(group.period)]
        for group in find_scan_groups(cfg.layer_specs)
    ]
    ngrams = mtp = drafts = None
    if cfg.engram_layer_ids:
        ngrams = Ngrams(*(zeros(1, B, cfg.engram_max_ngram_size - 1, dtype=kind) for kind in (jnp.int32, jnp.bool)))
    if draft and cfg.dspark_target_layer_ids:
        drafts = zeros(cfg.n_mtp_layers, B, W, K)
    elif draft and cfg.n_mtp_layers:
        mtp = Behind(zeros(1, B, 1, cfg.hc_mult, cfg.dim), recent(1, LayerSpec("window")))
    length_B = jnp.zeros(B, jnp.int32, out_sharding=jax.P(BATCH))
    return Cache(length_B, layers, History(ngrams, mtp, drafts), capacity)


def measure_cache(cache: Cache) -> dict[str, int]:
    """Count the bytes of a cache, or of its shapes, by kind."""
    sizes = dict.fromkeys(("entries", "index keys", "windows", "unfinished windows", "other"), 0)

    def count(kind: str, tree: object) -> None:
        sizes[kind] += sum(x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves(tree))

    for layer in (layer for stack in cache.layers for layer in stack):
        if layer.entries is not None:
            count("entries", layer.entries.entries_BmK)
            count("index keys", layer.entries.keys_BmJ)
        count("windows", layer.recent.window_BUK)
        count("unfinished windows", (layer.recent.main, layer.recent.index))
    count("other", cache.history)
    return sizes


def count_bytes_per_token(cfg: ModelConfig, *, quantised: bool = False) -> float:
    """Count the bytes that each token of a text adds to its cache: those of entries and index keys, over all layers.

    The numbers of entries come from the shapes of `init_cache`. `quantised`: in the formats of the released models.
    Index keys have 4 bits and a scale of 8 for 32. Entries of V4 have 8 bits and a scale of 8 for 64, but 16 bits for
    channels that RoPE rotates, and fill multiples of 8 bytes; those of V4.1 have 4 bits and a scale of 8 for 16.
    """
    tokens = math.lcm(*(set(cfg.compress_ratios) - {0}))
    sizes = jax.sharding.get_abstract_mesh().shape
    rows = math.prod(sizes[axis] for axis in BATCH)
    cache, total = jax.eval_shape(lambda: init_cache(cfg, rows, tokens)), 0
    plain = cfg.head_dim - cfg.rope_head_dim
    v4 = -(-(plain + 2 * cfg.rope_head_dim + -(-plain // 64)) // 8) * 8
    entry = cfg.head_dim // 2 + cfg.head_dim // 16 if cfg.kv_source_layers else v4
    for entries in (layer.entries for stack in cache.layers for layer in stack if layer.entries is not None):
        for x, width in ((entries.entries_BmK, entry), (entries.keys_BmJ, cfg.index_head_dim * 17 // 32)):
            if x is not None:  # [R, B, M, channels]
                total += x.shape[0] * x.shape[2] * (width if quantised else x.shape[3] * x.dtype.itemsize)
    return total / tokens


def grow(cfg: ModelConfig, cache: Cache, capacity: int) -> Cache:
    """Make room for the entries of `capacity` tokens, more than there is room for now."""

    def enlarged(spec: LayerSpec, layer: LayerCache) -> LayerCache:
        more = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, -(-capacity // spec.ratio) - x.shape[2]), (0, 0)])
        return layer._replace(entries=jax.tree.map(more, layer.entries))

    layers = [
        [enlarged(cfg.layer_specs[group.start + j], layer) for j, layer in enumerate(stack)]
        for group, stack in zip(find_scan_groups(cfg.layer_specs), cache.layers, strict=True)
    ]
    return dataclasses.replace(cache, layers=layers, capacity=capacity)


def join_history(kept_RBU: jax.Array, new_BT: jax.Array) -> jax.Array:
    """Put tokens of a chunk [B, T, ...] after the kept ones [1, B, U, ...]; the result is [1, B, U + T, ...]."""
    new_BT = jax.reshard(new_BT, row_spec(new_BT.ndim))
    return jnp.concatenate([kept_RBU, new_BT[None]], axis=2)


def commit(pending: Pending, n_B: jax.Array) -> Cache:
    """Add the first n tokens of a chunk to each row of the cache: at most those that were real.

    Entries made from the tokens after them are added too. Nobody sees these before the tokens that then end their
    windows have arrived, and with those they are made again.
    """
    cache, n_B = pending.cache, jax.reshard(jnp.asarray(n_B, jnp.int32), jax.P(BATCH))
    run = jax.shard_map(_commit, in_specs=(*[_STACK] * 4, jax.P(BATCH)), out_specs=_STACK)
    layers, history = run(cache.layers, pending.layers, cache.history, pending.history, n_B)
    return dataclasses.replace(cache, length_B=cache.length_B + n_B, layers=layers, history=history)


def _commit(
    layers: list[list[LayerCache]],
    updates: list[list[LayerUpdate]],
    history: History,
    followed: History,
    n_B: jax.Array,
) -> tuple[list[list[LayerCache]], History]:
    def take(kept: jax.Array, tokens_RBU: jax.Array) -> jax.Array:
        """Take as many tokens as are kept, up to the n-th of the chunk."""
        row = lambda x_U, n: jax.lax.dynamic_slice_in_dim(x_U, n, kept.shape[2])
        return jax.vmap(jax.vmap(row), in_axes=(0, None))(tokens_RBU, n_B)

    def advance(old: LayerCache, new: LayerUpdate) -> LayerCache:
        entries = None
        if old.entries is not None and new.entries is not None and new.slot_Bm is not None:
            entries = jax.vmap(put_entries)(old.entries, new.entries, new.slot_Bm)
        return LayerCache(jax.tree.map(take, old.recent, new.recent), entries)

    pairs = (zip(*group, strict=True) for group in zip(layers, updates, strict=True))
    return [[advance(*pair) for pair in group] for group in pairs], jax.tree.map(take, history, followed)
