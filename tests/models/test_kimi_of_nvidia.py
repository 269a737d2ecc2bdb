"""Kimi-K2.5 and K2.6 as NVIDIA exports them: NVFP4 under shortened names is the same model as under Moonshot's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.content import weights_digest
from orbit_runtime.model_info.remote_checkpoint import store_facts
from orbit_runtime.policy import load_policy
from orbit_runtime.storage import open_store
from tests.integration.tiny_kimi import make_kimi
from tests.models.family_matrix import logprobs

ADAPTER = AdapterConfig("LoRA", ("q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), rank=4)
LAYERS = "language_model.model.layers."
UNPACKED = (
    f"{LAYERS}0*", f"{LAYERS}1.self_attn*", f"{LAYERS}1.mlp.shared_experts*", "language_model.lm_head",
    "vision_tower*", "mm_projector*",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """`(moonshot, nvidia)`: one model under either's names, with scales of a cache in FP8."""
    folder = tmp_path_factory.mktemp("kimi")
    published, _ = make_kimi(folder, layout="NVFP4ModelOpt", unpacked=UNPACKED)
    tensors = load_file(published / "model.safetensors")
    tensors |= {
        f"{LAYERS}{layer}.self_attn.{kind}_proj.{kind}_scale": torch.tensor(0.5) for layer, kind in ("0k", "1v")
    }
    save_file(tensors, published / "model.safetensors")

    exported = folder / "nvidia"
    shutil.copytree(published, exported)
    save_file({shortened(name): each for name, each in tensors.items()}, exported / "model.safetensors")
    config = json.loads((published / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (exported / "config.json").write_text(json.dumps(config))
    legacy = {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": [shortened(pattern) for pattern in UNPACKED],
    }  # fmt: skip
    (exported / "hf_quant_config.json").write_text(json.dumps({"quantization": legacy}))
    return published, exported


def shortened(name: str) -> str:
    return name.replace(LAYERS, "language_model.layers.")


def test_the_names_differ_and_the_model_does_not(folders: tuple[Path, Path]) -> None:
    names = [set(load_file(folder / "model.safetensors")) for folder in folders]
    assert len(names[0] & names[1]) < len(names[0]) / 2
    assert "language_model.layers.1.mlp.experts.0.up_proj.weight_scale_2" in names[1]
    first, second = (load_policy(folder, ADAPTER) for folder in folders)
    assert first.injected.layers.keys() == second.injected.layers.keys()
    assert first.base_digest() == second.base_digest()
    assert torch.equal(logprobs(first, None), logprobs(second, None))
    assert weights_digest(folders[0]) == weights_digest(folders[1])


def test_the_planner_sees_the_same_sizes_in_a_folder_and_in_a_store(folders: tuple[Path, Path]) -> None:
    facts = [folder_facts(folder) for folder in folders]
    facts += [store_facts(open_store(str(folder))) for folder in folders]
    assert {each.precision for each in facts} == {"NVFP4"}
    assert len({each.checkpoint_bytes for each in facts}) == len({each.unknown for each in facts}) == 1
    assert all(sorted(map(str, each.weights)) == sorted(map(str, facts[0].weights)) for each in facts)
    assert all("scale" in name for name in facts[1].unknown), "nothing else is unknown"


def test_a_conversion_writes_the_publishers_names(folders: tuple[Path, Path], tmp_path: Path) -> None:
    written = []
    for number, folder in enumerate(folders):
        convert(folder, tmp_path / str(number), Target("BF16"), show=lambda *_: None)
        written.append(load_file(next((tmp_path / str(number)).glob("*.safetensors"))))
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(each, written[1][name]) for name, each in written[0].items())
    assert f"{LAYERS}1.mlp.experts.0.up_proj.weight" in written[1]
