"""Every family, format and adapter under every division among ranks, against one process: log-probs and gradients.

    .venv/bin/python -m tests.megatron.matrix                        everything, an hour on two cores
    .venv/bin/python -m tests.megatron.matrix TP2 qwen3_moe INT4     what has all of these words
    .venv/bin/python -m tests.megatron.matrix --bf16                 computed in BF16

`test_divided.py` runs a selection in which every pair of two choices occurs.

Belongs here: which cases there are, and their bounds. Does not belong here: what a case computes (`cases`).
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from orbit_runtime.policy import load_policy
from orbit_runtime.training.megatron.groups import GroupSizes
from tests.megatron.cases import differences, experts_of, folder_of, in_one_process, on_a_rank
from tests.megatron.ranks import World, end_spares, world
from tests.models.family_matrix import DENSE, EXPERT_LAYOUTS, Case, adapter_of, cover_pairs

DIVISIONS = {
    "1": GroupSizes(),
    "TP2": GroupSizes(2, tensor=2, expert=2),
    "TP2+SP": GroupSizes(2, tensor=2, expert=2, sequence_parallel=True),
    "EP2": GroupSizes(2, expert=2),
    "DP2": GroupSizes(2),
    "TP2+EP4+SP": GroupSizes(4, tensor=2, expert=4, sequence_parallel=True),
    "PP2": GroupSizes(2, pipeline=2),
    "CP2": GroupSizes(2, context=2),
    "CP2+EP2": GroupSizes(2, context=2, expert=2),
    "TP2+SP+PP2": GroupSizes(4, tensor=2, expert=2, pipeline=2, sequence_parallel=True),
    "TP2+SP+CP2": GroupSizes(4, tensor=2, expert=4, context=2, sequence_parallel=True),
    "CP2+PP2": GroupSizes(4, context=2, pipeline=2),
}
FORMATS = ("BF16", "INT4", "FP8", "NVFP4")
FAMILIES = ("qwen3", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "gpt_oss")
LOGPROBS, GRADIENTS = 5e-6, 1e-5
"""fp32: of a log-prob, and of a gradient relative to the largest of its parameter."""


@dataclass(frozen=True, order=True)
class Divided:
    division: str
    case: Case

    def __str__(self) -> str:
        return f"{self.division}-{self.case}"

    def pairs(self) -> set[tuple[tuple[int, str], ...]]:
        case = self.case
        values = enumerate((self.division, case.family, case.layout, case.adapter, case.experts))
        return set(itertools.combinations(values, 2))


def all_cases() -> list[Divided]:
    made = []
    for division in DIVISIONS:
        for family in FAMILIES:
            for layout in FORMATS if family != "gpt_oss" else ("BF16", "MXFP4GptOss"):
                for adapter in ("LoRA", "OFT"):
                    experts = ("None",) if family in DENSE else EXPERT_LAYOUTS
                    made += [Divided(division, Case(family, layout, adapter, each)) for each in experts]
    return made


def pairwise() -> list[Divided]:
    return cover_pairs(all_cases())


def check(ranks: World, case: Case, root: Path, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """What differs by most; AssertionError where it is more than rounding.

    In BF16 each side is as far from the exact result as rounding takes it, so that they may be twice as far apart as
    one process is from itself in fp32. All go to the same experts.
    """
    packed = folder_of(root, case)
    if dtype is torch.float32:
        apart, relative = differences(in_one_process(packed, case), ranks.call(on_a_rank, packed, case), case)
        logprobs, gradients = LOGPROBS, GRADIENTS
    else:
        experts = experts_of(load_policy(packed, adapter_of(case)))
        exact, one = in_one_process(packed, case), in_one_process(packed, case, dtype, experts)
        apart, relative = differences(one, ranks.call(on_a_rank, packed, case, dtype, experts), case)
        logprobs, gradients = (2 * rounding for rounding in differences(exact, [one], case))
    assert apart <= logprobs, f"log-probs differ by {apart}, and {logprobs} is rounding"
    assert relative <= gradients, f"gradients differ by {relative}, and {gradients} is rounding"
    return apart, relative


def run(chosen: Iterable[Divided], root: Path, dtype: torch.dtype) -> int:
    """Prints a line per case; returns how many failed."""
    failed, worst, count = 0, (0.0, 0.0), 0
    for division, group in itertools.groupby(sorted(chosen), key=lambda each: each.division):
        with world(DIVISIONS[division]) as ranks:
            for each in group:
                started, count = time.monotonic(), count + 1
                try:
                    found = check(ranks, each.case, root, dtype)
                except Exception as error:
                    failed += 1
                    print(f"{each}: FAILED {str(error)[-2000:]}", flush=True)
                    continue
                worst = (max(worst[0], found[0]), max(worst[1], found[1]))
                seconds = time.monotonic() - started
                print(f"{each}: log-probs {found[0]:.1e}, gradients {found[1]:.1e}, {seconds:.1f} s", flush=True)
        end_spares()
    print(
        f"{count} cases, {failed} failed; largest difference of log-probs {worst[0]:.1e}, of gradients {worst[1]:.1e}"
    )
    return failed


def main() -> int:
    words = set(sys.argv[1:])
    dtype = torch.bfloat16 if "--bf16" in words else torch.float32
    words.discard("--bf16")
    torch.set_num_threads(1)
    chosen = [each for each in all_cases() if words <= set(str(each).split("-"))]
    with tempfile.TemporaryDirectory() as root:
        return 1 if run(chosen, Path(root), dtype) else 0


if __name__ == "__main__":
    sys.exit(main())
