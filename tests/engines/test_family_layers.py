"""Looking into the layers of real SGLang servers of other families: routed experts, latent attention, cut weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from tests.engines.bisect_matrix import sample, start
from tests.engines.test_families import DEEPSEEK_LORA, LORA, LORA_EXPERTS, serve
from tests.engines.test_sglang_layers import compare
from tests.integration.engine_inputs import random_adapter
from tests.models.family_matrix import tokens_of

TOKENS = tokens_of(19, 5)


@pytest.mark.parametrize(
    ("family", "layout", "config"),
    [
        pytest.param("llama", "INT4", LORA, id="llama"),
        pytest.param("glm4_moe", "FP8", LORA_EXPERTS, id="glm4_moe"),
        pytest.param("kimi_k25", "INT4", DEEPSEEK_LORA, id="kimi_k25"),
    ],
)
def test_every_point_and_tensor_of_a_healthy_server_is_compared(
    family: str, layout: str, config: AdapterConfig, tmp_path: Path
) -> None:
    with serve(family, layout, config, tmp_path) as (policy, engine):
        adapter = random_adapter(policy, 1)
        engine.load_adapter("policy-v1", adapter)
        for asked in (None, "policy-v1"):
            found = compare(engine, policy, TOKENS, adapter, asked)
            assert found.is_clear, found.sentence()
            assert found.not_compared == ()


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_a_fault_of_each_kind_that_is_planted_in_a_running_server_is_named(model: str, tmp_path: Path) -> None:
    """A sample of `make test-bisect`, which plants all of them in every layer."""
    with start(model, tmp_path) as bench:
        for adapted in (False, True):
            healthy = bench.compare(adapted=adapted)
            assert healthy.is_clear, healthy.sentence()
            assert healthy.not_compared == ()
        problems = {f"{fault.kind} of {fault.name}": bench.try_fault(fault) for fault in sample(bench)}
        assert set(problems.values()) == {""}, problems
        assert len(problems) == 9
        assert bench.compare(adapted=False).is_clear
