"""One update of a trainer in ranks against one in this process: the same samples, the same mixture of experts.

A single rank shows the cost of calling another process, the others the cost of each axis on these cores: two ranks of
one thread against one process of one thread, so half the time would be ideal. Times on a CPU say nothing about a GPU;
what a rank gives to the others in an update, which is counted beside them (`counted_rank`), is the same there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, Comparison, Measured, NotMeasured, run, table

MEASURES = ("orbit_runtime/training", "orbit_runtime/workers/ranks/group.py", "orbit_runtime/policy")
DIVISIONS = {
    "one rank": {},
    "TP2": {"tensor": 2, "expert": 2, "sequence_parallel": True},
    "EP2": {"expert": 2},
    "PP2": {"pipeline": 2},
    "DP2": {},
}
WORLD = {"one rank": 1, "TP2": 2, "EP2": 2, "PP2": 2, "DP2": 2}


def make_samples(options: argparse.Namespace) -> list[Any]:
    """Groups of answers, each with its prompt; advantages of both signs."""
    from orbit_runtime.types import Sample

    made = []
    for group in range(options.groups):
        prompt = [2 + (group + index) % 90 for index in range(options.prompt)]
        for answer in range(8):
            tokens = [2 + (7 * answer + index) % 90 for index in range(options.answer)]
            blank = [0.0] * len(prompt)
            columns = {
                "sampled": blank + [-4.0] * len(tokens),
                "advantage": blank + [1.0 if answer % 2 else -1.0] * len(tokens),
            }
            mask = [0] * len(prompt) + [1] * len(tokens)
            made.append(Sample(prompt + tokens, mask, columns, group, len(prompt)))  # type: ignore[arg-type]
    return made


def build(name: str, options: argparse.Namespace, closing: ExitStack) -> tuple[Any, Any]:
    """The trainer in ranks, and its ranks."""
    from orbit_runtime.training.megatron.groups import GroupSizes
    from orbit_runtime.training.megatron.rank import RankSettings
    from orbit_runtime.training.megatron.trainer import MegatronTrainer
    from orbit_runtime.workers.ranks.group import GroupSettings, start_ranks

    folder, adapter, settings = trainer_parts(options.micro_batch, options.answer)
    sizes = GroupSizes(WORLD[name], **DIVISIONS[name])  # type: ignore[arg-type]
    logs = Path(closing.enter_context(TemporaryDirectory(prefix="orbit-ranks-")))
    group = GroupSettings(
        "benchmarks.counted_rank:CountedRank",
        {"settings": RankSettings(folder, adapter, sizes, settings)},
        sizes.world,
        environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    ranks = closing.enter_context(start_ranks(group, logs))
    return MegatronTrainer(ranks, "base"), ranks


def trainer_parts(micro_batch: int = 4096, answer: int = 64) -> tuple[Path, Any, Any]:
    """Model, adapter and settings of a trainer. Args: both in tokens."""
    from orbit_runtime.adapters.config import AdapterConfig
    from orbit_runtime.algorithms.constants import PolicyLossSettings
    from orbit_runtime.model_info.builtin_models import builtin_folder
    from orbit_runtime.spec.training import Training
    from orbit_runtime.training.settings import TrainerSettings
    from orbit_runtime.types import Sampling

    settings = TrainerSettings(
        Training(steps=1000, learning_rate=1e-4, micro_batch_tokens=micro_batch), decay_steps=1000,
        loss=PolicyLossSettings(), reduction="Token", constant_length=answer, correction=None,
        sampling=Sampling(max_new_tokens=answer), base_model="base", seed=0, router_replay="None",
    )  # fmt: skip
    adapter = AdapterConfig(type="OFT", targets=(), block_size=32, experts="Shared")
    return builtin_folder("tiny-moe-adder", "INT4"), adapter, settings


def measure(options: argparse.Namespace) -> Measured:
    try:
        import megatron.core  # noqa: F401
        import ray  # noqa: F401
    except ImportError as error:
        raise NotMeasured(f"{error.name} is not installed: pip install 'orbit-rl[megatron,ray]'") from None
    import torch

    from orbit_runtime.policy import load_policy
    from orbit_runtime.training import TorchTrainer

    if options.smallest:
        options.groups, options.repetitions = 2, 1
    torch.set_num_threads(1)
    samples = make_samples(options)
    folder, adapter, settings = trainer_parts(options.micro_batch, options.answer)
    rows, given = [], {}
    for name in DIVISIONS if not options.smallest else ("one rank", "TP2"):
        with ExitStack() as closing:
            alone, (divided, ranks) = (
                TorchTrainer(load_policy(folder, adapter), settings),
                build(name, options, closing),
            )
            turns: list[tuple[float, float]] = []
            for turn in range(options.repetitions + 1):
                pair = [_seconds(trainer, samples) for trainer in (divided, alone)]
                counts = ranks.call("taken_counts")
                if turn:
                    turns.append((pair[0], pair[1]))
            given |= _given(name, counts)
        rows.append(
            Comparison(
                f"update, {sum(len(each.token_ids_T) for each in samples):,} tokens", f"ranks, {name}",
                "one process, one thread", statistics.median(a for a, _ in turns),
                statistics.median(b for _, b in turns), statistics.median(b / a for a, b in turns),
                1 / 1.5 if name == "one rank" else None, options.repetitions,
            )
        )  # fmt: skip
    print(table(rows))
    for name in (row.a.removeprefix("ranks, ") for row in rows):
        print(f"{name}: a rank gives {given[f'{name}, MiB']:.1f} MiB in {given[f'{name}, calls']:.0f} calls")
    return Measured(rows, given, {"model": "tiny-moe-adder INT4, OFT on Shared experts", "threads of a rank": 1})


def _given(name: str, counts: list[dict[str, list[int]]]) -> dict[str, float]:
    """Figures of an update: what the rank that gives most gives to others, and the same by collective."""
    most = max(counts, key=lambda each: sum(size for _, size in each.values()))
    by_name = {
        f"{name}, {collective}, {what}": value
        for collective, (calls, size) in sorted(most.items())
        for what, value in (("calls", float(calls)), ("MiB", size / 2**20))
    }
    return {
        f"{name}, calls": float(sum(calls for calls, _ in most.values())),
        f"{name}, MiB": sum(size for _, size in most.values()) / 2**20,
        **by_name,
    }


def _seconds(trainer: Any, samples: list[Any]) -> float:
    start = time.perf_counter()
    trainer.update(samples)
    return time.perf_counter() - start


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=4096)


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, repetitions=5, add_options=add_options))
