"""Every causal type that transformers builds small: what Orbit computes is what transformers computes, in training and
while it samples, or the type is refused before anything trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.cli.main import run_command
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.families import FAMILIES
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.types import Request, Sampling
from tests.integration.engine_inputs import random_adapter
from tests.integration.killing import small_manifest
from tests.integration.tiny_models import load_reference, reference_logprobs
from tests.models.causal_types import LEFT_OUT, TYPES, make_type
from tests.models.family_matrix import tokens_of

SHORT = (
    "qwen2", "gpt2", "gemma2", "mixtral", "granite", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h",
    "qwen3_next", "glm_moe_dsa", "diffllama",
)  # fmt: skip
"""One type of each kind; the others are long."""
EACH = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in TYPES]
PROMPTS = [tokens_of(count, count) for count in (3, 11, 5)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", EACH)
def test_log_probs_are_those_of_each_sequence_alone_and_those_that_were_sampled(name: str, tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", name)
    reference = load_reference(folder)
    policy = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=64)
    print(f"\n{name:<20} {policy.mode.rows:<8} {policy.mode.decode:<8} {len(policy.injected.layers)} linears")
    short, long = tokens_of(10, 1), tokens_of(40, 2)
    with torch.no_grad():
        branches = [Branch(0, long[:3], long[3:]), Branch(0, long[:3], short), Branch(1, short[:1], short[1:])]
        found, _ = policy.logprobs(policy.pack(branches))
    expected = [
        reference_logprobs(reference, long)[2:],
        reference_logprobs(reference, [*long[:3], *short])[2:],
        reference_logprobs(reference, short),
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)
    engine = TorchEngine(policy, ChatTokenizer(folder), max_running_requests=4)
    engine.load_adapter("policy-v1", adapter := random_adapter(policy, 1))
    # Rows of both kinds side by side, more requests than rows, so that rows move and leave things behind.
    requests = [
        Request(index, index, tuple(PROMPTS[index % 3]), Sampling(max_new_tokens=4 + 3 * (index % 3)), each)
        for index, each in enumerate([None, "policy-v1", None, "policy-v1", None, None])
    ]
    answers = list(sample(engine, requests))
    assert len(answers) == len(requests)
    for answer in answers:
        request = requests[answer.request_id]
        prompt = len(request.prompt_ids_T)
        if request.adapter is None:
            expected_T = reference_logprobs(reference, [*request.prompt_ids_T, *answer.token_ids_T])[prompt - 1 :]
        else:
            with torch.no_grad(), policy.injected.selection.use("policy-v1"):
                packed = policy.pack([Branch(0, request.prompt_ids_T, answer.token_ids_T)])
                expected_T = policy.logprobs(packed)[0]
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected_T, rtol=0, atol=1e-5)
    assert adapter.files


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["GRPO", "SFT"])
@pytest.mark.parametrize("name", TYPES)
def test_two_steps_train(name: str, algorithm: str, tmp_path: Path) -> None:
    manifest = small_manifest(steps=2)
    spec = manifest["spec"]
    spec["model"] = {"uri": str(make_type(tmp_path / "model", name)), "maxSequenceLength": 64}
    spec["adapter"]["lora"] = {"rank": 2}
    if algorithm == "SFT":
        spec["algorithm"] = {"type": "SFT"}
        spec["data"]["prompts"][0] |= {"completionField": "answer"}
        del spec["environment"], spec["training"]["miniBatchPrompts"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(manifest))
    command = "sft" if algorithm == "SFT" else "run"
    assert run_command([command, str(file), "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] >= 0.0 for row in rows)
    if algorithm == "GRPO":
        assert all(row["parity_max"] < 1e-4 for row in rows)


def test_every_causal_type_of_transformers_is_made_or_left_out_with_a_reason() -> None:
    left_out = [name for names in LEFT_OUT.values() for name in names.split()]
    assert len(left_out) == len(set(left_out))
    assert not set(left_out) & (TYPES.keys() | FAMILIES.keys())
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= {*left_out, *TYPES, *FAMILIES}
