"""Answers that run while something else happens, watched by a process of their own.

    echo '{"Authorization": "Bearer KEY"}' | python benchmarks/running_answers.py URL ADAPTER TOKENS

takes the server's headers (`{}` where it asks for none), streams answers from an SGLang server and prints when each
token of each came: a watcher that trains and publishes as well would measure its own pauses.

Belongs here: watching. Does not belong here: what happens meanwhile (`sglang_publish`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from orbit_runtime.rollout.served import Server

STREAMS = 8
TOKENS = 200
PAUSE_SECONDS = 0.2
"""Between two acts: a few steps of decoding in which nothing of the one before is left."""


@dataclass
class Gaps:
    """Milliseconds between two tokens of one answer."""

    during: list[float] = field(default_factory=list)
    """Of those that overlap an act."""
    acts: int = 0

    def at(self, percent: int) -> float:
        return statistics.quantiles(self.during, n=100)[percent - 1]


def watch(server: Server, adapter: str, acts: Mapping[str, Callable[[], object]], gaps: Mapping[str, Gaps]) -> None:
    """Does one after the other of `acts`, again and again, while answers run; adds what was seen during each to `gaps`.

    What is compared takes turns by the second: the machine is not the same from one minute to the next.
    """
    command = [sys.executable, __file__, server.url, adapter, str(TOKENS)]
    spans = []
    turns = cycle(acts)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        # Not an argument: those every user of the machine can read.
        watcher.stdin.write(json.dumps(dict(server.headers)))
        watcher.stdin.close()
        # Every answer has begun.
        assert watcher.stdout.readline() == "begun\n", "the answers did not run: see the error above"
        while watcher.poll() is None:
            name, begun = next(turns), time.perf_counter()
            acts[name]()
            spans.append((name, begun, time.perf_counter()))
            time.sleep(PAUSE_SECONDS)
        stamps = json.loads(watcher.stdout.read())
    # One that ended after the first answer did saw fewer of them beside it.
    last = min(times[-1] for times in stamps)
    spans = [span for span in spans if span[2] < last]
    for name, begun, end in spans:
        gaps[name].acts += 1
        for times in stamps:
            found = ((after - before) * 1e3 for before, after in pairwise(times) if before < end and after > begun)
            gaps[name].during.extend(found)


async def _stream(url: str, adapter: str, tokens: int, headers: Mapping[str, str]) -> list[list[float]]:
    stamps: list[list[float]] = [[] for _ in range(STREAMS)]
    body = {
        "input_ids": [2, 3, 4, 5], "stream": True, "lora_path": adapter,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
    }  # fmt: skip

    async with httpx.AsyncClient(timeout=None, trust_env=False, headers=headers) as client:

        async def one(times: list[float]) -> None:
            async with client.stream("POST", f"{url}/generate", json=body) as answer:
                answer.raise_for_status()
                # Not parsed: on two cores that would take from the server what is measured here.
                async for chunk in answer.aiter_raw():
                    if b"data: {" in chunk:
                        times.append(time.perf_counter())
                        if len(times) == 2 and all(len(each) >= 2 for each in stamps):
                            print("begun", flush=True)

        await asyncio.gather(*(one(times) for times in stamps))
    return stamps


def _main(arguments: Sequence[str]) -> None:
    url, adapter, tokens = arguments
    print(json.dumps(asyncio.run(_stream(url, adapter, int(tokens), json.load(sys.stdin)))))


if __name__ == "__main__":
    _main(sys.argv[1:])
