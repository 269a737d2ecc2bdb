"""The trainer's packed pass and the torch engine's decode steps give the same bits, whatever stands beside."""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.model_info.builtin_models import any_builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.load import widen
from orbit_runtime.policy.logprobs import rows_are_equal, twice
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant.kernels import panels
from orbit_runtime.rollout.torch_engine import TorchEngine
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Completion, Request, Sampling

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SEQUENCES, PROMPTS, RUNNING = 72, 24, 12
REAL_MODEL = os.environ.get("ORBIT_REAL_MODEL", "")


@dataclass
class Endless:
    """A tokenizer with which answers end by length."""

    eos_ids: tuple[int, ...] = ()

    def decode(self, _tokens: object) -> str:
        return ""


def policy_of(folder: Path, adapter: AdapterConfig, dtype: torch.dtype) -> Policy:
    """With a random adapter as the trainer's and, as it is published, as the engine's `policy-v1`."""
    policy = widen(load_policy(folder, adapter, compute_dtype=dtype))
    generator, masters = torch.Generator().manual_seed(0), policy.injected.masters
    with torch.no_grad():
        for name, master in masters.parameters.items():
            size = master.shape[-1] ** -0.5 if name.endswith("lora_A") else 0.02
            master.copy_(torch.randn(master.shape, generator=generator) * size)
        published = copy.deepcopy(masters.applied(dtype))
    for name, layer in policy.injected.layers.items():
        layer.slots["policy-v1"] = published[name]  # type: ignore[assignment]
    return policy


def asked(policy: Policy) -> list[Request]:
    """Of mixed length, some of one prompt, one in seven without adapter."""
    generator = torch.Generator().manual_seed(1)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    prompts = [tuple(whole(5, policy.vocabulary) for _ in range(whole(3, 70))) for _ in range(PROMPTS)]
    return [
        Request(
            number,
            stream_key(0, "same-bits", number),
            prompts[number % PROMPTS],
            Sampling(max_new_tokens=whole(1, 41)),
            "policy-v1" if number % 7 else None,
        )
        for number in range(SEQUENCES)
    ]


def sampled(policy: Policy, requests: list[Request], running: int) -> dict[int, Completion]:
    engine, found = TorchEngine(policy, Endless(), max_running_requests=running), {}  # type: ignore[arg-type]
    engine.adopt("policy-v1", 1)
    engine.submit(requests)
    while engine.under_way:
        found |= {completion.request_id: completion for completion in engine.advance()}
    return found


FOLDERS = [
    *(("tiny-adder", each) for each in ("BF16", "INT4", "FP8", "NVFP4", "MXFP4")),
    ("tiny-qwen3", "FP8"),
    ("tiny-llama", "BF16"),
]
ADAPTERS = {
    "LoRA": AdapterConfig("LoRA", PROJECTIONS, rank=16, alpha=32.0),
    "OFT": AdapterConfig("OFT", PROJECTIONS, block_size=16),
    "OFT-of-some": AdapterConfig("OFT", ("q_proj", "v_proj", "down_proj"), block_size=16),
}


CASES = [
    pytest.param(
        *case,
        # Two threads beside other tests take minutes: in FP32 the real model's LoRA stands for them.
        marks=[pytest.mark.long]
        if torch.float32 in case
        and (case[1:] != ("LoRA", torch.float32, 2) if case[0] == Path(REAL_MODEL) else case[3] == 2)
        else [],
        id=f"{'-'.join(case[0].parts[-2:]) or 'real'}-{case[1]}-{case[2]}-{case[3]}".replace("torch.", ""),
    )
    for case in itertools.product(
        [*(any_builtin_folder(*each) for each in FOLDERS), Path(REAL_MODEL)],
        ADAPTERS,
        (torch.bfloat16, torch.float32),
        (1, 2),
    )
]


def test_a_product_that_sums_few_rows_in_another_order_is_found() -> None:
    w_NK = twice(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), 1, -1.0).bfloat16().float()

    def product(x_TK: torch.Tensor) -> torch.Tensor:
        total_TN = torch.zeros(len(x_TK), 64)
        for k in range(64) if len(x_TK) > 4 else reversed(range(64)):
            total_TN.addcmul_(x_TK[:, k : k + 1].float(), w_NK[:, k])
        return total_TN.bfloat16()

    assert rows_are_equal(product, 64, torch.bfloat16, (8, 1000))
    assert not rows_are_equal(product, 64, torch.bfloat16, (4, 1000))


@pytest.mark.parametrize(("model", "adapter", "dtype", "threads"), CASES)
def test_log_probs_of_engine_and_trainer_are_equal_to_the_bit(
    model: Path, adapter: str, dtype: torch.dtype, threads: int
) -> None:
    if model == Path():
        pytest.skip("no real model: ORBIT_REAL_MODEL names no folder (make real-model)")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        policy = policy_of(model, ADAPTERS[adapter], dtype)
        assert policy.direct is not None
        if not policy.direct.gives_same_bits:
            pytest.skip("the library's kernels differ by the number of rows here")
        requests = asked(policy)
        found = sampled(policy, requests, RUNNING)
        adapted = [each for each in requests if each.adapter]
        branches = [
            Branch(each.request_id % PROMPTS, each.prompt_ids_T, found[each.request_id].token_ids_T) for each in adapted
        ]
        for part in (slice(None), slice(9), slice(20, 21)):
            for records in (True, False):
                with torch.set_grad_enabled(records), policy.injected.selection.use(TRAINER_SLOT):
                    scored, _ = policy.logprobs(policy.pack(branches[part]))
                expected = [one for each in adapted[part] for one in found[each.request_id].logprobs_T]
                assert scored.tolist() == expected, (part, records)
        bare = [each for each in requests if not each.adapter]
        with torch.no_grad(), policy.injected.selection.use(None):
            branches_of_base = [
                Branch(each.request_id, each.prompt_ids_T, found[each.request_id].token_ids_T) for each in bare
            ]
            scored, _ = policy.logprobs(policy.pack(branches_of_base))
        assert scored.tolist() == [one for each in bare for one in found[each.request_id].logprobs_T]
        # Others beside them, and fewer at a time: the same tokens with the same log-probs.
        again = sampled(policy, adapted[::5], 3)
        assert all(again[number] == found[number] for number in again)
        # One bit of a weight that is used makes a difference.
        weight = policy.direct.shared()[0][1].views()[0]
        with torch.no_grad():
            weight.view(torch.int16)[0, weight.itemsize // 2 - 1] ^= 1 << 9
        if dtype is torch.bfloat16:
            policy.direct.shared()[0][1].order()
        with torch.no_grad(), policy.injected.selection.use(TRAINER_SLOT):
            changed, _ = policy.logprobs(policy.pack(branches))
        assert changed.tolist() != [one for each in adapted for one in found[each.request_id].logprobs_T]
    finally:
        torch.set_num_threads(before)


OTHER_FORMS = [
    ("tiny-moe-adder", "INT4"), ("tiny-qwen3-moe", "NVFP4"), ("tiny-kimi-k2", "INT4"), ("tiny-glm4-moe", "FP8"),
    ("tiny-gpt-oss", "MXFP4"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["BF16", "FP32"])
@pytest.mark.parametrize(
    "adapter", [AdapterConfig("LoRA", (), rank=8), AdapterConfig("OFT", (), block_size=8)], ids=str
)
@pytest.mark.parametrize(("model", "precision"), OTHER_FORMS)
def test_models_with_experts_have_equal_bits_where_products_are_orbits_own(
    model: str, precision: str, adapter: AdapterConfig, dtype: torch.dtype
) -> None:
    if panels.kernel(dtype) is None:
        pytest.skip("the library's kernels differ by the number of rows here")
    policy = policy_of(any_builtin_folder(model, precision), adapter, dtype)
    assert policy.direct is None
    requests = asked(policy)
    found = sampled(policy, requests, RUNNING)
    for slot in (TRAINER_SLOT, None):
        own = [each for each in requests if (each.adapter is None) == (slot is None)]
        branches = [
            Branch(each.request_id % PROMPTS, each.prompt_ids_T, found[each.request_id].token_ids_T) for each in own
        ]
        expected = [one for each in own for one in found[each.request_id].logprobs_T]
        with policy.injected.selection.use(slot):
            assert policy.logprobs(policy.pack(branches))[0].tolist() == expected
            first = policy.logprobs(policy.pack(branches[:1]))[0].tolist()
        assert first == expected[: len(first)]
    again = sampled(policy, requests[::5], 3)
    assert all(again[number] == found[number] for number in again)
