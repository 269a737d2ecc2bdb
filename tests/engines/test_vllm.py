"""What holds for vLLM alone, which runs without our plug-in; what it shares with every engine is in `test_contract`."""

from __future__ import annotations

import httpx

from orbit_runtime.parity.liveness import Limits, prove
from orbit_runtime.rollout.served_engine import ServedEngine
from tests.engines.servers import Adder
from tests.engines.test_sglang_faults import canary, policy_scores
from tests.integration.engine_inputs import random_adapter


def test_a_publish_is_proven_by_log_probs_and_a_version_that_was_dropped_is_named(
    vllm: ServedEngine, vllm_url: str, lora_adder: Adder
) -> None:
    policy, tokenizer = lora_adder
    (copy,) = vllm.copies()
    previous, failures = None, []
    for version in (1, 2, 3):
        name, adapter = f"proven-v{version}", random_adapter(policy, version)
        vllm.load_adapter(name, adapter)
        if version == 3:
            httpx.post(
                f"{vllm_url}/v1/unload_lora_adapter", json={"lora_name": "proven-v2"}, timeout=60, trust_env=False
            )
        scores = policy_scores(policy, adapter, canary(tokenizer))
        proof, previous = prove(
            adapter, name, copy, scores, canary(tokenizer), limits=Limits(1e-3, 0.02), previous=previous
        )
        assert proof.slot_digest is None
        failures.append(proof.failures)
    assert failures[:2] == [(), ()]
    assert "proven-v2, which sampled until now, is no longer" in failures[2][0]
    for name in vllm.adapters():
        vllm.unload_adapter(name)
