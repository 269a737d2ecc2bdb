"""Families other than the shipped model's on a real SGLang: what its CPU back end runs, with LoRA and with OFT."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.tiktoken_model import is_tiktoken, save_converted
from orbit_runtime.parity.liveness import Limits, Proof, prove
from orbit_runtime.planner.support.served import check_served, served_experts
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.facts import describe
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine, start_engine
from orbit_runtime.rollout.sglang_server import (
    ServerSettings,
    SGLangServer,
    lora_targets,
)
from orbit_runtime.rollout.transport import FolderMailbox, shared_memory
from orbit_runtime.sides.engines import routed_layers
from orbit_runtime.types import AdapterFiles, Request, Sampling
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE
from tests.engines.test_contract import policy_logprobs
from tests.engines.test_sglang_faults import policy_scores
from tests.integration.engine_inputs import random_adapter
from tests.integration.tiny_families import make_family
from tests.integration.tiny_kimi import make_kimi
from tests.models.family_matrix import tokens_of

MLA = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LORA = AdapterConfig(type="LoRA", targets=ATTENTION, rank=4, alpha=8.0)
OFT = AdapterConfig(type="OFT", targets=ATTENTION, block_size=16)
LORA_EXPERTS = AdapterConfig(type="LoRA", targets=(*ATTENTION, *MLP), rank=4, alpha=8.0, experts="SharedOuter")
OFT_EXPERTS = AdapterConfig(type="OFT", targets=(*ATTENTION, *MLP), block_size=16, experts="Shared")
DEEPSEEK_LORA = replace(LORA_EXPERTS, targets=(*MLA, *MLP))
DEEPSEEK_OFT = replace(OFT_EXPERTS, targets=(*MLA, *MLP), block_size=8)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
AS_PUBLISHED = {
    "rope_parameters": YARN, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
"""What DeepSeek-V3's config.json says and transformers leaves out; on a CPU SGLang knows no rotary angles but these."""
PROMPTS = [tuple(tokens_of(count, count)) for count in (3, 11, 29)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "layout", "config"),
    [
        pytest.param("llama", "INT4", LORA, id="llama-LoRA"),
        pytest.param("llama", "INT4", OFT, id="llama-OFT"),
        pytest.param("qwen3_moe", "INT4", LORA_EXPERTS, id="qwen3_moe-LoRA-SharedOuter"),
        pytest.param("qwen3_moe", "INT4", replace(LORA_EXPERTS, experts="PerExpert"), id="qwen3_moe-LoRA-PerExpert"),
        pytest.param("qwen3_moe", "INT4", replace(LORA_EXPERTS, experts="None"), id="qwen3_moe-LoRA-None"),
        pytest.param("qwen3_moe", "INT4", OFT_EXPERTS, id="qwen3_moe-OFT-Shared"),
        pytest.param("glm4_moe", "FP8", LORA_EXPERTS, id="glm4_moe-LoRA-SharedOuter"),
        pytest.param("glm4_moe", "FP8", replace(LORA_EXPERTS, experts="None"), id="glm4_moe-LoRA-None"),
        pytest.param("glm4_moe", "FP8", OFT_EXPERTS, id="glm4_moe-OFT-Shared"),
        pytest.param("deepseek_v3", "FP8Block", DEEPSEEK_LORA, id="deepseek_v3-LoRA-SharedOuter"),
        pytest.param("deepseek_v3", "FP8Block", DEEPSEEK_OFT, id="deepseek_v3-OFT-Shared"),
        pytest.param("kimi_k25", "INT4", DEEPSEEK_LORA, id="kimi_k25-LoRA-SharedOuter"),
        pytest.param("kimi_k25", "INT4", DEEPSEEK_OFT, id="kimi_k25-OFT-Shared"),
    ],
)
def test_a_publish_is_proven_and_samples_have_the_policys_log_probs(
    family: str, layout: str, config: AdapterConfig, tmp_path: Path
) -> None:
    with serve(family, layout, config, tmp_path) as (policy, engine):
        adapters = {f"policy-v{seed}": replace(random_adapter(policy, seed), version=seed) for seed in (1, 2)}
        for name, adapter in adapters.items():
            engine.load_adapter(name, adapter)
            proof = proven(policy, engine, name, adapter)
            assert proof.failures == ()
            assert proof.slot_digest == adapter.digest
        check_samples(policy, engine, adapters)


@pytest.mark.timeout(600)
def test_a_batch_of_more_tokens_than_a_kernels_tile(tmp_path: Path) -> None:
    with serve("qwen3_moe", "INT4", LORA_EXPERTS, tmp_path) as (policy, engine):
        adapter = replace(random_adapter(policy, 1), version=1)
        engine.load_adapter("policy-v1", adapter)
        prompts = [tuple(tokens_of(40, seed)) for seed in range(16)]
        sampling = Sampling(max_new_tokens=3)
        requests = [Request(index, index, prompt, sampling, "policy-v1") for index, prompt in enumerate(prompts)]
        for answer in sample(engine, requests):
            expected = policy_logprobs(policy, adapter, prompts[answer.request_id], answer.token_ids_T)
            torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=1e-4)


@pytest.mark.timeout(600)
def test_one_experts_factor_that_changed_in_its_slot_is_named(
    inside: Path, run_inside: Callable[..., None], tmp_path: Path
) -> None:
    with serve("qwen3_moe", "INT4", LORA_EXPERTS, tmp_path) as (policy, engine):
        adapter = replace(random_adapter(policy, 1), version=1)
        engine.load_adapter("policy-v1", adapter)
        assert proven(policy, engine, "policy-v1", adapter).failures == ()
        run_inside(
            engine,
            "(slot,) = [manager.memory_pool.uid_to_buffer_id[key] for key in manager.lora_refs]\n"
            "manager.lora_modules[1]['model.layers.1.mlp.experts'].down_lora_a_weights[slot, 3, 0] *= 2\n",
        )
        proof = proven(policy, engine, "policy-v1", adapter)
        assert proof.slot_digest != adapter.digest
        assert "model.layers.1.mlp.experts.w2.lora_A" in " ".join(proof.failures)


@contextmanager
def serve(
    family: str,
    layout: str,
    config: AdapterConfig,
    folder: Path,
    *,
    tensor_parallel: int = 1,
    tells_experts: bool = False,
    **sizes: int,
) -> Iterator[tuple[Policy, ServedEngine]]:
    """The policy on the packed checkpoint, and a server with the same values in BF16."""
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    packed, plain = checkpoint(folder, family, layout, sizes)
    policy, tokenizer = load_policy(packed, config), ChatTokenizer(packed)
    layers = tuple(policy.injected.layers)
    facts = describe(policy)
    check_served(facts.served("CPU"))
    settings = ServerSettings(
        model=plain, device="cpu", dtype="float32", max_running_requests=16,
        targets=lora_targets((*layers, *config.targets)), max_sequence_length=256, seed=0,
        lora_rank=config.rank if config.type == "LoRA" else 1,
        oft_block_size=config.block_size if config.type == "OFT" else 0,
        experts=served_experts(config.expert_layout, layers),
        tensor_parallel=tensor_parallel, reports_experts=tells_experts,
        tokenizer=save_converted(packed, folder / "tokenizer") if is_tiktoken(packed) else None,
    )  # fmt: skip
    routed = routed_layers(facts) if tells_experts else None
    server = SGLangServer(settings, log=folder / "server" / "sglang.log", routed=routed)
    desk = FolderMailbox(folder / "adapters", shared_memory)
    engine = start_engine([server], tokenizer, desk=desk, max_running_requests=16)
    try:
        yield policy, engine
    finally:
        engine.close()


def checkpoint(folder: Path, family: str, layout: str, sizes: Mapping[str, int]) -> tuple[Path, Path]:
    """The packed checkpoint, and what a server on a CPU gets of it."""
    if family == "kimi_k25":
        published, _ = make_kimi(folder)
        served = folder / "served"
        convert(published, served, Target("BF16"), show=lambda *_: None)
        return published, served
    packed, plain = make_family(folder, family, layout, sizes=sizes)
    if family == "deepseek_v3":
        describe_as_published(packed, plain)
    for file in packed.glob("tokenizer*"):
        shutil.copy(file, plain)
    return packed, plain


def check_samples(policy: Policy, engine: ServedEngine, adapters: Mapping[str, AdapterFiles]) -> None:
    """Two adapters and none in one batch: log-probs are the policy's."""
    names = [None, *adapters]
    requests = [
        Request(index, index, prompt, Sampling(max_new_tokens=6), names[index % 3])
        for index, prompt in enumerate([*PROMPTS, *reversed(PROMPTS), *PROMPTS])
    ]
    for answer in sample(engine, requests):
        request = requests[answer.request_id]
        with_adapter = adapters[request.adapter] if request.adapter else None
        expected = policy_logprobs(policy, with_adapter, request.prompt_ids_T, answer.token_ids_T)
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=1e-4)


def proven(policy: Policy, engine: ServedEngine, name: str, adapter: AdapterFiles) -> Proof:
    (copy,) = engine.copies()
    scores = policy_scores(policy, adapter, PROMPTS[2])
    proof, _ = prove(adapter, name, copy, scores, PROMPTS[2], limits=Limits(1e-3, 0.02), previous=None)
    return proof


def describe_as_published(*folders: Path) -> None:
    for folder in folders:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | AS_PUBLISHED))
