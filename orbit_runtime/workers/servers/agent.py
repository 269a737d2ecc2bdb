"""The agent of a container that only runs the engine: starts and ends servers for the run in another container.

Belongs here: HTTP on the loopback device, which the containers of a pod share, and the servers that were started.
Does not belong here: the client (`remote`), processes (`process`).

It starts only SGLang with Orbit's plug-in, only with arguments that a run needs, and only for clients with the run's
token. It can be reached only from within the pod.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated

from fastapi import FastAPI, HTTPException
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from orbit_runtime.errors import OutputError, UnsupportedError, UsageError
from orbit_runtime.ports.guard import Guard
from orbit_runtime.ports.server import build_server
from orbit_runtime.spec.engine_arguments import ALLOWED
from orbit_runtime.version import __version__
from orbit_runtime.workers.child.run_token import TOKEN_VARIABLE, shared_token
from orbit_runtime.workers.servers import protocol
from orbit_runtime.workers.servers.process import VERSION_VARIABLE, ServerProcess, launch_command, launch_environment
from orbit_runtime.workers.system import ask_driver

HOST = "127.0.0.1"
VARIABLES = frozenset(
    {
        protocol.VARIABLE, protocol.OFT_VARIABLE, protocol.EXPERTS_VARIABLE, protocol.WEIGHT_ONLY_VARIABLE,
        protocol.TAPS_VARIABLE, VERSION_VARIABLE, "OMP_WAIT_POLICY", "SGLANG_CPU_OMP_THREADS_BIND",
        "SGLANG_ENABLE_JIT_DEEPGEMM", "SGLANG_FORCE_FP8_MARLIN", "SGLANG_PLUGINS",
    }
)  # fmt: skip
"""Environment variables that a run may set for a server."""
OWN_FLAGS = frozenset(
    {
        "--attention-backend", "--base-gpu-id", "--context-length", "--device", "--disable-overlap-schedule",
        "--disable-shared-experts-fusion", "--dtype", "--enable-deterministic-inference", "--enable-fp32-lm-head",
        "--enable-lora",
        "--enable-memory-saver", "--enable-metrics", "--enable-return-routed-experts", "--enable-weights-cpu-backup",
        "--experts-shared-outer-loras", "--flashinfer-mxfp4-moe-precision", "--fp4-gemm-backend", "--host",
        "--incremental-streaming-output", "--lora-backend", "--lora-target-modules", "--max-loaded-loras",
        "--no-experts-shared-outer-loras",
        "--max-lora-rank", "--max-loras-per-batch", "--max-running-requests", "--max-total-tokens",
        "--mem-fraction-static", "--model-path", "--moe-runner-backend", "--port", "--random-seed",
        "--sampling-backend", "--sleep-on-idle", "--tokenizer-path", "--tp-size",
    }
)  # fmt: skip
"""Flags that `rollout.sglang_server` writes."""
FLAGS = OWN_FLAGS | {f"--{name}" for name in ALLOWED}
"""Flags a run may pass to a server: these, and those of the manifest. None names a file to write or code to run."""
LOG_BYTES = 1 << 16

Name = Annotated[str, PathParameter(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Text = Annotated[str, Field(max_length=4096)]


class ServerOrder(BaseModel):
    """A server to start."""

    model_config = ConfigDict(extra="forbid")

    arguments: Annotated[list[Text], Field(max_length=512)]
    """Arguments after the module's name."""
    environment: dict[Text, Text]


class State(BaseModel):
    """The state of a server."""

    exit_status: int | None
    """None while it runs; negative if a signal killed it."""


class Log(BaseModel):
    """The end of a server's log."""

    text: str


class Memory(BaseModel):
    """Memory in use."""

    bytes: int | None


class Agent:
    """The servers of one run. Safe to call from several threads."""

    def __init__(
        self, folder: Path, token: str, command: Callable[[Sequence[str]], list[str]] = launch_command
    ) -> None:
        """
        Args:
            folder: folder for logs.
            token: the run's token, which servers require.
        """
        self._folder = folder
        self._token = token
        self._command = command
        self._servers: dict[str, ServerProcess] = {}
        self._lock = Lock()
        self._is_ending = False

    def start(self, name: str, order: ServerOrder) -> None:
        """Starts a server. If the name is taken, the old server is ended first.

        Raises:
            ValueError: a variable or an argument that no run needs, or a value that no run sets.
            UnsupportedError: the interpreter does not exist.
            OSError: the log cannot be written.
        """
        refused = sorted(order.environment.keys() - VARIABLES)
        if refused:
            raise ValueError(f"a run may not set {', '.join(refused)} for a server")
        protocol.read_settings(order.environment)
        flags = {each.partition("=")[0] for each in order.arguments if each.startswith("-")}
        if refused := sorted(flags - FLAGS):
            raise ValueError(f"a run may not start a server with {', '.join(refused)}")
        self.stop(name)
        with self._lock:
            if self._is_ending:
                raise ValueError("the agent is about to end")
            self._servers[name] = ServerProcess(
                name, self._command(order.arguments), environment=launch_environment(order.environment),
                log=self._folder / name / "sglang.log", token=self._token,
            )  # fmt: skip

    def state(self, name: str) -> State | None:
        """None if there is no such server."""
        with self._lock:
            server = self._servers.get(name)
        return None if server is None else State(exit_status=server.exit_status())

    def memory(self, name: str) -> Memory:
        with self._lock:
            server = self._servers.get(name)
        return Memory(bytes=None if server is None else server.resident_bytes())

    def log(self, name: str) -> Log | None:
        """The log, also of a server that has ended; None if there was none."""
        try:
            with (self._folder / name / "sglang.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                return Log(text=file.read().decode(errors="replace"))
        except FileNotFoundError:
            return None

    def stop(self, name: str) -> None:
        with self._lock:
            server = self._servers.pop(name, None)
        if server is not None:
            server.stop()

    def end(self) -> None:
        """Ends all servers in parallel, because the pod's grace period covers them all, and refuses to start more."""
        with self._lock:
            self._is_ending = True
            names = list(self._servers)
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            list(pool.map(self.stop, names))


def build_app(agent: Agent, token: str) -> FastAPI:
    """`PUT`, `GET` and `DELETE` of `/servers/NAME`, their `/log` and `/memory`; `/gpus/memory`; `/version`.

    All servers end with the app. Every request needs the token.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(agent.end)

    app = FastAPI(title="orbit agent", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(Guard, token=token)

    @app.put("/servers/{name}")
    def _start(name: Name, order: ServerOrder) -> State:
        try:
            agent.start(name, order)
        except UnsupportedError as error:
            # The image cannot run it: the user must fix that, and the agent goes on.
            raise HTTPException(501, error.message) from None
        except (ValueError, OSError) as error:
            raise HTTPException(422, str(error)) from None
        return _known(agent.state(name))

    @app.get("/servers/{name}")
    def _state(name: Name) -> State:
        return _known(agent.state(name))

    @app.delete("/servers/{name}")
    def _stop(name: Name) -> None:
        agent.stop(name)

    @app.get("/servers/{name}/log")
    def _log(name: Name) -> Log:
        return _known(agent.log(name))

    @app.get("/servers/{name}/memory")
    def _memory(name: Name) -> Memory:
        return agent.memory(name)

    @app.get("/gpus/memory")
    def _gpu_memory(first: int, count: int) -> Memory:
        return Memory(bytes=gpu_memory(first, count))

    @app.get("/version")
    def _version() -> dict[str, str]:
        return {"version": __version__}

    return app


def _known[T](found: T | None) -> T:
    if found is None:
        raise HTTPException(404, "there is no such server")
    return found


def gpu_memory(first: int, count: int) -> int | None:
    """Bytes in use on these of the container's GPUs, if the driver reports them. Not run on hardware."""
    try:
        used = [int(line) for line in ask_driver("memory.used")]
    except ValueError:
        return None
    return sum(used[first : first + count]) * 2**20 if used else None


def run_agent(port: int) -> None:
    """Serves until SIGTERM or SIGINT; every server has ended by then.

    Raises:
        OutputError: the port is taken, or the run's token cannot be shared.
        UsageError: the path of the token is not set.
    """
    named = os.environ.get(TOKEN_VARIABLE)
    if not named:
        raise UsageError(
            "the agent needs the run's token, and no file for it is named",
            where=TOKEN_VARIABLE,
            fix="name a file in a folder shared with the run's container, the same in both",
        )
    token = shared_token(Path(named))
    with TemporaryDirectory(prefix="orbit-agent-") as folder:
        app = build_app(Agent(Path(folder), token), token)
        try:
            build_server(app, host=HOST, port=port).run()
        except SystemExit:
            # uvicorn exits this way if it cannot listen.
            raise OutputError(
                f"port {port} is in use", where=f"{HOST}:{port}", fix="choose another with --port"
            ) from None
