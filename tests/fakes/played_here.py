"""The process of an environment that asks the policy itself, in the event loop of whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from orbit_runtime.workers.user_code.environment_protocol import EnvironmentFailed, Policy, choice_to_json


class PlayedHere:
    """Like `EpisodeProcess`, without the process."""

    seconds = 5.0

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def play(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> None:
        self._policy = Policy(lambda message: self._told.put_nowait(dict(message)))
        self._playing = asyncio.create_task(self._run(prompt, fields, seed))

    async def send(self, message: Mapping[str, Any]) -> None:
        self._policy.hear(message["answers"])

    async def receive(self) -> dict[str, Any]:
        told = await self._told.get()
        if "crash" in told:
            raise EnvironmentFailed("crash", told["crash"])
        return told

    async def end_late(self) -> EnvironmentFailed:
        return EnvironmentFailed("timeout", "no answer", "its stack")

    async def close(self) -> None:
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)

    async def _run(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> None:
        try:
            rollouts = getattr(self._environment, "rollouts", 1)
            cohorts = [""] * rollouts if isinstance(rollouts, int) else rollouts
            chosen = await self._environment.play(self._policy, prompt, fields, seed)
            self._told.put_nowait({"chosen": choice_to_json(chosen, cohorts)})
        except Exception as error:
            self._told.put_nowait({"crash": str(error)})
