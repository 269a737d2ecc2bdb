"""Opponents of the policy: tools, or an environment in its own process.

Belongs here: the two opponents of `multi_turn`. Does not belong here: processes (`workers`), the order of turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from orbit_runtime.environments.multi_turn import Answered
from orbit_runtime.environments.tool_calls import ToolCall, parameter_schemas, parse_tool_calls
from orbit_runtime.model_info.calls.known import FORMATS
from orbit_runtime.types import Prompt
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool, EpisodeProcess
from orbit_runtime.workers.user_code.environment_protocol import ToolResult


class ToolUse:
    """Makes all calls of a completion at once; a completion without calls ends the episode.

    A call that fails or cannot be made returns an error for the policy to read.
    """

    def __init__(self, pool: EnvironmentPool, call_format: str = "") -> None:
        """Args: call_format: name of the format in which the model's template writes calls; empty if unknown."""
        self._pool = pool
        self._schemas = parameter_schemas(pool.tools)
        self._own = FORMATS.get(call_format)
        self._calls = 0
        self._errors = 0

    async def reset(self, prompt: Prompt, seed: int) -> Answered:
        return Answered(prompt.messages, tools=self._pool.tools)

    async def step(self, completion: str) -> Answered:
        calls = parse_tool_calls(completion, self._schemas, self._own)
        results = await asyncio.gather(*(self._make(call) for call in calls))
        self._calls += len(calls)
        self._errors += sum(result.is_error for result in results)
        messages: list[Mapping[str, Any]] = [
            {
                "role": "tool",
                "name": call.name,
                "content": result.text,
                **({"tool_call_id": call.id} if call.id else {}),
            }
            for call, result in zip(calls, results, strict=True)
        ]
        return Answered(messages, done=not calls)

    async def finish(self) -> Answered:
        return Answered(done=True)

    async def close(self) -> None: ...

    @property
    def counts(self) -> Mapping[str, int]:
        return {"tool_calls": self._calls, "tool_errors": self._errors}

    async def _make(self, call: ToolCall) -> ToolResult:
        if call.error:
            return ToolResult(f"Error: {call.error}", is_error=True)
        return await self._pool.call_tool(call.name, call.arguments)


class OwnProcess:
    """An environment in a process reserved for this episode."""

    def __init__(self, process: EpisodeProcess) -> None:
        self._process = process

    async def reset(self, prompt: Prompt, seed: int) -> Answered:
        return _answered(await self._process.reset(prompt.messages, prompt.fields, seed))

    async def step(self, completion: str) -> Answered:
        return _answered(await self._process.step(completion))

    async def finish(self) -> Answered:
        return _answered(await self._process.finish())

    async def close(self) -> None:
        await self._process.close()

    @property
    def counts(self) -> Mapping[str, int]:
        return {}


def _answered(answer: Mapping[str, Any]) -> Answered:
    return Answered(answer["messages"], answer["reward"], answer["done"], answer["parts"], answer["tools"])
