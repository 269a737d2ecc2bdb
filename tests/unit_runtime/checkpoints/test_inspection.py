"""What `orbit inspect` finds in headers: every format of every family, in a folder and in a store; and in cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.checkpoints.inspection import inspect_facts, inspect_headers
from orbit_runtime.cli.main import run_command
from orbit_runtime.model_info.cards import card_facts, repositories
from orbit_runtime.model_info.checkpoint import folder_headers
from orbit_runtime.model_info.remote_checkpoint import store_headers
from tests.unit_runtime.model_info.test_checkpoint import SMALL, open_memory, write_model

Captured = pytest.CaptureFixture[str]
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "g": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "MoE in BF16": ("qwen3_moe", {}, {}, "BF16"),
    "INT4 experts": ("qwen3_moe", INT4, {"routed_expert": "INT4"}, "INT4"),
    "FP8 blocks": (
        "qwen3_moe",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        dict.fromkeys(("attention", "routed_expert"), "FP8"),
        "FP8",
    ),
    "ModelOpt NVFP4": (
        "qwen3_moe",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        dict.fromkeys(("attention", "routed_expert"), "NVFP4"),
        "NVFP4",
    ),
    "gpt-oss": ("gpt_oss", {"quant_method": "mxfp4"}, {"routed_expert": "blocks"}, "MXFP4"),
    "DeepSeek-V4": (
        "deepseek_v4",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        {"attention": "V4-FP8", "shared_expert": "V4-FP8", "routed_expert": "V4-FP4"},
        "MXFP4",
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_and_a_store_say_the_same_of_every_format(tmp_path: Path, case: str, shards: int) -> None:
    family, block, forms, precision = CASES[case]
    config = {**SMALL[family], **({"quantization_config": block} if block else {})}
    total = write_model(tmp_path, config, forms, shards=shards)
    found = inspect_headers(folder_headers(tmp_path))
    assert (found.family, found.precision, found.refusal) == (family, precision, None)
    assert found.num_bytes == total == sum(group.num_bytes for group in found.groups)
    assert found.files == shards
    assert found.targets
    assert len(found.verdicts) == 6
    assert any(line.startswith("router") for line in found.special)
    experts = [group for group in found.groups if ".experts." in group.modules and group.parameters > 10_000]
    experts = [group for group in experts if not group.modules.startswith("mtp.")]  # The fixture leaves these in BF16.
    assert {group.format for group in experts} == {precision}
    store, _ = open_memory(tmp_path)
    remote = inspect_headers(store_headers(store, first_read=64))
    assert remote.groups == found.groups
    assert remote.verdicts == found.verdicts


@pytest.mark.parametrize("repository", sorted(repositories()))
def test_a_card_is_inspected_without_a_file(repository: str, capsys: Captured) -> None:
    facts = card_facts(repository)
    found = inspect_facts(facts)
    assert found.precision == facts.precision
    assert found.num_bytes == facts.checkpoint_bytes == sum(group.num_bytes for group in found.groups)
    assert run_command(["inspect", f"hf://{repository}@main", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == facts.precision


def test_deepseek_v4_on_sglang_is_said_not_to_have_run_on_hardware() -> None:
    name = next(each for each in repositories() if "V4-Flash" in each)
    verdicts = {(v.adapter, v.trainer, v.engine): v for v in inspect_facts(card_facts(name)).verdicts}
    lora = verdicts["LoRA", "Torch", "SGLang"]
    assert lora.state == "planned"
    assert any("DeepSeek-V4's attention" in reason and "not run on hardware" in reason for reason in lora.reasons)
    assert "down_proj" in verdicts["OFT", "Torch", "SGLang"].fix
    assert verdicts["LoRA", "Megatron", "SGLang"].state == "missing"


def test_a_quantisation_that_orbit_does_not_read_is_refused_by_name(tmp_path: Path, capsys: Captured) -> None:
    write_model(tmp_path, {**SMALL["qwen3_moe"], "quantization_config": {"quant_method": "bitsandbytes"}}, {})
    assert run_command(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "refused: Orbit does not read this quantisation: quant_method is 'bitsandbytes'" in said


def test_a_type_that_cannot_be_used_is_still_described(tmp_path: Path) -> None:
    config = {**SMALL["qwen3_moe"], "model_type": "qwen3_moe"}
    write_model(tmp_path, config, {})
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "newest"}))
    found = inspect_headers(folder_headers(tmp_path))
    assert (found.family, found.precision, found.verdicts) == ("newest", "BF16", ())
    assert any("models of type newest cannot be used here" in note for note in found.notes)


def test_a_store_whose_index_lies_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL["qwen3_moe"], {}, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.nowhere.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    store, _ = open_memory(tmp_path)
    with pytest.raises(Exception, match=r"model\.nowhere\.weight") as caught:
        store_headers(store)
    assert caught.value.exit_code == 66  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda folder: None, 66, "does not exist"),
        (lambda folder: folder.mkdir(), 66, "neither model.safetensors"),
        (lambda folder: (folder.mkdir(), (folder / "run.json").write_text("{}")), 64, "this is a run"),
        (lambda folder: folder.write_text(""), 64, "this is a file"),
        (lambda folder: (folder.mkdir(), (folder / "adapter_config.json").write_text("{")), 66, "not JSON"),
        (
            lambda folder: (folder.mkdir(), (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')),
            66,
            "adapter_model.safetensors",
        ),
    ],
)
def test_what_is_no_model_is_said_in_one_sentence(
    tmp_path: Path, capsys: Captured, make: Any, code: int, words: str
) -> None:
    make(tmp_path / "place")
    assert run_command(["inspect", str(tmp_path / "place")]) == code
    said = capsys.readouterr()
    assert words in said.err
    assert "Traceback" not in said.err + said.out


def test_an_address_of_no_known_kind_and_a_model_without_a_card_are_refused(capsys: Captured) -> None:
    assert run_command(["inspect", "ftp://somewhere/model"]) == 64
    assert run_command(["inspect", "hf://nobody/nothing"]) == 66
    assert "no shipped card" in capsys.readouterr().err
