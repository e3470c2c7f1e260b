# SPDX-License-Identifier: Apache-2.0
"""Text as documents of bytes: the standard library's source, or a file or folder of the user's."""

import itertools
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsv4_jax.validate import ConfigError

BORDER = 256  # the token before a document's first byte and after its last
VOCAB_SIZE = 257

# Folders of the standard library that are tests, legacy tools or not the standard library.
_SKIPPED = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_PART = 1 << 14  # a single file is cut into documents of about this many bytes, at line ends


class Document(NamedTuple):
    """A document: its name inside the source and its bytes."""

    name: str
    text: bytes

    @property
    def tokens(self) -> np.ndarray:
        """int32 token ids: every byte, between two BORDER tokens."""
        body = np.frombuffer(self.text, np.uint8).astype(np.int32)
        return np.concatenate([[BORDER], body, [BORDER]]).astype(np.int32)


def read_documents(path: str) -> list[Document]:
    """The documents at `path`, in the order of their names.

    A folder gives one document a file, hidden ones left out; a file is cut at line ends; an empty
    path is the standard library's source on this machine.

    Raises:
        ConfigError: if nothing is there or all of it is empty.
    """
    if not path:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts)]
    else:
        root = Path(path)
        if root.is_file():
            lines = root.read_bytes().splitlines(keepends=True)
            return _checked([Document(f"{i:08}", text) for i, text in enumerate(_parts(lines))], path)
        if not root.is_dir():
            raise ConfigError(f"data.path = {path!r} is neither a file nor a folder")
        hidden = (p for p in root.rglob("*") if not any(part.startswith(".") for part in p.relative_to(root).parts))
        files = [f for f in hidden if f.is_file()]
    named = sorted((f.relative_to(root).as_posix(), f) for f in files)
    return _checked([Document(name, f.read_bytes()) for name, f in named], path)


def split(documents: list[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Documents to train on and documents to hold out, by a hash of their names.

    Raises:
        ConfigError: if either part is empty.
    """

    def draw(document: Document) -> float:
        return zlib.crc32(document.name.encode()) / 2**32

    train = [d for d in documents if draw(d) >= held_out]
    evaluation = [d for d in documents if draw(d) < held_out]
    if not train or not evaluation:
        raise ConfigError(
            f"data.held_out = {held_out} of {len(documents)} documents leaves {len(train)} to train on and "
            f"{len(evaluation)} held out; both need one at least: change it or give more text"
        )
    return train, evaluation


def _parts(lines: list[bytes]) -> list[bytes]:
    ends = itertools.accumulate(len(line) for line in lines)
    numbered = zip((end // _PART for end in ends), lines, strict=True)
    return [b"".join(line for _, line in part) for _, part in itertools.groupby(numbered, lambda pair: pair[0])]


def _checked(documents: list[Document], path: str) -> list[Document]:
    documents = [d for d in documents if d.text]
    if not documents:
        raise ConfigError(f"data.path = {path!r} holds no text")
    return documents
