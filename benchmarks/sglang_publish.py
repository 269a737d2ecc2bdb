"""What SGLang costs through Orbit: publishing, the gap it makes in running answers, our client, and adapters.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/sglang_publish.py

All of one table is measured against the same server in the same minutes, the two sides of a comparison taking turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import httpx

from orbit_runtime.rollout.sglang_server import PYTHON_VARIABLE
from orbit_runtime.types import Request, Sampling

REQUESTS, GROUP = 64, 8
TOKENS = 32
STREAMS = 8
STREAM_TOKENS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the JSON file")
    parser.add_argument("--repetitions", type=int, default=10, help="turns that are counted")
    parser.add_argument("--adapters", default="LoRA,OFT")
    asked = parser.parse_args()
    if not os.environ.get(PYTHON_VARIABLE) and importlib.util.find_spec("sglang") is None:
        print(f"not measured: {PYTHON_VARIABLE} is not set, and SGLang is not installed here")
        return 0
    comparisons, facts = [], {}
    for adapter in asked.adapters.split(","):
        rows, found = measure(adapter, asked.repetitions)
        comparisons += rows
        facts[adapter] = found
    print(harness.table(comparisons))
    for adapter, found in facts.items():
        print(f"{adapter}: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    harness.save("sglang_publish", comparisons, facts, asked.out)
    return 0


def measure(adapter: str, repetitions: int) -> tuple[list[harness.Comparison], dict[str, float]]:
    from sglang_rig import started

    with started(adapter) as rig:
        rig.move(0, 0.02)
        rig.publish()
        publishing = _publishing(rig, repetitions)
        url = rig.engine.replicas[0].server.url
        # Answers run on an adapter that stays: a publish waits for its predecessor's answers before it unloads it.
        rig.engine.load_adapter("stays", rig.publication.adapter)
        quiet = _gaps(url, "stays", lambda: None)
        busy = _gaps(url, "stays", lambda: _publish(rig))
        name = rig.publication.name
        sampling = Sampling(max_new_tokens=TOKENS)
        prompts = [
            tuple(rig.tokenizer.encode_chat([{"role": "user", "content": f"{10 + index}+{99 - index}="}]))
            for index in range(REQUESTS)
        ]

        def through_client(adapter_name: str | None, samples: int = 1) -> None:
            made = [
                Request(index, index, prompts[index // samples], sampling, adapter_name) for index in range(REQUESTS)
            ]
            assert len(list(rig.engine.generate(made))) == REQUESTS

        def as_one_batch(samples: int = 1) -> None:
            asked = prompts[: REQUESTS // samples]
            body = {
                "input_ids": [list(prompt) for prompt in asked], "return_logprob": True,
                "lora_path": [name] * len(asked),
                "sampling_params": {"n": samples, "temperature": 1.0, "max_new_tokens": TOKENS,
                                    "stop_token_ids": list(rig.tokenizer.eos_ids)},
            }  # fmt: skip
            answer = httpx.post(f"{url}/generate", json=body, timeout=None, trust_env=False)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()) == REQUESTS

        comparisons = [
            harness.compare(
                f"{REQUESTS} answers, {adapter}", ("our client", lambda: through_client(name)),
                ("one batch of SGLang's", as_one_batch), repetitions=repetitions, target=0.9,
            ),
            harness.compare(
                f"{REQUESTS // GROUP} prompts, {GROUP} answers each, {adapter}",
                ("our client", lambda: through_client(name, GROUP)),
                ("one batch of SGLang's", lambda: as_one_batch(GROUP)), repetitions=repetitions, target=0.9,
            ),
            harness.compare(
                f"{REQUESTS} answers", (adapter, lambda: through_client(name)),
                ("no adapter", lambda: through_client(None)), repetitions=repetitions,
            ),
        ]  # fmt: skip
    return comparisons, publishing | {"gap p99 ms": quiet, "gap p99 ms while publishing": busy}


def _publish(rig: Any) -> None:
    rig.move(1, 1e-4)
    rig.publish()


def _publishing(rig: Any, repetitions: int) -> dict[str, float]:
    """Medians: from the published bytes to the end of their proof, the engine's own load call in it, and the whole act.

    The whole act also exports the adapter, writes it to the store, reads the trainer, and unloads the version before.
    """
    load, unload = rig.engine.load_adapter, rig.engine.unload_adapter
    loads: list[float] = []
    proven: list[float] = []
    begun = 0.0

    def timed_load(*given: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()
        load(*given)
        loads.append(time.perf_counter() - begun)

    def timed_unload(*given: Any) -> None:
        # The first that follows the proof.
        proven.append(time.perf_counter() - begun)
        unload(*given)

    rig.engine.load_adapter, rig.engine.unload_adapter = timed_load, timed_unload
    whole = []
    for _ in range(repetitions):
        rig.move(1, 1e-4)
        start = time.perf_counter()
        rig.publish()
        whole.append(time.perf_counter() - start)
    rig.engine.load_adapter, rig.engine.unload_adapter = load, unload
    over = statistics.median(a - b for a, b in zip(proven, loads, strict=True))
    return {"proven after ms": statistics.median(proven) * 1e3, "load ms": statistics.median(loads) * 1e3,
            "over the load ms": over * 1e3, "whole publish ms": statistics.median(whole) * 1e3}  # fmt: skip


def _gaps(url: str, adapter: str, meanwhile: Callable[[], None]) -> float:
    """p99 of the milliseconds between two tokens of running answers, `meanwhile` called again and again beside them."""
    gaps: list[float] = []
    done = threading.Event()

    def stream() -> None:
        body = {
            "input_ids": [2, 3, 4, 5], "stream": True, "lora_path": adapter,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": STREAM_TOKENS, "ignore_eos": True},
        }  # fmt: skip
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=None, trust_env=False) as answer:
            last = None
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    json.loads(line[6:])
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    watcher = threading.Thread(target=lambda: ([thread.join() for thread in threads], done.set()))
    watcher.start()
    time.sleep(0.2)
    while not done.is_set():
        meanwhile()
        time.sleep(0.2)
    return statistics.quantiles(gaps, n=100)[98] * 1e3


if __name__ == "__main__":
    raise SystemExit(main())
