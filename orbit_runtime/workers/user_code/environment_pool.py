"""Environments and tools in processes of their own: one that hangs, dies or uses too much costs only its own episode or
call.

Belongs here: copies of one template, handed out, timed and replaced. Does not belong here: the content of an episode
(`environments`), or what runs in a copy (`environment_cell`).

One thread of this process runs a separate event loop, which owns every copy: steps of a run have other loops, and Linux
ties the template's life to the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from orbit_runtime.errors import ManifestError, OrbitError, RewardsFailingError
from orbit_runtime.workers.child.process import (
    OutputRelay,
    Seal,
    Stacks,
    describe_exit,
    end_guarded,
    frame,
    import_path,
    receive_frame,
    start_module,
)
from orbit_runtime.workers.system import ClosedAtEnd
from orbit_runtime.workers.user_code.environment_protocol import (
    MAX_MESSAGE,
    WANTED,
    EnvironmentFailed,
    EnvironmentLimits,
    EnvironmentTarget,
    ToolResult,
)


class _Mailbox:
    """Calls to be made in one loop. Any thread may post."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._is_woken = False

    def post(self, call: Callable[[], object]) -> None:
        """Raises RuntimeError if the loop is closed."""
        with self._lock:
            if not self._is_woken:
                self._loop.call_soon_threadsafe(self._make)
                self._is_woken = True
            self._calls.append(call)

    def _make(self) -> None:
        with self._lock:
            self._is_woken = False
            calls, self._calls = self._calls, deque()
        for call in calls:
            call()


class OtherLoop:
    """The way into `loop`, which runs in a thread of its own, for coroutines that are awaited in this one's.

    `asyncio.run_coroutine_threadsafe` wakes the other loop for each call, and this one for each answer. When hundreds
    of episodes take a turn at once, that is most of what a turn costs: here many calls are one wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked = _Mailbox(loop)
        self._answered: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, which runs in the other loop; cancelled here, it is cancelled there.

        Raises:
            RuntimeError: the other loop is closed.
        """
        here = asyncio.get_running_loop()
        with self._lock:
            answers = self._answered.setdefault(here, _Mailbox(here))
        answer: asyncio.Future[T] = here.create_future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(tell)

        def tell(task: asyncio.Task[T]) -> None:
            # Closed: nobody waits any more.
            with contextlib.suppress(RuntimeError):
                answers.post(partial(_deliver, task, answer))

        try:
            self._asked.post(start)
        except RuntimeError:
            work.close()
            raise
        try:
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):
                self._asked.post(lambda: tasks[0].cancel())
            raise


def _deliver[T](task: asyncio.Task[T], answer: asyncio.Future[T]) -> None:
    error = None if task.cancelled() else task.exception()
    if answer.done():
        return
    if task.cancelled():
        answer.cancel()
    elif error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


TEMPLATE_MODULE = "orbit_runtime.workers.user_code.environment_template"
EPISODES_PER_CELL = 64
"""Replaces a process after this many episodes, and with it what they left behind."""
OUTPUT_BYTES = 1 << 18
"""Limit for the output of all environments that is passed to standard error; the rest is only counted."""


class Cell:
    """One copy, from the pool's side. Used by the pool's loop only."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stacks: Stacks
    ) -> None:  # fmt: skip
        self.pid = pid
        self.stacks = stacks
        self.served = 0
        self._reader = reader
        self._writer = writer
        self._seal = Seal()
        writer.write(frame(self._seal.key.encode()))

    async def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Raises TimeoutError, or ConnectionError if the process ended."""
        async with asyncio.timeout(seconds):
            await self.send(message)
            return await self.receive()

    async def send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(frame(json.dumps(message).encode()))
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Raises ConnectionError if the process ended, ValueError for what an environment wrote in its place."""
        try:
            return dict(json.loads(self._seal.open(await receive_frame(self._reader, 2 * MAX_MESSAGE))))
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("it ended") from error

    def close(self) -> None:
        self._writer.close()
        self.stacks.close()


class EnvironmentPool(ClosedAtEnd):
    """Up to `limits.processes` copies, made on demand.

    Args:
        search_path: folders to import from first.

    Raises:
        ManifestError: the environment or a tool cannot be imported.
    """

    def __init__(
        self, target: EnvironmentTarget, *, limits: EnvironmentLimits | None = None, search_path: Sequence[str] = ()
    ) -> None:
        self._target = target
        self._limits = limits or EnvironmentLimits()
        self._search_path = search_path
        self._free: list[Cell] = []
        self._cells: set[Cell] = set()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self.there = OtherLoop(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="environment-pool", daemon=True)
        self._thread.start()
        try:
            started = self._submit(self._start()).result()
            self.tools: tuple[dict[str, Any], ...] = tuple(started["tools"])
            """JSON schema of each tool."""
            self.cohorts: tuple[str, ...] | None = started["cohorts"] and tuple(started["cohorts"])
            """The name of each rollout of an episode, for an environment that asks the policy itself; else None."""
        except BaseException:
            self.close()
            raise

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The tool's result, or an error in words for the policy, also if the tool hung, died or used too much.

        May be awaited in any event loop.
        """
        return await self.there.run(self._call_tool(name, arguments))

    def open_episode(self) -> EpisodeProcess:
        """A process for one episode, taken on the first call. `close` must be awaited."""
        return EpisodeProcess(self)

    def close(self) -> None:
        """Ends every copy, whatever it is doing. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OrbitError):
            self._submit(self._end_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # Everything below runs in the pool's loop.

    async def _start(self) -> dict[str, Any]:
        self._places = asyncio.Semaphore(self._limits.processes)
        self._turn = asyncio.Lock()
        """The template handles one command at a time."""
        self._control, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        with theirs:
            self._template = start_module(
                TEMPLATE_MODULE, theirs.fileno(), os.getpid(), variables=self._target.variables,
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=output_write, stderr=output_write,
            )  # fmt: skip
        os.close(output_write)
        self._output = output_read
        self._printed = OutputRelay("environments", OUTPUT_BYTES)
        self._loop.add_reader(output_read, self._pass_on)
        self._control.setblocking(False)
        self._seal = Seal()
        head = {
            "path": import_path(self._search_path),
            "environment": self._target.environment,
            "arguments": dict(self._target.arguments),
            "tools": list(self._target.tools),
            "limits": dataclasses.asdict(self._limits),
            "key": self._seal.key,
        }
        self._answers = asyncio.StreamReader(limit=1 << 26)
        self._reading = self._loop.create_task(self._read_control())
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                await self._loop.sock_sendall(self._control, frame(json.dumps(head).encode()))
                answer = await self._answer()
        except TimeoutError:
            raise ManifestError(
                f"importing the environment took longer than {self._limits.start_seconds:g} s",
                where="spec.environment",
                fix="do slow work in reset, or raise spec.environment.limits.startSeconds",
            ) from None
        except ConnectionError:
            raise ManifestError(
                "the process that imports the environment ended", where="spec.environment", fix="see its output above"
            ) from None
        if "error" in answer:
            raise _unusable(answer["error"], answer["target"], is_tool=answer["target"] in self._target.tools)
        return answer

    async def _read_control(self) -> None:
        while data := await self._loop.sock_recv(self._control, 1 << 16):
            self._answers.feed_data(data)
        self._answers.feed_eof()

    async def _answer(self) -> dict[str, Any]:
        line = await self._answers.readline()
        try:
            return dict(json.loads(self._seal.open(line.removesuffix(b"\n"))))
        except ValueError as error:  # also of nothing: it ended
            raise ConnectionError("the template ended, or code that it imports wrote in its place") from error

    def _pass_on(self) -> None:
        """Passes on what environments print, up to the limit."""
        data = os.read(self._output, 1 << 16)
        if not data:
            self._loop.remove_reader(self._output)
            return
        self._printed.pass_on(data)

    async def _fork(self) -> Cell:
        ours, theirs = socket.socketpair()
        stacks = Stacks()
        try:
            async with self._turn:
                with theirs:
                    socket.send_fds(self._control, [b"F\0\0\0\0"], [theirs.fileno(), stacks.fd])
                pid = int((await self._answer())["forked"])
        except (ConnectionError, OSError) as error:
            ours.close()
            stacks.close()
            raise RewardsFailingError(
                "the process that environments are forked from ended",
                where="spec.environment",
                fix="look for code that ends or replaces its parent, and for the kernel's out-of-memory killer",
            ) from error
        ours.setblocking(False)
        cell = Cell(pid, *await asyncio.open_connection(sock=ours, limit=2 * MAX_MESSAGE), stacks)
        self._cells.add(cell)
        return cell

    async def _take(self) -> Cell:
        """A free copy, or a new one."""
        await self._places.acquire()
        if self._free:
            return self._free.pop()
        # The template answers commands in order, so the answer is read even if the caller is cancelled.
        forking = asyncio.create_task(self._fork())
        try:
            return await asyncio.shield(forking)
        except BaseException:
            forking.add_done_callback(self._not_taken)
            raise

    def _not_taken(self, forking: asyncio.Task[Cell]) -> None:
        """The caller of `_take` is gone, or no copy could be made."""
        if not forking.cancelled() and forking.exception() is None:
            self._free.append(forking.result())
        self._places.release()

    def _give_back(self, cell: Cell) -> None:
        cell.served += 1
        self._free.append(cell)
        self._places.release()

    async def _retire(self, cell: Cell) -> str:
        """Ends a copy once and returns how it had ended; runs to completion even if the caller is cancelled."""
        if cell not in self._cells:
            return "it was ended"
        self._cells.discard(cell)
        cell.close()
        return await asyncio.shield(self._reap(cell))

    async def _reap(self, cell: Cell) -> str:
        try:
            async with self._turn:
                await self._loop.sock_sendall(self._control, b"E" + cell.pid.to_bytes(4, "big"))
                status = int((await self._answer())["ended"])
        except (ConnectionError, OSError):
            return "its template ended"
        finally:
            self._places.release()
        return f"its process {describe_exit(os.waitstatus_to_exitcode(status))}"

    async def _ask(self, cell: Cell, message: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Raises EnvironmentFailed. The copy is then ended, as it is if the caller is cancelled."""
        allowed = self._limits.step_seconds if seconds is None else min(seconds, self._limits.step_seconds)
        try:
            return await self._held(cell, cell.ask(message, allowed))
        except TimeoutError:
            raise await self._late(cell, allowed) from None

    async def _held[T](self, cell: Cell, work: Coroutine[Any, Any, T]) -> T:
        """Exchanges messages with a copy, which is ended if it ended by itself, was late, or the
        caller is cancelled.
        """
        try:
            return await work
        except TimeoutError:
            raise
        except ConnectionError:
            raise EnvironmentFailed("crash", await self._retire(cell)) from None
        except ValueError:
            await self._retire(cell)
            raise EnvironmentFailed("crash", "it wrote to its process's socket; the process was killed") from None
        except BaseException:
            await self._retire(cell)
            raise

    async def _late(self, cell: Cell, seconds: float) -> EnvironmentFailed:
        """Ends a copy that did not answer in time; returns the failure, with its stack."""
        stack = await asyncio.to_thread(cell.stacks.ask, cell.pid) if cell in self._cells else ""
        await self._retire(cell)
        return EnvironmentFailed("timeout", f"no answer within {seconds:g} s; its process was killed", stack)

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        cell = await self._take()
        try:
            answer = await self._ask(cell, {"tool": name, "arguments": dict(arguments)})
        except EnvironmentFailed as failure:
            return ToolResult(f"Error: {name}: {failure.reason}", is_error=True)
        await self._end_use(cell)
        return ToolResult(str(answer["text"]), bool(answer["is_error"]))

    async def _end_use(self, cell: Cell) -> None:
        if cell not in self._cells:
            return
        if cell.served + 1 >= EPISODES_PER_CELL:
            await self._retire(cell)
        else:
            self._give_back(cell)

    async def _end_all(self) -> None:
        if not hasattr(self, "_template"):
            return
        self._reading.cancel()
        for cell in self._cells:
            cell.close()
        # The template ends its copies when this closes, and is killed if it does not.
        self._control.close()
        try:
            await asyncio.to_thread(self._template.wait, 5.0)
        except subprocess.TimeoutExpired:
            end_guarded(self._template)
        self._loop.remove_reader(self._output)
        os.close(self._output)


class EpisodeProcess:
    """One episode's environment, in a copy reserved for it until `close`. Its methods may be awaited in any loop."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._cell: Cell | None = None

    async def reset(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Returns the first messages; waits for a free copy. Raises EnvironmentFailed, like all methods here."""
        return await self._run({"reset": _given(prompt, fields, seed)})

    async def step(self, completion: str) -> dict[str, Any]:
        return await self._run({"step": completion})

    async def finish(self) -> dict[str, Any]:
        """Returns the final reward of an episode that was ended from outside."""
        return await self._run({"finish": True})

    # With an environment that asks the policy itself, in place of the three above.

    async def play(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> None:
        """Starts it; waits for a free copy. See `environment_protocol` for what is sent and received from then on."""
        await self.send({"play": _given(prompt, fields, seed)})

    async def send(self, message: Mapping[str, Any]) -> None:
        await self._pool.there.run(self._exchange(lambda cell: cell.send(message)))

    async def receive(self) -> dict[str, Any]:
        """The process's next message, however long that takes."""
        return dict(await self._pool.there.run(self._receive()))

    async def end_late(self) -> EnvironmentFailed:
        """Ends a copy that gave no message for `step_seconds`; returns the failure, to be raised."""
        cell, self._cell = self._cell, None
        assert cell is not None
        failure: EnvironmentFailed = await self._pool.there.run(self._pool._late(cell, self.seconds))
        return failure

    @property
    def seconds(self) -> float:
        """Limit of one response."""
        return self._pool._limits.step_seconds

    async def close(self) -> None:
        """Gives the copy back; a copy that does not respond is ended."""
        cell, self._cell = self._cell, None
        if cell is not None:
            await self._pool.there.run(self._close(cell))

    async def _run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return dict(await self._pool.there.run(self._ask(message)))

    async def _exchange[T](self, work: Callable[[Cell], Coroutine[Any, Any, T]]) -> T:
        if self._cell is None:
            self._cell = await self._pool._take()
        try:
            return await self._pool._held(self._cell, work(self._cell))
        except BaseException:
            self._cell = None
            raise

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._cell is None:
            self._cell = await self._pool._take()
        try:
            answer = await self._pool._ask(self._cell, message)
        except BaseException:
            self._cell = None
            raise
        return await self._checked(answer)

    async def _receive(self) -> dict[str, Any]:
        return await self._checked(await self._exchange(lambda cell: cell.receive()))

    async def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Raises EnvironmentFailed for an environment that raised: nothing is known of its copy, which is ended."""
        if "crash" in answer:
            cell, self._cell = self._cell, None
            if cell is not None:
                await self._pool._retire(cell)
            raise EnvironmentFailed("crash", str(answer["crash"]))
        return answer

    async def _close(self, cell: Cell) -> None:
        with contextlib.suppress(EnvironmentFailed):
            await self._pool._ask(cell, {"close": True})
            await self._pool._end_use(cell)


def _given(prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {"prompt": [dict(message) for message in prompt], "fields": dict(fields), "seed": seed}


def _unusable(message: str, target: str, *, is_tool: bool) -> ManifestError:
    if is_tool:
        return ManifestError(message, where="spec.environment.tools", fix="name an importable 'module:function'")
    if target.startswith("orbit_runtime."):
        return ManifestError(
            message, where="spec.environment", fix="correct its name or arguments, or install what it needs"
        )
    return ManifestError(
        message, where="spec.environment.entrypoint", fix=f"name an importable 'module:Class' with {WANTED}"
    )
