# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`."""

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from dsv4_jax.section import ConfigError


class Tokenizer(Protocol):
    """What the data needs of a tokenizer.

    Attributes:
        name: what it is, for people.
        fingerprint: changes when a text may get other ids.
        size: ids are below this.
        border: the id before a document's first token and after its last; no text has it.
    """

    name: str
    fingerprint: str
    size: int
    border: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, int, without borders."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids; borders are left out."""
        ...


class Bytes:
    """One token a byte of UTF-8, and a border."""

    name, fingerprint, size, border = "bytes", "bytes", 257, 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Bytes of every text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Text of bytes; what is no UTF-8 is replaced."""
        return bytes(ids[ids < self.border].astype(np.uint8)).decode(errors="replace")


class HuggingFace:
    """A `tokenizer.json`, with one of its tokens as the border."""

    def __init__(self, path: str, border: str):
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError(f"data.tokenizer = {path!r} needs a library: pip install 'dsv4_jax[text]'")
        from tokenizers import Tokenizer as Library

        try:
            text = Path(path).read_text()
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"data.tokenizer = {path!r} is no tokenizer.json: {error}") from error
        special = sorted(str(token) for token in self._library.get_added_tokens_decoder().values())
        found = self._library.token_to_id(border) if border else None
        if found is None:
            raise ConfigError(
                f"data.border = {border!r} must be the token of {path} that separates documents; its special "
                f"tokens are {', '.join(special[:20]) or 'none'}"
            )
        self.name, self.border = Path(path).name, found
        self.size = max(self._library.get_vocab().values()) + 1
        self.fingerprint = hashlib.sha256(f"{border}\n{text}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text; special tokens are neither added nor read out of the text."""
        self._library.encode_special_tokens = True
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids, without special tokens."""
        return self._library.decode(ids.tolist())


def load_tokenizer(tokenizer: str, border: str) -> Tokenizer:
    """The tokenizer named `bytes`, or the one in a file.

    Raises:
        ConfigError: if the file is none, or lacks the border token.
    """
    return Bytes() if tokenizer == "bytes" else HuggingFace(tokenizer, border)
