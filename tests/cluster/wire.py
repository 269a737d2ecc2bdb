"""The connection between an operator and its API server, in a test's hands: bytes pass, or they do not."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import yaml


class Wire:
    """Forwards every connection to `target`. Does not look inside: the bytes are encrypted end to end."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._silent: frozenset[socket.socket] = frozenset()
        self._lock = threading.Lock()
        self._is_cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> int:
        """Ends every connection there is, at once; new ones may be made. Returns how many there were."""
        with self._lock:
            ended = list(self._open)
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        return len(ended) // 2

    def hush(self) -> int:
        """From now on nothing comes back on the connections there are, and nobody is told; new ones are as ever."""
        with self._lock:
            self._silent = frozenset(self._open)
        return len(self._silent) // 2

    def cut(self) -> None:
        """Nothing passes any more."""
        self._is_cut.set()
        self.drop()

    def mend(self) -> None:
        self._is_cut.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut.is_set():
                near.close()
            else:
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._target) as far:
            with self._lock:
                self._open |= {near, far}
            try:
                self._pump(near, far)
            finally:
                with self._lock:
                    self._open -= {near, far}

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        while True:
            readable, _, _ = select.select(list(other), [], [])
            for side in readable:
                data = side.recv(65536)
                if not data:
                    return
                if side is near or far not in self._silent:
                    other[side].sendall(data)


@contextmanager
def open_wire(kubeconfig: str, copy: Path) -> Iterator[Wire]:
    """Writes `copy`, a kubeconfig that leads through the wire."""
    config = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
    cluster = config["clusters"][0]["cluster"]
    url = urlsplit(cluster["server"])
    assert url.hostname is not None
    assert url.port is not None
    wire = Wire((url.hostname, url.port))
    cluster["server"] = f"https://127.0.0.1:{wire.port}"
    copy.write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        yield wire
    finally:
        wire.close()
