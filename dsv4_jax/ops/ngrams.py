# SPDX-License-Identifier: Apache-2.0
"""Hash the n-grams that end at every token to the rows of its tables that an Engram reads (V4.1 section 2.4.2).

The hash is 64-bit arithmetic. It is done in pairs of 32-bit numbers, as JAX has no 64-bit ones by default.
Letters: B rows, S positions, L Engram layers, G look-back (n-grams of 2 to G tokens), H tables of each
length, C = (G - 1) H tables of a layer, by length and then by head.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.ops.documents import Documents
from dsv4_jax.section import ConfigError

Pair = tuple[jax.Array, jax.Array]


class Hashing(NamedTuple):
    """Hold the constants of all layers' hashes.

    Attributes:
        multipliers_LG: odd factor of the token k places back, uint64.
        primes_LC: number of rows of every table, int32.
        offsets_LC: first row of every table among the rows of its layer, int32.
    """

    multipliers_LG: np.ndarray
    primes_LC: np.ndarray
    offsets_LC: np.ndarray

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each layer's tables together."""
        return tuple(int(row.sum(dtype=np.int64)) for row in self.primes_LC)


@functools.cache
def make_hashing(layers: tuple[int, ...], longest: int, heads: int, start: int, vocab: int) -> Hashing:
    """Make the constants of the Engrams before the given layers.

    Args:
        layers: numbers of the layers, which seed their multipliers.
        longest: length of the longest n-gram in tokens, G.
        heads: number of tables for each length, H.
        start: lower bound of the table sizes. Each table takes the next unused prime >= `start` as its number
            of rows.
        vocab: bound of the token numbers. Multipliers are chosen so that their products with token numbers stay
            below 2^63.

    Raises:
        ConfigError: if a layer's rows cannot be counted in int32.
    """
    bound = max(1, (2**63 - 1) // vocab // 2)
    draws = [np.random.default_rng(10007 * layer).integers(0, bound, longest) for layer in layers]
    columns = (longest - 1) * heads
    unused = itertools.islice(filter(_is_prime, itertools.count(start)), len(layers) * columns)
    primes = np.array(list(unused), np.int64).reshape(len(layers), columns)
    ends = np.cumsum(primes, axis=1)
    if ends.max() >= 2**31:
        raise ConfigError(
            f"model.engram_vocab_size = {start} gives an Engram {ends.max():,} rows in {columns} tables, "
            f"which must be below 2^31"
        )
    multipliers = np.stack(draws).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    return Hashing(multipliers, primes.astype(np.int32), (ends - primes).astype(np.int32))


def _is_prime(n: int) -> bool:
    return n >= 2 and all(n % d for d in range(2, math.isqrt(n) + 1))


def hash_ngrams(
    hashing: Hashing, numbers_BS: jax.Array, pad: jax.Array | int, live_BS: jax.Array, docs: Documents
) -> jax.Array:
    """Hash every token's n-grams to rows of the layers' tables, int32 [B, S, L, C]. Batch rows are not split.

    Args:
        hashing: constants of the hashes.
        numbers_BS: the tokens' numbers, int32, from the token map.
        pad: number that replaces a missing token.
        live_BS: whether the token is text. Tokens before the document's start are missing, and so are the
            nearest token that is not text and all before it.
        docs: tables of the documents.
    """
    # After step k, `hashed` is the xor of number times multiplier of the token and the k tokens before it.
    live, rows = live_BS, []
    hashed: Pair | None = None
    for k in range(hashing.multipliers_LG.shape[1]):
        live &= (docs.position_BS >= k) & jnp.roll(live_BS, k, axis=1)
        t_BS = jnp.where(live, jnp.roll(numbers_BS, k, axis=1), pad)
        term = multiply(t_BS[..., None].astype(jnp.uint32), hashing.multipliers_LG[:, k])
        hashed = term if hashed is None else (hashed[0] ^ term[0], hashed[1] ^ term[1])
        # An n-gram of k + 1 tokens has H tables: its row in each is the hash modulo the table's prime.
        if k:
            H = hashing.primes_LC.shape[1] // (hashing.multipliers_LG.shape[1] - 1)
            columns = slice((k - 1) * H, k * H)
            high, low = (half[..., None] for half in hashed)
            row = remainder((high, low), hashing.primes_LC[:, columns]).astype(jnp.int32)
            rows.append(row + hashing.offsets_LC[:, columns])
    return jnp.concatenate(rows, axis=-1)


def multiply(x: jax.Array, m: np.ndarray) -> Pair:
    """Multiply x (uint32) by m (uint64) modulo 2^64; return the (high, low) 32 bits. The two broadcast."""
    m_high, m_low = (m >> np.uint64(32)).astype(np.uint32), m.astype(np.uint32)
    # The low 32 x 32 bits of the product by halves of 16 bits, so that no partial product overflows.
    x1, x0 = x >> 16, x & 0xFFFF
    m1, m0 = m_low >> 16, m_low & 0xFFFF
    a, b = x1 * m0, x0 * m1
    carry = (x0 * m0 >> 16) + (a & 0xFFFF) + (b & 0xFFFF)
    return x * m_high + x1 * m1 + (a >> 16) + (b >> 16) + (carry >> 16), x * m_low


def remainder(pair: Pair, p: np.ndarray) -> jax.Array:
    """Compute (2^32 high + low) mod p, uint32, for p > 0 (int32), which broadcasts with the halves.

    By long division. Each step brings down as many bits of `low` as fit into 32 together with a remainder.
    """
    high, low = pair
    digit, left = 32 - int(p.max()).bit_length(), 32
    p = p.astype(np.uint32)
    r = high % p
    while left:
        bits = min(digit, left)
        left -= bits
        r = (r << bits | (low >> left) & ((1 << bits) - 1)) % p
    return r
