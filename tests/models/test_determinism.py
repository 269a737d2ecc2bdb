"""No pass of the product adds in an order that nobody fixed: docs/decisions/0005-same-bits.md.

Belongs here: the operations of single passes. Does not belong here: whole runs (`tests/integration/test_same_bits.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.lora import dropout
from orbit_runtime.algorithms.constants import Correction, PolicyLossSettings
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import gather_rows
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.training import TorchTrainer
from orbit_runtime.types import Request, Sampling
from tests.integration.test_torch_trainer import SETTINGS, changed, samples_of, with_reference
from tests.integration.tiny_families import make_family
from tests.models.determinism import RepeatedSums
from tests.models.family_matrix import Case, adapter_of, tokens_of

CASES = [
    Case("qwen3", "INT4", "LoRA", "None"),
    Case("qwen3", "NVFP4", "OFT", "None"),
    Case("llama", "FP8Block", "LoRA", "None"),
    Case("llama", "MXFP4", "OFT", "None"),
    Case("qwen3_moe", "INT4", "LoRA", "SharedOuter"),
    Case("qwen3_moe", "MXFP4", "OFT", "SharedOuter"),
    Case("glm4_moe", "FP8", "LoRA", "PerExpert"),
    Case("deepseek_v3", "NVFP4", "LoRA", "Shared"),
    Case("kimi_k2", "INT4", "OFT", "PerExpert"),
    Case("gpt_oss", "MXFP4GptOss", "OFT", "Shared"),
    Case("deepseek_v4", "MXFP4V4", "LoRA", "SharedOuter"),
]
# Everything that adds a pass of its own: reference and old log-probs, several updates, both epochs.
UPDATES = changed(
    SETTINGS, mini_batch_prompts=2, update_epochs=2, correction=Correction("TokenTruncated", 2.0),
    sampling=replace(SETTINGS.sampling, temperature=0.8, top_p=0.9),
    loss=PolicyLossSettings(kl_coefficient=0.1),
)  # fmt: skip


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """torch refuses by name whatever it lists as without a fixed order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def load(packed: Path, case: Case) -> Policy:
    config = adapter_of(case)
    return load_policy(packed, replace(config, dropout=0.2) if case.adapter == "LoRA" else config)


def updated(packed: Path, case: Case) -> str:
    trainer = TorchTrainer(load(packed, case), UPDATES)
    trainer.update(with_reference(samples_of(1, groups=3, size=4), trainer))
    return publishable(trainer, 1).digest


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_adds_nowhere_twice_and_torch_finds_nothing_to_refuse(case: Case, tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, case.family, case.layout)
    with RepeatedSums() as watch:
        plain = updated(packed, case)
    assert watch.found == []
    assert {"bmm" if case.adapter == "OFT" else "mm", "_fused_adamw_"} <= watch.operations, (
        "it saw forward pass and update"
    )
    with deterministic_algorithms():
        assert updated(packed, case) == plain


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampling_adds_nowhere_twice_and_torch_finds_nothing_to_refuse(case: Case, tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, case.family, case.layout)
    policy = load(packed, case)
    sampling = Sampling(max_new_tokens=5, temperature=0.8, top_p=0.9)
    prompts = [tuple(tokens_of(count, count)) for count in (3, 11, 5)]
    requests = [Request(at, at, prompts[at % 3], sampling, None) for at in range(7)]

    def answers() -> list[tuple[object, ...]]:
        made = sample(TorchEngine(policy, ChatTokenizer(packed), max_running_requests=4), requests)
        return sorted((each.request_id, each.token_ids_T, each.logprobs_T) for each in made)

    with RepeatedSums() as watch:
        plain = answers()
    assert watch.found == []
    with deterministic_algorithms():
        assert answers() == plain


def test_the_watch_names_what_adds_twice() -> None:
    source = torch.randn(6, 4, requires_grad=True)
    once, twice = torch.tensor([0, 2, 5]), torch.tensor([0, 2, 2])
    for index, found in ((once, 0), (twice, 1)):
        for gather in (
            lambda index: source[index],
            lambda index: source.index_select(0, index),
            lambda index: source.gather(0, index[:, None].expand(-1, 4)),
        ):
            with RepeatedSums() as watch:
                gather(index).sum().backward()
            assert len(watch.found) == found, (index, watch.found, sorted(watch.operations))


def test_the_gradient_of_gathered_rows_is_added_in_the_order_of_the_cells() -> None:
    """In fp32 another order gives other bits, as the reversed sum shows."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(700, 96, generator=generator, requires_grad=True)
    index = torch.randint(0, 40, (30, 50), generator=generator)
    slope = torch.randn(30, 50, 96, generator=generator)
    gathered = gather_rows(source, index)
    assert torch.equal(gathered, source[index])
    (found,) = torch.autograd.grad(gathered, source, slope)
    expected, reversed_ = torch.zeros(700, 96), torch.zeros(700, 96)
    cells = list(zip(index.flatten().tolist(), slope.flatten(0, 1), strict=True))
    for total, order in ((expected, cells), (reversed_, cells[::-1])):
        for row, part in order:
            total[row] += part
    assert torch.equal(found, expected)
    assert not torch.equal(expected, reversed_)
    assert torch.equal(F.embedding(index, source), gathered)


def test_dropout_does_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        kept = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kept.append(dropout(torch.ones(500, 1000), 0.3, 12345))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])
