"""Between the front, which speaks HTTP, and the engine's process: one stream of records each way.

Belongs here: the records and how they travel. Does not belong here: what either side does with them (`front`,
`sampler`).

Pickled: both ends are processes of one program, joined by a socket pair that nobody else has.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def pack(record: object) -> bytes:
    data = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def receive(reader: StreamReader) -> Any:
    """The next record; None: the other side has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (IncompleteReadError, ConnectionError):
        return None
