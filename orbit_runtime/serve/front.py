"""The process that speaks HTTP, beside the one that holds the engine: `python -m orbit_runtime.serve.front FD`.

Belongs here: its life. Does not belong here: routes (`app`), the engine's end (`sampler`).

It ends with the engine's process, however that ends: its stream ends then.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import OutputError
from orbit_runtime.observability.server import listen
from orbit_runtime.serve.app import build_app
from orbit_runtime.serve.asking import Engine
from orbit_runtime.serve.channel import Ready, Setup, Stop, pack, receive
from orbit_runtime.serve.metrics import ServeMetrics

KEEP_ALIVE_SECONDS = 30
BACKLOG = 2048


async def serve(connection: socket.socket) -> None:
    import uvicorn

    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 24)
    setup = await receive(reader)
    assert isinstance(setup, Setup)
    try:
        listener = listen(
            setup.host,
            setup.port,
            "--listen",
            "choose another port, 0 for any that is free, and an address of this machine",
            backlog=BACKLOG,
        )
    except OutputError as error:
        writer.write(pack(Ready(0, str(error))))
        await writer.drain()
        return
    metrics = ServeMetrics()
    engine = Engine(writer, setup.models, setup.base, concurrent=setup.limits.concurrent, ended=metrics.ended)
    tokenizer = await asyncio.to_thread(ChatTokenizer, setup.model_folder, setup.template_arguments)
    app = build_app(engine, tokenizer, setup.vocabulary, setup.limits, metrics, setup.token, setup.kind)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        workers=1,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.002)
    writer.write(pack(Ready(listener.getsockname()[1])))
    hearing = asyncio.create_task(_hear(reader, engine, server))
    await asyncio.wait((serving, hearing), return_when=asyncio.FIRST_COMPLETED)
    # Not those of requests: their time is over, or the engine's process has ended.
    os._exit(0)


async def _hear(reader: asyncio.StreamReader, engine: Engine, server: object) -> None:
    """Until the engine's process has ended."""
    while (record := await receive(reader)) is not None:
        if isinstance(record, Stop):
            server.should_exit = True  # type: ignore[attr-defined]
        else:
            engine.hear(record)


def main() -> None:
    # Who started it tells it when to end; Ctrl-C of a terminal is for that one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    # In a thread: uvicorn takes signals in a main thread only.
    thread = threading.Thread(target=lambda: asyncio.run(serve(connection)), name="orbit-http")
    thread.start()
    with suppress(KeyboardInterrupt):
        thread.join()


if __name__ == "__main__":
    main()
