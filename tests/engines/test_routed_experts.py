"""A real SGLang server tells the experts that its tokens went to: in fp32 those that the trainer's routers choose."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.state import load_slot, remove_slot
from orbit_runtime.data.routing import unpack_experts
from orbit_runtime.parity.locate import Location, locate
from orbit_runtime.policy import Policy
from orbit_runtime.policy.packed import Branch, lay_out_experts
from orbit_runtime.policy.snapshot import take_snapshot
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles, Completion, Request, Sampling
from tests.engines.test_families import DEEPSEEK_LORA, LORA_EXPERTS, PROMPTS, serve
from tests.integration.engine_inputs import random_adapter


@pytest.fixture(
    scope="module",
    params=[("qwen3_moe", "INT4", LORA_EXPERTS), ("deepseek_v3", "INT4", DEEPSEEK_LORA)],
    ids=["qwen3_moe", "deepseek_v3, whose first layer has none"],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Policy, ServedEngine, AdapterFiles]]:
    family, layout, config = request.param
    config: AdapterConfig
    with serve(family, layout, config, tmp_path_factory.mktemp("served"), tells_experts=True) as (policy, engine):
        adapter = random_adapter(policy, 1)
        engine.load_adapter("policy-v1", adapter)
        yield policy, engine, adapter


def check(policy: Policy, adapter: AdapterFiles, request: Request, answer: Completion) -> None:
    """The trainer's own choice under the same adapter, and log-probs through the engine's."""
    assert answer.routed_experts is not None
    told = unpack_experts(answer.routed_experts)
    branch = Branch(0, request.prompt_ids_T, answer.token_ids_T)
    batch, routing = policy.pack([branch]), policy.routing
    assert routing is not None
    slot = "checked" if request.adapter else None
    if slot:
        load_slot(policy.injected.layers, slot, adapter.files)
    with torch.no_grad(), policy.injected.selection.use(slot):
        with routing.noted() as noted:
            policy.logprobs(batch)
        logprobs, _ = policy.logprobs(batch, routed_TLC=lay_out_experts([branch], [told], batch))
    if slot:
        remove_slot(policy.injected.layers, slot)
    np.testing.assert_array_equal(np.sort(told), np.sort(noted().numpy()))
    torch.testing.assert_close(torch.tensor(answer.logprobs_T), logprobs, rtol=0, atol=1e-4)


def test_samples_of_one_prompt_bring_their_experts(served: tuple[Policy, ServedEngine, AdapterFiles]) -> None:
    policy, engine, adapter = served
    requests = [
        Request(number, number, PROMPTS[2], Sampling(max_new_tokens=7), "policy-v1" if number < 4 else None)
        for number in range(8)
    ]
    for answer in sample(engine, requests):
        check(policy, adapter, requests[answer.request_id], answer)


def test_layers_are_compared_through_the_experts_that_the_engine_chose(
    served: tuple[Policy, ServedEngine, AdapterFiles],
) -> None:
    """A router that chooses otherwise in one layer is told as that, and no layer is accused for it."""
    policy, engine, adapter = served
    assert policy.routing is not None
    theirs = engine.copies()[0].snapshot(PROMPTS[2], None)
    assert theirs.routed_TLC is not None

    def found(routed_TLC: np.ndarray | None) -> Location:
        ours, again = (
            take_snapshot(policy, PROMPTS[2], None, adapter.files, copies=copies, routed_TLC=routed_TLC)
            for copies in (1, 2)
        )
        return locate(ours, again, theirs, dtype="float32", group=None)

    healthy = found(theirs.routed_TLC)
    assert healthy.is_clear, healthy.sentence()
    assert healthy.rerouted == 0.0
    # The trainer's router of the first such layer turns away from the expert that its first token went to.
    router = next(module for name, module in policy.model.named_modules() if name.endswith(".mlp.gate"))
    expert = int(theirs.routed_TLC[0, 0, 0])

    def turn_away(_: torch.nn.Module, __: object, result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = result
        other = torch.tensor([each for each in range(logits.shape[-1]) if each not in chosen[0]][:1])
        return logits, weights, torch.where(chosen == expert, other.to(chosen.dtype), chosen)

    turned = router.register_forward_hook(turn_away, prepend=True)
    try:
        replayed, own = found(theirs.routed_TLC), found(None)
    finally:
        turned.remove()
    assert own.point is not None, "without replay the layer that was sent elsewhere is named"
    assert replayed.point is None, replayed.sentence()
    assert replayed.rerouted


def test_prompts_that_are_asked_together_bring_theirs(served: tuple[Policy, ServedEngine, AdapterFiles]) -> None:
    policy, engine, adapter = served
    requests = [
        Request(number, number, prompt, Sampling(max_new_tokens=5), None) for number, prompt in enumerate(PROMPTS)
    ]
    # A second time out of the server's cache.
    for _ in range(2):
        for answer in sample(engine, requests):
            check(policy, adapter, requests[answer.request_id], answer)
