# SPDX-License-Identifier: Apache-2.0
"""Convert text to token ids and back, by bytes or with a Hugging Face `tokenizer.json`."""

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from dsv4_jax.section import ConfigError


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        name: name for messages.
        fingerprint: hash that differs between tokenizers that may give different ids to the same text.
        size: number of ids; all ids are below it.
        border: id before the first and after the last token of a document. It occurs in no text.
    """

    name: str
    fingerprint: str
    size: int
    border: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of every text, int [n], without borders."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`, without borders."""
        ...


class Bytes:
    """A tokenizer with one id per byte of UTF-8, and a border."""

    name, fingerprint, size, border = "bytes", "bytes", 257, 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of every text in UTF-8, uint8 [n]."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of bytes, without borders; invalid UTF-8 becomes the replacement character."""
        return bytes(ids[ids < self.border].astype(np.uint8)).decode(errors="replace")


class HuggingFace:
    """A tokenizer from a `tokenizer.json`, with one of its tokens as the border."""

    def __init__(self, path: str, border: str):
        """Read the file at `path`; `border` is the text of its token that separates documents.

        Raises:
            ConfigError: if the file is no `tokenizer.json` or lacks that token, or if `tokenizers` is not installed.
        """
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError(f"data.tokenizer = {path!r} needs a library: pip install 'dsv4_jax[text]'")
        from tokenizers import Tokenizer as Library

        try:
            text = Path(path).read_text()
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"data.tokenizer = {path!r} is no tokenizer.json: {error}") from error
        special = sorted(str(token) for token in self._library.get_added_tokens_decoder().values())
        border_id = self._library.token_to_id(border) if border else None
        if border_id is None:
            raise ConfigError(
                f"data.border = {border!r} must be the token of {path} that separates documents; its special "
                f"tokens are {', '.join(special[:20]) or 'none'}"
            )
        self.name, self.border = Path(path).name, border_id
        self.size = max(self._library.get_vocab().values()) + 1
        self.fingerprint = hashlib.sha256(f"{border}\n{text}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of every text, int32 [n].

        No special token is added. If the text spells a special token, it is encoded as ordinary text.
        """
        self._library.encode_special_tokens = True
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`, without special tokens."""
        return self._library.decode(ids.tolist())


def load_tokenizer(tokenizer: str, border: str) -> Tokenizer:
    """Make the byte tokenizer if `tokenizer` is `bytes`, else read the `tokenizer.json` at that path.

    Raises:
        ConfigError: if the file is no `tokenizer.json`, or lacks the token `border`.
    """
    return Bytes() if tokenizer == "bytes" else HuggingFace(tokenizer, border)
