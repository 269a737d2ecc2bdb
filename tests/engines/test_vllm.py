"""A real vLLM server, attached: its log-probs are the policy's, with two adapters and none in one batch.

vLLM is no dependency of Orbit. Name the interpreter of an environment that it is installed in (its CPU build will do).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.liveness import Limits, prove
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.wire import is_serving
from orbit_runtime.types import Sampling
from orbit_runtime.workers.server_process import ServerProcess, free_port
from tests.engines.servers import Adder, attach
from tests.engines.test_contract import policy_logprobs
from tests.engines.test_sglang_faults import canary, policy_scores
from tests.integration.engine_inputs import by_id, random_adapter, requests_for

PYTHON = "ORBIT_VLLM_PYTHON"
pytestmark = pytest.mark.skipif(not os.environ.get(PYTHON), reason=f"needs vLLM: {PYTHON} names no interpreter")
CLOSE = 5e-4
"""vLLM's attention on a CPU rounds differently from torch's."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    convert(builtin_folder("tiny-adder", "INT4"), folder / "base", Target("BF16"), show=lambda *_: None)
    command = [
        os.environ[PYTHON], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "base"),
        "--dtype", "float32", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-model-len", "256",
        "--max-num-seqs", "32", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORBIT", "PYTHONPATH"))}
    environment |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    server = ServerProcess("vLLM", command, environment=environment, log=folder / "log")
    address = f"http://127.0.0.1:{port}"

    try:
        server.wait_until(lambda: is_serving(address, seconds=30), seconds=800)
        yield address
    finally:
        server.stop()


@pytest.fixture
def engine(url: str, lora_adder: Adder, tmp_path: Path) -> Iterator[ServedEngine]:
    made = attach(lora_adder, url, tmp_path, "Folder")
    yield made
    for name in made.adapters():
        made.unload_adapter(name)
    made.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_the_policys(engine: ServedEngine, lora_adder: Adder, temperature: float) -> None:
    policy, tokenizer = lora_adder
    adapters = {f"sampled-{temperature}-{version}": random_adapter(policy, version) for version in (1, 2)}
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
    sampling = Sampling(temperature=temperature, max_new_tokens=5)
    for name in (None, *adapters):
        requests = requests_for(tokenizer, ["12+34=", "56+78="], 4, sampling=sampling, adapter=name)
        found = by_id(list(engine.generate(requests)))
        assert sorted(found) == [request.request_id for request in requests]
        for request in requests:
            answer = found[request.request_id]
            assert answer.token_ids_T[-1] in tokenizer.eos_ids or answer.finish_reason == "length"
            expected = policy_logprobs(
                policy, adapters.get(name or ""), request.prompt_ids_T, answer.token_ids_T, temperature
            )
            torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=CLOSE)


def test_a_publish_is_proven_by_log_probs_and_a_version_that_was_dropped_is_named(
    engine: ServedEngine, url: str, lora_adder: Adder
) -> None:
    policy, tokenizer = lora_adder
    (copy,) = engine.copies()
    previous, failures = None, []
    for version in (1, 2, 3):
        name, adapter = f"proven-v{version}", random_adapter(policy, version)
        engine.load_adapter(name, adapter)
        if version == 3:
            httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "proven-v2"}, timeout=60, trust_env=False)
        scores = policy_scores(policy, adapter, canary(tokenizer))
        proof, previous = prove(
            adapter, name, copy, scores, canary(tokenizer), limits=Limits(1e-3, 0.02), previous=previous
        )
        assert proof.slot_digest is None
        failures.append(proof.failures)
    assert failures[:2] == [(), ()]
    assert "proven-v2, which sampled until now, no longer stands" in failures[2][0]
