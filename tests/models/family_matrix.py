"""Every family, format, adapter and expert layout: each loads, has transformers' log-probs, trains and loads back.

    .venv/bin/python -m tests.models.family_matrix            every combination, a few minutes
    .venv/bin/python -m tests.models.family_matrix gpt_oss    those of one family

The ordinary tests run a selection in which every pair of two choices occurs (`pairwise`).
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import expected_applied_digest, files_digest
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.adapters.state import applied_digest, export_adapter, load_slot, slot_files
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch
from tests.integration.tiny_families import LAYOUTS, make_family
from tests.integration.tiny_models import load_reference, reference_logprobs

DENSE = ("qwen3", "llama")
EXPERT_LAYOUTS = ("SharedOuter", "Shared", "PerExpert", "None")


@dataclass(frozen=True, order=True)
class Case:
    family: str
    layout: str
    adapter: str
    experts: str

    def __str__(self) -> str:
        return f"{self.family}-{self.layout}-{self.adapter}-{self.experts}"

    def pairs(self) -> set[tuple[tuple[int, str], ...]]:
        values = list(enumerate((self.family, self.layout, self.adapter, self.experts)))
        return set(itertools.combinations(values, 2))


def all_cases() -> list[Case]:
    return [
        Case(family, layout, adapter, experts)
        for family, layouts in LAYOUTS.items()
        for layout in layouts
        for adapter in ("LoRA", "OFT")
        for experts in (("None",) if family in DENSE else EXPERT_LAYOUTS)
    ]


def pairwise() -> list[Case]:
    return cover_pairs(all_cases())


def cover_pairs(cases: list[Any]) -> list[Any]:
    """A small selection with every pair that any case has: the case with most new pairs first."""
    remaining = [*cases]
    missing = {pair for case in remaining for pair in case.pairs()}
    chosen = []
    while missing:
        best = max(remaining, key=lambda case: len(case.pairs() & missing))
        chosen.append(best)
        missing -= best.pairs()
        remaining.remove(best)
    return sorted(chosen)


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(2, 120, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def adapter_of(case: Case) -> AdapterConfig:
    """With the family's usual targets."""
    return AdapterConfig(case.adapter, (), rank=4, alpha=8.0, block_size=16, experts=case.experts)  # type: ignore[arg-type]


def logprobs(policy: Policy, slot: str | None) -> torch.Tensor:
    """Of two sequences, of which one is longer than the sliding windows."""
    first, second = tokens_of(14, 1), tokens_of(7, 2)
    with policy.injected.selection.use(slot):
        values, _ = policy.logprobs(policy.pack([Branch(0, first[:3], first[3:]), Branch(1, second[:1], second[1:])]))
    return values


def check_case(case: Case, folder: Path) -> None:
    packed, plain = make_family(folder, case.family, case.layout)
    policy = load_policy(packed, adapter_of(case))
    digest = policy.base_digest()
    with torch.no_grad():
        before = logprobs(policy, None)
    model = load_reference(plain)
    expected = torch.cat([reference_logprobs(model, tokens_of(14, 1))[2:], reference_logprobs(model, tokens_of(7, 2))])
    torch.testing.assert_close(before, expected, rtol=0, atol=1e-5)
    after = train(policy)
    assert after > float(before.mean()) + 0.01
    assert policy.base_digest() == digest
    check_loads_back(policy, load_policy(packed, adapter_of(case)))


def train(policy: Policy, steps: int = 3) -> float:
    """Makes the sequences likelier; returns their mean log-prob afterwards."""
    optimizer = torch.optim.AdamW(policy.injected.parameters(), lr=0.02)
    for _ in range(steps):
        (-logprobs(policy, TRAINER_SLOT).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(logprobs(policy, TRAINER_SLOT).mean())


def check_loads_back(policy: Policy, other: Policy) -> None:
    """Another policy with the published files computes what the trainer computes, and says that it applied them."""
    files = export_adapter(policy.injected, policy.injected.config, "tiny")
    load_slot(other.injected.layers, "policy-v1", files)
    with torch.no_grad(), other.traced() as trace:
        loaded = logprobs(other, "policy-v1")
    with torch.no_grad():
        trained = logprobs(policy, TRAINER_SLOT)
    assert torch.equal(loaded, trained)
    again = slot_files(other.injected.layers, "policy-v1", files["adapter_config.json"])
    assert files_digest(again) == files_digest(files)
    distinct = {(entry.module, *(id(tensor) for tensor in entry.tensors.values())): entry for entry in trace}
    assert applied_digest(distinct.values()) == expected_applied_digest(files)


def main(families: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [case for case in all_cases() if not families or case.family in families]
    failed, start = 0, time.monotonic()
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            try:
                check_case(case, Path(folder))
            except Exception as error:  # every case is tried, whatever the others do
                failed += 1
                print(f"{case}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} combinations hold, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
