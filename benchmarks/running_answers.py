"""Running answers, watched by a separate process while something else happens.

    echo '{"Authorization": "Bearer KEY"}' | python benchmarks/running_answers.py URL ADAPTER TOKENS

reads the server's headers from standard input (`{}` for none), streams answers from an SGLang server and prints the
arrival time of each token: a watcher that also trains and publishes would measure its own pauses.

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
    from orbit_runtime.rollout.server_types import ServerHandle

STREAMS = 8
TOKENS = 200
PAUSE_SECONDS = 0.2
"""Between two acts: a few decode steps, so that the previous act no longer has an effect."""


@dataclass
class Gaps:
    """Milliseconds between consecutive tokens of an answer."""

    during: list[float] = field(default_factory=list)
    """The answers that overlap an act."""
    acts: int = 0

    def at(self, percent: int) -> float:
        return statistics.quantiles(self.during, n=100)[percent - 1]


def watch(
    server: ServerHandle, adapter: str, acts: Mapping[str, Callable[[], object]], gaps: Mapping[str, Gaps]
) -> None:
    """Repeats `acts`, one after the other, while answers run; adds the gaps seen during each to `gaps`.

    Acts alternate within seconds, because the machine's load changes from one minute to the next.
    """
    command = [sys.executable, __file__, server.url, adapter, str(TOKENS)]
    spans = []
    turns = cycle(acts)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        # Not an argument: every user of the machine can read arguments.
        watcher.stdin.write(json.dumps(dict(server.headers)))
        watcher.stdin.close()
        # Printed once every answer has begun.
        assert watcher.stdout.readline() == "begun\n", "the answers did not run: see the error above"
        while watcher.poll() is None:
            name, begun = next(turns), time.perf_counter()
            acts[name]()
            spans.append((name, begun, time.perf_counter()))
            time.sleep(PAUSE_SECONDS)
        stamps = json.loads(watcher.stdout.read())
    # Only until the first answer ends: after that, fewer answers run side by side.
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
                # Not parsed: on two cores that would slow down the server that is measured here.
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
