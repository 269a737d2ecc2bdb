"""Adapters that PEFT wrote: refused with settings that change the arithmetic, or of another rank than they say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, OFTConfig
from safetensors.torch import save_file

from orbit_runtime.checkpoints.adapter_folder import CONFIG_FILE, MODEL_FILE, NEUTRAL_FIELDS, open_adapter
from orbit_runtime.errors import ModelError
from orbit_runtime.serve.names import ServedModel

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
ARITHMETIC: dict[str, Any] = {
    "bias": "all", "fan_in_fan_out": True, "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2}, "use_dora": True, "alora_invocation_tokens": [3], "use_qalora": True,
    "monteclora_config": {"n": 1}, "layer_replication": [[0, 2], [1, 3]], "lora_bias": True,
    "trainable_token_indices": [1], "target_parameters": ["mlp.experts.down_proj"], "use_bdlora": {"a": 1},
    "arrow_config": {"top_k": 1}, "kasa_config": {"a": 1}, "velora_config": {"a": 1}, "ensure_weight_tying": True,
    "init_lora_weights": "pissa", "coft": True, "block_share": True,
}  # fmt: skip
"""Every field of PEFT's two configurations that is not neutral, with a value that is not its default."""


def write(folder: Path, config: LoraConfig | OFTConfig, **changes: Any) -> str:
    """An adapter with one layer: LoRA of rank 4, or OFT in blocks of 4."""
    config.save_pretrained(str(folder))
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    lora = {f"{LAYER}.lora_A.weight": torch.zeros(4, 8), f"{LAYER}.lora_B.weight": torch.zeros(8, 4)}
    oft = {f"{LAYER}.oft_R.weight": torch.zeros(2, 6)}
    save_file(lora if isinstance(config, LoraConfig) else oft, folder / MODEL_FILE)
    return str(folder)


def plain(kind: type[LoraConfig] | type[OFTConfig]) -> LoraConfig | OFTConfig:
    return LoraConfig(r=4, lora_alpha=8) if kind is LoraConfig else OFTConfig(oft_block_size=4)


@pytest.mark.parametrize("kind", [LoraConfig, OFTConfig])
def test_the_defaults_of_the_installed_peft_are_plain(tmp_path: Path, kind: type[LoraConfig]) -> None:
    adapter = open_adapter(write(tmp_path, plain(kind)))
    assert (adapter.type, adapter.rank) == ("LoRA" if kind is LoraConfig else "OFT", 4)


@pytest.mark.parametrize(
    ("facts", "run", "evaluation"),
    [
        ({}, None, {}),
        ({"run": "x\r\nset-cookie: y" + "z" * 99, "evaluation": 3}, "x\r\nset-cookie: y" + "z" * 48, {}),
        ({"evaluation": {"a": {"mean": 10**400, "low": None, "high": None}}}, None, {}),
        ({"evaluation": {"a": {"mean": 1, "low": None, "high": None, "more": 2}}}, None,
         {"a": {"mean": 1.0, "low": None, "high": None}}),
    ],
)  # fmt: skip
def test_what_a_manifest_tells_of_a_run_is_read_whatever_it_holds_and_stays_one_header(
    tmp_path: Path, facts: dict[str, Any], run: str | None, evaluation: dict[str, Any]
) -> None:
    place = write(tmp_path, plain(LoraConfig))
    (tmp_path / "manifest.json").write_text(json.dumps({"facts": facts}))
    adapter = open_adapter(place)
    assert (adapter.run, adapter.evaluation) == (run, evaluation)
    told = ServedModel("policy", None, place, run=adapter.run, evaluation=adapter.evaluation).provenance
    assert b"\n" not in told
    assert b"\r" not in told
    assert json.loads(told)["run"] == run


def test_no_field_of_the_installed_peft_is_unknown() -> None:
    """One that a new PEFT has is either neutral, or arithmetic: decide."""
    fields = {each.name for kind in (LoraConfig, OFTConfig) for each in dataclasses.fields(kind)}
    assert fields - NEUTRAL_FIELDS == ARITHMETIC.keys()


@pytest.mark.parametrize("value", [True, False, "gaussian", "orthogonal", "eva"])
def test_initial_values_that_leave_the_base_alone_are_plain(tmp_path: Path, value: object) -> None:
    assert open_adapter(write(tmp_path, plain(LoraConfig), init_lora_weights=value)).scaling == 2.0


@pytest.mark.parametrize("kind", [LoraConfig, OFTConfig])
@pytest.mark.parametrize("field", [*ARITHMETIC, "a_field_of_tomorrow"])
def test_a_field_that_may_change_the_arithmetic_is_refused_by_name(
    tmp_path: Path, kind: type[LoraConfig], field: str
) -> None:
    place = write(tmp_path, plain(kind), **{field: ARITHMETIC.get(field, 16)})
    with pytest.raises(ModelError, match=f"Orbit does not compute with {field} = ") as caught:
        open_adapter(place)
    words = "path_initial_model_for_weight_conversion" if field == "init_lora_weights" else "merge it into its base"
    assert words in str(caught.value.fix)
    assert caught.value.exit_code == 66


@pytest.mark.parametrize("value", ["olora", "pissa_niter_16", "corda", "loftq", "lora_ga"])
def test_an_adapter_that_changed_its_base_is_to_be_converted(tmp_path: Path, value: str) -> None:
    with pytest.raises(ModelError, match="as plain LoRA"):
        open_adapter(write(tmp_path, plain(LoraConfig), init_lora_weights=value))


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (LoraConfig, {"r": 8}, "q_proj has rank 4, and adapter_config.json says 8"),
        (OFTConfig, {"oft_block_size": 8}, "q_proj has blocks of size 4, and adapter_config.json says 8"),
    ],
)
def test_a_rank_that_the_tensors_do_not_have_is_refused_with_both(
    tmp_path: Path, kind: type[LoraConfig], change: dict[str, int], words: str
) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        open_adapter(write(tmp_path, plain(kind), **change))
    assert (caught.value.exit_code, bool(caught.value.fix)) == (66, True)
