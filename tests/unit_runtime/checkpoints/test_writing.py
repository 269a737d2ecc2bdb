"""What convert and merge write beside the tensors, and in which files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from orbit_runtime.checkpoints.adapter_folder import CONFIG_FILE, MODEL_FILE, AdapterFolder, build_adapter
from orbit_runtime.checkpoints.combined_files import write_combined
from orbit_runtime.checkpoints.destination import opened
from orbit_runtime.checkpoints.rewrite import RewriteItem, split_shards
from orbit_runtime.checkpoints.tensor_files import Output


def test_tensors_are_divided_among_files_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def size(item: RewriteItem) -> int:
        nonlocal asked
        asked += 1
        return item.outputs[0].num_bytes

    monkeypatch.setattr(RewriteItem, "num_bytes", property(size))
    items = [RewriteItem(str(at), (Output(str(at), "U8", (count,)),), 0) for at, count in enumerate([3, 3, 3, 9, 1, 6])]
    found = [[int(item.name) for item in shard] for shard in split_shards(items, 7)]
    assert found == [[0, 1], [2], [3], [4, 5]]
    assert asked <= 2 * len(items)


def test_what_a_run_recorded_of_its_weights_is_not_copied_beside_other_weights(tmp_path: Path) -> None:
    source = tmp_path / "policy-v3"
    source.mkdir()
    (source / "manifest.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    with opened(tmp_path / "out", "sha256:1") as destination:
        destination.finish(source, {"model_type": "llama"}, {}, {})
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_of_two_adapters_the_first_does_not_say_which_layers_both_adapt(tmp_path: Path) -> None:
    def of(layer: int, **more: object) -> AdapterFolder:
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], **more}
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors = {f"{name}.lora_{side}.weight": torch.ones(2, 2, dtype=torch.bfloat16) for side in "AB"}
        return build_adapter(str(layer), {CONFIG_FILE: json.dumps(config).encode(), MODEL_FILE: save(tensors)})

    write_combined([of(0, layers_to_transform=[0], layers_pattern="layers"), of(1)], [1, 1], None, tmp_path / "both")
    written = json.loads((tmp_path / "both" / CONFIG_FILE).read_text())
    assert not written["layers_to_transform"]
    assert not written["layers_pattern"]
