"""Stands in for `orbit` in a pod: does what the manifest tells it to, so that a test can see what follows from it.

What to do stands in the arguments of the manifest's first reward: under `attempts` by number, else at the top.

- `exit`: ends with this code; `words` is left as the termination message.
- `serve`: answers `/status` and goes on until SIGTERM: then exit code 75. `lie`, `hang` or `flood` instead of `honest`.
- `deaf`: SIGTERM is heard and not followed.
- `eat`: takes memory, `fill`: disk, until something ends it.

Called as `ray`, as KubeRay does it, it listens where a probe of that node looks.

Only the standard library: it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MIB = 1 << 20


def main() -> int:
    if Path(sys.argv[0]).name == "ray":
        return join_ranks()
    manifest = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    told = manifest["spec"]["environment"]["rewards"][0]["arguments"]
    attempt = os.environ["ORBIT_ATTEMPT"].rpartition("-a")[2]
    told = told.get("attempts", {}).get(attempt, told)
    if told.get("deaf"):
        signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM: no", flush=True))
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    # Who reads it knows that signals are heard from now on: until then the kernel keeps them from a first process.
    print(f"scripted: attempt {attempt}: {json.dumps(told, ensure_ascii=False)[:500]}", flush=True)
    if "words" in told:
        Path(os.environ["ORBIT_TERMINATION_FILE"]).write_text(told["words"], encoding="utf-8")
    if "exit" in told:
        return int(told["exit"])
    if told.get("eat"):
        eaten = []
        while True:
            eaten.append(os.urandom(MIB) * 4)
    if told.get("fill"):
        with Path("/var/cache/orbit/filled").open("wb") as file:
            file.write(os.urandom(MIB) * int(told["fill"]))
    serve(manifest["metadata"]["name"], str(told.get("serve", "honest")))
    return 0


def join_ranks() -> int:
    """`ray start` until SIGTERM; whatever else is asked is well at once."""
    command = " ".join(sys.argv)
    if " start" in command:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        ThreadingHTTPServer(("0.0.0.0", 6379 if "--head" in command else 9500), BaseHTTPRequestHandler).serve_forever()
    return 0


def serve(run: str, how: str) -> None:
    """On the run's port, for ever."""
    began = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/status":
                return self._answer(b"{}")
            if how == "hang":
                time.sleep(3600)
            if how == "flood":
                return self._answer(b'"', *[b"x" * MIB] * 64, b'"')
            step = int(time.monotonic() - began) + 1
            facts: dict[str, Any] = {"run": run, "phase": "Running", "step": step, "total": 1000, "live": True,
                                     "reward": 0.5, "last_checkpoint_step": step, "execution": 1}  # fmt: skip
            if how == "lie":
                facts |= {"step": -5, "total": 10**30, "reward": "NaN", "last_checkpoint_step": 1e308,
                          "adapter_digest": "x" * 60_000, "execution": [], "eta_seconds": -1}  # fmt: skip
            return self._answer(json.dumps(facts).encode())

        def _answer(self, *parts: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(ConnectionError):
                for part in parts:
                    self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            """Silent: probes come every few seconds."""

    ThreadingHTTPServer(("0.0.0.0", 9400), Handler).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
