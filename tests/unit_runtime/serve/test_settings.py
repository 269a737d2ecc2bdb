"""What servers of a model without a run are planned with."""

from __future__ import annotations

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.planner import Machine
from orbit_runtime.planner.verdict import plan_as_run
from orbit_runtime.serve.open import _without_run
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.spec import OrbitRun

REPOSITORY = "Qwen/Qwen3-4B"


def test_servers_without_a_run_leave_the_memory_of_a_default_trainer() -> None:
    config = AdapterConfig(type="LoRA", targets=("q_proj", "o_proj"), rank=64, alpha=7.0)
    settings = _without_run(f"hf://{REPOSITORY}", config, "SGLang", ServeLimits(sequence=4096, running=64))
    run = OrbitRun.model_validate(
        {
            "apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "a"},
            "spec": {
                "model": {"uri": f"hf://{REPOSITORY}", "maxSequenceLength": 4096},
                "adapter": {"type": "LoRA", "lora": {"rank": 64, "alpha": 7.0}, "targets": ["q_proj", "o_proj"]},
                "data": {"prompts": [{"uri": "builtin://addition"}]},
                "environment": {"rewards": [{"name": "a", "type": "ExactMatch", "arguments": {"field": "answer"}}]},
                "rollout": {"engine": "SGLang", "maxRunningRequests": 64},
                "training": {"trainer": "Torch", "steps": 1},
            },
        }
    )  # fmt: skip
    model, machine = card_facts(REPOSITORY), Machine(find_gpu("H100"), 8)
    made = settings.plan(model, machine)
    assert made.server_memory == plan_as_run(run, model, machine).server_memory
    assert made.server_memory is not None
    assert made.server_memory.fraction < 0.2
