"""Between the front, which speaks HTTP, and the engine's process: one stream of records each way.

Belongs here: the records and how they travel. Does not belong here: what either side does with them (`front`,
`sampler`).

Pickled: both ends are processes of one program, joined by a socket pair that nobody else has.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from orbit_runtime.planner.sampling import Kind
from orbit_runtime.rollout.news import Alternatives, News
from orbit_runtime.serve.names import Served
from orbit_runtime.serve.requests import Limits
from orbit_runtime.types import FinishReason, Sampling

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a front starts with."""

    model_folder: str
    """Of its tokenizer."""
    vocabulary: int
    limits: Limits
    token: str | None
    host: str
    port: int
    models: tuple[Served, ...]
    base: str
    """The base's name."""
    kind: Kind
    """Which settings of sampling the engine gives."""
    template_arguments: Mapping[str, Any]
    """Of the chat template."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion that is asked for."""

    prompt_ids_T: tuple[int, ...]
    key: int
    sampling: Sampling
    alternatives: int = 0
    """Most probable tokens that are told for each place."""


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: the choices of one HTTP request, under the ids from `first_id` on."""

    first_id: int
    model: str
    choices: tuple[Choice, ...]
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """To the engine: an adapter under a name, or the base under it."""

    call: int
    name: str
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Stop:
    """To the front: no more connections; what is under way may end within so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ready:
    """To the engine's process: it listens, or why not."""

    port: int
    refusal: str = ""


Ended = tuple[int, array[int], array[float], FinishReason, str, Alternatives | None]
"""Of one choice that has ended: its request id, all its tokens and log-probs, why it ended, its text, and what else was
probable."""


@dataclass(frozen=True, slots=True)
class Step:
    """To the front: everything that came of one step of the batch."""

    news: News | None
    """Of streamed choices."""
    ended: Sequence[Ended]


@dataclass(frozen=True, slots=True)
class Refusal:
    """To the front: nothing comes of these requests, or of a call."""

    request_ids: tuple[int, ...]
    status: int
    message: str
    code: str | None
    param: str | None = None
    call: int | None = None
    is_fatal: bool = False
    """The engine has failed: nothing is answered any more."""


@dataclass(frozen=True, slots=True)
class Changed:
    """To the front: a call's answer, and what every name stands for from now on."""

    call: int
    result: dict[str, Any]
    models: tuple[Served, ...]


class Line(asyncio.Protocol):
    """One end of the stream. Records are handed over as their bytes arrive: no task has to wake for them first.

    Args:
        hear: called with each record.
        gone: called once, when the other side has ended.
    """

    def __init__(self, hear: Callable[[Any], None], gone: Callable[[], None]) -> None:
        self._hear = hear
        self._gone = gone
        self._unread = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def send(self, record: object) -> None:
        """Nothing where the other side has ended: it needs nothing any more."""
        if self._transport is not None and not self._transport.is_closing():
            data = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """What was sent before still leaves."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        start = 0
        while (size := self._record_size(start)) is not None:
            begin, start = start + _LENGTH.size, start + _LENGTH.size + size
            self._hear(pickle.loads(self._unread[begin:start]))
        del self._unread[:start]

    def _record_size(self, start: int) -> int | None:
        """None: the record that begins here is not whole yet."""
        if len(self._unread) < start + _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._unread, start)
        return size if len(self._unread) >= start + _LENGTH.size + size else None

    def connection_lost(self, error: Exception | None) -> None:
        self._gone()
