"""The torch engine on every family: its log-probs are those of transformers' own generation, adapters included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orbit_runtime.adapters.files import files_digest
from orbit_runtime.adapters.state import export_adapter
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.types import AdapterFiles, Request, Sampling
from tests.integration.tiny_families import make_family
from tests.integration.tiny_models import load_reference, reference_logprobs
from tests.models.family_matrix import Case, adapter_of, tokens_of

CASES = [
    Case("qwen3", "INT4", "LoRA", "None"),
    Case("qwen3_moe", "INT4", "LoRA", "SharedOuter"),
    Case("qwen3_moe", "FP8Block", "OFT", "Shared"),
    Case("glm4_moe", "FP8", "LoRA", "PerExpert"),
    Case("deepseek_v3", "NVFP4", "LoRA", "Shared"),
    Case("kimi_k2", "INT4", "OFT", "PerExpert"),
    Case("gpt_oss", "MXFP4GptOss", "LoRA", "SharedOuter"),
    Case("gpt_oss", "MXFP4GptOss", "OFT", "SharedOuter"),
    Case("deepseek_v4", "MXFP4V4", "LoRA", "SharedOuter"),
]
PROMPTS = [tokens_of(count, count) for count in (3, 11, 5)]
"""The second is longer than the sliding windows, the others become so while they are answered."""


def moved_adapter(policy: Policy) -> AdapterFiles:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.injected.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    files = export_adapter(policy.injected, policy.injected.config, "tiny")
    return AdapterFiles(1, files, files_digest(files))


@pytest.mark.parametrize("kernel", ["Eager", "SDPA"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_engine_samples_has_the_log_probs_of_transformers_and_of_the_trainer(
    case: Case, kernel: str, tmp_path: Path
) -> None:
    packed, plain = make_family(tmp_path, case.family, case.layout)
    policy = load_policy(packed, adapter_of(case), kernel=kernel)  # type: ignore[arg-type]
    engine = TorchEngine(policy, ChatTokenizer(packed), max_running_requests=4)
    engine._kernel = kernel  # type: ignore[assignment]
    engine.load_adapter("policy-v1", moved_adapter(policy))
    # Rows of both kinds side by side, more requests than rows, so that rows move and leave things behind.
    requests = [
        Request(index, index, tuple(PROMPTS[index % 3]), Sampling(max_new_tokens=4 + 3 * (index % 3)), adapter)
        for index, adapter in enumerate([None, "policy-v1", None, "policy-v1", None, None])
    ]
    model = load_reference(plain)
    for answer in sample(engine, requests):
        request = requests[answer.request_id]
        tokens = [*request.prompt_ids_T, *answer.token_ids_T]
        if request.adapter is None:
            expected = reference_logprobs(model, tokens)[len(request.prompt_ids_T) - 1 :]
        else:
            with torch.no_grad(), policy.injected.selection.use("trainer"):
                batch = policy.pack([Branch(0, request.prompt_ids_T, answer.token_ids_T)])
                expected = policy.logprobs(batch)[0]
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [each for each in CASES if each.adapter == "LoRA"], ids=str)
def test_greedy_answers_are_those_of_transformers_generate(case: Case, tmp_path: Path) -> None:
    packed, plain = make_family(tmp_path, case.family, case.layout)
    policy = load_policy(packed, adapter_of(case))
    engine = TorchEngine(policy, ChatTokenizer(packed), max_running_requests=4)
    greedy = Sampling(max_new_tokens=9, temperature=0.0)
    answers = {each.request_id: each for each in sample(engine,
        [Request(index, index, tuple(prompt), greedy, None) for index, prompt in enumerate(PROMPTS)]
    )}  # fmt: skip
    model = load_reference(plain)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    for index, prompt in enumerate(PROMPTS):
        ours = answers[index].token_ids_T
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=len(ours), do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        assert made.sequences[0, len(prompt) :].tolist() == ours.tolist()
        logits = torch.stack([each[0] for each in made.logits]).log_softmax(-1)
        theirs = logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
        (scored,) = engine.score([*prompt, *ours], [None])
        torch.testing.assert_close(torch.tensor(scored.logprobs_T)[len(prompt) :], theirs, rtol=0, atol=1e-5)
