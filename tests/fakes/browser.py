"""A real browser over its DevTools protocol: what a reader sees of a page, and what a click does."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import websocket

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
DESKTOP, PHONE = (1280, 900), (390, 844)


class Browser:
    """One tab. `complaints` is everything that its console and policy said."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0",
             "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        said = next(line for line in self._process.stderr if "DevTools listening" in line)
        host = re.search(r"ws://([^/]+)/", said)
        assert host
        with urllib.request.urlopen(f"http://{host[1]}/json") as answer:
            (tab,) = (each for each in json.load(answer) if each["type"] == "page")
        self._socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=30)
        self._number = 0
        self.complaints: list[str] = []
        self._loaded = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := self._receive()).get("id") != number:
            pass
        result: dict[str, Any] = message.get("result", message)
        return result

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv())
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(message["params"]))
        self._loaded += message.get("method") == "Page.loadEventFired"
        return message

    def open(self, url: str, size: tuple[int, int] = DESKTOP, *, script: bool = True) -> None:
        """Args: script: whether the page's JavaScript runs."""
        width, height = size
        self.complaints.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        before = self._loaded
        self.call("Page.navigate", url=url)
        while self._loaded == before:
            self._receive()

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 10.0) -> Any:
        """Until it is true. The seconds are those of a browser that answers at once: it is asked so many times."""
        for _ in range(int(seconds / 0.02)):
            if found := self.run(expression):
                return found
            time.sleep(0.02)
        raise AssertionError(f"{expression} stayed {found!r}")

    def hover(self, selector: str, share: float) -> None:
        """Moves the pointer over an element, at this share of its width."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + share * box[2], y=box[1] + box[3] / 2)

    def click(self, selector: str, share: float = 0.5) -> None:
        self.hover(selector, share)
        box = self.run(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        at = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def text(self, selector: str) -> str:
        return str(self.run(f"(document.querySelector({selector!r}) || {{}}).innerText || ''"))

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({selector!r}).length"))

    def size(self) -> tuple[int, int]:
        """What the page takes: width and height."""
        width, height = self.run("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        return width, height

    def screenshot(self, path: Path) -> None:
        """For people."""
        width, height = self.size()
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 8000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
