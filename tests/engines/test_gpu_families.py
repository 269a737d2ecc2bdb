"""Families whose attention SGLang computes on GPUs only: its real modules and LoRA manager, loaded without a server.

The expectation is transformers' model over the same values, with PEFT's adapters from the same folders. What a whole
pass on a GPU makes of it is not seen here: no server of these families has run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.ports import free_port
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import ROTATIONS_FILE, expected_applied_digest
from orbit_runtime.adapters.state import parse_tensors
from orbit_runtime.planner.support.served import check_served, served_experts
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.facts import describe
from orbit_runtime.rollout.sglang_server import (
    ServerSettings,
    lora_targets,
    server_arguments,
)
from orbit_runtime.sglang_plugin.rotation import parts
from orbit_runtime.types import AdapterFiles
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE
from tests.integration.engine_inputs import random_adapter
from tests.integration.tiny_families import make_family
from tests.models.family_matrix import tokens_of

ROOT = Path(__file__).resolve().parents[2]
V4 = ("q_a_proj", "kv_proj", "q_b_proj", "o_b_proj")
GQA = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LORA = AdapterConfig(type="LoRA", targets=(*V4, *MLP), rank=4, alpha=8.0, experts="None")
OFT = AdapterConfig(type="OFT", targets=(*V4, *MLP), block_size=16, experts="None")
PUBLISHED_AS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v4": {
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "moe_layer_freq": 1,
        "first_k_dense_replace": 0, "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "swiglu_limit": 10.0,
        # The tiny model compresses by 8 where SGLang knows 128 only; what its layers compress is not computed here.
        "compress_ratios": [0, 4, 0],
        "rope_scaling": {
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
        },
    },
}  # fmt: skip
"""What config.json says where a model is published, and transformers leaves out or says otherwise."""
NAMED: Mapping[str, tuple[str, ...]] = {
    "gpt_oss": ("--attention-backend", "triton", "--moe-runner-backend", "triton"),
}
"""Back ends without which SGLang takes no arguments of a family's; neither is started here."""
LENGTHS = (5, 3, 7, 4, 2)
ORDER = ("policy-v1", None, "policy-v2", "policy-v1", None)
"""Adapters of the batch's prompts."""
LAYER = "model.layers.{}"


@dataclass(frozen=True)
class Answered:
    """What SGLang's modules said in one batch."""

    outputs: dict[str, Tensor]
    facts: dict[str, Any]
    wrapped: dict[str, str]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", [LORA, OFT], ids=["LoRA", "OFT"])
def test_deepseek_v4s_attention_and_shared_experts_are_adapted_as_by_peft(
    config: AdapterConfig, tmp_path: Path
) -> None:
    packed, plain = make_family(tmp_path, "deepseek_v4", "MXFP4V4")
    policy = load_policy(packed, config)
    adapters = publish(policy, tmp_path)
    reference = Reference(plain, tmp_path, adapters)
    sizes = v4_modules(reference.config)
    whole = f"{LAYER.format(0)}.self_attn"
    entered, expected = reference.inside(whole)
    inputs = {name: torch.randn(sum(LENGTHS), size) for name, size in sizes.items()}
    answered = ask(policy, served(plain, packed, "deepseek_v4"), adapters, {**inputs, f"attention:{whole}": entered})

    assert set(answered.wrapped) == set(sizes)
    check_read_back(answered, adapters)
    for name, x in inputs.items():
        check_close(config, name, answered.outputs[name], reference.layers(parts(name), x))
    check_close(config, whole, answered.outputs[f"attention:{whole}"], expected)
    without = reference.inside(whole, adapted=False)[1]
    assert float((without - expected).abs().max()) > 0.2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("experts", ["SharedOuter", "PerExpert"])
def test_a_lora_of_deepseek_v4s_experts_is_read_back_and_their_products_are_cut(experts: Any, tmp_path: Path) -> None:
    packed, plain = make_family(tmp_path, "deepseek_v4", "MXFP4V4")
    policy = load_policy(packed, replace(LORA, experts=experts))
    adapters = publish(policy, tmp_path)
    experts_of_a_layer = f"{LAYER.format(2)}.mlp.experts"
    beyond = 40 * torch.randn(sum(LENGTHS), policy.model.config.hidden_size)
    answered = ask(policy, served(plain, packed, "deepseek_v4"), adapters, {f"packed:{experts_of_a_layer}": beyond})
    assert answered.wrapped[experts_of_a_layer] == "FusedMoEWithLoRA"
    check_read_back(answered, adapters)
    gate, up = beyond.chunk(2, -1)
    cut = torch.cat([gate.clamp(max=10.0), up.clamp(-10.0, 10.0)], -1)
    assert torch.equal(answered.outputs[f"packed:{experts_of_a_layer}"], cut.repeat(1, 2))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "layout", "targets"),
    [
        pytest.param("deepseek_v4", "MXFP4V4", (*V4, "gate_proj", "up_proj"), id="deepseek_v4"),
        pytest.param("gpt_oss", "MXFP4GptOss", (*GQA, "gate_up_proj"), id="gpt_oss"),
    ],
)
def test_tokens_are_turned_on_their_way_to_the_experts(
    family: str, layout: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """As on a GPU, where `down_proj` is left out; gpt-oss pads tokens, and DeepSeek-V4 hands quantised ones along."""
    packed, plain = make_family(tmp_path, family, layout)
    policy = load_policy(packed, replace(OFT, targets=targets, experts="Shared"))
    adapters = publish(policy, tmp_path)
    width = policy.model.config.hidden_size
    layers = [f"{LAYER.format(index)}.mlp.experts" for index in range(2)]
    inputs = {f"sent:{name}": torch.randn(sum(LENGTHS), width) for name in layers}
    answered = ask(policy, served(plain, packed, family), adapters, inputs)
    check_read_back(answered, adapters)
    leaf = "gate_up_proj" if family == "gpt_oss" else "w3"
    for name, x in inputs.items():
        rows = []
        for adapter, each in zip(ORDER, x.split(LENGTHS), strict=True):
            if adapter is None:
                rows.append(each)
                continue
            R = parse_tensors(adapters[adapter].files, ROTATIONS_FILE)[f"{name.removeprefix('sent:')}.{leaf}.oft_R"][0]
            rows.append(each @ torch.block_diag(*R.float()))
        torch.testing.assert_close(answered.outputs[name], torch.cat(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "config",
    [replace(LORA, targets=(*GQA, "gate_up_proj")), replace(OFT, targets=(*GQA, "gate_up_proj"))],
    ids=["LoRA", "OFT"],
)
def test_gpt_oss_attention_with_its_biases_is_adapted_as_by_peft(config: AdapterConfig, tmp_path: Path) -> None:
    packed, plain = make_family(tmp_path, "gpt_oss", "MXFP4GptOss")
    policy = load_policy(packed, config)
    adapters = publish(policy, tmp_path)
    reference = Reference(plain, tmp_path, adapters)
    sizes = {"qkv_proj": 64, "o_proj": 64}
    names = {f"{LAYER.format(index)}.self_attn.{leaf}": size for index in range(2) for leaf, size in sizes.items()}
    inputs = {name: torch.randn(sum(LENGTHS), size) for name, size in names.items()}
    answered = ask(policy, served(plain, packed, "gpt_oss"), adapters, inputs)
    assert set(answered.wrapped) == set(names)
    check_read_back(answered, adapters)
    for name, x in inputs.items():
        check_close(config, name, answered.outputs[name], reference.layers(parts(name), x))


def v4_modules(config: Any) -> dict[str, int]:
    """SGLang's modules that an adapter reaches, and their input features."""
    sizes = {
        "self_attn.wqkv_a": config.hidden_size,
        "self_attn.wq_b": config.q_lora_rank,
        "self_attn.wo_b": config.o_groups * config.o_lora_rank,
        "mlp.shared_experts.gate_up_proj": config.hidden_size,
        "mlp.shared_experts.down_proj": config.moe_intermediate_size,
    }
    layers = range(config.num_hidden_layers)
    return {f"{LAYER.format(index)}.{name}": size for index in layers for name, size in sizes.items()}


def check_read_back(answered: Answered, adapters: Mapping[str, AdapterFiles]) -> None:
    assert answered.facts["unhooked"] == []
    assert "error" not in answered.facts, answered.facts
    for name, adapter in adapters.items():
        told = answered.facts["adapters"][name]
        assert told["slot_digest"] == adapter.digest
        assert told["applied_digest"] == expected_applied_digest(adapter.files)


def check_close(config: AdapterConfig, name: str, found: Tensor, expected: Tensor) -> None:
    # PEFT multiplies by R as it is; the engine, as the trainer, by R rounded to BF16.
    close = 2e-5 if config.type == "LoRA" else 2e-2
    torch.testing.assert_close(found, expected, rtol=close, atol=close, msg=lambda said: f"{name}: {said}")


def publish(policy: Policy, folder: Path) -> dict[str, AdapterFiles]:
    """Two adapters that nobody trained, each in a folder of its name."""
    check_served(describe(policy).served("CPU"))
    made = {f"policy-v{seed}": random_adapter(policy, seed, scale=0.1) for seed in (1, 2)}
    for name, adapter in made.items():
        (folder / name).mkdir()
        for file, content in adapter.files.items():
            (folder / name / file).write_bytes(content)
    return made


def served(plain: Path, packed: Path, family: str) -> Path:
    """The model's values in BF16 under the configuration with which it is published."""
    folder = plain.with_name("served")
    shutil.copytree(plain, folder)
    left_out = ("quantization_config", "expert_dtype", *(("rope_parameters",) if family in PUBLISHED_AS else ()))
    config = {
        name: each for name, each in json.loads((packed / "config.json").read_text()).items() if name not in left_out
    }
    (folder / "config.json").write_text(json.dumps(config | PUBLISHED_AS.get(family, {})))
    return folder


def ask(policy: Policy, base: Path, adapters: Iterable[str], inputs: Mapping[str, Tensor]) -> Answered:
    """Runs `loaded` in SGLang's environment, beside the folders of the adapters."""
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    config, layers, folder = policy.injected.config, tuple(policy.injected.layers), base.parent
    is_lora, experts = config.type == "LoRA", served_experts(config.expert_layout, layers)
    settings = ServerSettings(
        model=base, device="cpu", dtype="float32", targets=lora_targets((*layers, *config.targets)),
        max_running_requests=16, max_sequence_length=256, seed=0, lora_rank=config.rank if is_lora else 1,
        oft_block_size=0 if is_lora else config.block_size, experts=experts,
    )  # fmt: skip
    paths = {name: str(folder / f"{name}.safetensors") for name in ("inputs", "outputs")}
    save_file({"none": torch.zeros(1)} | {name: x.contiguous() for name, x in inputs.items()}, paths["inputs"])
    asked = {
        "arguments": [*server_arguments(settings, free_port()), *NAMED.get(policy.model.config.model_type, ())],
        "oft_block_size": settings.oft_block_size, "experts": experts, "told": str(folder / "told.json"), **paths,
        "adapters": {name: str(folder / name) for name in adapters},
        "batch": list(zip(ORDER, LENGTHS, strict=True)),
    }  # fmt: skip
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [os.environ[PYTHON_VARIABLE], str(ROOT / "tests" / "engines" / "loaded.py"), str(folder / "asked.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=800)
    assert done.returncode == 0, done.stderr[-6000:]
    told = json.loads((folder / "told.json").read_text())
    return Answered(load_file(paths["outputs"]), told["facts"], told["wrapped"])


class Reference:
    """transformers' model over the same values, with PEFT's adapters from the published folders."""

    def __init__(self, base: Path, folder: Path, names: Iterable[str]) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.config = model.config
        first, *others = names
        self._peft = PeftModel.from_pretrained(model, folder / first, adapter_name=first)
        for name in others:
            self._peft.load_adapter(folder / name, adapter_name=name)
        self._peft.eval()

    @torch.no_grad()
    def layers(self, names: tuple[str, ...], x_TK: Tensor) -> Tensor:
        """What these layers, which SGLang may run as one, make of the batch's rows."""
        found = [self._peft.base_model.model.get_submodule(name) for name in names]
        rows = []
        for adapter, x in zip(ORDER, x_TK.split(LENGTHS), strict=True):
            with self._using(adapter):
                rows.append(torch.cat([layer(x) for layer in found], -1))
        return torch.cat(rows)

    @torch.no_grad()
    def inside(self, name: str, *, adapted: bool = True) -> tuple[Tensor, Tensor]:
        """Input and output of a module in the model's pass over each prompt of the batch."""
        seen: list[tuple[Tensor, Tensor]] = []

        def record(_: Any, args: Any, named: Any, y: Any) -> None:
            x = args[0] if args else named["hidden_states"]
            seen.append((x[0], (y[0] if isinstance(y, tuple) else y)[0]))

        handle = self._peft.base_model.model.get_submodule(name).register_forward_hook(record, with_kwargs=True)
        for index, (adapter, length) in enumerate(zip(ORDER, LENGTHS, strict=True)):
            with self._using(adapter if adapted else None):
                self._peft(torch.tensor([tokens_of(length, index)]))
        handle.remove()
        return torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])

    @contextmanager
    def _using(self, adapter: str | None) -> Iterator[None]:
        if adapter is None:
            with self._peft.disable_adapter():
                yield
        else:
            self._peft.set_adapter(adapter)
            yield
