"""Runs an evaluation from the first to the last sample: every model answers what is not in the folder yet.

Belongs here: the order of models and tasks, stopping and continuing. Does not belong here: one episode (`player`), a
model (`api_model`; `loop` for engines).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import uvloop

from orbit_runtime.environments.episodes import Episode
from orbit_runtime.errors import StoppedOnRequest
from orbit_runtime.evaluation.api_model import ApiConnection, ApiEpisode, ApiModel, Conversations
from orbit_runtime.evaluation.journal import Journal
from orbit_runtime.evaluation.player import MeteredSource, play
from orbit_runtime.evaluation.records import EvalSample
from orbit_runtime.evaluation.tasks import EvalTask
from orbit_runtime.types import Prompt, Tokenizer

Show = Callable[[str, int, int], None]
"""Called with the current task, the number of samples so far, and the total."""


class Subject(Protocol):
    """A model to be measured."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def to_json(self) -> Mapping[str, Any]:
        """Identifies the model: a later start under the same name must give the same."""

    def asking(self) -> AbstractAsyncContextManager[Callable[[], MeteredSource]]:
        """A context in which the model answers; yields a factory of token sources, one per episode."""


@dataclass(frozen=True)
class ApiSubject:
    """A model behind an API."""

    api: ApiModel
    conversations: Conversations

    @property
    def name(self) -> str:
        return self.api.model

    @property
    def tokenizer(self) -> Conversations:
        return self.conversations

    def to_json(self) -> dict[str, Any]:
        return {"kind": "api", "url": self.api.shown, "model": self.api.model}

    @asynccontextmanager
    async def asking(self) -> Any:
        connection = ApiConnection(self.api)
        try:
            yield lambda: ApiEpisode(connection, self.api, self.conversations, asyncio.sleep)
        finally:
            await connection.close()


def ask_all(
    subjects: Sequence[Subject], tasks: Sequence[EvalTask], journal: Journal, *, concurrency: int, show: Show
) -> None:
    """Runs until every model has answered every sample, or failed to after every retry.

    Raises:
        StoppedOnRequest: SIGINT or SIGTERM; every finished sample is kept.
        OrbitError: a model, an environment or the scorer failed.
    """
    # uvloop takes less processor time per request than asyncio's loop, which limits the speed of many requests.
    uvloop.run(_ask_all(subjects, tasks, journal, concurrency, show))


async def _ask_all(
    subjects: Sequence[Subject], tasks: Sequence[EvalTask], journal: Journal, concurrency: int, show: Show
) -> None:
    with _cancelled_by_signals() as stopped:
        try:
            for subject in subjects:
                await ask_one(subject, tasks, journal, concurrency=concurrency, show=show)
        except asyncio.CancelledError:
            if not stopped:
                raise
            raise StoppedOnRequest(
                f"{stopped[0]}: {len(journal.samples)} samples are kept; the same command continues"
            ) from None


async def ask_one(
    subject: Subject, tasks: Sequence[EvalTask], journal: Journal, *, concurrency: int, show: Show
) -> None:
    """Asks one model, which is not even started if no sample is missing."""
    left = [(task, _missing(subject, task, journal)) for task in tasks]
    total = sum(len(task.table.prompts_P) * task.spec.algorithm.group_size for task in tasks)
    done = total - sum(len(episodes) for _, episodes in left)
    show(subject.name, done, total)
    if done == total:
        return

    async with subject.asking() as ask:
        for task, episodes in left:

            def keep(sample: EvalSample, prompt: Prompt, task: EvalTask = task) -> None:
                nonlocal done
                done += 1
                journal.add(replace(sample, expected=task.expected(prompt)))
                show(subject.name, done, total)

            environment = task.environment(subject.tokenizer)
            await play(subject.name, task.name, environment, episodes, ask, concurrency=concurrency, keep=keep)


def _missing(subject: Subject, task: EvalTask, journal: Journal) -> list[Episode]:
    episodes = task.environment(subject.tokenizer).build_episodes(task.table.prompts_P, 0)
    return [
        each
        for each in episodes
        if not journal.has((subject.name, task.name, each.prompt.prompt_id, each.sample_index))
    ]


@contextmanager
def _cancelled_by_signals() -> Iterator[list[str]]:
    """A context in which SIGINT and SIGTERM cancel this task; the signal is put into the list that it yields."""
    stopped: list[str] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(name: str) -> None:
        stopped.append(name)
        task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in signals:
            loop.add_signal_handler(number, stop, number.name)
    except (RuntimeError, ValueError):
        # Only the main thread receives signals.
        yield stopped
        return
    try:
        yield stopped
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
