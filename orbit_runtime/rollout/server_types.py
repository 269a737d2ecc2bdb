"""Types of engines that are servers: requests, responses, and what every kind of server can do.

Belongs here: records and Protocols between the engine (`served_engine`), its copies (`replica`) and the kinds of server
(`sglang_api`, `vllm_api`), and what a response must be, whichever kind gave it. Does not belong here: HTTP (`wire`),
starting servers (`sglang_server`, `attached`).

Legend: `R` tokens of a sequence that train, `K` likeliest tokens in the place of each.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from orbit_runtime.adapters.files import adapter_bytes
from orbit_runtime.errors import GateError
from orbit_runtime.rollout.streaming import LEAST_LOGPROB, Alternatives
from orbit_runtime.rollout.transport import AdapterTransfer
from orbit_runtime.types import (
    FLOATS,
    TOKENS,
    AdapterFiles,
    FinishReason,
    Request,
    RoutedExperts,
    Sampling,
    Scored,
    TopTokens,
)

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class LostError(Exception):
    """The server did not answer: it died, was cut off, hangs, or returned an internal error."""


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that every copy must hold."""

    adapter: AdapterFiles
    files: Callable[[], Path]
    """Puts its files where servers see them, and returns their folder there. Safe to call twice, from any thread."""
    handover: AdapterTransfer | None = None
    """The other transport, while it is open."""

    @property
    def num_bytes(self) -> int:
        return adapter_bytes(self.adapter)


@dataclass(frozen=True)
class Ask:
    """One completion requested from a server: a request, or the rest of one."""

    rid: str
    """The server's id for it; never reused."""
    request: Request
    tokens_T: tuple[int, ...] = ()
    """Tokens of the completion that exist already."""

    @property
    def input_T(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids_T, *self.tokens_T)

    @property
    def max_new_tokens(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.tokens_T)


@dataclass(frozen=True)
class Call:
    """Completions requested together, under one adapter and sampling: samples of one prompt, which share its prefill,
    or one for each of several prompts."""

    asks: tuple[Ask, ...]

    @property
    def first(self) -> Request:
        return self.asks[0].request


@dataclass(frozen=True)
class TokenPiece:
    """New tokens of one completion, each token once."""

    index: int
    """Index of the ask within its call."""
    token_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    finish_reason: FinishReason | None
    """None if more tokens will come."""
    total: int | None = None
    """Tokens by the server's count, including this piece; None if it does not report a count."""
    adapter: str | None = None
    """Adapter that the server's plug-in says was applied, empty for the bare base; None if not reported."""
    routed_experts: RoutedExperts | None = None
    """Experts of all inputs of the completion, with its last piece; None if not requested."""
    alternatives: Alternatives | None = None
    """Alternatives of these tokens; None if not requested."""


@dataclass(frozen=True)
class ServerFacts:
    """A server's description of itself; None for what it does not report."""

    kind: str
    """`SGLang` or `vLLM`."""
    version: str
    model: str
    serves_lora: bool | None = None
    max_rank: int | None = None
    targets: tuple[str, ...] | None = None
    max_tokens: int | None = None
    """Maximum sequence length."""
    architectures: tuple[str, ...] | None = None
    deterministic: bool = False
    """Whether it draws by each request's seed, and by a fixed seed if none is given."""
    ranks: int = 1
    """Processes that each load an adapter."""
    plugin: int | None = None
    """Version of the facts that Orbit's plug-in reports; None if it runs without the plug-in."""
    unhooked: tuple[str, ...] = ()
    """Hooks that the plug-in could not install."""


Sleeping = Literal["cache", "weights", "graphs"]
"""Resources that a server can release while it sleeps."""


class ServerHandle(Protocol):
    """A process somewhere that can be waited for or brought back."""

    @property
    def url(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """HTTP headers that every request needs."""

    def start(self) -> None:
        """Returns once it responds. Raises EngineDiedError (82) if it never does."""

    def is_alive(self) -> bool: ...

    def describe(self) -> str:
        """Names the place of its log, for an error message."""

    def stop(self) -> None:
        """Safe to call twice."""

    def memory_bytes(self) -> int | None:
        """Memory in use on its device, or on a CPU by its processes; None if not known here."""


class Api(Protocol):
    """The API of one kind of server. Every method raises LostError if no response comes."""

    @property
    def takes_prompts(self) -> bool:
        """Whether a call may hold several prompts."""

    @property
    def ends_one(self) -> bool:
        """Whether `abort` can end single completions of a call."""

    async def about(self) -> ServerFacts: ...

    async def is_healthy(self) -> bool:
        """Whether it responds at all."""

    async def makes_progress(self) -> bool:
        """Whether it computes or is idle."""

    async def names(self) -> frozenset[str]:
        """Names of the adapters that it reports."""

    async def load(self, name: str, adapter: AdapterFiles, folder: Path) -> None:
        """Args: folder: the path given to the server; it holds the files, or their ticket."""

    async def unload(self, name: str) -> None: ...

    def stream(self, call: Call, eos: Sequence[int]) -> AsyncGenerator[TokenPiece]:
        """Pieces of all completions of the call, interleaved in any order, until each has ended.

        Closing a stream early aborts its completions.
        """

    async def abort(self, rids: Sequence[str]) -> None:
        """Aborts these; their streams report it. A server that can end only whole calls does nothing."""

    async def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], prefix_length: int | None = None
    ) -> list[Scored]:
        """Readings by adapter, computed anew, without digests. `prefix_length`: see `Copy.score`, if supported."""

    async def likeliest(self, token_ids_T: Sequence[int], start: int, count: int) -> LikeliestTokens:
        """The base's `count` likeliest tokens at each position from `start` (at least 1) on, as the server orders them.
        Only the positions are checked.
        """

    async def facts(self, num_bytes: int = 0) -> Mapping[str, Mapping[str, Any]] | None:
        """Adapter → what the plug-in reads in the slots; None if the server runs without the plug-in.

        Args:
            num_bytes: size of the adapters that it holds and must hash first.
        """

    async def sleep(self, parts: Sequence[Sleeping]) -> None:
        """Releases these parts once nothing runs."""

    async def wake(self, parts: Sequence[Sleeping]) -> None: ...

    async def exposition(self) -> str:
        """The server's metrics, in Prometheus' text format."""

    async def text(self, token_ids_T: Sequence[int]) -> str | None:
        """These tokens decoded by the server's tokenizer, without special tokens; None if it does not support that."""


def build_piece(index: int, tokens: Sequence[Any], logprobs: Sequence[Any], reason: object, **more: Any) -> TokenPiece:
    """Raises GateError for anything that is not a valid piece of a completion."""
    finish = None if reason is None else FINISH.get(str(reason))
    if len(tokens) != len(logprobs) or (reason is not None and finish is None):
        raise GateError(
            f"the engine answered {len(tokens)} tokens with {len(logprobs)} log-probs and finish reason {reason}",
            where="rollout",
        )
    told = tuple(int(token) for token in tokens)
    return TokenPiece(index, told, tuple(number(value) for value in logprobs), finish, **more)


def number(value: Any) -> float:
    """Raises GateError for anything that is not a log-prob."""
    if isinstance(value, bool) or not isinstance(value, float | int) or value != value or value > 1e-3:
        raise GateError(f"the engine answered the log-prob {value!r}", where="rollout")
    return float(value)


MOST_LOGPROB, MOST_MASS = 1e-3, 1.0 + 1e-3
"""Bounds, with rounding, of a log-prob of 0, and of probabilities that add up to 1."""
MISSING = (float("nan"), -1)
"""Stands for a token that a server did not name."""


@dataclass(frozen=True, slots=True)
class LikeliestTokens:
    """A server's likeliest tokens, the likeliest first; not checked."""

    logprobs_RK: np.ndarray
    ids_RK: np.ndarray
    """Numbers, which may be no ids."""

    def at(self, rows: Sequence[int]) -> LikeliestTokens:
        return LikeliestTokens(self.logprobs_RK[rows], self.ids_RK[rows])


def from_rows(rows_R: Sequence[Sequence[Sequence[Any]]], count: int) -> LikeliestTokens:
    """
    Args:
        rows_R: log-prob and id of tokens; what is more than `count` of them is left out.

    Raises:
        GateError: these are no numbers.
    """

    def column(index: int) -> np.ndarray:
        told = (
            chain((pair[index] for pair in row[:count]), repeat(MISSING[index], count - len(row))) for row in rows_R
        )
        return np.fromiter(chain.from_iterable(told), np.float64, len(rows_R) * count).reshape(len(rows_R), count)

    try:
        return LikeliestTokens(column(0), column(1))
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise GateError(f"the likeliest tokens are not log-probs and ids: {error}", where="rollout") from None


def check_likeliest(
    told: LikeliestTokens, token_ids_T: Sequence[int], places_R: Sequence[int], *, vocabulary: int, where: str
) -> TopTokens:
    """
    Args:
        places_R: each row's token, by its index in the sequence.
        vocabulary: ids are smaller.
        where: the manifest names the servers.

    Raises:
        GateError: (84) a row is not the beginning of a distribution over the vocabulary.
    """
    for problem, wrong_RK, fix in _problems(told.ids_RK, told.logprobs_RK, vocabulary):
        if wrong_RK.any():
            row, index = (int(each[0]) for each in wrong_RK.nonzero())
            place, named, logprob = places_R[row], told.ids_RK[row, index], told.logprobs_RK[row, index]
            raise GateError(
                f"number {index + 1} of the teacher's {wrong_RK.shape[1]} likeliest tokens in the place of token "
                f"{place} of an answer, after {list(token_ids_T[max(0, place - 4) : place])}, is {named:.10g} with the "
                f"log-prob {logprob:g}: {problem}",
                where=where,
                fix=fix,
            )
    ids, logprobs = told.ids_RK.astype(np.int32), told.logprobs_RK.astype(np.float32)
    return array(TOKENS, ids.tobytes()), array(FLOATS, logprobs.tobytes())


def _problems(ids_RK: np.ndarray, logprobs_RK: np.ndarray, vocabulary: int) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yields each possible fault, the entries that have it, and the fix."""
    count = ids_RK.shape[1]
    yield (
        "the server named fewer",
        (ids_RK == MISSING[1]) & np.isnan(logprobs_RK),
        f"start vLLM with --max-logprobs {count} or more, or lower algorithm.teacher.topK",
    )
    other_model = "take a teacher whose servers tell log-probs of the model's own distribution"
    no_logprob = ~((logprobs_RK > LEAST_LOGPROB) & (logprobs_RK <= MOST_LOGPROB))
    yield "that is no log-prob of a token that can follow", no_logprob, other_model
    no_id = ~((ids_RK >= 0) & (ids_RK < vocabulary) & (ids_RK == np.floor(ids_RK)))
    yield (
        f"the policy's vocabulary has the ids 0 to {vocabulary - 1}",
        no_id,
        "take a teacher with the policy's tokenizer and vocabulary",
    )
    order = "look at the server, or take another: it does not answer as SGLang and vLLM do"
    yield "it is likelier than the one before it", np.diff(logprobs_RK, axis=1, prepend=np.inf) > 0, order
    by_id = ids_RK.argsort(axis=1, kind="stable")
    again = np.zeros_like(no_id)
    ordered = np.take_along_axis(ids_RK, by_id, axis=1)
    np.put_along_axis(again, by_id, np.diff(ordered, axis=1, prepend=-1) == 0, axis=1)
    yield "it was named before", again, order
    too_much = np.exp(logprobs_RK, dtype=np.float64).cumsum(axis=1) > MOST_MASS
    yield "the probabilities up to it add up to more than 1", too_much, other_model


def given_fields(sampling: Sampling) -> dict[str, Any]:
    """Sampling fields of a request under the names that SGLang and vLLM share. Defaults are sent too: vLLM takes what
    is left out from the model's generation_config.json, SGLang from `--preferred-sampling-params`."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
    }
