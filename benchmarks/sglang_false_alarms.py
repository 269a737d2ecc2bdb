"""Hundreds of publishes to a real SGLang server, each proven: no healthy one may fail; also the cost of a proof.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/sglang_false_alarms.py --publishes 500

The updates between them range in size from one that no log-prob shows to one that changes every answer, so that the
proof is tested where it could raise a false alarm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Measured, need_sglang, run
from orbit_runtime.errors import GateError

MEASURES = (
    "orbit_runtime/parity", "orbit_runtime/loop/publish.py", "orbit_runtime/rollout", "orbit_runtime/sglang_plugin",
    "orbit_runtime/adapters",
)  # fmt: skip
SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3)
RESET_AFTER = 25
"""Publishes after which the masters are reset: the sum of many such updates is not a realistic adapter."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--publishes", type=int, default=500, help="of each adapter type")
    parser.add_argument("--adapters", default="LoRA,OFT")


def measure(options: argparse.Namespace) -> Measured:
    need_sglang()
    publishes = 2 if options.smallest else options.publishes
    found = {adapter: measure_one(adapter, publishes) for adapter in options.adapters.split(",")}
    print(
        f"{'adapter':<8} {'publishes':>9} {'false alarms':>12} {'load ms':>8} {'publish ms':>10} {'largest error':>14}"
    )
    for adapter, each in found.items():
        print(
            f"{adapter:<8} {each['publishes']:>9} {len(each['failures']):>12} {each['load_ms']:>8.1f} "
            f"{each['publish_ms']:>10.1f} {each['largest_change_error']:>14.2e}"
        )
    alarms = [f"{adapter}: {why}" for adapter, each in found.items() for why in each["failures"]]
    return Measured(figures=found, refused="; ".join(alarms))


def measure_one(adapter: str, count: int) -> dict[str, Any]:
    from benchmarks.sglang_rig import started

    failures: list[str] = []
    errors, publishes, loads = [0.0], [], []
    with started(adapter) as rig:
        load = rig.engine.load_adapter

        def timed_load(*given: object) -> None:
            start = time.perf_counter()
            load(*given)  # type: ignore[arg-type]
            loads.append(time.perf_counter() - start)

        rig.engine.load_adapter = timed_load  # type: ignore[method-assign, assignment]
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
    raise SystemExit(run(__file__, __doc__, measure, add_options))
