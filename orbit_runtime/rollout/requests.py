"""Shared by all engines: checks of requests and slot names, a completion's end and text, and
sampling without a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import suppress

from orbit_runtime.errors import DataError, GateError, OrbitError
from orbit_runtime.types import Completion, Engine, FinishReason, Request, Sampling, Tokenizer

UNFINISHED: tuple[FinishReason, ...] = ("abort", "deadline")


def check_request(request: Request, under_way: Collection[int]) -> None:
    """Raises DataError for an empty prompt, GateError for an id in flight or a completion that has already ended."""
    if not request.prompt_ids_T:
        raise DataError(f"request {request.request_id} has an empty prompt")
    if request.request_id in under_way:
        raise GateError(f"request {request.request_id} is under way already", where="rollout")
    so_far = request.so_far
    if so_far is None:
        return
    if so_far.finish_reason not in UNFINISHED:
        raise GateError(f"the completion to continue has ended: {so_far.finish_reason}", where="rollout")
    if len(so_far.token_ids_T) >= request.sampling.max_new_tokens:
        raise GateError(
            f"the completion to continue has {len(so_far.token_ids_T)} tokens, as many as it may have", where="rollout"
        )


def check_new_slot(name: str, held: Collection[str], retired: Collection[str]) -> None:
    """Raises GateError for a name that an adapter had before: it would be ambiguous."""
    if name in held or name in retired:
        raise GateError(f"adapter name {name!r} was used before", fix="publish every version under a new name")


def check_held_slot(name: str, held: Collection[str]) -> None:
    """Raises GateError if no adapter has this name."""
    if name not in held:
        raise GateError(f"no adapter {name!r} in the engine; it holds {', '.join(held) or 'none'}")


def sample(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
    """Submits and yields each completion as it ends. For callers without an event loop and with nothing in flight.

    If the caller stops iterating, its requests are aborted.

    Raises:
        The errors of `submit` and `completions`.
    """
    engine.submit(requests)
    stream = engine.completions()
    with asyncio.Runner() as runner:
        try:
            while True:
                completion = runner.run(_next(stream))
                if completion is None:
                    return
                yield completion
        finally:
            runner.run(stream.aclose())
            runner.run(end_all(engine))


async def end_all(engine: Engine) -> None:
    """Aborts everything in flight and waits until it has ended; errors of these requests no longer matter."""
    engine.abort()
    is_ended = False
    while not is_ended:
        with suppress(OrbitError):
            async for _ in engine.completions():
                pass
            is_ended = True


async def _next(stream: AsyncGenerator[Completion]) -> Completion | None:
    return await anext(stream, None)


def end_ids(sampling: Sampling, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that end a completion, given the model's own end tokens."""
    own = () if sampling.ignore_eos else tuple(eos_ids)
    return (*own, *sampling.stop_token_ids)


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int], sampling: Sampling) -> str:
    """Decoded text, without the token that ended it and cut at the first stop string."""
    kept = tokens[:-1] if tokens and tokens[-1] in end_ids(sampling, tokenizer.eos_ids) else tokens
    text = tokenizer.decode(kept)
    cuts = [at for at in (text.find(stop) for stop in sampling.stop) if at >= 0]
    return text[: min(cuts)] if cuts else text
