"""A fake of a Hugging Face hub on this machine: real HTTP, one port for the hub and one for its CDN, with faults.

Belongs here: the two requests of the hub that Orbit makes, and what can go wrong with them. Not the real hub: it was
written from its documented behaviour, and knows nothing of Xet, pull requests or accounts.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_good"
SIGNATURE = "X-Signature=secret"


@dataclass
class Repository:
    """Files of the branch `main`; commits keep what they hold."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    is_private: bool = False
    is_gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes to announce instead of the true ones."""

    def commit(self, files: Mapping[str, bytes]) -> str:
        self.head = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[self.head] = dict(files)
        return self.head


@dataclass
class Fault:
    """What happens, `times` times, to requests whose path holds `path`."""

    path: str
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Bytes after which the connection ends."""
    flip: bool = False
    """The body's last byte is another one."""
    ignore_range: bool = False
    hold: threading.Event | None = None
    """The body's second half waits for it."""
    times: int = 1


@dataclass(frozen=True)
class Request:
    role: str
    """`hub` or `cdn`."""
    path: str
    range: str | None
    authorization: str | None


class HubServer:
    """Example: `with HubServer() as hub: hub.add("org/name", {"config.json": b"{}"}); environ = hub.environment()`"""

    def __init__(self, large: int = 4096) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.large = large
        """Files from this size on are kept in LFS and served by the CDN."""
        self._servers = {role: ThreadingHTTPServer(("127.0.0.1", 0), _bound(self, role)) for role in ("hub", "cdn")}
        for server in self._servers.values():
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def url(self, role: str = "hub") -> str:
        return f"http://127.0.0.1:{self._servers[role].server_port}"

    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url(), "HF_HUB_OFFLINE": "0"}

    def add(self, name: str, files: Mapping[str, bytes], *, kind: str = "models") -> Repository:
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.commit(files)
        return repository

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.path in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def asked_for(self, path: str) -> list[Request]:
        return [request for request in self.requests if path in request.path]


def _bound(hub: HubServer, role: str) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"hub": hub, "role": role})


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    role: str
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        request = Request(self.role, self.path, self.headers.get("Range"), self.headers.get("Authorization"))
        self.hub.requests.append(request)
        fault = self.hub.take_fault(unquote(self.path))
        if fault is not None and fault.status:
            self.answer(fault.status, b"no", fault.headers)
        elif self.role == "cdn":
            self.serve_blob(fault)
        else:
            self.serve_hub(fault)

    def serve_blob(self, fault: Fault | None) -> None:
        assert urlsplit(self.path).query == SIGNATURE
        digest = urlsplit(self.path).path.removeprefix("/")
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == digest:
                        return self.serve(data, fault)
        return self.answer(404, b"", {})

    def serve_hub(self, fault: Fault | None) -> None:
        path = unquote(urlsplit(self.path).path)
        listing = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)", path)
        found = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path)
        assert listing or found, path
        kind = listing[1] if listing else ("datasets" if found[1] else "models")
        name, revision = (listing or found)[2], (listing or found)[3]
        repository = self.hub.repositories.get((kind, name))
        trusted = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.is_private and not trusted):
            return self.answer(404 if trusted else 401, b"", {"X-Error-Code": "RepoNotFound"})
        if repository.is_gated and not listing:
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        commit = repository.head if revision == "main" else revision
        if commit not in repository.commits:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if listing:
            siblings = [_sibling(file, files[file], repository, self.hub.large) for file in files]
            return self.answer(200, json.dumps({"sha": commit, "siblings": siblings}).encode(), {})
        if found[4] not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = files[found[4]]
        if len(data) >= self.hub.large:
            place = f"{self.hub.url('cdn')}/{hashlib.sha256(data).hexdigest()}?{SIGNATURE}"
            return self.answer(302, b"", {"Location": place})
        return self.serve(data, fault)

    def serve(self, data: bytes, fault: Fault | None) -> None:
        fault = fault or Fault("")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        body, headers, status = data, {}, 200
        if asked and not fault.ignore_range:
            start, end = int(asked[1]), int(asked[2] or len(data) - 1)
            body, status = data[start : end + 1], 206
            headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(data)}"
        if fault.flip:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault.hold is not None:
            self.head(status, len(body), headers)
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            fault.hold.wait(60)
            self.wfile.write(body[len(body) // 2 :])
        elif fault.cut_after is not None:
            self.head(status, len(body), headers)
            self.wfile.write(body[: fault.cut_after])
            self.close_connection = True
        else:
            self.answer(status, body, headers)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.head(status, len(body), headers)
        self.wfile.write(body)

    def head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


def _sibling(name: str, data: bytes, repository: Repository, large: int) -> dict[str, Any]:
    size = repository.sizes.get(name, len(data))
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git}
    if len(data) >= large:
        # In git there is a pointer: its digest says nothing of the file.
        pointer = hashlib.sha1(name.encode()).hexdigest()
        digest = hashlib.sha256(data).hexdigest()
        found |= {"blobId": pointer, "lfs": {"sha256": digest, "size": size, "pointerSize": 134}}
    return found
