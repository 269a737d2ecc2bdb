"""The nouns of engines that are servers: what is asked, what is answered, and what every kind of server can do.

Belongs here: records and Protocols between the engine (`served_engine`), its copies (`replica`) and the kinds of server
(`sglang_api`, `vllm_api`). Does not belong here: HTTP (`wire`), starting servers (`sglang_server`, `attached`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from orbit_runtime.adapters.patience import total_bytes
from orbit_runtime.errors import GateError
from orbit_runtime.rollout.handover import Handover
from orbit_runtime.rollout.news import Alternatives
from orbit_runtime.types import AdapterFiles, FinishReason, Request, RoutedExperts, Scored

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class LostError(Exception):
    """The server did not answer: it died, was cut off, hangs, or answered with an error of its own."""


@dataclass(frozen=True)
class Loaded:
    """An adapter that every copy must hold."""

    adapter: AdapterFiles
    folder: Path
    """For its files, as Orbit and the server see them; they are written when a server first takes them so."""
    handover: Handover | None = None
    """The other way, while it is open."""

    @property
    def num_bytes(self) -> int:
        return total_bytes(self.adapter.files.values())

    @property
    def ticket(self) -> Path:
        """The folder that a server was told which took it the other way."""
        return self.folder / "ticket"

    def write_files(self, folder: Path) -> Path:
        """Safe to call twice."""
        for name, content in self.adapter.files.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)
        return folder


@dataclass(frozen=True)
class Ask:
    """One completion that a server is asked for: a request, or what is left of one."""

    rid: str
    """What the server knows it by; never used twice."""
    request: Request
    tokens_T: tuple[int, ...] = ()
    """Of the completion, those that are there already."""

    @property
    def input_T(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids_T, *self.tokens_T)

    @property
    def max_new_tokens(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.tokens_T)


@dataclass(frozen=True)
class Call:
    """Completions that are asked for together, under one adapter and sampling: samples of one prompt, which share its
    prefill, or one each of several prompts."""

    asks: tuple[Ask, ...]

    @property
    def first(self) -> Request:
        return self.asks[0].request


@dataclass(frozen=True)
class Piece:
    """What a server tells of one completion, each token once."""

    index: int
    """Of the ask within its call."""
    token_ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    finish_reason: FinishReason | None
    """None: more will come."""
    total: int | None = None
    """Tokens that the server counts, those of this piece included; None: it does not tell."""
    adapter: str | None = None
    """That the server's plug-in says was applied, empty for the bare base; None: nobody tells."""
    routed_experts: RoutedExperts | None = None
    """Of all inputs of the completion, with its last piece; None: not asked for."""
    alternatives: Alternatives | None = None
    """Of these tokens; None: not asked for."""


@dataclass(frozen=True)
class About:
    """What a server tells of itself; None: it does not tell."""

    kind: str
    """`SGLang` or `vLLM`."""
    version: str
    model: str
    serves_lora: bool | None = None
    max_rank: int | None = None
    targets: tuple[str, ...] | None = None
    max_tokens: int | None = None
    """Longest sequence."""
    architectures: tuple[str, ...] | None = None
    deterministic: bool = False
    """It draws by each request's seed, and by one and the same where none is given."""
    ranks: int = 1
    """Processes that each load an adapter."""
    plugin: int | None = None
    """Version of the facts that Orbit's plug-in tells; None: it runs without."""
    unhooked: tuple[str, ...] = ()
    """What the plug-in could not hook."""


Sleeping = Literal["cache", "weights", "graphs"]
"""What a server can give back for a while."""


class Server(Protocol):
    """A process somewhere, that can be waited for or brought back."""

    @property
    def url(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What it must be asked with."""
        ...

    def start(self) -> None:
        """Returns once it answers. Raises EngineDiedError (82) where it does not come to answer."""
        ...

    def is_alive(self) -> bool: ...

    def describe(self) -> str:
        """What to read about its end, for an error's message."""
        ...

    def stop(self) -> None:
        """Safe to call twice."""
        ...

    def memory_bytes(self) -> int | None:
        """What its device holds, or on a CPU its processes; None: not known here."""
        ...


class Api(Protocol):
    """How one kind of server is asked. Every method raises LostError where no answer comes."""

    @property
    def takes_prompts(self) -> bool:
        """A call may hold several."""
        ...

    @property
    def ends_one(self) -> bool:
        """`abort` ends single completions of a call."""
        ...

    async def about(self) -> About: ...

    async def is_healthy(self) -> bool:
        """It answers at all."""
        ...

    async def makes_progress(self) -> bool:
        """It computes, or has nothing to do."""
        ...

    async def names(self) -> frozenset[str]:
        """Adapters that it says it holds."""
        ...

    async def load(self, name: str, adapter: AdapterFiles, folder: Path) -> None:
        """Args: folder: what the server is told; it holds the files, or their ticket."""
        ...

    async def unload(self, name: str) -> None: ...

    def stream(self, call: Call, eos: Sequence[int]) -> AsyncGenerator[Piece]:
        """Pieces of all completions of the call, in no promised order among them, until each has ended.

        A stream that is closed early ends what it was for.
        """
        ...

    async def abort(self, rids: Sequence[str]) -> None:
        """Ends these where they are; their streams tell so. A server that ends only whole calls does nothing."""
        ...

    async def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], prefix_length: int | None = None
    ) -> list[Scored]:
        """By adapter, computed anew, without digests. `prefix_length`: as for a `Copy`, where there is such a way."""
        ...

    async def facts(self, num_bytes: int = 0) -> Mapping[str, Mapping[str, Any]] | None:
        """By adapter: what the plug-in reads in the slots; None: it runs without.

        Args:
            num_bytes: of the adapters that it holds, and hashes first.
        """
        ...

    async def sleep(self, parts: Sequence[Sleeping]) -> None:
        """Once nothing runs."""
        ...

    async def wake(self, parts: Sequence[Sleeping]) -> None: ...

    async def exposition(self) -> str:
        """Its metrics, in Prometheus' text format."""
        ...

    async def text(self, token_ids_T: Sequence[int]) -> str | None:
        """The server's tokenizer's text of these tokens, special ones left out; None: it does not tell."""
        ...


def build_piece(index: int, tokens: Sequence[Any], logprobs: Sequence[Any], reason: object, **more: Any) -> Piece:
    """Raises GateError for what is no piece of an answer."""
    finish = None if reason is None else FINISH.get(str(reason))
    if len(tokens) != len(logprobs) or (reason is not None and finish is None):
        raise GateError(
            f"the engine answered {len(tokens)} tokens with {len(logprobs)} log-probs and finish reason {reason}",
            where="rollout",
        )
    told = tuple(int(token) for token in tokens)
    return Piece(index, told, tuple(number(value) for value in logprobs), finish, **more)


def number(value: Any) -> float:
    """Raises GateError for anything that is no log-prob."""
    if isinstance(value, bool) or not isinstance(value, float | int) or value != value or value > 1e-3:
        raise GateError(f"the engine answered the log-prob {value!r}", where="rollout")
    return float(value)
