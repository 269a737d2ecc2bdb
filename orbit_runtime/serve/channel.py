"""The channel between the front, which speaks HTTP, and the engine's process: one stream of records each way.

Belongs here: the records and how they travel. Does not belong here: what either side does with them (`front`,
`sampler`).

Records are pickled: both ends are processes of one program, connected by a socket pair that no other process has.
"""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from orbit_runtime.planner.support.manifests import Kind
from orbit_runtime.rollout.streaming import Alternatives, TokenDeltas
from orbit_runtime.serve.names import ServedModel
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.spec.data import Chat
from orbit_runtime.types import FinishReason, Sampling
from orbit_runtime.workers.child.process import Frames, frame


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that a front starts with."""

    model_folder: str
    """Folder with its tokenizer."""
    vocabulary: int
    limits: ServeLimits
    token: str | None
    host: str
    port: int
    models: tuple[ServedModel, ...]
    base: str
    """The base's name."""
    kind: Kind
    """Engine kind, which decides the supported sampling settings."""
    chat: Chat
    """How messages become text."""
    started: float | None
    """See `ChatTokenizer`."""
    update_token: str | None = None
    """Token that alone may change weights; None if `token` may too."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One requested completion."""

    prompt_ids_T: tuple[int, ...]
    key: int
    sampling: Sampling
    alternatives: int = 0
    """Most probable tokens to report for each position."""


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: the choices of one HTTP request, with consecutive ids from `first_id`."""

    first_id: int
    model: str
    choices: tuple[Choice, ...]
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: abort these requests."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NameChange:
    """To the engine: put an adapter, a whole model, or the base under a name."""

    call: int
    name: str
    adapter: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """To the front: accept no more connections; requests in flight may take this long to end."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ready:
    """To the engine's process: the front listens, or why it does not."""

    port: int
    refusal: str = ""


Ended = tuple[int, array[int], array[float], FinishReason, str, Alternatives | None]
"""A finished choice: request id, all tokens and log-probs, finish reason, text and alternatives."""


@dataclass(frozen=True, slots=True)
class BatchStep:
    """To the front: the results of one batch step."""

    deltas: TokenDeltas | None
    """New tokens of streamed choices."""
    ended: Sequence[Ended]


@dataclass(frozen=True, slots=True)
class Refusal:
    """To the front: these requests, or a call, have failed."""

    request_ids: tuple[int, ...]
    status: int
    message: str
    code: str | None
    param: str | None = None
    call: int | None = None
    is_fatal: bool = False
    """Whether the engine has failed and accepts no more requests."""


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """To the front: a call's result, and the new meaning of every name."""

    call: int
    result: dict[str, Any]
    models: tuple[ServedModel, ...]


class Line(asyncio.Protocol):
    """One end of the stream. Records are handed over as their bytes arrive, without waking a task first.

    Args:
        hear: called with each record.
        gone: called once, when the other side has ended.
    """

    def __init__(self, hear: Callable[[Any], None], gone: Callable[[], None]) -> None:
        self._hear = hear
        self._gone = gone
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    def send(self, record: object) -> None:
        """Does nothing if the other side has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(pickle.dumps(record, pickle.HIGHEST_PROTOCOL)))

    def close(self) -> None:
        """Closes the stream; data sent before is still delivered."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for record in self._frames.feed(data):
            self._hear(pickle.loads(record))

    def connection_lost(self, error: Exception | None) -> None:
        self._gone()
