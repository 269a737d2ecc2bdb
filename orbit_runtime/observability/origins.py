"""Whether a request of HTTP may come from a page of another site, in the browser of this machine's user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def foreign(scope: Mapping[str, Any]) -> str:
    """Why an ASGI request is refused as foreign to this machine's programs; empty if it is not.

    A page elsewhere may send requests to this machine (its browser says whose page it is), and read the answers under a
    name that its owner makes this machine's (which is then the host that the request names).
    """
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
    if other := next((each for each in hosts if _name(f"//{each}") not in LOOPBACK), ""):
        return f"the request is to {other[:200]!r}, and not to 127.0.0.1 or localhost"
    if other := next((each for each in origins if [each.partition("://")[2]] != hosts), ""):
        return f"the request is from a page of {other[:200]!r}"
    return ""


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
