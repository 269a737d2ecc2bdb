"""One process of an environment or of tools, forked from the template: serves one episode, or one call, at a time.

Belongs here: its limits, calling user code, and telling apart every way it can misbehave. Does not belong here: time
limits, which only another process can enforce (`environment_pool`).

In:  the key that marks what it answers (`Seal`), then frames of JSON. Out: marked frames of JSON.

`{"tool": name, "arguments": {...}}` is answered by `{"text", "is_error"}`;
`{"reset": {"prompt", "fields", "seed"}}`, `{"step": text}` and `{"finish": true}` by
`{"messages", "reward", "done", "parts"}` or `{"crash": reason}`; `{"close": true}` by `{}`. After `{"play": {"prompt",
"fields", "seed"}}` both sides write whenever they have something to say: the environment any number of `{"ask": ...}`
and one `{"chosen": [...]}` or `{"crash": reason}` at its end, the run `{"answers": [...]}`
(`environment_protocol`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbit_runtime.workers.child.process import Seal, end_with_parent, frame, receive_frame
from orbit_runtime.workers.user_code.confine import forbid_processes
from orbit_runtime.workers.user_code.entrypoints import describe
from orbit_runtime.workers.user_code.environment_protocol import (
    MAX_MESSAGE,
    EnvironmentLimits,
    Policy,
    Step,
    checked_messages,
    checked_number,
    choice_to_json,
)

MAX_READ = 1 << 30


@dataclass(frozen=True)
class LoadedEnvironment:
    """Everything that the template imported."""

    environment: Callable[..., Any] | None
    arguments: Mapping[str, Any]
    tools: Mapping[str, Callable[..., Any]]
    cohorts: tuple[str, ...] | None = None
    """The name of each of an episode's rollouts, with `play`."""


def serve(connection: socket.socket, loaded: LoadedEnvironment, limits: EnvironmentLimits, parent_pid: int) -> None:
    """Serves until the other end closes."""
    os.setsid()  # its own group, killed whole
    end_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    limit_memory(limits.memory_bytes)
    if not limits.may_fork:
        forbid_processes()
    connection.setblocking(False)
    asyncio.run(_serve(connection, loaded))


def limit_memory(allowed: int) -> None:
    """Limits private memory beyond the current amount: heap, anonymous maps and thread stacks, but not mapped files."""
    status = Path("/proc/self/status")
    has = int(status.read_text().partition("VmData:")[2].split()[0]) << 10 if status.exists() else 0
    resource.setrlimit(resource.RLIMIT_DATA, (has + allowed, has + allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


async def _serve(connection: socket.socket, loaded: LoadedEnvironment) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_READ)
    seal = Seal((await receive_frame(reader)).decode())

    def write(answer: Mapping[str, Any], who: str) -> None:
        writer.write(frame(seal.close(_body(answer, who))))

    told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    reading = asyncio.create_task(_read(reader, told))
    episode = None
    while (message := await told.get()) is not None:
        if "answers" in message:
            continue  # of an episode that has ended meanwhile
        if "tool" in message:
            answer = await _call_tool(loaded.tools, message["tool"], message["arguments"])
        elif "close" in message:
            await _close(episode)
            episode, answer = None, {}
        else:
            try:
                if "reset" in message or "play" in message:
                    assert loaded.environment is not None
                    episode = loaded.environment(**loaded.arguments)
                if "play" in message:
                    answer = await _play_branches(episode, message["play"], loaded, told, write, reading)
                else:
                    answer = await _play(episode, message)
            except MemoryError:
                answer = {"crash": "MemoryError: spec.environment.limits.memory was reached"}
            except BaseException as error:  # SystemExit and KeyboardInterrupt of user code are crashes, too
                answer = {"crash": describe(error)}
        write(answer, _asked(message))
        await writer.drain()


def _asked(message: Mapping[str, Any]) -> str:
    """The receiver of a message, for the user: the name of a tool, or of the environment's function."""
    return str(message["tool"]) if "tool" in message else next(iter(message))


async def _read(reader: asyncio.StreamReader, told: asyncio.Queue[dict[str, Any] | None]) -> None:
    """Puts each message into the queue, and None at the end."""
    try:
        while True:
            told.put_nowait(json.loads(await receive_frame(reader)))
    except asyncio.IncompleteReadError:
        told.put_nowait(None)


async def _play_branches(
    episode: Any,
    given: Mapping[str, Any],
    loaded: LoadedEnvironment,
    told: asyncio.Queue[dict[str, Any] | None],
    write: Callable[[Mapping[str, Any], str], None],
    reading: asyncio.Task[None],
) -> dict[str, Any]:
    """Runs `play` to its end, while answers come in; ends what it leaves running."""
    assert loaded.cohorts is not None
    policy = Policy(lambda message: write(message, "play"))
    playing = asyncio.create_task(episode.play(policy, given["prompt"], given["fields"], given["seed"]))
    hearing = asyncio.create_task(told.get())
    try:
        while not playing.done():
            await asyncio.wait((playing, hearing), return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                message = hearing.result()
                if message is None:
                    told.put_nowait(None)
                    raise ConnectionError("the run has ended")
                policy.hear(message["answers"])
                hearing = asyncio.create_task(told.get())
        return {"chosen": choice_to_json(playing.result(), loaded.cohorts)}
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task(), reading}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _body(answer: Mapping[str, Any], who: str) -> bytes:
    try:
        # Half of a surrogate pair, as in a file's name, is no character that a policy could read: it becomes `?`.
        body = json.dumps(answer, allow_nan=False, ensure_ascii=False).encode(errors="replace")
    except (TypeError, ValueError, RecursionError) as error:
        body = json.dumps({"crash": f"what it answered is not JSON: {error}"}).encode()
    if len(body) > MAX_MESSAGE:
        message = f"{who} answered with {len(body):,} bytes at once, and {MAX_MESSAGE:,} are allowed"
        if who == "reset":
            message += "; without messages of its own, reset answers with the row's prompt: shorten what is too long"
        fail = {"text": f"Error: {message}", "is_error": True} if "text" in answer else {"crash": message}
        body = json.dumps(fail).encode()
    return body


async def _call_tool(
    tools: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Calls a tool. What it raises is returned for the policy to read, which may then call it better."""
    function = tools[name]
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return {"text": f"Error: {name}: {error}", "is_error": True}
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = await value
        return {"text": value if isinstance(value, str) else json.dumps(value), "is_error": False}
    except MemoryError:
        return {"text": f"Error: {name} needed more memory than it may have", "is_error": True}
    except BaseException as error:  # as above
        text = " ".join(str(error).split())[:300]
        return {"text": f"Error: {type(error).__name__}: {text}", "is_error": True}


async def _play(episode: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    if "reset" in message:
        given = message["reset"]
        value = await _maybe_await(episode.reset(given["prompt"], given["fields"], given["seed"]))
        step = value if isinstance(value, Step) else Step(given["prompt"] if value is None else value)
        where = "reset"
        if not step.messages and not step.done:
            raise TypeError("reset gave no message, and the policy answers messages")
    elif "step" in message:
        value, where = await _maybe_await(episode.step(message["step"])), "step"
        if not isinstance(value, Step):
            raise TypeError(f"step returned {type(value).__name__}, and not orbit_runtime.environments.Step")
        step = value
    else:
        finish, where = getattr(episode, "finish", None), "finish"
        value = await _maybe_await(finish()) if finish is not None else None
        step = value if isinstance(value, Step) else Step(reward=0.0 if value is None else value, done=True)
    return {
        "messages": checked_messages(step.messages, where),
        "reward": checked_number(step.reward, f"reward of {where}"),
        "done": bool(step.done),
        "parts": {str(name): checked_number(value, f"part {name!r} of {where}") for name, value in step.parts.items()},
        "tools": [dict(tool) for tool in getattr(episode, "tools", ())] if where == "reset" else [],
    }


async def _close(episode: Any) -> None:
    close = getattr(episode, "close", None)
    if close is not None:
        try:
            await _maybe_await(close())
        except BaseException as error:  # its episode is over and scored
            print(f"environment: close raised {describe(error)}", file=sys.stderr, flush=True)


async def _maybe_await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
