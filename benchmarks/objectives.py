"""Whether every named algorithm learns the quickstart's task: the same number of samples, several seeds.

    python -m benchmarks.objectives                             every algorithm, three seeds: an hour on two cores
    python -m benchmarks.objectives --types GRPO DAPO           a result of their own: objectives_grpo_dapo.json

Belongs here: running them, curves and the documentation's table. Does not belong here: whether their arithmetic is
right (`tests/integration/test_objectives.py`).

Each run is `examples/quickstart.yaml` with two updates per step, so that ratios and clips have an effect, and answers
of up to 8 tokens, so that a correct one is not overlong. Rewards are those of all samples, in the order in which they
were drawn; samples that dynamic sampling dropped count as well, and every algorithm ends at the same number of samples.
`Distillation` sees no reward: its teacher is the adapter that `GRPO` leaves with another seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, Measured, run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec.load import load_manifest
from orbit_runtime.spec.objectives import OBJECTIVES

MEASURES = ("orbit_runtime/algorithms", "orbit_runtime/spec/objectives.py", "orbit_runtime/training/updater.py")
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
NAMED = [name for name in OBJECTIVES if name not in ("Custom", "SFT")]
PROMPTS, GROUP, STEPS, POINTS = 32, 16, 60, 6
TEACHERS_SEED = 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--types", nargs="+", choices=NAMED, default=NAMED)
    parser.add_argument("--steps", type=int, default=STEPS, help="whose samples every algorithm gets")


def curve(name: str, seed: int, steps: int, prompts: int) -> list[float]:
    """Mean reward in each of `POINTS` equal parts of the samples, in the order in which they were drawn."""
    with tempfile.TemporaryDirectory() as folder:
        settings = []
        if name == "Distillation":
            train_one(["algorithm.type=GRPO", f"data.seed={TEACHERS_SEED}"], steps, prompts, f"{folder}/teacher")
            teacher = f"{folder}/teacher/adapters/policy-v{steps}"
            settings = [f"algorithm.teacher={{type: Adapter, uri: {teacher}, over: Full, beta: 1}}"]
        train_one([f"algorithm.type={name}", f"data.seed={seed}", *settings], steps, prompts, f"{folder}/run")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return parts_of([json.loads(line) for line in lines], total=steps * prompts)


def train_one(settings: Sequence[str], steps: int, prompts: int, out: str) -> None:
    from orbit_runtime.loop import run as train

    both = [
        *settings,
        f"training.steps={steps}", f"training.promptsPerStep={prompts}",
        f"training.miniBatchPrompts={prompts // 2}", "rollout.sampling.maxNewTokens=8", f"algorithm.groupSize={GROUP}",
        "observability.metricsPort=-1",
    ]  # fmt: skip
    manifest = load_manifest(QUICKSTART, both)
    ended = train(manifest, out=out, progress=SilentProgress(), manifest_folder=QUICKSTART.parent).ended
    if ended != "done":
        raise SystemExit(f"{' '.join(settings)}: the run ended as {ended!r}, and not with its last step")


def parts_of(rows: Sequence[Mapping[str, Any]], *, total: int) -> list[float]:
    """Args: total: number of groups that count; each group of a step gets the step's mean reward."""
    by_group = [float(row["reward_mean"]) for row in rows for _ in range(row["groups"])][:total]
    size = len(by_group) // POINTS
    return [statistics.fmean(by_group[part * size : (part + 1) * size]) for part in range(POINTS)]


def measure(options: argparse.Namespace) -> Measured:
    steps, prompts = (POINTS, 2) if options.smallest else (options.steps, PROMPTS)
    types, seeds = (["GRPO"], [0]) if options.smallest else (options.types, options.seeds)
    figures: dict[str, object] = {}
    print(f"{'algorithm':<28}{'seed':>5}  reward in each sixth of the samples", flush=True)
    flat: list[str] = []
    for name in types:
        for seed in seeds:
            points = curve(name, seed, steps, prompts)
            figures[f"{name} seed {seed}"] = points
            print(f"{name:<28}{seed:>5}  {' '.join(f'{each:.3f}' for each in points)}", flush=True)
            if points[-1] <= points[0] and not options.smallest:
                flat.append(f"{name} with seed {seed}")
    facts = {"samples": steps * prompts * GROUP, "steps": steps, "seeds": list(seeds)}
    # Some of the algorithms alone are a result of their own, which leaves that of all where it is.
    variant = "" if options.smallest or types == NAMED else "_".join(types).lower()
    refused = f"no better than before: {', '.join(flat)}" if flat else ""
    return Measured(figures=figures, facts=facts, refused=refused, variant=variant)


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_options))
