"""A server that computes in BF16, as on a GPU: its logits are fp32 like the trainer's, and log-probs agree better."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
import torch

from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout.sglang_server import ServerSettings, SGLangServer, lora_targets
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE
from tests.engines.servers import LORA
from tests.models.family_matrix import tokens_of

SEQUENCES = [[2 + token % 100 for token in tokens_of(24, seed)] for seed in range(100)]


def server_logprobs(policy: Policy, model: Path, folder: Path) -> torch.Tensor:
    settings = ServerSettings(
        model=model, device="cpu", dtype="bfloat16", targets=lora_targets(tuple(policy.injected.layers)),
        max_running_requests=16, max_sequence_length=128, seed=0, lora_rank=LORA.rank,
    )  # fmt: skip
    server = SGLangServer(settings, log=folder / "sglang.log")
    found: list[float] = []
    try:
        server.start()
        with httpx.Client(base_url=server.url, headers=dict(server.headers), timeout=120, trust_env=False) as http:
            for tokens in SEQUENCES:
                asked = {"input_ids": tokens, "return_logprob": True, "logprob_start_len": 0}
                answer = http.post("/generate", json={**asked, "sampling_params": {"max_new_tokens": 1}})
                told = answer.raise_for_status().json()["meta_info"]["input_token_logprobs"]
                found += [value for value, *_ in told[1:]]
    finally:
        server.stop()
    return torch.tensor(found)


def own_logprobs(policy: Policy) -> torch.Tensor:
    with torch.no_grad(), policy.injected.selection.use(None):
        parts = [policy.logprobs(policy.pack([Branch(0, each[:1], each[1:])]))[0] for each in SEQUENCES]
    return torch.cat(parts)


def test_a_bf16_servers_log_probs_are_nearer_to_those_of_fp32_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert os.environ.get(PYTHON_VARIABLE), f"{PYTHON_VARIABLE} is not set: run `make test-engines`"
    model = builtin_folder("tiny-adder", "BF16")
    policy = load_policy(model, LORA, compute_dtype=torch.bfloat16)
    served, ours = server_logprobs(policy, model, tmp_path), own_logprobs(policy)
    monkeypatch.setattr("orbit_runtime.policy.model.logits_of", lambda head, hidden: head(hidden))
    rounded = own_logprobs(policy)
    near, far = (float((served - each).abs().mean()) for each in (ours, rounded))
    assert near < 0.9 * far, f"{near:.4f} with fp32 logits, {far:.4f} with BF16 ones"
