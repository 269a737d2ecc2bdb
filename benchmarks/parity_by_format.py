"""How far trainer and engine differ, per format and engine, compared with how far each side differs from itself.

Runs what `orbit parity` runs on the shipped model. With SGLang on a CPU the engine's base is the checkpoint unpacked to
BF16 by our codec, and `ORBIT_SGLANG_PYTHON` names its interpreter; `--engines Torch` does not need it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Measured, need_sglang, run
from orbit_runtime.cli.output import format_table
from orbit_runtime.loop.parity import ParityComparison, compare_sides
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import load_manifest

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
PRECISIONS = ("BF16", "INT4", "FP8", "NVFP4", "MXFP4")
MEASURES = (
    "orbit_runtime/parity", "orbit_runtime/loop/parity.py", "orbit_runtime/policy", "orbit_runtime/quant",
    "orbit_runtime/rollout", "orbit_runtime/sglang_plugin",
)  # fmt: skip
TARGET_SECONDS = 5.0
"""For one measurement, with models and servers loaded."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", default="Torch,SGLang")


def measure(options: argparse.Namespace) -> Measured:
    engines = options.engines.split(",")
    if "SGLang" in engines:
        need_sglang()
    precisions = ("INT4",) if options.smallest else PRECISIONS
    found = [measure_one(engine, precision) for engine in engines for precision in precisions]
    print(table(found))
    failures = [f"{each.engine}, {each.precision}: {why}" for each in found for why in each.preflight.failures]
    return Measured(
        figures={"found": [each.to_json() for each in found]},
        facts={"target_seconds": TARGET_SECONDS},
        refused="; ".join(failures),
    )


def measure_one(engine: str, precision: str) -> ParityComparison:
    changes = [f"spec.rollout.engine={engine}", f"spec.model.precision={precision}"]
    return compare_sides(load_manifest(EXAMPLE, changes), progress=SilentProgress(), manifest_folder=EXAMPLE.parent)


def table(found: list[ParityComparison]) -> str:
    """Mean |difference of log-probs| per token of each pair; p99 and max are those of the random adapter."""
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
    raise SystemExit(run(__file__, __doc__, measure, add_options))
