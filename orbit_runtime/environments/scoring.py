"""Scores for episodes: calls made in one turn of the event loop go to the reward workers together.

Belongs here: joining calls, and giving each episode its results. Does not belong here: running rewards (`workers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from orbit_runtime.errors import OrbitError
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardResult, RewardScorer


class Scoring:
    """Collects scoring calls of many concurrent episodes of one event loop."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self._waiting: list[tuple[Sequence[RewardCall], asyncio.Future[list[RewardResult]]]] = []

    async def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        """Results in the order of the calls. Raises the error that ended the scorer."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._submit)
        future: asyncio.Future[list[RewardResult]] = loop.create_future()
        self._waiting.append((calls, future))
        return await future

    def _submit(self) -> None:
        asked, self._waiting = self._waiting, []
        try:
            submitted = self._scorer.submit([call for calls, _ in asked for call in calls])
        except OrbitError as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        submitted.add_done_callback(partial(_bring_back, asyncio.get_running_loop(), asked))


_Asked = Sequence[tuple[Sequence[RewardCall], asyncio.Future[list[RewardResult]]]]


def _bring_back(loop: asyncio.AbstractEventLoop, asked: _Asked, submitted: Future[list[RewardResult]]) -> None:
    """Runs in the scorer's thread. If the event loop has closed meanwhile, nothing waits for the rewards any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_hand_out, asked, submitted)


def _hand_out(asked: _Asked, submitted: Future[list[RewardResult]]) -> None:
    error = submitted.exception()
    results = iter(()) if error else iter(submitted.result())
    for calls, future in asked:
        mine = [next(results) for _ in calls] if not error else []
        if future.done():
            # Its episode was cancelled meanwhile.
            continue
        if error:
            future.set_exception(error)
        else:
            future.set_result(mine)
