"""How far trainer and engine are apart, per format and engine, beside what each side differs from itself.

Runs what `orbit parity` runs on the shipped model. With SGLang on a CPU the engine's base is the checkpoint unpacked to
BF16 by our codec; `ORBIT_SGLANG_PYTHON` names its interpreter, and without it only the torch engine is measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import arguments, save
from orbit_runtime.cli.output import format_table
from orbit_runtime.loop.parity import Comparison, compare_sides
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.rollout.sglang_server import PYTHON_VARIABLE
from orbit_runtime.spec import load_manifest

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
PRECISIONS = ("BF16", "INT4", "FP8", "NVFP4", "MXFP4")
TARGET_SECONDS = 5.0
"""Of one measurement, models and servers up."""


def main() -> int:
    options = arguments(__doc__ or "")
    engines = ["Torch"]
    if os.environ.get(PYTHON_VARIABLE):
        engines.append("SGLang")
    else:
        print(f"SGLang is not measured: {PYTHON_VARIABLE} is not set (see docs/guides/sglang.md)")
    found = [measure(engine, precision) for engine in engines for precision in PRECISIONS]
    print(table(found))
    facts = {"target_seconds": TARGET_SECONDS, "found": [each.to_json() for each in found]}
    print(save("parity_by_format", [], facts, options.out))
    return int(any(each.preflight.failures for each in found))


def measure(engine: str, precision: str) -> Comparison:
    changes = [f"spec.rollout.engine={engine}", f"spec.model.precision={precision}"]
    return compare_sides(load_manifest(EXAMPLE, changes), progress=SilentProgress(), manifest_folder=EXAMPLE.parent)


def table(found: list[Comparison]) -> str:
    """mean |difference of log-probs| per token of each pair; p99 and max are those of the random adapter."""
    header = ("engine", "base", "trainer itself", "engine itself", "adapter off", "random adapter", "p99", "max", "s")
    pairs = ("trainer_floor", "engine_floor", "base", "random")
    rows = [
        (
            each.engine,
            each.precision,
            *(f"{getattr(each.preflight, name).mean:.1e}" for name in pairs),
            f"{each.preflight.random.p99:.1e}",
            f"{each.preflight.random.max:.1e}",
            f"{each.seconds:.1f}",
        )
        for each in found
    ]
    return format_table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
