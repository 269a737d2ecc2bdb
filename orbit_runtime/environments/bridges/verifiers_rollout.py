"""Environments of the package verifiers, up to 0.1: they ask a client for completions, which here is the policy.

Belongs here: inverting its control flow into reset and step. Does not belong here: its rubric and its tools, which run
unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers  # type: ignore[import-not-found, unused-ignore]
from verifiers.clients import Client  # type: ignore[import-not-found, unused-ignore]
from verifiers.types import (  # type: ignore[import-not-found, unused-ignore]
    AssistantMessage,
    Response,
    ResponseMessage,
    ToolCall,
)

from orbit_runtime.environments.tool_calls import parameter_schemas, parse_tool_calls
from orbit_runtime.workers.user_code.environment_protocol import Step

MODEL = "policy"


class VerifiersEpisode:
    """One rollout of `verifiers.load_environment(name, **arguments)`, which is loaded once for all episodes.

    The rollout's input is row `example` of the environment's own dataset if the prompt's row has that column;
    otherwise it is the prompt, with the columns `answer`, `info` and `task` as the package names them.
    """

    _environment: Any = None

    @classmethod
    def prepare(cls, name: str, arguments: Mapping[str, Any]) -> None:
        cls._environment = verifiers.load_environment(name, **arguments)

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.tools: list[dict[str, Any]] = []
        self._policy = _Policy()
        self._playing: asyncio.Task[Any] | None = None

    async def reset(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> Step:
        rollout = self._environment.run_rollout(_input(self._environment, prompt, fields), self._policy, MODEL, {})
        self._playing = asyncio.create_task(rollout)
        step = await self._next()
        self.tools = self._policy.tools
        return step

    async def step(self, completion: str) -> Step:
        self._policy.answer(completion)
        return await self._next()

    async def finish(self) -> Step:
        """Ends the rollout like a prompt that exceeds the model's context: it is scored as it is."""
        self._policy.end()
        return await self._next()

    async def close(self) -> None:
        if self._playing is not None and not self._playing.done():
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)

    async def _next(self) -> Step:
        """The next request, or the end of the episode."""
        assert self._playing is not None
        asking = asyncio.ensure_future(self._policy.asked.get())
        await asyncio.wait((asking, self._playing), return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return Step(asking.result())
        asking.cancel()
        output = self._playing.result()
        if output.get("error") and not output.get("is_truncated"):
            raise RuntimeError(f"verifiers: {output['error']}")
        measured = (output.get("metrics") or {}).items()
        metrics = {name: float(value) for name, value in measured if isinstance(value, int | float)}
        return Step(reward=float(output["reward"] or 0.0), done=True, parts=metrics)


class _Policy(Client):  # type: ignore[misc]
    """The client that the environment sends requests to."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        """Messages that the policy has not seen yet."""
        self.tools: list[dict[str, Any]] = []
        self._seen = 0
        self._is_over = False
        self._answer: asyncio.Future[str] | None = None

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **others: Any
    ) -> Response:
        if self._is_over:
            raise verifiers.OverlongPromptError("a limit has ended the episode")
        if self._seen and (len(prompt) <= self._seen or not isinstance(prompt[self._seen - 1], AssistantMessage)):
            raise RuntimeError("the environment changes what was said before: one episode is one conversation")
        new, self._seen = prompt[self._seen :], len(prompt) + 1
        self.tools = [_schema(tool) for tool in tools or ()]
        self._answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait([_message(each) for each in new])
        return self._response(await self._answer)

    def answer(self, completion: str) -> None:
        assert self._answer is not None
        self._answer.set_result(completion)

    def end(self) -> None:
        self._is_over = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(verifiers.OverlongPromptError("a limit has ended the episode"))

    def _response(self, text: str) -> Response:
        schemas = parameter_schemas(self.tools)
        calls = [
            ToolCall(
                id=call.id or f"call-{self._seen}-{index}", name=call.name, arguments=json.dumps(dict(call.arguments))
            )
            for index, call in enumerate(parse_tool_calls(text, schemas))
            # An invalid call stays in the text, and the environment responds to it as text.
            if not call.error
        ]
        reason = "tool_calls" if calls else "stop"
        message = ResponseMessage(content=text, tool_calls=calls or None, finish_reason=reason, is_truncated=False)
        return Response(id=f"answer-{self._seen}", created=0, model=MODEL, usage=None, message=message)

    # What the package's own clients do before they call a server.

    def setup_client(self, config: Any) -> None: ...

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None: ...

    async def from_native_response(self, response: Any) -> Any:
        return response

    async def close(self) -> None: ...


def _input(environment: Any, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> dict[str, Any]:
    if "example" in fields:
        return dict(environment.get_dataset()[int(fields["example"])])
    known = {name: fields[name] for name in ("answer", "info", "task") if name in fields}
    return {"example_id": 0, "prompt": [dict(message) for message in prompt], **known}


def _message(message: Any) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    # A prompt given as one text, as for completion models, becomes a user message.
    role = "user" if plain["role"] == "text" else plain["role"]
    return {**plain, "role": role, "content": plain.get("content", "")}


def _schema(tool: Any) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": about}
