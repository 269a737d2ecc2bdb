"""`orbit serve` against the engine that it serves, called directly: 64 short completions at a time, until all are done.

The client has a process of its own, keeps 64 connections, and requests on each the next completion when the previous
one has ended; the engine that is called directly gets its next request in the same way. Both use the same weights in
one process, in turns. Whole answers and streamed ones; every answer's length is checked.

The target is for two cores with nothing else on them: one decodes, and HTTP and the client share the other. Where
others take some of it, the ratio says more of them than of the server, so each process's processor time is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Measured, compare, run

MEASURES = ("orbit_runtime/serve", "orbit_runtime/rollout")
AT_ONCE = 64
TOKENS = range(16, 49)
"""Lengths of the completions, in turn: completions of equal length would all end in the same step, so the engine would
wait either for none of them or for all."""
TARGET = 0.9
PROMPT = [{"role": "user", "content": "12+34="}]
THREADS = 1
"""torch's threads: on two cores the front needs the other core."""


def measure(options: argparse.Namespace) -> Measured:
    import torch

    from orbit_runtime.rollout import TorchEngine
    from orbit_runtime.serve.open import ServeRequest, open_models
    from orbit_runtime.serve.requests import ServeLimits
    from orbit_runtime.serve.server import start_serving

    torch.set_num_threads(THREADS)
    requests = AT_ONCE if options.smallest else 8 * AT_ONCE
    opened = open_models(ServeRequest(model="builtin://tiny-adder"), ServeLimits(running=AT_ONCE), lambda _: None)
    base = opened.policies.base
    assert base.policy is not None
    engine = TorchEngine(base.policy, base.tokenizer, max_running_requests=AT_ONCE)
    prompt = tuple(base.tokenizer.encode_chat(PROMPT))
    with closing(start_serving(opened, "127.0.0.1", 0, None)) as serving:
        client = Client(serving.url)
        with closing(client):
            spent = Spent({"engine": os.getpid(), "front": serving.front_pid, "client": client.pid})
            comparisons = [
                compare(
                    f"{requests} completions, {AT_ONCE} at a time, {name}",
                    ("the engine", lambda: spent.by("direct", lambda: asyncio.run(directly(engine, prompt, requests)))),
                    ("orbit serve", lambda name=name: spent.by(name, lambda: client.ask(requests, name == "streamed"))),
                    repetitions=options.repetitions,
                )
                for name in ("whole", "streamed")
            ]
    return Measured(
        comparisons,
        {"processor milliseconds a completion": spent.milliseconds(requests),
         **{f"share of the engine's own speed, {'streamed' if at else 'whole'}": 1 / row.ratio
            for at, row in enumerate(comparisons)}},
        {"tokens": [TOKENS[0], TOKENS[-1]], "model": "builtin://tiny-adder", "torch threads": THREADS,
         "target": TARGET},
    )  # fmt: skip


def tokens_of(request: int) -> int:
    return TOKENS[request * 7 % len(TOKENS)]


async def directly(engine: object, prompt: tuple[int, ...], requests: int) -> None:
    from orbit_runtime.rollout import TorchEngine
    from orbit_runtime.serve.requests import choice_key
    from orbit_runtime.types import Request, Sampling

    assert isinstance(engine, TorchEngine)
    asked = iter(
        [
            Request(at, choice_key(1, 0, at), prompt, Sampling(max_new_tokens=tokens_of(at), ignore_eos=True), None)
            for at in range(requests)
        ]
    )
    engine.submit([next(asked) for _ in range(AT_ONCE)])
    done = 0
    async for completion in engine.completions():
        assert len(completion.token_ids_T) == tokens_of(completion.request_id)
        done += 1
        if (following := next(asked, None)) is not None:
            engine.submit([following])
    assert done == requests


class Spent:
    """Processor time of these processes while something is done, by name of what was done and of the process."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = processes
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def by(self, name: str, work: Callable[[], None]) -> None:
        before = [_processor_seconds(pid) for pid in self._processes.values()]
        work()
        for (process, pid), seconds in zip(self._processes.items(), before, strict=True):
            self._seconds[f"{name}, {process}"].append(_processor_seconds(pid) - seconds)

    def milliseconds(self, completions: int) -> dict[str, float]:
        """Medians, of one completion."""
        return {name: round(statistics.median(each) / completions * 1e3, 2) for name, each in self._seconds.items()}


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client:
    """The client process."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, requests: int, streamed: bool) -> None:
        """Returns when all requests are answered."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([requests, streamed]) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("the client has failed")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def act_as_client(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for line in sys.stdin:
        requests, streamed = json.loads(line)
        asyncio.run(ask_all(host, int(port), requests, streamed))
        print("done", flush=True)


async def ask_all(host: str, port: int, requests: int, streamed: bool) -> None:
    body = {"model": "tiny-adder", "messages": PROMPT, "ignore_eos": True, "stream": streamed}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    numbers = count()

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        while (number := next(numbers)) < requests:
            data = json.dumps({**body, "max_tokens": tokens_of(number)})
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write((head + data).encode())
            start = await reader.readuntil(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 200"), start
            if streamed:
                answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            else:
                (length,) = [line for line in start.split(b"\r\n") if line.startswith(b"content-length:")]
                answer = await reader.readexactly(int(length.partition(b":")[2]))
            assert b'"completion_tokens":%d' % tokens_of(number) in answer, answer
        writer.close()

    await asyncio.gather(*(connection() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        act_as_client(sys.argv[2])
        raise SystemExit
    raise SystemExit(run(__file__, __doc__, measure, repetitions=7))
