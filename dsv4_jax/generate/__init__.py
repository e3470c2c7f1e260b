# SPDX-License-Identifier: Apache-2.0
"""Text from a trained model. The package is a function as well: `dsv4_jax.generate(model, prompts)` gives tokens."""

import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_jax.data.tokenizer import Tokenizer
    from dsv4_jax.generate.engine import Token
    from dsv4_jax.generate.request import Request
    from dsv4_jax.model.deepseek import DeepSeek


def generate(
    model: "DeepSeek",
    prompts: Iterable["Request | Sequence[int] | str"],
    *,
    tokenizer: "Tokenizer | None" = None,
    rows: int = 8,
    invariant: bool = False,
    chunk: int = 64,
    capacity: int = 0,
    draft: int = 0,
    keep_experts: bool = False,
    **options: Any,
) -> Iterator["Token"]:
    """Continue prompts; yield every token as it is made. A row whose text is finished takes the next prompt.

    Args:
        model: the model.
        prompts: requests, or token ids, or with a tokenizer texts that begin a document. They are taken as rows are
            free, so they need not end.
        tokenizer: makes the tokens' text. Without `stop_ids`, texts then end at its border.
        rows: prompts to continue at a time; fewer if there are fewer prompts.
        invariant: use all rows for a few prompts too, so that their tokens do not depend on how many there are.
        chunk: tokens of a prompt to read at a time, between which the other rows go on.
        capacity: tokens of a row to make room for at first, 0: those of the longest prompt and what it asks for, up to
            1,024. The room doubles when a text needs more, which compiles programs anew.
        draft: tokens to draft at a time with the MTP block or the draft blocks, which changes the speed alone; 0: none.
        keep_experts: return the experts of all tokens.
        options: attributes of `Request` for prompts that are none.

    Raises:
        ConfigError: for values that cannot work.
    """
    from dsv4_jax.generate.engine import Generator
    from dsv4_jax.generate.request import find_capacity, make_request

    waiting = (make_request(prompt, model.cfg, tokenizer, **options) for prompt in prompts)
    first = list(itertools.islice(waiting, max(rows, 1)))
    if not first:
        return
    engine = Generator(
        model,
        rows if invariant else min(rows, len(first)),
        chunk=chunk,
        capacity=capacity or find_capacity(first),
        draft=draft,
        keep_experts=keep_experts,
        tokenizer=tokenizer,
    )
    for request in itertools.chain(first, waiting):
        engine.add(request)
        while not engine.idle:
            yield from engine.step()
    while engine.busy:
        yield from engine.step()


class _Callable(types.ModuleType):
    """A package that can be called; `import dsv4_jax.generate.engine` would otherwise hide a function of its name."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _Callable
