"""One case: the log-probs of two prompts' answers and the gradient of their sum, in one process and on ranks.

Belongs here: the arithmetic that both sides do. Does not belong here: which cases there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.adapters.masters import MasterPlace
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch, PackedBatch, lay_out_experts
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.megatron.model import RankPolicy, load_rank_policy
from orbit_runtime.training.megatron.owners import Owners
from tests.integration.tiny_families import make_family
from tests.models.family_matrix import Case, adapter_of, tokens_of


def sizes_of(case: Case) -> dict[str, int]:
    """Sizes that two ranks divide at the ends of groups and blocks."""
    if case.layout.startswith("FP8Block"):
        heads = {} if case.family in ("deepseek_v3", "kimi_k2") else {"head_dim": 64, "num_key_value_heads": 4}
        return heads | {"intermediate_size": 256, "moe_intermediate_size": 256}
    return {"intermediate_size": 128, "moe_intermediate_size": 64}


@cache
def folder_of(root: Path, case: Case) -> Path:
    """Folder of the packed checkpoint, which is made once for each root."""
    (root / str(case)).mkdir()
    packed, _ = make_family(root / str(case), case.family, case.layout, sizes=sizes_of(case))
    return packed


@dataclass(frozen=True)
class Found:
    logprobs: torch.Tensor
    numbers: range
    """Numbers of the branches."""
    gradients: dict[str, torch.Tensor]
    places: dict[str, MasterPlace]
    norm: float


def branches() -> list[Branch]:
    """Answers to two prompts, 27 tokens: no multiple of a number of ranks."""
    first, second = tokens_of(6, 1), tokens_of(4, 2)
    return [
        Branch(0, first, tokens_of(7, 3)), Branch(0, first, tokens_of(3, 4)), Branch(1, second, tokens_of(9, 5)),
        Branch(1, second, tokens_of(2, 6)),
    ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Experts:
    """Where one process sends tokens in fp32. In BF16 a router that rounds otherwise sends a token elsewhere, and what
    follows differs by far more than rounding."""

    layers: tuple[int, ...]
    routed: tuple[np.ndarray, ...]
    """The routed experts of each branch, int16 `[inputs, L, C]`."""

    def lay_out(self, policy: Policy, numbers: Sequence[int], batch: PackedBatch) -> torch.Tensor | None:
        if policy.routing is None:
            return None
        own = [self.layers.index(layer) for layer in policy.routing.layers]
        given = [branches()[number] for number in numbers]
        return lay_out_experts(given, [self.routed[number][:, own] for number in numbers], batch)


def experts_of(policy: Policy) -> Experts | None:
    if policy.routing is None:
        return None
    routed = []
    with probed(policy), torch.no_grad():
        for branch in branches():
            with policy.routing.noted() as noted:
                policy.logprobs(policy.pack([branch]))
            routed.append(noted().numpy())
    return Experts(policy.routing.layers, tuple(routed))


@contextmanager
def probed(policy: Policy) -> Iterator[None]:
    """Under a random adapter, so that no gradient is 0."""
    with policy.injected.masters.probing("random", seed=7), policy.injected.selection.use(TRAINER_SLOT):
        yield


def compute(policy: Policy, numbers: range, experts: Experts | None = None) -> torch.Tensor:
    """Log-probs of these of the branches. Gradients are left in the masters.

    Args:
        experts: None: where the routers choose.
    """
    given = [branches()[number] for number in numbers]
    with probed(policy):
        batch = policy.pack(given)
        logprobs, _ = policy.logprobs(batch, routed_TLC=experts.lay_out(policy, numbers, batch) if experts else None)
        weights = torch.cat([torch.linspace(0.5, 1.5, len(each.continuation_T)) for each in given])
        (logprobs * weights).sum().backward()
    return logprobs.detach()


def compute_in_stages(held: RankPolicy, numbers: range, experts: Experts | None) -> torch.Tensor:
    """The same of a stage, a pass for each branch, so that several are under way. Only the last one has log-probs."""
    policy, pipeline = held.policy, held.pipeline
    assert pipeline is not None
    found = []

    def begin(number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = branches()[number]
        batch = policy.pack([given])
        routed_TLC = experts.lay_out(policy, [number], batch) if experts else None
        if not pipeline.is_last:
            return policy.through(batch, routed_TLC), pipeline.take_entered()
        logprobs, _ = policy.logprobs(batch, routed_TLC=routed_TLC)
        found.append(logprobs.detach())
        return (logprobs * torch.linspace(0.5, 1.5, len(given.continuation_T))).sum(), pipeline.take_entered()

    def finish(begun: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        root, entered = begun
        root.backward(None if pipeline.is_last else pipeline.receive_gradient(root), retain_graph=True)
        if entered is not None:
            pipeline.send_gradient(entered.grad)

    with probed(policy):
        pipeline.run(numbers, begin, finish)
    return torch.cat(found) if found else torch.empty(0)


@cache
def in_one_process(
    folder: Path, case: Case, dtype: torch.dtype = torch.float32, experts: Experts | None = None
) -> Found:
    policy = load_policy(folder, adapter_of(case), compute_dtype=dtype)
    logprobs = compute(policy, range(4), experts)
    masters = policy.injected.masters
    gradients = {name: master.grad for name, master in masters.parameters.items() if master.grad is not None}
    norm = float(torch.stack([each.square().sum() for each in gradients.values()]).sum().sqrt())
    return Found(logprobs, range(4), gradients, dict(masters.places), norm)


def on_a_rank(
    groups: Groups, folder: Path, case: Case, dtype: torch.dtype = torch.float32, experts: Experts | None = None
) -> Found:
    """Every replica computes every other branch; sums are over all of them."""
    held = load_rank_policy(folder, adapter_of(case), groups, compute_dtype=dtype)
    policy = held.policy
    numbers = range(groups.data.rank(), 4, groups.data.size())
    staged = held.pipeline is not None
    logprobs = compute_in_stages(held, numbers, experts) if staged else compute(policy, numbers, experts)
    masters = policy.injected.masters
    owners = Owners(groups, masters.parameters, masters.places)
    owners.collect_gradients()
    norm = float(owners.norm())
    gradients: dict[str, Any] = {name: master.grad for name, master in owners.owned.items()}
    return Found(logprobs, numbers, gradients, dict(masters.places), norm)


def differences(expected: Found, ranks: list[Found], case: Case) -> tuple[float, float]:
    """Largest difference of a log-prob, and of gradients relative to the largest of their parameter."""
    config = adapter_of(case)
    by_branch = expected.logprobs.split([len(each.continuation_T) for each in branches()])
    known = [rank for rank in ranks if len(rank.logprobs)]
    assert known
    apart = max(
        float((rank.logprobs - torch.cat([by_branch[number] for number in rank.numbers])).abs().max()) for rank in known
    )
    relative = 0.0
    assert set(expected.gradients) == {name for rank in ranks for name in rank.gradients}
    for rank in ranks:
        assert set(rank.gradients) <= set(expected.gradients)
        relative = max(relative, abs(rank.norm / expected.norm - 1))
        for name, found in rank.gradients.items():
            whole = expected.gradients[name]
            wanted = rank.places[name].cut(whole, config)
            assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
            relative = max(relative, float((found - wanted).abs().max() / whole.abs().max().clamp(min=1e-12)))
    return apart, relative
