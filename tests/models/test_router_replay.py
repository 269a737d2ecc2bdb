"""Router replay: tokens go to the experts that rollout chose, weighed by the trainer's own scores, with its gradients.

The expectation for choices that are not the trainer's own is transformers' model, whose routers are told the same
choice with weights from a dense mask over all experts: equation 5 of arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.routing import pack_experts, unpack_experts
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch, lay_out_experts
from orbit_runtime.policy.routing import OWN_CHOICE, Routing
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.training import TorchTrainer, TrainerSettings
from orbit_runtime.types import Request, Sample, Sampling
from tests.integration.engine_inputs import by_id, random_adapter
from tests.integration.test_torch_trainer import SETTINGS, changed
from tests.integration.tiny_families import make_family
from tests.integration.tiny_models import load_reference, reference_logprobs
from tests.models.family_matrix import tokens_of

FAMILIES = {"qwen3_moe": "INT4", "glm4_moe": "FP8", "deepseek_v3": "INT4", "gpt_oss": "MXFP4GptOss"}
LORA = AdapterConfig(type="LoRA", targets=("o_proj",), rank=4, alpha=8.0, experts="None")
EXPERTS, PER_TOKEN = 8, 2
PROMPTS = [tokens_of(6, 1), tokens_of(9, 2)]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path, Path]:
    packed, plain = make_family(tmp_path_factory.mktemp("model"), request.param, FAMILIES[request.param])
    return load_policy(packed, LORA), packed, plain


def routing_of(policy: Policy) -> Routing:
    assert policy.routing is not None
    return policy.routing


def branches() -> list[Branch]:
    """Three answers to each of two prompts, not in order."""
    lengths = [(0, 5), (1, 1), (0, 2), (1, 7), (0, 4), (1, 3)]
    return [
        Branch(prompt, PROMPTS[prompt], tokens_of(length, 10 + seed)) for seed, (prompt, length) in enumerate(lengths)
    ]


def random_choice(policy: Policy, sequences: Sequence[Branch], seed: int) -> list[np.ndarray]:
    """Of each branch's inputs; those with one prompt agree on it."""
    layers = len(routing_of(policy).layers)

    def draw(tokens: int, key: int) -> np.ndarray:
        scores = np.random.default_rng(key).random((tokens, layers, EXPERTS))
        return scores.argsort(-1)[..., :PER_TOKEN].astype(np.int16)

    prompts = {each.prefix_id: draw(len(each.prefix_T), seed + each.prefix_id) for each in sequences}
    return [
        np.concatenate((prompts[each.prefix_id], draw(len(each.continuation_T) - 1, seed + 100 + number)))
        for number, each in enumerate(sequences)
    ]


def own_choice(policy: Policy, sequence: Sequence[int]) -> np.ndarray:
    batch = policy.pack([Branch(0, sequence[:1], sequence[1:])])
    with torch.no_grad(), policy.injected.selection.use(None), routing_of(policy).noted() as noted:
        policy.logprobs(batch)
    return noted().numpy()


def passed(policy: Policy, routed: list[np.ndarray | None] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and gradients of their sum."""
    sequences = branches()
    batch = policy.pack(sequences)
    routed_TLC = lay_out_experts(sequences, routed, batch) if routed else None
    masters = policy.injected.masters.parameters
    with policy.injected.selection.use(TRAINER_SLOT):
        logprobs, _ = policy.logprobs(batch, routed_TLC=routed_TLC)
    gradients = torch.autograd.grad(logprobs.sum(), list(masters.values()))
    return logprobs.detach(), dict(zip(masters, gradients, strict=True))


def test_the_trainers_own_choice_replayed_is_bit_for_bit_no_replay(made: tuple[Policy, Path, Path]) -> None:
    policy, *_ = made
    randomise(policy)
    sequences = branches()
    batch = policy.pack(sequences)
    with torch.no_grad(), policy.injected.selection.use(TRAINER_SLOT), routing_of(policy).noted() as noted:
        policy.logprobs(batch)
    logprobs, gradients = passed(policy, None)
    with policy.injected.selection.use(TRAINER_SLOT):
        again, _ = policy.logprobs(batch, routed_TLC=noted())
    replayed = torch.autograd.grad(again.sum(), list(policy.injected.masters.parameters.values()))
    assert torch.equal(again, logprobs)
    assert all(torch.equal(a, b) for a, b in zip(replayed, gradients.values(), strict=True))
    assert max(float(each.abs().max()) for each in gradients.values()) > 1e-3


def randomise(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.injected.masters.parameters.values():
            master.copy_(torch.randn(master.shape, generator=generator) * 0.05)


def test_choices_of_others_equal_a_dense_computation_token_by_token_behind_shared_prompts(
    made: tuple[Policy, Path, Path],
) -> None:
    policy, _, plain = made
    sequences, model = branches(), load_reference(plain)
    routed = random_choice(policy, sequences, 3)
    batch = policy.pack(sequences)
    with torch.no_grad(), policy.injected.selection.use(None):
        found, _ = policy.logprobs(batch, routed_TLC=lay_out_experts(sequences, routed, batch))
        free, _ = policy.logprobs(batch)
    expected = []
    for each, chosen in zip(sequences, routed, strict=True):
        tokens = [*each.prefix_T, *each.continuation_T]
        # The last token is nobody's input, and transformers computes it as well.
        with told(model, np.concatenate((chosen, chosen[-1:]))):
            expected.append(reference_logprobs(model, tokens)[len(each.prefix_T) - 1 :])
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2e-5)
    assert float((found - free).abs().max()) > 0.05


@contextmanager
def told(model: Any, chosen_TLC: np.ndarray) -> Iterator[None]:
    """transformers' routers choose as they are told."""
    handles, layer = [], 0
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router")) and hasattr(module, "top_k"):
            handles.append(module.register_forward_hook(dense_choice(torch.from_numpy(chosen_TLC[:, layer]).long())))
            layer += 1
    assert layer == chosen_TLC.shape[1]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def dense_choice(chosen_TC: Tensor) -> Callable[..., Any]:
    def choose(router: Any, _: Any, result: Any) -> Any:
        logits_TE = result[0].double()
        mask_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TC, 1.0)
        if hasattr(router, "routed_scaling_factor"):
            score_TE = mask_TE / (1 + (-logits_TE).exp())
            weight_TE = score_TE / score_TE.sum(1, keepdim=True) * router.routed_scaling_factor
        else:
            score_TE = mask_TE * logits_TE.exp()
            weight_TE = score_TE / score_TE.sum(1, keepdim=True)
        return result[0], weight_TE.gather(1, chosen_TC).to(result[1].dtype), chosen_TC

    return choose


def test_where_nobody_said_where_a_token_went_the_routers_choose(made: tuple[Policy, Path, Path]) -> None:
    policy, *_ = made
    sequences = branches()
    routed: list[np.ndarray | None] = list(random_choice(policy, sequences, 5))
    known = [None if number % 2 else each for number, each in enumerate(routed)]
    laid_out = lay_out_experts(sequences, known, policy.pack(sequences))
    assert laid_out is not None
    # Both prompts' first branches: one knows, of the other only later ones could, and none does.
    assert int((laid_out[:6] == OWN_CHOICE).sum()) == 0
    unknown = sum(len(each.continuation_T) - 1 for number, each in enumerate(sequences) if number % 2) + len(PROMPTS[1])
    assert int((laid_out[:, 0, 0] == OWN_CHOICE).sum()) == unknown
    with torch.no_grad(), policy.injected.selection.use(None):
        batch = policy.pack(sequences)
        found, _ = policy.logprobs(batch, routed_TLC=laid_out)
        free, _ = policy.logprobs(batch)
    counts = [len(each.continuation_T) for each in sequences]
    for number, (mine, own) in enumerate(zip(found.split(counts), free.split(counts), strict=True)):
        # Experts multiply other groups of tokens in the two passes, which rounds otherwise; another choice of experts
        # is seen at 0.3 and more.
        close = torch.allclose(mine, own, rtol=0, atol=5e-6)
        assert close == bool(number % 2)


def test_a_shared_prompt_goes_where_the_first_branch_that_knows_it_says(made: tuple[Policy, Path, Path]) -> None:
    policy, *_ = made
    sequences = branches()
    routed: list[np.ndarray | None] = list(random_choice(policy, sequences, 6))
    routed[0] = None
    laid_out = lay_out_experts(sequences, routed, policy.pack(sequences))
    assert laid_out is not None
    np.testing.assert_array_equal(laid_out[: len(PROMPTS[0])], routed[2][: len(PROMPTS[0])])  # type: ignore[index]


def test_the_torch_engine_tells_the_experts_of_prompts_and_answers(made: tuple[Policy, Path, Path]) -> None:
    """Rows join and leave while others run; both sides compute the same in fp32, so their choices agree."""
    policy, packed, _ = made
    engine = TorchEngine(policy, ChatTokenizer(packed), max_running_requests=3, notes_experts=True)
    engine.load_adapter("policy-v1", random_adapter(policy, 1))
    requests = [
        Request(number, number, tuple(PROMPTS[number % 2]), Sampling(max_new_tokens=2 + number), None)
        for number in range(6)
    ]
    for answer in sample(engine, requests):
        request = requests[answer.request_id]
        assert answer.routed_experts is not None
        told_TLC = unpack_experts(answer.routed_experts)
        sequence = [*request.prompt_ids_T, *answer.token_ids_T]
        assert len(told_TLC) == len(sequence) - 1
        np.testing.assert_array_equal(np.sort(told_TLC), np.sort(own_choice(policy, sequence)))
    engine.close()


def test_an_engine_that_is_not_asked_tells_none(made: tuple[Policy, Path, Path]) -> None:
    policy, packed, _ = made
    engine = TorchEngine(policy, ChatTokenizer(packed), max_running_requests=3)
    answers = by_id(list(sample(engine, [Request(0, 0, tuple(PROMPTS[0]), Sampling(max_new_tokens=4), None)])))
    assert answers[0].routed_experts is None


# --- the trainer ---


def settings(replay: str) -> TrainerSettings:
    return changed(SETTINGS, router_replay=replay, micro_batch_tokens=25)  # type: ignore[arg-type]


def samples(policy: Policy, choose: Callable[[list[int]], np.ndarray] | None) -> list[Sample]:
    made = []
    for number, each in enumerate(branches()):
        tokens, blank = [*each.prefix_T, *each.continuation_T], len(each.prefix_T)
        count = len(each.continuation_T)
        made.append(
            Sample(
                tokens, [0] * blank + [1] * count,
                {
                    "sampled": [0.0] * blank + [-4.0] * count,
                    "advantage": [0.0] * blank + [(-1.0) ** number] * count,
                },
                each.prefix_id, blank, pack_experts(choose(tokens)) if choose else None,
            )
        )  # fmt: skip
    return made


def published(folder: Path, replay: str, made: list[Sample]) -> tuple[str, dict[str, float]]:
    trainer = TorchTrainer(load_policy(folder, LORA), settings(replay))
    metrics = dict(trainer.update(made).metrics)
    return publishable(trainer, 1).digest, metrics


def test_a_step_replays_what_it_is_told_to_and_measures_parity_with_and_without(
    made: tuple[Policy, Path, Path],
) -> None:
    _, folder, _ = made
    policy = load_policy(folder, LORA)
    sequences = [[*each.prefix_T, *each.continuation_T] for each in branches()]
    own = samples(policy, lambda tokens: own_choice(policy, tokens))
    others = [
        replace(sample, routed_experts=pack_experts(routed))
        for sample, routed in zip(own, random_choice(policy, branches(), 8), strict=True)
    ]
    assert [list(sample.token_ids_T) for sample in own] == sequences
    plain, without = published(folder, "None", others)
    assert "router_agreement" not in without

    recorded, metrics = published(folder, "Record", others)
    assert recorded == plain
    assert metrics["parity_mean_unreplayed"] != metrics["parity_mean_replayed"]
    assert 0.1 < metrics["router_agreement"] < 0.5
    assert {name: metrics[name] for name in without} == without

    replayed, metrics = published(folder, "Replay", own)
    assert replayed == plain
    assert metrics["router_agreement"] == 1.0
    assert metrics["parity_mean_replayed"] == metrics["parity_mean_unreplayed"]

    other, metrics = published(folder, "Replay", others)
    assert other != plain
    assert metrics["parity_mean"] != without["parity_mean"]
    assert published(folder, "Replay", samples(policy, None))[0] == plain
