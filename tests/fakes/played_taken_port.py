"""Stands in for the interpreter of SGLang: a real uvicorn whose port another process took before it came to listening.

Like SGLang it does not end when that fails, because its schedulers' threads go on. The file `taken` in the folder of
the environment variable `PLAYED_FOLDER` holds the number of starts whose port is taken.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import uvicorn
from fastapi import FastAPI

app = FastAPI()


@app.get("/health")
def _health() -> str:
    return "up"


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    left = Path(os.environ["PLAYED_FOLDER"]) / "taken"
    if (times := int(left.read_text())) > 0:
        left.write_text(str(times - 1))
        # Kept open until this process is killed, as by any process that listens.
        globals()["other"] = socket.create_server(("127.0.0.1", port))
    threading.Thread(target=time.sleep, args=(600,)).start()
    uvicorn.run(app, host="127.0.0.1", port=port)


main()
