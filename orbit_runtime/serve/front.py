"""The process that speaks HTTP, beside the one that holds the engine: `python -m orbit_runtime.serve.front FD`.

It ends with the engine's process, however that ends, because its stream then ends.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import OutputError
from orbit_runtime.observability.server import LISTEN_FIX, listen
from orbit_runtime.ports.server import PEER_CONNECTIONS, build_server
from orbit_runtime.serve.app import build_app
from orbit_runtime.serve.channel import Line, Ready, Setup, Stop
from orbit_runtime.serve.engine_client import EngineClient
from orbit_runtime.serve.metrics import ServeMetrics

KEEP_ALIVE_SECONDS = 30
BACKLOG = 2048


class Front:
    """Receives records from the engine's process, and ends on its request or with it."""

    def __init__(self) -> None:
        import uvicorn

        self._setup: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
        self._engine: EngineClient | None = None
        self._server: uvicorn.Server | None = None
        # Ends at once, with requests in flight: they cannot be completed any more.
        self._line = Line(self._hear, lambda: os._exit(0))

    async def serve(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._line, sock=connection)
        setup = await self._setup
        try:
            listener = listen(
                setup.host,
                setup.port,
                "--listen",
                LISTEN_FIX,
                backlog=BACKLOG,
            )
        except OutputError as error:
            self._line.send(Ready(0, str(error)))
            self._line.close()
            # Wait until the record has left; the closed line then ends the process.
            await asyncio.Event().wait()
            return
        metrics = ServeMetrics()
        engine = self._engine = EngineClient(
            self._line.send, setup.models, setup.base, concurrent=setup.limits.concurrent, ended=metrics.ended
        )
        tokenizer = await asyncio.to_thread(ChatTokenizer, setup.model_folder, setup.chat, started=setup.started)
        app = build_app(
            engine, tokenizer, setup.vocabulary, setup.limits, metrics, setup.token, setup.kind, setup.update_token
        )
        server = self._server = build_server(
            app,
            most=max(PEER_CONNECTIONS, 2 * setup.limits.concurrent),
            lifespan="off",
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.002)
        self._line.send(Ready(listener.getsockname()[1]))
        await asyncio.wait((serving,))
        os._exit(0)

    def _hear(self, record: object) -> None:
        if isinstance(record, Setup):
            self._setup.set_result(record)
        elif isinstance(record, Stop):
            assert self._server is not None
            self._server.should_exit = True
        else:
            assert self._engine is not None
            self._engine.hear(record)


async def serve(connection: socket.socket) -> None:
    await Front().serve(connection)


def _allow_connections() -> None:
    """Raises the limit of open files, each connection being one, to what the administrator allows: often it is 1,024,
    which idle clients alone would use up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    # The parent tells this process when to end; Ctrl-C of a terminal is for the parent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _allow_connections()
    # The tokenizer's library imports torch if it is installed: seconds, and hundreds of megabytes, for no use here.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    import uvloop

    connection = socket.socket(fileno=int(sys.argv[1]))
    # In a thread, because uvicorn handles signals only in the main thread.
    thread = threading.Thread(target=lambda: uvloop.run(serve(connection)), name="orbit-http")
    thread.start()
    with suppress(KeyboardInterrupt):
        thread.join()


if __name__ == "__main__":
    main()
