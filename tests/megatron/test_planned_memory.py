"""The planner's bytes of a rank on a GPU against what a rank really holds, part by part, on the CPU.

All is measured in BF16. Norms of queries and keys keep their input in fp32 on a CPU, where the fused kernel of a GPU
keeps it as it is: half of that counts. The measuring side looks at the storages of a rank's tensors, and at those that
autograd saves. It knows nothing of the planner's formulas. The fullest rank counts: it is the one that runs out of
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.planner import Machine, Plan, plan
from orbit_runtime.policy.packed import Branch
from orbit_runtime.policy.recompute import Recompute
from orbit_runtime.spec import OrbitRun
from orbit_runtime.training.megatron.groups import Groups, GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.types import Sample
from tests.integration.test_torch_trainer import SETTINGS, changed
from tests.megatron.ranks import World, world
from tests.megatron.trainers import WorldRanks, rank_here
from tests.models.test_planned_memory import angles, living_tensors, storage_bytes

DIVISIONS = {
    "TP2": GroupSizes(2, tensor=2, expert=2, sequence_parallel=True),
    "EP2": GroupSizes(2, expert=2),
    "PP2": GroupSizes(2, pipeline=2),
    "CP2": GroupSizes(2, context=2),
    "DP2": GroupSizes(2),
}


@dataclass(frozen=True)
class Lengths:
    """Of a micro-batch's sequences: as long as the manifest allows, so that the plan's upper bounds happen."""

    prompt: int
    new: int
    sequences: int


MANY, ONE = Lengths(12, 20, 8), Lengths(96, 160, 1)
"""Ranks that divide the tokens of several sequences may each have whole ones, and need no other rank's keys."""


FIGURES: dict[str, dict[str, tuple[int, int]]] = {}
"""Case → part → (measured, planned) of the tests that ran; `benchmarks/planned_memory.py` makes a table of them."""


def lengths_of(sizes: GroupSizes) -> Lengths:
    return MANY if sizes.context == 1 else ONE


@dataclass(frozen=True)
class Case:
    model: str
    precision: str
    adapter: Literal["LoRA", "OFT"]
    experts: Literal["PerExpert", "SharedOuter", "Shared", "None"]

    def __str__(self) -> str:
        return f"{self.model}-{self.precision}-{self.adapter}-{self.experts}"

    @property
    def config(self) -> AdapterConfig:
        targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        return AdapterConfig(
            type=self.adapter, targets=targets, rank=8, alpha=16.0, block_size=16, experts=self.experts
        )


CASES = (
    Case("tiny-adder", "INT4", "LoRA", "None"),
    Case("tiny-adder", "NVFP4", "OFT", "None"),
    Case("tiny-moe-adder", "INT4", "LoRA", "PerExpert"),
    Case("tiny-moe-adder", "INT4", "OFT", "SharedOuter"),
)


def planned(case: Case, sizes: GroupSizes, recompute: Recompute = "None") -> Plan:
    settings = {"lora": {"rank": 8, "alpha": 16.0}} if case.adapter == "LoRA" else {"oft": {"blockSize": 16}}
    given = {"tensor": sizes.tensor, "expert": sizes.expert, "pipeline": sizes.pipeline, "context": sizes.context}
    lengths = lengths_of(sizes)
    run = OrbitRun.model_validate({
        "apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "measured"},
        "spec": {
            "model": {"uri": "model", "maxSequenceLength": lengths.prompt + lengths.new},
            "adapter": {"type": case.adapter, "experts": case.experts, **settings} if case.experts != "None"
            else {"type": case.adapter, **settings},
            "algorithm": {"groupSize": 4},
            "data": {"prompts": [{"uri": "prompts.jsonl"}]},
            "environment": {"rewards": [{"name": "r", "type": "ExactMatch"}]},
            "rollout": {"engine": "SGLang", "sampling": {"maxNewTokens": lengths.new}},
            "training": {
                "trainer": "Megatron", "steps": 1, "promptsPerStep": 4, "microBatchTokens": 256, "parallel": given,
                "recompute": recompute, "attention": "SDPA",
            },
        },
    })  # fmt: skip
    card = find_gpu("H100")
    assert card is not None
    return plan(run, folder_facts(builtin_folder(case.model, case.precision)), Machine(card, sizes.world, 2**40))


def branches(lengths: Lengths) -> list[Branch]:
    length = lengths.prompt + lengths.new
    tokens = [[2 + (7 * index + 3 * at) % 100 for at in range(length)] for index in range(lengths.sequences)]
    return [Branch(index, each[: lengths.prompt], each[lengths.prompt :]) for index, each in enumerate(tokens)]


def samples(lengths: Lengths) -> list[Sample]:
    made = []
    # Every replica gets the same number.
    for branch in branches(lengths) * 2:
        prompt, new = branch.prefix_T, branch.continuation_T
        total = len(prompt) + len(new)
        columns = {"sampled": [-1.0] * total, "advantage": [0.5 - len(made) % 2] * total}
        mask = (0,) * len(prompt) + (1,) * len(new)
        made.append(Sample((*prompt, *new), mask, columns, len(made), len(prompt)))
    return made


def measure(groups: Groups) -> dict[str, int]:
    """Bytes of this rank's parts."""
    rank, seen = rank_here(), {}
    optimizer = rank._updater.optimizer
    masters = list(rank._masters.parameters.values())
    optimizer.register_step_pre_hook(
        lambda *_: seen.update(gradients=storage_bytes(m.grad for m in masters if m.grad is not None))
    )
    rank.update(samples(lengths_of(groups.sizes)))
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    policy = rank.policy
    angles = {id(buffer) for name, buffer in policy.model.named_buffers() if "inv_freq" in name}
    base = [t for t in policy._base_tensors().values() if id(t) not in angles]
    of_masters = {master.untyped_storage().data_ptr() for master in masters}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        applied = policy.injected.masters.applied(torch.bfloat16)
    kept += [tensor for slot in applied.values() for tensor in slot.tensors().values()]
    return {
        "base": storage_bytes(base),
        "adapter": storage_bytes(masters),
        "optimizer": storage_bytes(moments),
        "adapter, rounded": storage_bytes(t for t in kept if t.untyped_storage().data_ptr() not in of_masters),
        **seen,
    }


def measure_saved(groups: Groups) -> int:
    """Bytes that autograd keeps of one micro-batch; 0 with stages, whose passes are several at a time."""
    if groups.sizes.pipeline > 1:
        return 0
    policy, saved = rank_here().policy, []
    batch = policy.pack(branches(lengths_of(groups.sizes)))
    known = {t.untyped_storage().data_ptr() for t in policy._base_tensors().values()}
    selection = policy.injected.selection

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved.append(tensor)
        return tensor

    with selection.use(TRAINER_SLOT):
        known |= {
            t.untyped_storage().data_ptr() for s in selection.live[TRAINER_SLOT].values() for t in s.tensors().values()
        }
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.logprobs(batch)
    heads = (t for t in saved if t.dtype is torch.float32 and t.ndim == 4 and t.shape[-1] > 1)
    return storage_bytes(saved) - storage_bytes(heads) // 2


@pytest.fixture(scope="module", params=sorted(DIVISIONS))
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(DIVISIONS[request.param]) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_holds_what_the_plan_says(ranks: World, case: Case) -> None:
    train = planned(case, ranks.sizes).phases["train"]
    start(ranks, case, torch.bfloat16)
    found = ranks.call(measure)
    rows = {part: (max(each[part] for each in found), train[part]) for part in found[0] if part != "base"}
    base = train["base (trainer)"] + train.get("base (trainer), replicated", 0)
    rows["base"] = (max(each["base"] for each in found), base)
    saved = ranks.call(measure_saved)
    if any(saved):
        names = ("activations", "activations gathered", "keys and values gathered")
        # The mean: a router that nobody trained sends one rank's experts more than another's.
        rows["activations"] = (sum(saved) // len(saved), sum(train.get(name, 0) for name in names))
    (division,) = [name for name, sizes in DIVISIONS.items() if sizes == ranks.sizes]
    FIGURES[f"{division}, {case}"] = rows
    wrong = {part: each for part, each in rows.items() if not 0.95 <= each[1] / each[0] <= 1.05}
    assert not wrong, "measured, planned"


@pytest.mark.parametrize("recompute", ["Selective", "PerLayer"])
def test_a_rank_keeps_what_the_plan_says_of_layers_that_are_computed_again(ranks: World, recompute: Recompute) -> None:
    if ranks.sizes.pipeline > 1:
        pytest.skip("several passes of a stage are under way at a time")
    case = CASES[0]
    start(ranks, case, torch.bfloat16)
    held = ranks.call(measure_held, recompute)
    train = planned(case, ranks.sizes, recompute).phases["train"]
    # Keys and values of other ranks are held within the layer that is computed again.
    assert train["activations"] == pytest.approx(sum(held) / len(held), rel=0.05)


def measure_held(groups: Groups, recompute: Recompute) -> int:
    """Bytes of what autograd saves outside of layers, and of what Python holds for their second pass."""
    policy, saved = rank_here().policy, []
    batch = policy.pack(branches(lengths_of(groups.sizes)))
    with torch.no_grad():
        # What is made at the first pass and stays is no activation.
        policy.logprobs(batch)
    before = {id(tensor) for tensor in living_tensors()}
    with policy.injected.selection.use(TRAINER_SLOT):
        before |= {id(tensor) for tensor in living_tensors()}
        policy.recompute(recompute)
        with (
            angles(policy) as known,
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ):
            logprobs, _ = policy.logprobs(batch)
    known |= {t.untyped_storage().data_ptr() for t in living_tensors() if id(t) in before}
    held = [t for t in (*saved, *living_tensors()) if t.untyped_storage().data_ptr() not in known]
    policy.recompute("None")
    # The result itself is no activation: two numbers for each target.
    return storage_bytes(held) - 2 * logprobs.nbytes


def start(ranks: World, case: Case, dtype: torch.dtype) -> None:
    folder, training = builtin_folder(case.model, case.precision), changed(SETTINGS, micro_batch_tokens=256)
    WorldRanks(ranks, RankSettings(folder, case.config, ranks.sizes, training, policy={"compute_dtype": dtype}))
