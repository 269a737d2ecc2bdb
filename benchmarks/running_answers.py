"""Answers that run while something else happens, watched by a process of their own.

    python benchmarks/running_answers.py URL ADAPTER TOKENS

streams answers from an SGLang server and prints when each token of each came: a watcher that trains and publishes as
well would measure its own pauses.

Belongs here: watching. Does not belong here: what happens meanwhile (`sglang_publish`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

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


def watch(url: str, adapter: str, act: Callable[[], object], gaps: Gaps, *, everywhere: bool = False) -> None:
    """Calls `act` again and again while answers run, until they end; adds what was seen to `gaps`.

    Args:
        everywhere: every gap counts, also where nothing happens.
    """
    command = [sys.executable, __file__, url, adapter, str(TOKENS)]
    spans = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        # Every answer has begun.
        watcher.stdout.readline()
        while watcher.poll() is None:
            begun = time.perf_counter()
            act()
            spans.append((begun, time.perf_counter()))
            time.sleep(PAUSE_SECONDS)
        stamps = json.loads(watcher.stdout.read())
    # One that ended after the first answer did saw fewer of them beside it.
    last = min(times[-1] for times in stamps)
    spans = [span for span in spans if span[1] < last]
    gaps.acts += len(spans)
    for times in stamps:
        for before, after in pairwise(times):
            if everywhere or any(before < end and after > begun for begun, end in spans):
                gaps.during.append((after - before) * 1e3)


async def _stream(url: str, adapter: str, tokens: int) -> list[list[float]]:
    stamps: list[list[float]] = [[] for _ in range(STREAMS)]
    body = {
        "input_ids": [2, 3, 4, 5], "stream": True, "lora_path": adapter,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
    }  # fmt: skip

    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:

        async def one(times: list[float]) -> None:
            async with client.stream("POST", f"{url}/generate", json=body) as answer:
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
    print(json.dumps(asyncio.run(_stream(url, adapter, int(tokens)))))


if __name__ == "__main__":
    _main(sys.argv[1:])
