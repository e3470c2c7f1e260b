# SPDX-License-Identifier: Apache-2.0
"""Turn tokens into text as they come, and end the text at a stop string."""

from collections.abc import Sequence

import numpy as np

from dsv4_jax.data.tokenizer import Tokenizer

_LONGEST = 8  # tokens that wait for the rest of a character: more than any character has


class TextStream:
    """The text of one request.

    Attributes:
        stopped: whether a stop string was found; it and what follows are no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Begin a text that ends before the first of the strings `stop`."""
        self.stopped = False
        self._tokenizer, self._stop, self._held = tokenizer, [s for s in stop if s], ""
        self._ids: list[int] = []  # those of the last piece of text, which may change how the next ones read
        self._read = 0  # and how many these are

    def add(self, token: int) -> str:
        """Add a token; return the text that is certain now: of whole characters, and not the start of a stop string."""
        self._ids.append(token)
        before, now = (self._tokenizer.decode(np.array(ids)) for ids in (self._ids[: self._read], self._ids))
        if now.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._read < _LONGEST:
            return ""
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return self._release(now[len(before) :])

    def end(self) -> str:
        """Return the text that was held back."""
        before, now = (self._tokenizer.decode(np.array(ids)) for ids in (self._ids[: self._read], self._ids))
        text, self._held, self._ids, self._read = self._release(now[len(before) :]) + self._held, "", [], 0
        return text

    def _release(self, text: str) -> str:
        """Return all but what might become a stop string."""
        text = self._held + text
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]
