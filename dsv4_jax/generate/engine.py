# SPDX-License-Identifier: Apache-2.0
"""Generate tokens for many requests at a time, each row of a cache serving one after another.

A step computes either the next chunk of the prompts, or one token (with drafts: a few) of every row whose prompt is
done. The two kinds of steps take turns, so that a long prompt does not hold up the others. Rows without work are idle.
There is one program for each kind of step and each capacity of the cache, and none depends on how many rows have work:
what a request gets does not depend on the others.
"""

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.generate.programs import Chunk, embed_prompt, read_chunk, read_drafts
from dsv4_jax.generate.request import Request
from dsv4_jax.generate.sampling import Rule
from dsv4_jax.generate.speculate import check_width
from dsv4_jax.generate.text import TextStream
from dsv4_jax.mesh import BATCH, ensure_mesh
from dsv4_jax.model.cache import grow, init_cache
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.model.token_types import TEXT
from dsv4_jax.section import ConfigError


class Token(NamedTuple):
    """A generated token.

    Attributes:
        request: number of the request, in the order in which they were added.
        id: the token.
        logprob: logarithm of its probability under the model, without temperature and limits.
        finish: why the text ends here: `stop` or `length`; None if it goes on.
        text: text that is certain with this token; "" without a tokenizer.
        experts: experts of the tokens that were read for it, int32 [layers, tokens, k]; None unless they are kept.
            Together a request's arrays are the `forced_experts` of its text without the last token.
    """

    request: int
    id: int
    logprob: float
    finish: str | None
    text: str
    experts: np.ndarray | None


@dataclasses.dataclass
class _Row:
    """The request that a row of the cache serves.

    Attributes:
        ids: tokens of the text: the first `length` are in the cache, the others are to be read.
        made: number of tokens made so far.
        images: embeddings of the text's first tokens, and their kinds; None without images.
    """

    number: int
    request: Request
    ids: list[int]
    length: int = 0
    made: int = 0
    images: tuple[np.ndarray, np.ndarray] | None = None
    stream: TextStream | None = None
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def reads_prompt(self) -> bool:
        return not self.made

    @property
    def unread(self) -> int:
        return len(self.ids) - self.length


class Generator:
    """Generate tokens for requests, `rows` at a time.

    Attributes:
        rows: number of rows of the cache.
        chunk: tokens of a prompt that one step reads.
        capacity: tokens for whose entries the cache has room; it doubles when a text needs more.
        draft: tokens that are drafted at a time.
        steps: number of steps of each kind so far: `prompt` and `token`.
        last: kind of the last step.
        drafted: drafts of each row that were checked so far.
        accepted: how many of them were accepted, for each place of a draft.
    """

    def __init__(
        self,
        model: DeepSeek,
        rows: int = 8,
        *,
        chunk: int = 64,
        capacity: int = 256,
        draft: int = 0,
        keep_experts: bool = False,
        tokenizer: Tokenizer | None = None,
    ):
        """Make an empty cache on the current mesh.

        Args:
            model: the model.
            rows: number of requests to serve at a time, rounded up to a multiple of the mesh's data x expert.
            chunk: tokens of a prompt to read at a time, rounded up to a multiple of the mesh's context.
            capacity: tokens to make room for at first.
            draft: tokens to draft at a time; 0: none.
            keep_experts: return the experts of all tokens.
            tokenizer: makes the tokens' text.

        Raises:
            ConfigError: for sizes below 1, or if the model cannot draft as many tokens.
        """
        check_width(model.cfg, draft)
        for name, size in (("rows", rows), ("chunk", chunk), ("capacity", capacity)):
            if size < 1:
                raise ConfigError(f"{name} = {size} must be 1 or above")
        ensure_mesh()
        sizes = jax.sharding.get_abstract_mesh().shape
        self._devices = math.prod(sizes[axis] for axis in BATCH)
        self.model, self.keep_experts, self.draft, self.tokenizer = model, keep_experts, draft, tokenizer
        self.rows, self.chunk = rows + -rows % self._devices, chunk + -chunk % sizes["context"]
        self._one = sizes["context"]  # tokens of a chunk that reads a single one
        self._leaves, self._tree = jax.tree.flatten(model)
        self.cache = init_cache(model.cfg, self.rows, capacity, draft=draft > 0)
        self.steps, self.last = collections.Counter[str](), ""
        self.drafted, self.accepted = 0, np.zeros(draft, int)
        self._table: list[_Row | None] = [None] * self.rows
        self._queue: collections.deque[_Row] = collections.deque()
        self._done: dict[int, _Row] = {}  # the last finished request of each row
        self._added = 0

    @property
    def capacity(self) -> int:
        """Return the tokens for whose entries the cache has room."""
        return self.cache.capacity

    @property
    def idle(self) -> bool:
        """Return whether a row is free for one more request."""
        return len(self._queue) < self._table.count(None)

    @property
    def busy(self) -> bool:
        """Return whether there are unfinished requests."""
        return bool(self._queue) or any(self._table)

    def add(self, request: Request, after: int | None = None) -> int:
        """Queue a request; return its number.

        Args:
            request: the request.
            after: number of a finished request whose text the prompt continues. Its tokens are still in the cache: as
                long as its row serves no other one.

        Raises:
            ConfigError: for ids that the model does not have, stop strings without a tokenizer, or another row that
                was taken.
        """
        ids, vocab = np.asarray(request.ids), self.model.cfg.vocab_size
        if ids.min() < 0 or ids.max() >= vocab:
            raise ConfigError(f"the ids of a prompt must be 0 to {vocab - 1}, found {ids.min()} to {ids.max()}")
        if request.stop and self.tokenizer is None:
            raise ConfigError("stop: strings need a tokenizer; stop_ids are token ids")
        row = _Row(self._added, request, list(map(int, ids)))
        if self.tokenizer is not None:
            row.stream = TextStream(self.tokenizer, request.stop)
        if request.patches is not None and request.token_types is not None:
            row.images = self._embed_images(request), request.token_types
        self._added += 1
        if after is None:
            self._queue.append(row)
            return row.number
        i, old = next(((i, old) for i, old in self._done.items() if old.number == after), (0, None))
        if old is None or self._table[i] is not None:
            raise ConfigError(f"request {after} is not finished, or its row serves another one: its text cannot go on")
        row.length, row.ids, row.images = old.length, [*old.ids, *row.ids], old.images
        self._table[i] = row
        return row.number

    def cancel(self, number: int) -> None:
        """Give up a request. Its row takes the next one."""
        self._table = [None if row is not None and row.number == number else row for row in self._table]
        self._queue = collections.deque(row for row in self._queue if row.number != number)

    def step(self) -> list[Token]:
        """Run one step; return the tokens that it made, none if it read a part of prompts that go on."""
        for i, row in enumerate(self._table):
            if row is None and self._queue:
                self._table[i] = self._queue.popleft()
        rows = [(i, row) for i, row in enumerate(self._table) if row is not None]
        prompts = [(i, row) for i, row in rows if row.reads_prompt]
        texts = [(i, row) for i, row in rows if not row.reads_prompt]
        if not rows:
            return []
        self.last = "prompt" if prompts and (self.last != "prompt" or not texts) else "token"
        self.steps[self.last] += 1
        return self._read(prompts, self.chunk) if self.last == "prompt" else self._read(texts, self._one)

    def _read(self, rows: list[tuple[int, _Row]], T: int) -> list[Token]:
        """Read the next tokens of some rows, T at most, and draw a token where none is pending after them."""
        drafts = self.draft if self.last == "token" else 0
        self._make_room(max(row.length + min(T, row.unread) + drafts for _, row in rows))
        ids, n, length = (np.zeros(shape, np.int32) for shape in ((self.rows, T), self.rows, self.rows))
        for i, row in enumerate(self._table):
            length[i] = 0 if row is None else row.length
        for i, row in rows:
            n[i] = min(T, row.unread)
            ids[i, : n[i]] = row.ids[row.length : row.length + n[i]]
        chunk = Chunk(ids, n, length, self._rule(), *self._images(rows, T))
        run = functools.partial(read_drafts, width=drafts) if drafts else read_chunk
        self.cache, drawn = run(self._leaves, self.cache, chunk, tree=self._tree, keep_experts=self.keep_experts)
        drawn = jax.tree.map(np.asarray, drawn)
        made = []
        for i, row in rows:
            kept = int(drawn.kept_B[i])  # drafts that were accepted were read as well
            row.length += int(n[i])
            if self.keep_experts:
                row.experts.append(np.stack([layer[i, : n[i] + kept] for layer in drawn.experts]))
            if drafts:
                self.drafted += 1
                self.accepted += np.arange(drafts) < kept
            if not row.unread:
                row.length += kept
                made += self._take(i, row, drawn.token_Bm[i, : kept + 1], drawn.logprob_Bm[i])
        return made

    def _take(self, i: int, row: _Row, tokens: np.ndarray, logprobs: np.ndarray) -> list[Token]:
        """Add tokens to the text of a row, up to its end; free the row if the text ends."""
        # Those after the first were read with it: each has the experts of the token before.
        experts = np.concatenate(row.experts, axis=1) if row.experts else None
        cuts = None
        if experts is not None:
            cuts = np.split(experts, range(experts.shape[1] - len(tokens) + 1, experts.shape[1]), 1)
        row.experts, made = [], []
        for j, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=False)):
            row.made += 1
            stop, full = token in row.request.stop_ids, row.made == row.request.max_tokens
            finish = "stop" if stop else "length" if full else None
            text = ""
            if row.stream is not None:
                text = "" if stop else row.stream.add(token)
                text += row.stream.end() if finish and not row.stream.stopped else ""
                finish = "stop" if row.stream.stopped else finish
            made.append(Token(row.number, token, logprob, finish, text, None if cuts is None else cuts[j]))
            if finish:
                # A text that goes on is read again if drafts after its end are in the cache.
                row.length = 0 if j < len(tokens) - 1 else row.length
                row.ids += [] if stop else [token]
                self._table[i], self._done[i] = None, row
                return made
            row.ids.append(token)
        return made

    def _make_room(self, length: int) -> None:
        capacity = self.capacity
        while capacity < length:
            capacity *= 2
        if capacity > self.capacity:
            self.cache = grow(self.model.cfg, self.cache, capacity)

    def _rule(self) -> Rule:
        """Collect the rules of all rows; idle ones take the likeliest token, which nobody reads."""
        rule = Rule(*(np.full(self.rows, x, kind) for x, kind in zip((0, 0, 1, 0, 0), "fiffI", strict=True)))
        for i, row in enumerate(self._table):
            if row is not None:
                request = row.request
                values = request.temperature, request.top_k, request.top_p, request.min_p, request.seed % 2**32
                for array, value in zip(rule, values, strict=True):
                    array[i] = value
        return rule

    def _images(self, rows: list[tuple[int, _Row]], T: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Collect kinds and embeddings of the next T positions of prompts; None where there can be no images.

        A model that reads images gets the arrays for every prompt: one program, whichever rows have images.
        """
        if not self.model.cfg.vision_n_layers or self.last != "prompt":
            return None, None
        types = np.full((self.rows, T), TEXT, np.int32)
        embeddings = np.zeros((self.rows, T, self.model.cfg.dim), np.float32)
        for i, row in rows:
            if row.images is not None:
                own, kinds = (x[row.length : row.length + T] for x in row.images)
                embeddings[i, : len(own)], types[i, : len(kinds)] = own, kinds
        return types, embeddings

    def _embed_images(self, request: Request) -> np.ndarray:
        """Compute the embeddings [length, D] of a prompt with images, all at once, on every row of devices."""
        assert request.patches is not None and request.image_grids is not None and request.token_types is not None

        def filled(x: Any, size: int, value: int) -> np.ndarray:
            return np.pad(x, [(0, size - len(x)), *[(0, 0)] * (np.ndim(x) - 1)], constant_values=value)

        # Few sizes, so that few programs are compiled; and a copy for every row of devices.
        length = len(request.ids) + -len(request.ids) % self.chunk
        patches = 1 << (len(request.patches) - 1).bit_length()
        ids, types = filled(request.ids, length, 0), filled(request.token_types, length, TEXT)
        copies = [np.tile(x.astype(np.int32), (self._devices, 1)) for x in (ids, types)]
        arrays = *copies, filled(request.patches, patches, 0), np.asarray(request.image_grids)
        return np.asarray(embed_prompt(self._leaves, *arrays, tree=self._tree))[: len(request.ids)]
