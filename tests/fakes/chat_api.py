"""An OpenAI-compatible API that answers as it is told to: right, late, busy, cut off.

Belongs here: HTTP over asyncio streams. Does not belong here: what is asked of it (the tests, the benchmark).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

ANSWER = 200
CUT = 0
"""In place of a status: the answer ends in its middle."""


@dataclass
class ChatApi:
    """Runs in a thread. Use as a context manager.

    Example: `with ChatApi(say=lambda body: "46") as api: …` then ask `api.url`.
    """

    say: Callable[[Mapping[str, Any]], str | Mapping[str, Any]]
    """Text of the answer, or its whole message."""
    statuses: Callable[[int], int] = lambda number: ANSWER
    """Status of the n-th request."""
    refuses: tuple[str, ...] = ()
    """Settings that it refuses (400), whatever they are."""
    headers: str = ""
    """Further header lines of an answer that is none, each with its end."""
    raw: bytes = b""
    """In place of every answer, its head included."""
    delay_seconds: float = 0.0
    key: str | None = None
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    port: int = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _run(self, ready: threading.Event) -> None:
        self._at_once = 0
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().lower().split("\r\n")
                length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
                body = json.loads(await reader.readexactly(length))
                if not await self._answer(body, head.decode(), writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _answer(self, body: Mapping[str, Any], head: str, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the connection goes on."""
        number = len(self.asked)
        self.asked.append(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        self._at_once -= 1
        if self.raw:
            writer.write(self.raw)
            await writer.drain()
            return False
        status = self.statuses(number)
        if self.key is not None and f"Bearer {self.key}\r\n" not in head:
            status = 401
        if refused := [name for name in self.refuses if name in body]:
            status = 400
        said = self.say(body)
        message = said if isinstance(said, Mapping) else {"role": "assistant", "content": said}
        content = {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3},
        }
        data = json.dumps(content if status in (ANSWER, CUT) else {"error": {"message": f"as told {refused}"}}).encode()
        extra = "" if status in (ANSWER, CUT) else self.headers
        writer.write(
            f"HTTP/1.1 {status or ANSWER} .\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            f"{extra}\r\n".encode()
            + (data[: len(data) // 2] if status == CUT else data)
        )
        await writer.drain()
        return status != CUT
