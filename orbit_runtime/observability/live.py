"""The page of a live run, made by a separate process that reads the run folder.

Belongs here: that process (`python -m orbit_runtime.observability.live URI`), its pipe, and how often it works.
Does not belong here: HTTP (`server`), the contents of the page (`report_html`).

A page of 10,000 steps, or a step with gigabytes of rollouts, would take the interpreter and memory from the run: hence
a separate process. It starts with the first reader, and ends when no reader has come for a while or the run ends. It
has a low priority, keeps the rows that it has read, and rebuilds a page only after ten times as long as the last page
took, so that all readers together use at most a tenth of a core.

In:  a line of JSON: `{"page": true}` or `{"step": 12, "from": 0}`.
Out: a frame with the answer, empty if there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Buffer, Callable, Sequence
from typing import IO

from orbit_runtime.errors import OrbitError
from orbit_runtime.observability.groups import read_groups, read_references
from orbit_runtime.observability.metrics import MetricsRow
from orbit_runtime.observability.report import build_report
from orbit_runtime.observability.report_html import render_html
from orbit_runtime.observability.run_folder import FolderSource, add_rows, rollout_files
from orbit_runtime.storage import open_store
from orbit_runtime.storage.store import NotFound
from orbit_runtime.workers.child.process import Frames, frame, start_module

ANSWER_SECONDS = 60.0
IDLE_SECONDS = 600.0
REST = 10.0
"""A page is rebuilt only after this many times as long as it took to build."""
NICENESS = 10
PAGE_BYTES = 1 << 20
"""Bytes of rollouts sent at once."""
_MODULE = "orbit_runtime.observability.live"


class LivePage:
    """The reader's side. Safe to use from several threads, which take turns."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def page(self) -> bytes | None:
        """The page; None if it could not be made in time."""
        return self._ask({"page": True})

    def rollouts(self, step: int, start: int) -> bytes | None:
        """JSON of `GroupPage`; None if the step has none."""
        return self._ask({"step": step, "from": start})

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            self._end()

    def _ask(self, question: dict[str, object]) -> bytes | None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._process = start_module(
                    _MODULE, self._uri, variables=os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            answer = None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
                answer = _read(process.stdout, time.monotonic() + ANSWER_SECONDS)
            if answer is None:
                self._end()
            return answer or None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _read(stream: IO[bytes], deadline: float) -> bytes | None:
    """Reads one answer; None if its writer ended or is too late."""
    frames = Frames()
    while True:
        if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        piece = os.read(stream.fileno(), 1 << 16)
        if not piece:
            return None
        if found := frames.feed(piece):
            return found[0]


class LiveFolder:
    """A run folder that is read repeatedly."""

    def __init__(self, source: FolderSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = _Remembering(source)
        self._clock = clock
        self._rows: dict[int, MetricsRow] = {}
        self._page = ""
        self._rested = 0.0

    def page(self) -> str:
        started = self._clock()
        if started >= self._rested:
            self._rows = add_rows(self._source, self._rows)
            rows = tuple(self._rows[step] for step in sorted(self._rows))
            self._page = render_html(build_report(self._source, rows=rows, newest_only=True), is_live=True)
            ended = self._clock()
            self._rested = ended + max(1.0, REST * (ended - started))
        return self._page

    def rollouts(self, step: int, start: int) -> str:
        """The groups; `""` if the step has none."""
        file = next((each for each in rollout_files(self._source) if each.step == step), None)
        if file is None:
            return ""
        references = read_references(self._source, file)
        return json.dumps(
            read_groups(self._source, file, references, start=start, most_bytes=PAGE_BYTES).to_json(),
            ensure_ascii=False,
        )


class _Remembering:
    """A `FolderSource` that caches what never changes."""

    def __init__(self, source: FolderSource) -> None:
        self._source = source
        self._known: dict[str, bytes] = {}
        self.uri = source.uri
        self.list, self.size, self.get_range = source.list, source.size, source.get_range

    def get(self, key: str) -> bytes:
        if not (key.startswith("evaluation/") and key.endswith("/summary.json")):
            return self._source.get(key)
        if key not in self._known:
            self._known[key] = self._source.get(key)
        return self._known[key]

    def view_many(self, keys: Sequence[str]) -> Sequence[Buffer | NotFound]:
        return self._source.view_many(keys)


def main(uri: str) -> None:
    """Serves until the pipe closes or no requests come."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    folder = LiveFolder(open_store(uri, writable=False))
    answers = os.fdopen(os.dup(1), "wb")
    # Output of libraries must not enter the pipe.
    os.dup2(2, 1)
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        asked = json.loads(line)
        text = ""
        # A store that does not answer now may answer the next time.
        with contextlib.suppress(OrbitError):
            text = folder.page() if "page" in asked else folder.rollouts(int(asked["step"]), int(asked["from"]))
        answers.write(frame(text.encode("utf-8", errors="replace")))
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
