"""The operator, with a transport that kills the process at one API call, and one that lets some calls fail.

`ORBIT_TEST_CRASH=before:7` ends it as `kill -9` does before the seventh call that changes something (the Lease's not
counted), `after:7` after it was answered. `ORBIT_TEST_FAULTS=409,429,500` answers an eighth of such calls with these.
`ORBIT_TEST_SILENT_SECONDS=3` is how long a watch may bring nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from typing import Any

from orbit_operator import handlers
from orbit_operator.api import Api, ApiError, open_api
from orbit_operator.main import run
from orbit_operator.settings import load_settings

WRITES = ("POST", "PUT", "PATCH", "DELETE")


async def open_faulty(**options: Any) -> Api:
    """The real client under a transport of ours."""
    api = await open_api(**options)
    when, _, number = os.environ.get("ORBIT_TEST_CRASH", "never:0").partition(":")
    faults = [int(code) for code in filter(None, os.environ.get("ORBIT_TEST_FAULTS", "").split(","))]
    draw = random.Random(7)
    count = itertools.count(1)
    call = api.call

    async def faulty(verb: str, kind: Any, path: str, *rest: Any, **named: Any) -> Any:
        counted = verb in WRITES and kind.plural != "leases"
        this = next(count) if counted else 0
        if counted and when == "before" and this == int(number):
            os._exit(137)
        if counted and faults and draw.random() < 1 / 8:
            raise ApiError(draw.choice(faults), "Injected", f"{verb} {path}")
        try:
            return await call(verb, kind, path, *rest, **named)
        finally:
            if counted:
                print(f"CALL {this} {verb} {path}", flush=True)
            if counted and when == "after" and this == int(number):
                os._exit(137)

    api.call = faulty  # type: ignore[method-assign]
    return api


def main() -> None:
    """Runs `orbit_operator.main.main` under that transport."""
    handlers.SILENT_SECONDS = float(os.environ.get("ORBIT_TEST_SILENT_SECONDS", handlers.SILENT_SECONDS))
    sys.exit(asyncio.run(run(load_settings(os.environ), open_faulty)))
