"""How much of an adapter exists a second time while a divided trainer proves what it applies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from orbit_runtime.adapters import expert_layer, rotations
from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.adapters.inject import AdaptedLayer
from orbit_runtime.adapters.layer import TRAINER_SLOT, Slot
from orbit_runtime.adapters.masters import Masters
from orbit_runtime.policy import load_policy
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.megatron.groups import Groups, GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from tests.megatron.cases import folder_of
from tests.megatron.ranks import World, world
from tests.megatron.test_trainer import TRAINING
from tests.megatron.trainers import WorldRanks, rank_here
from tests.models.family_matrix import Case, adapter_of

TOKENS = (5, 9, 3, 77, 20, 31)
CASES = (
    Case("qwen3_moe", "INT4", "LoRA", "PerExpert"),
    Case("qwen3_moe", "INT4", "OFT", "PerExpert"),
    Case("qwen3_moe", "BF16", "LoRA", "SharedOuter"),
    Case("qwen3_moe", "BF16", "OFT", "SharedOuter"),
)
FEW = 1 << 12
"""Bytes, or values of rotations, that are built together: here nearly every layer is more than that."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(GroupSizes(2, tensor=2, expert=2, sequence_parallel=True)) as made:
        yield made


class Alive:
    """Bytes of the storages of slots that were built from masters and are still there."""

    def __init__(self) -> None:
        self.most = self.built = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._known:
            self._known[reference.cdata] = (reference, storage.nbytes())
            self.built += storage.nbytes()
            self.most = max(self.most, self.count())

    def count(self) -> int:
        # A view of a storage keeps it, whoever has the view.
        self._known = {key: each for key, each in self._known.items() if not each[0].expired()}
        return sum(size for _, size in self._known.values())


def watch(groups: Groups, few: int | None) -> None:
    """Counts from now on. Args: few: what is built together."""
    expert_layer.RUN_BYTES = few or 1 << 22
    rotations.BATCH_VALUES = few or 1 << 20
    made = rank_here()
    vars(made._masters).pop("rotations", None)
    alive, built = Alive(), made.policy.injected.selection.applied_masters
    honest = built[TRAINER_SLOT]

    def build(*which: Any) -> dict[str, Slot]:
        slots = honest(*which)
        for slot in slots.values():
            for tensor in slot.tensors().values():
                alive.add(tensor)
        return slots

    built[TRAINER_SLOT] = build
    globals()["ALIVE"] = alive


def told(groups: Groups) -> tuple[int, int, int, int]:
    """Most bytes at a time, bytes now, bytes of all that was built, and of all that layers apply, in fp32."""
    alive: Alive = globals()["ALIVE"]
    made = rank_here()
    with torch.no_grad():
        every = made._masters.applied(torch.float32).values()
    storages = {tensor.untyped_storage().data_ptr(): tensor for slot in every for tensor in slot.tensors().values()}
    return alive.most, alive.count(), alive.built, sum(t.untyped_storage().nbytes() for t in storages.values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_proof_has_few_of_the_applied_values_at_a_time(ranks: World, root: Path, case: Case) -> None:
    settings = RankSettings(folder_of(root, case), adapter_of(case), ranks.sizes, TRAINING)
    many = MegatronTrainer(WorldRanks(ranks, settings), TRAINING.base_model)
    one = TorchTrainer(load_policy(folder_of(root, case), adapter_of(case)), TRAINING)
    with many.probing("random", 5), one._policy.injected.masters.probing("random", 5):
        (wanted, _), files = one.score(TOKENS), publishable(one, 1)
        ranks.call(watch, FEW)
        published, (adapted, _) = publishable(many, 1), many.score(TOKENS)
        found = ranks.call(told)
        ranks.call(watch, None)
    assert published.digest == files.digest
    assert adapted.applied_digest == wanted.applied_digest == expected_applied_digest(published.files)
    assert adapted.logprobs_T == pytest.approx(wanted.logprobs_T, abs=5e-6)
    for most, left, built, adapter in found:
        assert built >= adapter, "every layer's values were built for the pass"
        # Experts that share a file's tensor are built together, which here is a third of all.
        share = 4 if case.experts == "PerExpert" else 2
        assert most <= adapter / share, "and released before the next ones were"
        assert left <= adapter / share


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
@pytest.mark.parametrize("layout", ["PerExpert", "SharedOuter", "Shared"])
def test_a_layer_that_is_built_alone_has_the_bits_of_all_built_together(
    kind: str, layout: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof builds one layer after the other, or few of its experts; training builds all."""
    case = Case("qwen3_moe", "BF16", kind, layout)  # type: ignore[arg-type]
    injected = load_policy(folder_of(root, case), adapter_of(case)).injected
    with torch.no_grad():
        for number, parameter in enumerate(injected.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(number)).mul_(0.1)
    for few in (1, 3000, 1 << 20):
        monkeypatch.setattr(rotations, "BATCH_VALUES", few)
        monkeypatch.setattr(expert_layer, "RUN_BYTES", few)
        masters = replace(injected.masters)
        every = masters.applied(torch.float32)
        for name, layer in injected.layers.items():
            for experts in runs_of(layer):
                check(masters, name, experts, every[name])


def runs_of(layer: AdaptedLayer) -> Sequence[slice]:
    return [slice(None), *(layer.runs() if isinstance(layer, expert_layer.AdaptedExpertLinear) else [])]


def check(masters: Masters, name: str, experts: slice, whole: Slot) -> None:
    alone = masters.applied(torch.float32, name, experts)[name].tensors()
    for kind, tensor in whole.tensors().items():
        expected = tensor if tensor.shape == alone[kind].shape else tensor[experts]
        assert torch.equal(alone[kind], expected), (name, kind, experts)
