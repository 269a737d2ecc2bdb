"""The cost of SGLang through Orbit: publishing, the gap it causes in running answers, our client, and adapters.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/sglang_publish.py

Each table is measured against one server within the same minutes; the two sides of a comparison take turns.

A gap is the time between two tokens of a running answer, seen by a separate process; gaps that overlap an act count.
The acts, which alternate within seconds, are: nothing; what the engine itself needs for a new adapter (its load call, a
prefill as long as the proof's without log-probs, and its unload call, without any of Orbit's code); and a publish. The
trainer computes in each publish, on the same cores. For OFT, which SGLang does not have, the engine's own act uses a
LoRA of rank 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.running_answers import Gaps, watch
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.server_types import ServerHandle
from orbit_runtime.types import Request, Sampling
from orbit_runtime.workers.system import wait_asleep

MEASURES = (
    "orbit_runtime/loop/publish.py", "orbit_runtime/parity", "orbit_runtime/rollout", "orbit_runtime/sglang_plugin",
    "orbit_runtime/adapters", "orbit_runtime/storage", "benchmarks/running_answers.py", "benchmarks/sglang_rig.py",
)  # fmt: skip
GROUP = 8


@dataclass(frozen=True)
class Size:
    requests: int = 64
    tokens: int = 32
    warm: int = 5
    publishes: int = 50
    """Number of publishes timed alone; `warm` more before them are not counted."""
    watches: int = 60
    """Number of times that answers run side by side from beginning to end."""


SMALLEST = Size(requests=8, tokens=4, warm=1, publishes=2, watches=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapters", default="LoRA,OFT")


def measure(options: argparse.Namespace) -> harness.Measured:
    # As `orbit run` does, before torch is imported.
    wait_asleep(os.environ)
    harness.need_sglang()
    comparisons, figures = [], {}
    for adapter in options.adapters.split(","):
        rows, figures[adapter] = measure_one(adapter, options.repetitions, SMALLEST if options.smallest else Size())
        comparisons += rows
    print(harness.table(comparisons))
    for adapter, found in figures.items():
        print(f"{adapter}: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    return harness.Measured(comparisons, figures)


def measure_one(adapter: str, repetitions: int, size: Size) -> tuple[list[harness.Comparison], dict[str, float]]:
    from benchmarks.sglang_rig import started

    with started(adapter) as rig:
        begun, stolen = time.monotonic(), harness.stolen_seconds()
        rig.move(0, 0.02)
        rig.publish()
        publishing = _publishing(rig, size)
        assert rig.publication is not None
        server = rig.engine.replicas[0].server
        # Answers use an adapter that stays loaded: a publish waits for the previous version's answers before unloading.
        rig.engine.load_adapter("stays", rig.publication.adapter)
        gaps = _gaps(rig, server, adapter, size.watches)
        name = rig.publication.name
        sampling = Sampling(max_new_tokens=size.tokens)
        prompts = [
            tuple(rig.tokenizer.encode_chat([{"role": "user", "content": f"{10 + index}+{99 - index}="}]))
            for index in range(size.requests)
        ]

        def through_client(adapter_name: str | None, samples: int = 1) -> None:
            made = [
                Request(index, index, prompts[index // samples], sampling, adapter_name)
                for index in range(size.requests)
            ]
            assert len(list(sample(rig.engine, made))) == size.requests

        def as_one_batch(samples: int = 1) -> None:
            asked = prompts[: size.requests // samples]
            body = {
                "input_ids": [list(prompt) for prompt in asked], "return_logprob": True,
                "lora_path": [name] * len(asked),
                "sampling_params": {"n": samples, "temperature": 1.0, "max_new_tokens": size.tokens,
                                    "stop_token_ids": list(rig.tokenizer.eos_ids)},
            }  # fmt: skip
            answer = httpx.post(
                f"{server.url}/generate", json=body, headers=dict(server.headers), timeout=None, trust_env=False
            )
            assert answer.status_code == 200, answer.text
            assert len(answer.json()) == size.requests

        comparisons = [
            harness.compare(
                f"{size.requests} answers, {adapter}", ("our client", lambda: through_client(name)),
                ("one batch of SGLang's", as_one_batch), repetitions=repetitions, target=0.9,
            ),
            harness.compare(
                f"{size.requests // GROUP} prompts, {GROUP} answers each, {adapter}",
                ("our client", lambda: through_client(name, GROUP)),
                ("one batch of SGLang's", lambda: as_one_batch(GROUP)), repetitions=repetitions, target=0.9,
            ),
            harness.compare(
                f"{size.requests} answers", (adapter, lambda: through_client(name)),
                ("no adapter", lambda: through_client(None)), repetitions=repetitions,
            ),
        ]  # fmt: skip
        lost = (harness.stolen_seconds() - stolen) / (time.monotonic() - begun)
    return comparisons, publishing | gaps | {"cores taken by the machine's host": lost}


def _publish(rig: Any) -> None:
    rig.move(1, 1e-4)
    rig.publish()


def _publishing(rig: Any, size: Size) -> dict[str, float]:
    """Medians: from the published bytes to the end of their proof, the engine's load call within that, the whole act.

    The whole act also exports the adapter, writes it to the store, reads the trainer, and unloads the previous version.
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
        # The first unload after the proof.
        proven.append(time.perf_counter() - begun)
        unload(*given)

    rig.engine.load_adapter, rig.engine.unload_adapter = timed_load, timed_unload
    whole = []
    for _ in range(size.warm + size.publishes):
        rig.move(1, 1e-4)
        start = time.perf_counter()
        rig.publish()
        whole.append(time.perf_counter() - start)
    rig.engine.load_adapter, rig.engine.unload_adapter = load, unload
    loads, proven, whole = loads[size.warm :], proven[size.warm :], whole[size.warm :]
    over = statistics.median(a - b for a, b in zip(proven, loads, strict=True))
    return {"proven after ms": statistics.median(proven) * 1e3, "load ms": statistics.median(loads) * 1e3,
            "over the load ms": over * 1e3, "whole publish ms": statistics.median(whole) * 1e3}  # fmt: skip


def _gaps(rig: Any, server: ServerHandle, adapter: str, watches: int) -> dict[str, float]:
    """The gaps of all turns together."""
    gaps = {name: Gaps() for name in ("nothing", "own", "ours")}
    with _engines_own(rig, server, adapter) as load_and_prefill:
        acts = {"nothing": lambda: time.sleep(0.1), "own": load_and_prefill, "ours": lambda: _publish(rig)}
        for _ in range(watches):
            watch(server, "stays", acts, gaps)
    nothing, own, ours = gaps["nothing"], gaps["own"], gaps["ours"]
    return {
        "gap p50 ms": nothing.at(50), "gap p99 ms": nothing.at(99),
        "gap p50 ms, the engine's own": own.at(50), "gap p99 ms, the engine's own": own.at(99),
        "gap p50 ms while publishing": ours.at(50), "gap p99 ms while publishing": ours.at(99),
        "over the engine's own gap p99 ms": ours.at(99) - own.at(99), "publishes watched": ours.acts,
    }  # fmt: skip


@contextmanager
def _engines_own(rig: Any, server: ServerHandle, adapter: str) -> Iterator[Callable[[], None]]:
    """What any client would do with a new adapter: load it, send as many tokens as the proof, unload it."""
    from benchmarks.sglang_rig import small_lora

    files = rig.publication.adapter.files if adapter == "LoRA" else small_lora()
    prompts = [list(rig.publisher.canary_T)] * 4
    names = (f"own-{number}" for number in count())
    with (
        TemporaryDirectory() as folder,
        httpx.Client(base_url=server.url, headers=dict(server.headers), timeout=None, trust_env=False) as client,
    ):
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)

        def post(path: str, body: dict[str, Any]) -> None:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text

        def load_and_prefill() -> None:
            name = next(names)
            post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
            body = {"input_ids": prompts, "lora_path": [name, name, None, None],
                    "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}  # fmt: skip
            post("/generate", body)
            post("/unload_lora_adapter", {"lora_name": name})

        yield load_and_prefill


if __name__ == "__main__":
    raise SystemExit(harness.run(__file__, __doc__, measure, add_options, repetitions=10))
