# SPDX-License-Identifier: Apache-2.0
"""Map token ids to the numbers that n-grams are made of: ids that count as the same share one (V4.1 section 2.4.2)."""

import importlib.util
from pathlib import Path

import numpy as np

from dsv4_jax.model.config import ModelConfig
from dsv4_jax.section import ConfigError

UNDECODABLE = "\ufffd"
SPACE = "\ue000"  # from Unicode's private use area: protects a lone space from being stripped


def make_token_map(cfg: ModelConfig) -> np.ndarray | None:
    """Make the map of every token id to its number, int32 [vocab], by `engram_token_map`.

    Return None for `identity` if `engram_compressed_vocab_size` is not the vocabulary's size, as in an official
    configuration without its tokenizer. The rows of n-grams must then come with the batch.

    Raises:
        ConfigError: if the file cannot be used or does not fit the vocabulary.
    """
    source, numbers = cfg.engram_token_map, count_numbers(cfg)
    if source == "identity":
        return np.arange(cfg.vocab_size, dtype=np.int32) if numbers == cfg.vocab_size else None
    if source.endswith(".npy"):
        return _from_array(source, cfg.vocab_size, numbers)
    return _from_tokenizer(cfg, numbers)


def count_numbers(cfg: ModelConfig) -> int:
    """Return the number of different ids after the map."""
    return cfg.engram_compressed_vocab_size or cfg.vocab_size


def _from_array(path: str, vocab: int, numbers: int) -> np.ndarray:
    key = f"model.engram_token_map = {path!r}"
    try:
        numbers_V = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} is no array: {error}") from error
    if numbers_V.shape != (vocab,) or not np.issubdtype(numbers_V.dtype, np.integer):
        want = f"integers [{vocab}], a number for each token id"
        raise ConfigError(f"{key} must hold {want}; found {numbers_V.dtype}{list(numbers_V.shape)}")
    low, high = int(numbers_V.min()), int(numbers_V.max())
    if low < 0 or high >= numbers:
        raise ConfigError(f"{key} must hold numbers from 0 to {numbers - 1}; found {low} to {high}")
    return numbers_V.astype(np.int32)


def _from_tokenizer(cfg: ModelConfig, numbers: int) -> np.ndarray:
    """Number keys in the order of their first token. Ids beyond the tokenizer's get the padding's number."""
    path = cfg.engram_token_map
    key = f"model.engram_token_map = {path!r}"
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError(f"{key} needs a library: pip install 'dsv4_jax[text]'")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text())
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{key} is no tokenizer.json: {error}") from error
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if not cfg.engram_pad_id < size <= cfg.vocab_size:
        limits = f"more than engram_pad_id = {cfg.engram_pad_id} and at most vocab_size = {cfg.vocab_size}"
        raise ConfigError(f"{key} has {size} tokens, expected {limits}")
    seen: dict[str, int] = {}
    numbers_V = np.array([seen.setdefault(k, len(seen)) for k in _keys(tokenizer, size)], np.int32)
    if len(seen) != numbers:
        raise ConfigError(
            f"{key} gives {len(seen)} numbers, but model.engram_compressed_vocab_size = "
            f"{cfg.engram_compressed_vocab_size} stands for {numbers}"
        )
    return np.concatenate([numbers_V, np.full(cfg.vocab_size - size, numbers_V[cfg.engram_pad_id], np.int32)])


def _keys(tokenizer, size: int) -> list[str]:
    """Make the key of every token: its text without case, accents and repeated or outer spaces.

    Tokens with equal keys count as the same. A token that is no text by itself, such as a part of a character, has
    its own name as key and is like no other.
    """
    from tokenizers import Regex, normalizers

    plain = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), SPACE),
            normalizers.Strip(),
            normalizers.Replace(SPACE, " "),
        ]
    )
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    return [
        tokenizer.id_to_token(i) if UNDECODABLE in text else plain.normalize_str(text) or text
        for i, text in enumerate(texts)
    ]
