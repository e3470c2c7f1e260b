# SPDX-License-Identifier: Apache-2.0
"""Text from a trained model. The package is a function as well: `dsv4_jax.generate(model, prompts)` gives tokens."""

import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_jax.data.tokenizer import Tokenizer
    from dsv4_jax.generate.engine import Request, Token
    from dsv4_jax.model.deepseek import DeepSeek


def generate(
    model: "DeepSeek",
    prompts: Iterable["Request | Sequence[int] | str"],
    *,
    tokenizer: "Tokenizer | None" = None,
    stop: Sequence[str] = (),
    rows: int = 8,
    invariant: bool = False,
    chunk: int = 64,
    capacity: int = 0,
    keep_experts: bool = False,
    **options: Any,
) -> Iterator["Token"]:
    """Continue prompts; yield every token as it is made. A row whose text is finished takes the next prompt.

    Args:
        model: the model.
        prompts: requests, or token ids, or with a tokenizer texts that begin a document. They are taken as rows are
            free, so they need not end.
        tokenizer: makes the tokens' text. Without `stop_ids`, texts then end at its border.
        stop: strings before which a text ends; they need a tokenizer.
        rows: prompts to continue at a time; fewer if there are fewer prompts.
        invariant: use all rows for a few prompts too, so that their tokens do not depend on how many there are.
        chunk: tokens of a prompt to read at a time, between which the other rows go on.
        capacity: tokens of a row to make room for at first, 0: those of the longest prompt and what it asks for, up to
            1,024. The room doubles when a text needs more, which compiles programs anew.
        keep_experts: return the experts of all tokens.
        options: attributes of `Request` for prompts that are none.

    Raises:
        ConfigError: for values that cannot work.
    """
    from dsv4_jax.generate.engine import Generator, Request
    from dsv4_jax.generate.text import TextStream
    from dsv4_jax.section import ConfigError

    if tokenizer is None and stop:
        raise ConfigError("stop: strings need a tokenizer; stop_ids are token ids")
    if tokenizer is not None and "stop_ids" not in options:  # ids that no token has end a text too
        options["stop_ids"] = {tokenizer.border, *range(tokenizer.size, model.cfg.vocab_size)}

    def request(prompt: "Request | Sequence[int] | str") -> Request:
        if isinstance(prompt, Request):
            return prompt
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ConfigError("a prompt of text needs a tokenizer")
            prompt = [tokenizer.border, *map(int, tokenizer.encode([prompt])[0])]
        return Request(ids=prompt, **options)

    waiting = map(request, prompts)
    first = list(itertools.islice(waiting, rows))
    if not first:
        return
    room = max(len(r.ids) + min(r.max_tokens, 1024) for r in first)
    room = capacity or 1 << max(6, (room - 1).bit_length())
    engine = Generator(model, rows if invariant else len(first), chunk=chunk, capacity=room, keep_experts=keep_experts)
    streams: dict[int, TextStream] = {}
    for prompt in itertools.chain(first, waiting):
        number = engine.add(prompt)
        if tokenizer is not None:
            streams[number] = TextStream(tokenizer, stop)
        while not engine.idle:
            yield from _tokens(engine, streams)
    while engine.busy:
        yield from _tokens(engine, streams)


def _tokens(engine: Any, streams: dict[int, Any]) -> Iterator["Token"]:
    """Run a step, and add the text to its tokens."""
    for token in engine.step():
        if (stream := streams.get(token.request)) is None:
            yield token
            continue
        text = "" if token.finish == "stop" else stream.add(token.id)
        if stream.stopped:
            engine.cancel(token.request)  # unless this was its last token anyway
            token = token._replace(finish="stop")
        if token.finish:
            text += "" if stream.stopped else stream.end()
            del streams[token.request]
        yield token._replace(text=text)


class _Callable(types.ModuleType):
    """A package that can be called; `import dsv4_jax.generate.engine` would otherwise hide a function of its name."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _Callable
