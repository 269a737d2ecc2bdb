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
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from orbit_runtime.adapters.config import AdapterConfig, InjectReport
from orbit_runtime.model_info import checkpoint
from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.model_info.quantization import quantisation_method
from orbit_runtime.model_info.weights import ModelFacts, StoredWeight
from orbit_runtime.planner.parts import server_prefill_tokens
from orbit_runtime.policy.facts import PolicyFacts, RoutedFacts
from orbit_runtime.rollout.sglang_server import server_arguments, server_variables
from orbit_runtime.sides.engines import engine_settings, plan_servers
from orbit_runtime.spec import MachineFacts, load_manifest, resolve
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE
from tests.engines.published_configs import published_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAM = Path(__file__).parent / "pretended_gpus.py"
GPUS: dict[str, dict[str, Any]] = {
    "B200": {"name": "NVIDIA B200", "capability": (10, 0), "processors": 148},
    "H100": {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "processors": 132},
}
FIELDS = {"--fp4-gemm-backend": "fp4_gemm_runner_backend"}
"""Flags whose field has another name."""
LAYOUTS = {
    "deepseek_v4": "MXFP4V4", "gpt_oss": "MXFP4GptOss", "INT4": "INT4", "FP8 in blocks": "FP8Block",
    "FP8": "FP8", "NVFP4": "NVFP4ModelOpt", "BF16": "BF16",
}  # fmt: skip


OFT = "adapter={type: OFT, targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj]}"
CASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "kimi-k2-6", "kimi-k2-6-oft", "deepseek-v4-flash", "deepseek-v4-pro", "glm-4-5", "gpt-oss-120b", "llama-3-1-8b",
        "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-30b-a3b-nvfp4", "qwen3-4b", "qwen3-4b-bf16",
    ), ()),
    "qwen3-30b-a3b OFT": (OFT,),
    "kimi-k2-6 deterministic": ("rollout.deterministic=true",),
    "kimi-k2-6-oft deterministic": ("rollout.deterministic=true",),
    "gpt-oss-120b deterministic": ("rollout.deterministic=true",),
    "qwen3-30b-a3b deterministic": ("rollout.deterministic=true",),
    "kimi-k2-6 replay": ("rollout.routerReplay=Replay",),
    "kimi-k2-6-oft replay": ("rollout.routerReplay=Replay",),
    "glm-4-5 replay": ("rollout.routerReplay=Replay",),
    "gpt-oss-120b replay": ("rollout.routerReplay=Replay",),
    "qwen3-30b-a3b OFT replay": (OFT, "rollout.routerReplay=Record"),
    "qwen3-30b-a3b-nvfp4 replay": ("rollout.routerReplay=Replay",),
    "qwen3-4b cache asleep": ("rollout.sleep=Cache",),
    "qwen3-4b asleep": ("rollout.sleep=All",),
    "qwen3-30b-a3b split": ("placement.layout=Split", "placement.trainerGpus=4"),
}  # fmt: skip
"""Name, which begins with the example's, → what is changed of its `spec`."""


def module_name(stored: StoredWeight) -> str:
    """The module's name in the trainer's model."""
    return f"{stored.weight.module.rpartition('.')[0]}.{stored.weight.target}"


def layout_of(stored: StoredWeight, family: str) -> str:
    if stored.format == "MXFP4":
        return LAYOUTS[family]
    return LAYOUTS["FP8 in blocks" if stored.format == "FP8" and stored.block else stored.format]


def facts_of(resolved: Any, model: ModelFacts) -> PolicyFacts:
    """The facts that a loaded policy would give."""
    from orbit_runtime.sides.trainers import adapter_config

    adapter: AdapterConfig = adapter_config(resolved.run.spec)
    if not adapter.targets:
        adapter = replace(adapter, targets=model.architecture.default_targets)
    linear = [each for each in model.weights if each.weight.is_linear and each.weight.role not in ("mtp", "vision")]
    adapted = [each for each in linear if each.weight.target in adapter.targets]
    if adapter.expert_layout == "None":
        adapted = [each for each in adapted if each.weight.role != "routed_expert"]
    experts = [each for each in adapted if each.weight.role == "routed_expert"]
    routed = [each.weight.layer for each in linear if each.weight.role == "routed_expert"]
    forms = {layout_of(each, model.architecture.family) for each in experts}
    return PolicyFacts(
        vocabulary=model.architecture.vocab_size, precision=model.precision, compute_dtype="bfloat16", adapter=adapter,
        layers=tuple(map(module_name, adapted)), modules=frozenset(map(module_name, linear)),
        report=InjectReport((), 0), expert_formats=tuple(sorted(forms)), group_size=None,
        routed=RoutedFacts(model.architecture.num_layers, tuple(sorted({int(each or 0) for each in routed})),
                           model.architecture.experts_per_token) if routed else None,
    )  # fmt: skip


def command_line(example: str, overrides: tuple[str, ...], gpu: str, folder: Path) -> dict[str, Any]:
    """`arguments` and `variables` of the run's last server. Raises as a run would."""
    settings = [f"placement.gpuProduct={gpu}", "placement.gpus=8", "rollout.engine=SGLang", *overrides]
    run = load_manifest(EXAMPLES / f"{example}.yaml", [f"spec.{each}" for each in settings])
    repository = run.spec.model.uri.removeprefix("hf://").partition("@")[0]
    config = published_config(repository)
    model = folder / repository.replace("/", "--")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    save_file({}, model / "model.safetensors")
    resolved = resolve(run, MachineFacts(has_cuda=True, num_gpus=8))
    facts = replace(card_facts(repository), quantised_by=quantisation_method(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "folder_facts", lambda _: facts)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: GPUS[gpu]["name"])
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: GPUS[gpu]["capability"])
        server = plan_servers(engine_settings(resolved), facts_of(resolved, facts), model, folder)[-1]
    found = server._settings
    return {"arguments": server_arguments(found, 30000), "variables": server_variables(found, folder / "taps")}


@pytest.fixture(scope="module", params=GPUS)
def gpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def told(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Case → its `arguments`, and SGLang's `resolved` ones or its `error`."""
    folder = tmp_path_factory.mktemp(gpu)
    cases = {name: command_line(name.split()[0], changed, gpu, folder) for name, changed in CASES.items()}
    card = find_gpu(gpu)
    assert card is not None
    asked = {"gpu": {**GPUS[gpu], "bytes": card.usable_bytes}, "cases": cases, "told": str(folder / "told.json")}
    (folder / "asked.json").write_text(json.dumps(asked))
    python = os.environ.get(PYTHON_VARIABLE)
    assert python, f"{PYTHON_VARIABLE} is not set: run `make test-engines`"
    done = subprocess.run(
        [python, str(PROGRAM), str(folder / "asked.json")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((folder / "told.json").read_text())
    return {name: {**case, **answers[name]} for name, case in cases.items()}


def test_sglang_accepts_every_example(told: dict[str, dict[str, Any]]) -> None:
    refused = {name: (case["error"], case["at"]) for name, case in told.items() if "error" in case}
    assert refused == {}


def test_nothing_that_orbit_asked_for_is_changed(told: dict[str, dict[str, Any]]) -> None:
    changed = {}
    for name, case in told.items():
        found = case["resolved"]
        for flag, values in flags(case["arguments"]):
            field = FIELDS.get(flag, flag.removeprefix("--").replace("-", "_"))
            have = found[field]
            want = sorted(values) if field == "lora_target_modules" else values[0] if values else "True"
            if (have if isinstance(have, list) else str(have)) != want:
                changed[name, flag] = (want, have)
    assert changed == {}


def flags(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    starts = [*(index for index, each in enumerate(arguments) if each.startswith("--")), len(arguments)]
    for start, end in pairwise(starts):
        flag = arguments[start]
        yield (flag.replace("--no-", "--"), ["False"]) if flag.startswith("--no-") else (
            flag, arguments[start + 1 : end]
        )  # fmt: skip


def test_what_sglang_decides_itself_is_what_orbit_counts_on(gpu: str, told: dict[str, dict[str, Any]]) -> None:
    for name, case in told.items():
        found, is_v4, deterministic = case["resolved"], name.startswith("deepseek"), name.endswith("deterministic")
        # "auto" is BF16 with the plug-in (decision 15); DeepSeek-V4's attention prescribes its own.
        assert found["kv_cache_dtype"] == ("fp8_e4m3" if is_v4 else "auto"), name
        assert not found["disable_overlap_schedule"], name
        assert found["cuda_graph_config"]["decode"]["backend"] == "full", name
        assert found["chunked_prefill_size"] == server_prefill_tokens(find_gpu(gpu)), name
        assert found["chunked_prefill_size"] % found["page_size"] == 0, name
        assert found["sampling_backend"] == ("pytorch" if deterministic else "flashinfer"), name
        # Prefixes are lost only with FlashInfer's deterministic attention.
        assert found["disable_radix_cache"] == (found["attention_backend"] == "flashinfer"), name


def test_the_attention_that_it_ends_up_with(gpu: str, told: dict[str, dict[str, Any]]) -> None:
    for name, case in told.items():
        found = case["resolved"]["attention_backend"], case["resolved"]["page_size"]
        if name.startswith("deepseek"):
            assert found == ("dsv4", 256), name
        elif gpu == "H100":
            assert found == ("fa3", 1), name
        elif name.endswith("deterministic"):
            assert found == ("flashinfer" if name.startswith("qwen3") else "triton", 1), name
        else:
            assert found == ("trtllm_mla" if name.startswith("kimi") else "trtllm_mha", 64), name


def test_experts_are_reported_by_runners_that_are_told_them(told: dict[str, dict[str, Any]]) -> None:
    runners = {name: case["resolved"]["moe_runner_backend"] for name, case in told.items() if name.endswith("replay")}
    assert runners == {
        "kimi-k2-6 replay": "marlin", "kimi-k2-6-oft replay": "marlin", "glm-4-5 replay": "triton",
        "gpt-oss-120b replay": "marlin", "qwen3-30b-a3b OFT replay": "triton", "qwen3-30b-a3b-nvfp4 replay": "marlin",
    }  # fmt: skip


def test_without_a_report_sglang_keeps_its_own_runner(gpu: str, told: dict[str, dict[str, Any]]) -> None:
    """On Blackwell these choose experts inside the kernel, so a report of experts would be zeros."""
    own = {name: told[name]["resolved"]["moe_runner_backend"] for name in ("kimi-k2-6-oft", "qwen3-30b-a3b OFT")}
    assert set(own.values()) == {"flashinfer_trtllm" if gpu == "B200" else "auto"}
    gpt_oss = told["gpt-oss-120b"]["resolved"]["moe_runner_backend"]
    assert gpt_oss == ("flashinfer_mxfp4" if gpu == "B200" else "triton_kernel")
