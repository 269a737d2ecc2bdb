"""Hundreds of publishes to a real SGLang server, each proven: no healthy one may fail, and what a proof costs.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/sglang_false_alarms.py --publishes 500

The updates between them have sizes from one that no log-prob shows to one that changes every answer, so that the proof
is asked where it could raise a false alarm.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.sglang_server import PYTHON_VARIABLE

SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3)
RESET_AFTER = 25
"""Publishes after which the masters start from their beginning: the sum of many updates is no adapter anybody has."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the JSON file")
    parser.add_argument("--publishes", type=int, default=500, help="of each adapter type")
    parser.add_argument("--adapters", default="LoRA,OFT")
    asked = parser.parse_args()
    if not os.environ.get(PYTHON_VARIABLE) and importlib.util.find_spec("sglang") is None:
        print(f"not measured: {PYTHON_VARIABLE} is not set, and SGLang is not installed here")
        return 0
    facts = {adapter: measure(adapter, asked.publishes) for adapter in asked.adapters.split(",")}
    print(
        f"{'adapter':<8} {'publishes':>9} {'false alarms':>12} {'load ms':>8} {'publish ms':>10} {'largest error':>14}"
    )
    for adapter, found in facts.items():
        print(
            f"{adapter:<8} {found['publishes']:>9} {len(found['failures']):>12} {found['load_ms']:>8.1f} "
            f"{found['publish_ms']:>10.1f} {found['largest_change_error']:>14.2e}"
        )
    harness.save("sglang_false_alarms", [], facts, asked.out)
    return 1 if any(found["failures"] for found in facts.values()) else 0


def measure(adapter: str, count: int) -> dict[str, Any]:
    from sglang_rig import started

    failures: list[str] = []
    errors, publishes, loads = [0.0], [], []
    with started(adapter) as rig:
        load = rig.engine.load_adapter

        def timed_load(*given: object) -> None:
            start = time.perf_counter()
            load(*given)  # type: ignore[arg-type]
            loads.append(time.perf_counter() - start)

        rig.engine.load_adapter = timed_load  # type: ignore[method-assign]
        first = [parameter.detach().clone() for parameter in rig.policy.injected.parameters()]
        for number in range(count):
            if number % RESET_AFTER == 0:
                for parameter, value in zip(rig.policy.injected.parameters(), first, strict=True):
                    parameter.data.copy_(value)
            rig.move(number, SCALES[number % len(SCALES)])
            start = time.perf_counter()
            try:
                errors.append(rig.publish().proof.change_error)
            except GateError as error:
                failures.append(str(error))
                break
            publishes.append(time.perf_counter() - start)
            if number % 50 == 49:
                print(f"{adapter}: {number + 1} publishes, {len(failures)} failed", file=sys.stderr, flush=True)
    return {
        "publishes": len(publishes),
        "failures": failures,
        "load_ms": statistics.median(loads) * 1e3,
        "publish_ms": statistics.median(publishes) * 1e3 if publishes else float("nan"),
        "largest_change_error": max(errors),
    }


if __name__ == "__main__":
    raise SystemExit(main())
