"""The agent of a container that only runs the engine: it starts and ends servers for the run in another container.

Belongs here: HTTP on the loopback device, which the containers of a pod share, and the servers that were started.
Does not belong here: the other side (`remote_process`), processes (`server_process`).

It starts SGLang with Orbit's plug-in and nothing else. Only what runs in the same pod reaches it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Lock
from typing import Annotated

from fastapi import FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from orbit_runtime import __version__
from orbit_runtime.errors import OutputError
from orbit_runtime.workers.nvidia_smi import ask_driver
from orbit_runtime.workers.server_process import ServerProcess
from orbit_runtime.workers.sglang_launch import launch_command, launch_environment

HOST = "127.0.0.1"
ALLOWED = ("ORBIT_SGLANG", "SGLANG_", "OMP_WAIT_POLICY")
"""How names of variables begin that a run may set for a server."""

Text = Annotated[str, Field(max_length=4096)]


class Order(BaseModel):
    """A server that a run wants."""

    model_config = ConfigDict(extra="forbid")

    arguments: Annotated[list[Text], Field(max_length=512)]
    """What follows the module's name."""
    environment: dict[Text, Text]
    log: Text
    """A file that both containers see."""


class State(BaseModel):
    """Whether a server lives."""

    exit_status: int | None
    """None while it does; negative: the signal that killed it."""


class Memory(BaseModel):
    """What something takes now."""

    bytes: int | None


class Agent:
    """The servers of one run. Safe to call from several threads."""

    def __init__(self, command: Callable[[Sequence[str]], list[str]] = launch_command) -> None:
        self._command = command
        self._servers: dict[str, ServerProcess] = {}
        self._lock = Lock()
        self._is_ending = False

    def start(self, name: str, order: Order) -> None:
        """Under a name that is taken, the old server ends first.

        Raises:
            ValueError: a variable that a run may not set.
            OSError: the log cannot be written, or there is no such interpreter.
        """
        refused = sorted(each for each in order.environment if not each.startswith(ALLOWED))
        if refused:
            raise ValueError(f"a run may not set {', '.join(refused)} for a server")
        self.stop(name)
        with self._lock:
            if self._is_ending:
                raise ValueError("the agent is about to end")
            self._servers[name] = ServerProcess(
                name, self._command(order.arguments), environment=launch_environment(order.environment),
                log=Path(order.log),
            )  # fmt: skip

    def state(self, name: str) -> State | None:
        """None where there is no such server."""
        with self._lock:
            server = self._servers.get(name)
        return None if server is None else State(exit_status=server.exit_status())

    def memory(self, name: str) -> Memory:
        with self._lock:
            server = self._servers.get(name)
        return Memory(bytes=None if server is None else server.resident_bytes())

    def stop(self, name: str) -> None:
        with self._lock:
            server = self._servers.pop(name, None)
        if server is not None:
            server.stop()

    def end(self) -> None:
        """Ends all servers, at once: the pod's grace period is one for all. None is started any more."""
        with self._lock:
            self._is_ending = True
            names = list(self._servers)
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            list(pool.map(self.stop, names))


def build_app(agent: Agent) -> FastAPI:
    """`PUT`, `GET` and `DELETE` of `/servers/NAME`; `/memory` of servers and GPUs; `/version`.

    Its end is the end of all servers.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(agent.end)

    app = FastAPI(title="orbit agent", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.put("/servers/{name}")
    def _start(name: str, order: Order) -> State:
        try:
            agent.start(name, order)
        except (ValueError, OSError) as error:
            raise HTTPException(422, str(error)) from None
        return _known(agent.state(name))

    @app.get("/servers/{name}")
    def _state(name: str) -> State:
        return _known(agent.state(name))

    @app.delete("/servers/{name}")
    def _stop(name: str) -> None:
        agent.stop(name)

    @app.get("/servers/{name}/memory")
    def _memory(name: str) -> Memory:
        return agent.memory(name)

    @app.get("/gpus/memory")
    def _gpu_memory(first: int, count: int) -> Memory:
        return Memory(bytes=gpu_memory(first, count))

    @app.get("/version")
    def _version() -> dict[str, str]:
        return {"version": __version__}

    return app


def _known(state: State | None) -> State:
    if state is None:
        raise HTTPException(404, "there is no such server")
    return state


def gpu_memory(first: int, count: int) -> int | None:
    """Bytes in use on these of the container's GPUs, as the driver says, if it does. Not run on hardware."""
    try:
        used = [int(line) for line in ask_driver("memory.used")]
    except ValueError:
        return None
    return sum(used[first : first + count]) * 2**20 if used else None


def run_agent(port: int) -> None:
    """Until SIGTERM or SIGINT; then every server has ended.

    Raises:
        OutputError: the port is taken.
    """
    import uvicorn

    config = uvicorn.Config(build_app(Agent()), host=HOST, port=port, log_config=None, access_log=False, workers=1)
    server = uvicorn.Server(config)
    try:
        server.run()
    except SystemExit:
        # uvicorn's own end where it cannot listen.
        raise OutputError(f"port {port} is in use", where=f"{HOST}:{port}", fix="choose another with --port") from None
