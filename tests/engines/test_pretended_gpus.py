"""What SGLang 0.5.23 makes of the command lines that Orbit writes for its examples on eight B200 and eight H100.

A fake: there is no GPU. The planner and `plan_servers` are told of one by a patched torch, and SGLang, in its own
interpreter, likewise (`pretended_gpus`); from there on both are the real ones. Configurations are the shipped cards',
completed from memory (`published_configs`); weights and kernels are not there.

So this shows which arguments SGLang refuses or changes before it opens a model. It cannot show that kernels exist for
what it chose, that weights load, that memory suffices or that numbers are right.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.report import InjectReport
from orbit_runtime.errors import OrbitError
from orbit_runtime.loop.engines import plan_servers
from orbit_runtime.model_info import checkpoint
from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.model_info.quantization import quantisation_method
from orbit_runtime.model_info.weights import ModelFacts, StoredWeight
from orbit_runtime.policy.facts import PolicyFacts, RoutedFacts
from orbit_runtime.rollout.sglang_server import server_arguments, server_variables
from orbit_runtime.spec import MachineFacts, load_manifest, resolve
from orbit_runtime.workers.sglang_launch import PYTHON_VARIABLE
from tests.engines.published_configs import published_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAM = Path(__file__).parent / "pretended_gpus.py"
GPUS = {
    "B200": {"name": "NVIDIA B200", "capability": (10, 0), "processors": 148},
    "H100": {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "processors": 132},
}
LAYOUTS = {
    "deepseek_v4": "MXFP4V4", "gpt_oss": "MXFP4GptOss", "INT4/128": "INT4", "FP8/128": "FP8Block", "FP8": "FP8",
    "NVFP4/128": "NVFP4ModelOpt", "BF16": "BF16",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    example: str
    overrides: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.example}{' ' if self.label else ''}{self.label}"


EXAMPLE_NAMES = (
    "kimi-k2-6", "kimi-k2-6-oft", "deepseek-v4-flash", "deepseek-v4-pro", "glm-4-5", "gpt-oss-120b", "llama-3-1-8b",
    "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-30b-a3b-nvfp4", "qwen3-4b", "qwen3-4b-bf16",
)  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "": (),
    "deterministic": ("rollout.deterministic=true",),
    "replay": ("rollout.routerReplay=Replay",),
    "asleep": ("rollout.sleep=All",),
    "split": ("placement.layout=Split", "placement.trainerGpus=4"),
}


def module_name(stored: StoredWeight) -> str:
    """As the trainer's model has it."""
    return f"{stored.weight.module.rpartition('.')[0]}.{stored.weight.target}"


def facts_of(resolved: Any, model: ModelFacts) -> PolicyFacts:
    """As a loaded policy would give them."""
    from orbit_runtime.loop.trainers import adapter_config

    adapter: AdapterConfig = adapter_config(resolved.run.spec)
    if not adapter.targets:
        adapter = replace(adapter, targets=model.architecture.default_targets)
    linear = [each for each in model.weights if each.weight.is_linear and each.weight.role not in ("mtp", "vision")]
    adapted = [each for each in linear if each.weight.target in adapter.targets]
    if adapter.expert_layout == "None":
        adapted = [each for each in adapted if each.weight.role != "routed_expert"]
    experts = [each for each in adapted if each.weight.role == "routed_expert"]
    routed = [each.weight.layer for each in linear if each.weight.role == "routed_expert"]
    family = model.architecture.family
    forms = {LAYOUTS[family if each.format == "MXFP4" else f"{each.format}{'/128' if each.block else ''}"] for each in experts}
    return PolicyFacts(
        vocabulary=model.architecture.vocab_size, precision=model.precision, compute_dtype="bfloat16", adapter=adapter,
        layers=tuple(map(module_name, adapted)), modules=frozenset(map(module_name, linear)),
        report=InjectReport((), 0), expert_formats=tuple(sorted(forms)), group_size=None,
        routed=RoutedFacts(model.architecture.num_layers, tuple(sorted({int(each or 0) for each in routed})),
                           model.architecture.experts_per_token) if routed else None,
    )  # fmt: skip


def command_line(example: str, overrides: tuple[str, ...], gpu: str, folder: Path) -> dict[str, Any]:
    """`arguments` and `variables` of the run's last server, or the `refusal` of Orbit."""
    gpus = [f"spec.placement.gpuProduct={gpu}", "spec.placement.gpus=8", "spec.rollout.engine=SGLang"]
    run = load_manifest(EXAMPLES / f"{example}.yaml", [*gpus, *(f"spec.{each}" for each in overrides)])
    repository = run.spec.model.uri.removeprefix("hf://").partition("@")[0]
    config = published_config(repository)
    model = folder / repository.replace("/", "--")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    header = b"{}"
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    resolved = resolve(run, MachineFacts(has_cuda=True, num_gpus=8))
    facts = replace(card_facts(repository), quantised_by=quantisation_method(config))
    card = find_gpu(gpu)
    assert card is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "folder_facts", lambda _: facts)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: GPUS[gpu]["name"])
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: GPUS[gpu]["capability"])
        try:
            server = plan_servers(resolved, facts_of(resolved, facts), model, folder)[-1]
        except OrbitError as error:
            return {"refusal": f"{error.exit_code} {error.where}: {error.message}"}
    settings = server._settings
    return {
        "arguments": server_arguments(settings, 30000),
        "variables": server_variables(settings, folder / "taps"),
    }


@cache
def resolved_by(gpu: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Example and variant → SGLang's `resolved` arguments or its `error`, or Orbit's `refusal`."""
    cases = {
        f"{example} {variant}".strip(): command_line(example, overrides, gpu, folder)
        for example in EXAMPLE_NAMES
        for variant, overrides in VARIANTS.items()
    }
    asked = {
        "gpu": {**GPUS[gpu], "bytes": find_gpu(gpu).usable_bytes},
        "cases": {name: case for name, case in cases.items() if "arguments" in case},
        "told": str(folder / "told.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    python = os.environ.get(PYTHON_VARIABLE)
    assert python, f"{PYTHON_VARIABLE} is not set: run `make test-engines`"
    done = subprocess.run(
        [python, str(PROGRAM), str(folder / "asked.json")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told: Mapping[str, dict[str, Any]] = json.loads((folder / "told.json").read_text())
    return {name: {**case, **told.get(name, {})} for name, case in cases.items()}
