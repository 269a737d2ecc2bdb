"""`orbit eval` of 1,000 samples against an API that takes 50 ms, with 64 in flight: the overhead above that.

The API is a process of its own. The time to read prompts and to start the scoring process is reported separately, and
not part of the ratio. The API's time above its 50 ms is reported as well, as the ratio of a client that only sends the
same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Measured, run, stolen_seconds

ROOT = Path(__file__).parents[1]
MEASURES = ("orbit_runtime/evaluation", "orbit_runtime/environments", "orbit_runtime/workers")
SAMPLES, CONCURRENCY, DELAY = 1000, 64, 0.05
TARGET = 1.1


ANSWER = json.dumps({
    "id": "1", "object": "chat.completion", "created": 0, "model": "fake",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "46"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8},
}).encode()  # fmt: skip
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Late(asyncio.Protocol):
    """Answers each request after the delay, and does nothing else: the CPU time of an API should not affect the
    measurement."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._got = transport, b""

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (end := self._got.find(b"\r\n\r\n")) >= 0:
            head = self._got[:end].lower()
            whole = end + 4 + int(head.partition(b"content-length:")[2].partition(b"\r")[0])
            if len(self._got) < whole:
                return
            self._got = self._got[whole:]
            asyncio.get_running_loop().call_later(DELAY, self._transport.write, HEAD % len(ANSWER) + ANSWER)


def serve() -> None:
    """The API's process: prints its URL, and ends when its standard input is closed."""
    import uvloop

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Late, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()

    uvloop.run(wait())


def ask(url: str, samples: int, folder: Path) -> tuple[float, float]:
    """Seconds to start, and from the request of the first sample until the last one is written."""
    from orbit_runtime.evaluation.api_model import ApiModel, Conversations
    from orbit_runtime.evaluation.evaluate import ApiSubject, ask_all
    from orbit_runtime.evaluation.journal import Journal
    from orbit_runtime.evaluation.tasks import EvaluationSettings, open_task
    from orbit_runtime.spec import MachineFacts, load_manifest, resolve
    from orbit_runtime.storage import claim_execution, open_store

    began = time.perf_counter()
    run_ = resolve(load_manifest(ROOT / "examples/quickstart.yaml"), MachineFacts(has_cuda=False, num_gpus=0)).run
    with ExitStack() as closing:
        prompts = math.ceil(samples / 2)
        task = open_task("sums", run_.spec, EvaluationSettings(samples=2, limit=prompts), [], closing)
        first = replace(task, name="first", table=replace(task.table, prompts_P=task.table.prompts_P[:2]))
        store = open_store(str(folder))
        execution = claim_execution(store, run_name="benchmark")
        closing.callback(lambda: execution.release("done"))
        subject = ApiSubject(ApiModel(url, "fake"), Conversations())
        with Journal(store, execution) as journal:
            # Scorers start with their first call.
            for each in (first, task):
                started = time.perf_counter()
                ask_all([subject], [each], journal, concurrency=CONCURRENCY, show=lambda *_: None)
            journal.gather()
            ended = time.perf_counter()
            assert sum(sample.environment == "sums" for sample in journal.samples) == 2 * prompts
    return started - began, ended - started


async def only_ask(port: int, samples: int) -> float:
    """Seconds for the same number of requests without an evaluation."""
    body = b'{"model": "fake", "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 8}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: api\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    left = iter(range(samples))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(CONCURRENCY)))
    return time.perf_counter() - started


def measure(options: argparse.Namespace) -> Measured:
    samples = 2 * CONCURRENCY if options.smallest else SAMPLES
    ideal = math.ceil(samples / CONCURRENCY) * DELAY
    api = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=-1, stdout=-1, text=True)
    assert api.stdin is not None
    assert api.stdout is not None
    try:
        url, stolen = api.stdout.readline().strip(), stolen_seconds()
        port = int(url.rpartition(":")[2].partition("/")[0])
        found, bare = [], []
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(options.repetitions + 1):
                found.append(ask(url, samples, Path(folder) / str(turn)))
                bare.append(asyncio.run(only_ask(port, samples)) / ideal)
    finally:
        api.stdin.close()
        api.wait(10)
    ratios = sorted(seconds / ideal for _, seconds in found[1:])
    bare = sorted(bare[1:])
    figures = {
        "ratio": {"least": ratios[0], "median": ratios[len(ratios) // 2], "most": ratios[-1]},
        "ratio of a client that only sends": {"least": bare[0], "median": bare[len(bare) // 2], "most": bare[-1]},
        "seconds": [seconds for _, seconds in found[1:]],
        "start_seconds": [start for start, _ in found[1:]],
    }
    print(f"{samples} samples: {ratios[len(ratios) // 2]:.2f} times the ideal {ideal:.2f} s; target {TARGET}")
    facts = {"samples": samples, "concurrency": CONCURRENCY, "delay_seconds": DELAY, "target": TARGET,
             "stolen_seconds": stolen_seconds() - stolen}  # fmt: skip
    return Measured(figures=figures, facts=facts)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        raise SystemExit(run(__file__, __doc__, measure, repetitions=5))
