# SPDX-License-Identifier: Apache-2.0
"""Engram: a memory of n-grams, looked up before some layers and added to their streams (V4.1 section 2.4.2).

Letters: B rows, S positions, N streams, D width, L Engrams, C tables of an Engram, R rows of all its tables,
K width of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax.mesh import act_spec, row_spec
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.params import Params, TokenMap, linear, mark_saved, whole
from dsv4_jax.model.token_map import count_numbers, make_token_map
from dsv4_jax.ops.documents import Documents
from dsv4_jax.ops.lookup import lookup
from dsv4_jax.ops.ngrams import Hashing, hash_ngrams, make_hashing
from dsv4_jax.optim.roles import MatrixSpec, Role

PART = "engram"  # part of the model for the optimizer, which multiplies its learning rate by a factor


def compute_hashing(cfg: ModelConfig) -> Hashing:
    """Compute the constants of all n-gram hashes of the model.

    Raises:
        ConfigError: if they give other sizes than the configuration states, or too many rows.
    """
    hashes = make_hashing(
        cfg.engram_layer_ids,
        cfg.engram_max_ngram_size,
        cfg.engram_n_heads,
        cfg.engram_vocab_size,
        count_numbers(cfg),
    )
    stated = cfg.engram_num_embeddings
    why = "the row counts that engram_vocab_size, engram_n_heads and engram_max_ngram_size give"
    cfg.need("engram_num_embeddings", stated in ((), hashes.rows), f"must be {hashes.rows}, {why}")
    return hashes


def count_spare_rows(rows: int) -> int:
    """Count the rows to add to a table of `rows` so that many numbers of devices divide it. They are never read.

    The stored rows are a multiple of 3 x 2^k, for the largest k up to 12 that adds at most a thousandth. The mesh has
    no part in it, so that a checkpoint fits any.
    """
    multiples = (3 << k for k in range(12, -1, -1) if (3 << k) * 1000 <= rows)
    return -rows % next(multiples, 1)


def make_token_map_buffer(cfg: ModelConfig, make: Params) -> TokenMap | None:
    """Make the buffer of the model's token map; None without Engrams, or where `make_token_map` gives none."""
    numbers_V = make_token_map(cfg) if cfg.engram_layer_ids else None
    return None if numbers_V is None else make.buffer(TokenMap, jnp.asarray(numbers_V), "tokens")


def compute_engram_rows(
    cfg: ModelConfig,
    numbers_V: TokenMap | None,
    ids_BS: jax.Array,
    text_BS: jax.Array,
    docs: Documents,
    before: int = 0,
) -> jax.Array:
    """Compute the table rows that every token reads in every Engram, int32 [B, S - before, L, C].

    Args:
        cfg: the model.
        numbers_V: token map, the number in n-grams of every token id.
        ids_BS: token ids.
        text_BS: whether a token is text, neither of an image nor padding.
        docs: document borders.
        before: number of tokens at the start of the rows that only n-grams of later ones read.

    Raises:
        ValueError: without a token map.
    """
    if numbers_V is None:
        raise ValueError(
            f"model.engram_token_map = 'identity' gives {cfg.vocab_size} numbers, but "
            f"model.engram_compressed_vocab_size = {cfg.engram_compressed_vocab_size}: name the tokenizer.json in "
            f"model.engram_token_map, or pass engram_rows"
        )

    def rows(numbers_V: jax.Array, *batch) -> jax.Array:
        ids_BS, text_BS, docs = batch
        hashed = hash_ngrams(compute_hashing(cfg), numbers_V[ids_BS], numbers_V[cfg.engram_pad_id], text_BS, docs)
        return hashed[:, before:]

    batch = jax.tree.map(lambda a: jax.reshard(a, row_spec(2)), (ids_BS, text_BS, docs))
    find = jax.shard_map(rows, in_specs=(jax.P(), *[row_spec(2)] * 3), out_specs=row_spec(4))
    return jax.reshard(find(numbers_V[...], *batch), act_spec(4))


class Engram(nnx.Module):
    """Engram memory before one layer: a table of n-grams, and projections of its rows to keys and values.

    The keys gate the values, which are added to the streams.
    """

    def __init__(self, cfg: ModelConfig, make: Params, number: int):
        self.cfg = cfg
        N, D, K = cfg.hc_mult, cfg.dim, cfg.engram_head_dim
        hashes = compute_hashing(cfg)
        rows, C = hashes.rows[number], hashes.primes_LC.shape[1]
        spare = count_spare_rows(rows)
        self.embed = make.table(("rows", rows + spare), ("head_dim", K), role=Role("table", part=PART), spare=spare)
        # A key projection for every stream and one for the value.
        maps = Role("matrix", MatrixSpec(output_split=N + 1), part=PART)
        self.wkv = make.kernel(("heads", C * K), ("streams", (N + 1) * D), role=maps)
        gains = Role("norm", part=PART)
        self.q_weight = make.ones(("streams", N), ("norm", D), suffix="", role=gains)
        self.k_weight = make.ones(("streams", N), ("norm", D), suffix="", role=gains)

    def __call__(self, x_BSND: jax.Array, rows_BSC: jax.Array, text_BS: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Add the memory of the n-grams in `rows` to the streams, where `text`.

        Elsewhere zeros are read. Their values are zero whatever the gate, so the streams stay as they were, and no
        gradient reaches the table.
        """
        N, D = x_BSND.shape[2:]
        with jax.named_scope("lookup"):
            e_BSI = mark_saved(self._read(rows_BSC, text_BS, dtype))
        # One key for every stream [B, S, N, D] and one value for all [B, S, D].
        kv = linear(e_BSI, self.wkv, dtype)
        key_BSND = kv[..., : N * D].reshape(x_BSND.shape)
        value_BSD = kv[..., N * D :]
        gain_ND = whole(self.q_weight) * whole(self.k_weight)
        gate_BSN = compute_gates(x_BSND, key_BSND, gain_ND, self.cfg.norm_eps)
        memory = jnp.einsum("bsn,bsd->bsnd", gate_BSN, value_BSD.astype(jnp.float32))
        return (x_BSND + memory).astype(x_BSND.dtype)

    def _read(self, rows_BSC: jax.Array, text_BS: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Look up the rows of each token, side by side [B, S, C K]; zeros where not `text`."""
        table = self.embed[...]
        # A row number after the table's last reads zeros. The table is split by rows over the mesh axes of its spec.
        rows_BSC = jnp.where(text_BS[..., None], rows_BSC, len(table))
        spec = jax.typeof(table).sharding.spec
        axes = (spec[0],) if isinstance(spec[0], str) else tuple(spec[0] or ())

        def read(table_RK: jax.Array, rows_BSC: jax.Array) -> jax.Array:
            B, S, _ = rows_BSC.shape
            return lookup(table_RK, rows_BSC.reshape(-1), axes, dtype).reshape(B, S, -1)

        return jax.shard_map(read, in_specs=(spec, act_spec(3)), out_specs=act_spec(3))(table, rows_BSC)


def compute_gates(x_BSND: jax.Array, key_BSND: jax.Array, gain_ND: jax.Array, eps: float) -> jax.Array:
    """Compute the weight of the memory in each stream, fp32 [B, S, N]: sigmoid of the signed root of q k / sqrt(D).

    q and k are stream and key after RMSNorm; `gain` is the product of the two norms' weights. The root's slope is 0
    below |q k| = 1e-6 sqrt(D), so that the gradient is finite at q k = 0 and at a key of zeros.
    """
    x, key = x_BSND.astype(jnp.float32), key_BSND.astype(jnp.float32)
    scale = lambda a: jax.lax.rsqrt((a * a).mean(-1) + eps)
    dot = (x * key * gain_ND).sum(-1) * scale(x) * scale(key) / np.sqrt(x.shape[-1])
    return jax.nn.sigmoid(jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)))
