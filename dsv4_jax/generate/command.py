# SPDX-License-Identifier: Apache-2.0
"""The `sample` command: continue one prompt, many prompts, or what a reader types, and stream the text."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsv4_jax.data.tokenizer import Tokenizer
from dsv4_jax.generate.engine import Generator
from dsv4_jax.generate.request import Request, find_capacity, make_request
from dsv4_jax.model.cache import measure_cache
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.model.deepseek import DeepSeek
from dsv4_jax.section import ConfigError

# Keys of a line of a file of prompts: those of `Request` that JSON can hold, the prompt and its image.
KEYS = ("prompt", "image", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")


class Sampler:
    """Continue prompts with a model, write the text as it is made, and measure the speed."""

    def __init__(
        self,
        model: DeepSeek,
        tokenizer: Tokenizer,
        requests: list[Request],
        write: Callable[[str], Any],
        *,
        rows: int = 8,
        draft: int = 0,
    ):
        """Make a generator for some requests; `write` gets every piece of text."""
        self._engine = Generator(
            model,
            min(rows, max(len(requests), 1)),
            capacity=find_capacity(requests),
            draft=draft,
            tokenizer=tokenizer,
        )
        self._requests, self._write, self._tokenizer = requests, write, tokenizer
        self._start, self._first, self._tokens = time.perf_counter(), 0.0, 0
        self._programs: set[tuple[str, int]] = set()  # that have run: by the kind of step and the room
        self._compiling, self._steady, self._later = 0.0, 0.0, 0  # seconds of their first steps; of others, and tokens

    def stream(self) -> None:
        """Continue the only request; write its text."""
        self._run(self._requests[0])
        self._write("\n")

    def converse(self, lines: Iterator[str], make: Callable[[str], Request]) -> None:
        """Continue the text with every line; what came before stays in the cache."""
        after = None
        for line in lines:
            request = make(line)
            if after is not None:  # the document goes on: without another border, and the image stands at its start
                request = dataclasses.replace(request, ids=self._tokenizer.encode([line])[0].tolist(), patches=None)
            after = self._run(request, after)
            self._write("\n")

    def write_all(self) -> None:
        """Continue all requests; write a line of JSON for each when it is finished."""
        texts = {self._engine.add(request): "" for request in self._requests}
        while self._engine.busy:
            for token in self._step():
                texts[token.request] += token.text
                if token.finish:
                    done = {"number": token.request, "text": texts.pop(token.request), "finish": token.finish}
                    self._write(json.dumps(done, ensure_ascii=False) + "\n")

    def _run(self, request: Request, after: int | None = None) -> int:
        number = self._engine.add(request, after)
        while self._engine.busy:
            for token in self._step():
                self._write(token.text)
        return number

    def _step(self) -> list[Any]:
        start = time.perf_counter()
        made = self._engine.step()
        now, program = time.perf_counter(), (self._engine.last, self._engine.capacity)
        if program not in self._programs:
            self._programs.add(program)
            self._compiling += now - start
        elif self._tokens:
            self._steady, self._later = self._steady + now - start, self._later + len(made)
        if made and not self._tokens:
            self._first = now - self._start
        self._tokens += len(made)
        return made

    def report(self) -> Iterator[str]:
        """Describe the speed, the drafts and the cache, a line each."""
        engine = self._engine
        speed = f", then {self._later / self._steady:,.1f} tokens/s" if self._later else ""
        yield f"{self._tokens} tokens, the first after {self._first:.2f} s{speed}"
        if self._programs:
            number, spent = len(self._programs), self._compiling
            yield f"first steps of {number} programs, which compile: {spent:.2f} s, not in tokens/s"
        if engine.draft:
            shares = ", ".join(f"{count / max(engine.drafted, 1):.0%}" for count in engine.accepted)
            yield f"drafts accepted up to each slot: {shares}; {engine.steps['token']} passes after the prompts"
        sizes = measure_cache(engine.cache)
        grows = sizes["entries"] + sizes["index keys"]
        parts = ", ".join(f"{kind} {size:,}" for kind, size in sizes.items())
        yield f"cache of {engine.rows} rows of {engine.capacity:,} tokens in bytes: {parts}"
        yield f"{grows / engine.rows / engine.capacity:,.2f} bytes per token of a row"


def read_prompts(path: Path, cfg: ModelConfig, tokenizer: Tokenizer, **options: Any) -> list[Request]:
    """Read a file of prompts, - for the standard input: a line of JSON each, with `prompt` and any other of `KEYS`.

    Raises:
        ConfigError: for a file that cannot be read, or a line that is no prompt, naming it.
    """
    try:
        lines = (read_input() if str(path) == "-" else path.read_text()).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
                raise ConfigError('must be an object with a string "prompt"')
            if unknown := set(record) - set(KEYS):
                raise ConfigError(f"unknown keys {sorted(unknown)}, expected some of {KEYS}")
            requests.append(make_request(record.pop("prompt"), cfg, tokenizer, **(options | record)))
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"--prompts {path}, line {number}: {error}") from error
    if not requests:
        raise ConfigError(f"--prompts {path} has no prompt")
    return requests


def read_input(line: bool = False) -> str:
    """Read the standard input, or a line of it.

    Raises:
        ConfigError: if it is no text.
    """
    try:
        return sys.stdin.readline() if line else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the standard input must be text: {error}") from error


def type_lines() -> Iterator[str]:
    """Yield lines that a reader types, until the end of the input."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = read_input(line=True)
        if not line:
            return
        yield line
