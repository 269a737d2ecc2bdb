"""Damaged and mislabelled checkpoints, through each door that reads them: `orbit run`, `convert` and `inspect`.

Each is refused with one message that names the file and the tensor. `inspect` reads headers only: what only values show
is not its to find, and the table says so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import ManifestError, ModelError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant import int4
from tests.integration.killing import small_manifest
from tests.integration.tiny_models import make_checkpoint

M = "model.layers.0.self_attn.q_proj"
WHOLE = ("run", "convert", "inspect")
VALUES = ("run", "convert")
"""Doors that read values."""
TOKENS = [3, 27, 26, 20, 27, 25, 38, 1, 4, 30, 31, 1]
Captured = pytest.CaptureFixture[str]
Tensors = dict[str, Tensor]


def tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path, metadata={"format": "pt"})

    return spoil


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return tensors(lambda held: held.update({name: make(held[name]).contiguous()}))


def drop(name: str) -> Callable[[Path], None]:
    return tensors(lambda held: held.pop(name))


def one(value: float) -> Callable[[Tensor], Tensor]:
    """The first element replaced."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.float().flatten()
        changed[0] = value
        return changed.view(tensor.shape).to(tensor.dtype)

    return change


def config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        held = json.loads(path.read_text())
        change(held)
        path.write_text(json.dumps(held))

    return spoil


def group_of(size: int) -> Callable[[Path], None]:
    def change(held: dict[str, Any]) -> None:
        held["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = size

    return config(change)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def relabel(folder: Path) -> None:
    """The header calls the packed words another type of the same size."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"dtype":"I32"', b'"dtype":"F32"'))


def lying_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    held = load_file(folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys([*held, "model.layers.9.mlp.up_proj.weight"], "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def asymmetric(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """The model as INT4 with zero points, k_proj of 12 rows, then spoiled."""

    def spoil(folder: Path) -> None:
        source = make_checkpoint(folder.parent / "twelve", "llama")
        path = source / "config.json"
        held = json.loads(path.read_text()) | {"num_key_value_heads": 2, "head_dim": 6, "num_attention_heads": 4}
        path.write_text(json.dumps(held))
        weights = load_file(source / "model.safetensors")
        for name, w in weights.items():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                weights[name] = w[:12].contiguous()
            elif name.endswith("q_proj.weight"):
                weights[name] = w[:24].contiguous()
            elif name.endswith("o_proj.weight"):
                weights[name] = w[:, :24].contiguous()
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder)
        convert(source, folder, Target("INT4Asymmetric", 8), show=lambda *_: None)
        tensors(change)(folder)

    return spoil


def set_trailing_bits(held: Tensors) -> None:
    held["model.layers.0.self_attn.k_proj.weight_zero_point"][-1, 0] |= 1 << 20


def two_weights(held: Tensors) -> None:
    held[f"{M}.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Row:
    precision: str
    spoil: Callable[[Path], None]
    words: tuple[str, ...]
    doors: tuple[str, ...] = WHOLE


PACKED, SCALE = f"{M}.weight_packed", f"{M}.weight_scale"
ROWS: dict[str, Row] = {
    "truncated file": Row("INT4", truncate, ("model.safetensors", "truncated or damaged")),
    "mislabelled dtype": Row("INT4", relabel, ("model.safetensors: model.", "found F32")),
    "codes of another shape": Row("INT4", put(PACKED, lambda t: t[:-8]), (SCALE, "expected BF16 [120, any]")),
    "scale missing": Row("INT4", drop(SCALE), (SCALE, "missing from the checkpoint")),
    "codes missing": Row("INT4", drop(PACKED), (SCALE, "there are no codes")),
    "scale of the wrong shape": Row("INT4", put(SCALE, lambda t: t[:-1]), (SCALE, "expected BF16 [128, any]")),
    "shape missing": Row("INT4", drop(f"{M}.weight_shape"), (f"{M}.weight_shape", "missing")),
    "shape that lies": Row(
        "INT4", put(f"{M}.weight_shape", lambda t: t * 2), (PACKED, "expected int32 [256, 32]"), VALUES
    ),
    "scale of zero": Row("INT4", put(SCALE, one(0.0)), (f"model.safetensors: {SCALE}", "is 0.0"), VALUES),
    "scale of NaN": Row("INT4", put(SCALE, one(float("nan"))), (f"model.safetensors: {SCALE}", "is nan"), VALUES),
    "infinite scale": Row("INT4", put(SCALE, one(float("inf"))), (f"model.safetensors: {SCALE}", "is inf"), VALUES),
    "infinite FP8 block scale": Row(
        "FP8", put(f"{M}.weight_scale_inv", one(float("inf"))), (f"{M}.weight_scale_inv", "is inf"), VALUES
    ),
    "FP8 value of NaN": Row("FP8", put(f"{M}.weight", one(float("nan"))), (f"{M}.weight", "is NaN"), VALUES),
    "FP8 scale missing": Row("FP8", drop(f"{M}.weight_scale_inv"), (f"{M}.weight_scale_inv", "missing")),
    "FP8 scale of the wrong shape": Row(
        "FP8", put(f"{M}.weight_scale_inv", lambda t: t.repeat(2, 1)), (f"{M}.weight_scale_inv", "expected F32")
    ),
    "NVFP4 global scale of zero": Row(
        "NVFP4", put(f"{M}.weight_global_scale", one(0.0)), (f"{M}.weight_global_scale", "is 0.0"), VALUES
    ),
    "NVFP4 columns that are no multiple of 16": Row(
        "NVFP4", put(PACKED, lambda t: t[:, :-4]), (PACKED, "120 columns are not a multiple of the group of 16")
    ),
    "MXFP4 scale of NaN": Row("MXFP4", put(SCALE, lambda t: torch.full_like(t, 255)), (SCALE, "NaN in E8M0"), VALUES),
    "a group size that does not divide": Row("INT4", group_of(40), ("down_proj", "not a multiple of the config's")),
    "a group size that is another": Row("INT4", group_of(64), ("groups of 32, the config says 64",)),
    "an index that lies": Row("INT4", lying_index, ("model.layers.9", "does not hold")),
    "zero points with bits past the last row": Row(
        "INT4", asymmetric(set_trailing_bits), ("k_proj.weight_zero_point", "past the last of 12 rows"), VALUES
    ),
    "two weights for one module": Row("INT4", tensors(two_weights), (PACKED, "has two weights")),
    "packed tensors that the config calls BF16": Row(
        "INT4", config(lambda held: held.pop("quantization_config")), ("leaves", "in BF16")
    ),
    "a weight that is not finite": Row(
        "BF16", put(f"{M}.weight", one(float("nan"))), (f"{M}.weight", "not finite"), VALUES
    ),
    "a norm that is not finite": Row(
        "INT4", put("model.norm.weight", one(float("inf"))), ("model.norm.weight", "not finite"), ("run",)
    ),
    "a setting that is not finite": Row(
        "BF16", config(lambda held: held.update(rms_norm_eps=float("nan"))), ("config.json", "rms_norm_eps is nan")
    ),
    "rotary angles of nothing": Row(
        "BF16",
        config(lambda held: held.update(rope_theta=0.0, rope_parameters={"rope_type": "default", "rope_theta": 0.0})),
        ("config.json", "rope_theta is 0.0"),
        ("run",),
    ),
    "weights of another model": Row(
        "BF16", config(lambda held: held.update(intermediate_size=192)), ("192",), ("run", "inspect")
    ),
}


def through(door: str, folder: Path, place: Path) -> int:
    if door == "inspect":
        return run_command(["inspect", str(folder)])
    if door == "convert":
        packed = "quantization_config" in json.loads((folder / "config.json").read_text())
        precision = "BF16" if packed else "INT4"
        return run_command(["convert", str(folder), str(place / "converted"), "--precision", precision])
    manifest = small_manifest(steps=1)
    manifest["spec"]["model"] = {"uri": str(folder)}
    # Smaller than any layer here: the plan would refuse a larger one before the weights are read.
    manifest["spec"]["adapter"] = {"type": "LoRA", "lora": {"rank": 4}}
    (place / "run.yaml").write_text(json.dumps(manifest))
    return run_command(["run", str(place / "run.yaml"), "--out", str(place / "out")])


CASES = [(name, door) for name, row in ROWS.items() for door in row.doors]


@pytest.mark.parametrize(("name", "door"), CASES, ids=[f"{name}, {door}" for name, door in CASES])
def test_a_damaged_checkpoint_is_refused_with_file_tensor_and_remedy(
    tmp_path: Path, capsys: Captured, name: str, door: str
) -> None:
    row = ROWS[name]
    folder = tmp_path / "model"
    shutil.copytree(builtin_folder("tiny-adder", row.precision), folder)
    row.spoil(folder)
    capsys.readouterr()
    assert through(door, folder, tmp_path) == 66
    said = capsys.readouterr()
    for words in row.words:
        assert words in said.err, said.err
    assert "\n  fix: " in said.err
    assert "Traceback" not in said.err + said.out
    assert not (tmp_path / "converted" / "config.json").exists()
    assert not (tmp_path / "out" / "run.json").exists()


def quantise_head(folder: Path) -> None:
    """The output head in INT4, and no word in the ignore list."""
    path = folder / "model.safetensors"
    held = load_file(path)
    name = "lm_head" if "lm_head.weight" in held else "model.embed_tokens"
    weight = int4.quantize(held.pop("lm_head.weight") if name == "lm_head" else held[f"{name}.weight"], 32)
    held |= {f"lm_head.{key}": tensor for key, tensor in int4.buffers(weight).items()}
    held["lm_head.weight_shape"] = torch.tensor(weight.shape)
    save_file(held, path, metadata={"format": "pt"})
    config(lambda held: held["quantization_config"].update(ignore=[]))(folder)


def logprobs(folder: Path) -> Tensor:
    policy = load_policy(folder, AdapterConfig(type="LoRA", targets=("q_proj",)))
    with torch.no_grad():
        return policy.logprobs(policy.pack([Branch(0, TOKENS[:1], TOKENS[1:])]))[0]


def test_a_quantised_head_is_read_as_it_is_noted_and_unpacked(tmp_path: Path, capsys: Captured) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    convert(make_checkpoint(tmp_path / "source", "llama"), folder, Target("INT4", 32), show=lambda *_: None)
    quantise_head(folder)
    convert(folder, out, Target("BF16"), show=lambda *_: None)
    torch.testing.assert_close(logprobs(folder), logprobs(out), rtol=0, atol=1e-5)
    assert run_command(["inspect", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["head"] == "INT4"
    assert any("output head is quantised" in note for note in said["notes"])


def test_a_quantised_head_that_the_config_ties_to_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(builtin_folder("tiny-adder", "INT4"), folder)
    quantise_head(folder)
    with pytest.raises(ModelError, match=r"lm_head is quantised, but the config ties it"):
        logprobs(folder)


def test_mixed_formats_in_one_layer_are_read_each_as_it_is_and_noted(tmp_path: Path, capsys: Captured) -> None:
    """k_proj of layer 0 in MXFP4, its neighbours in INT4."""
    folder = tmp_path / "model"
    shutil.copytree(builtin_folder("tiny-adder", "INT4"), folder)
    other = load_file(builtin_folder("tiny-adder", "MXFP4") / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj"

    def exchange(held: Tensors) -> None:
        for key in [key for key in held if key.startswith(f"{name}.")]:
            del held[key]
        held.update({key: tensor for key, tensor in other.items() if key.startswith(f"{name}.")})

    tensors(exchange)(folder)
    group = json.loads((builtin_folder("tiny-adder", "MXFP4") / "config.json").read_text())["quantization_config"]
    group = group["config_groups"]["group_0"] | {"targets": [name], "format": "mxfp4-pack-quantized"}

    def mix(held: dict[str, Any]) -> None:
        block = held["quantization_config"]
        block["config_groups"]["group_0"]["format"] = "pack-quantized"
        block["config_groups"]["group_1"] = group

    config(mix)(folder)
    convert(folder, tmp_path / "out", Target("BF16"), show=lambda *_: None)
    torch.testing.assert_close(logprobs(folder), logprobs(tmp_path / "out"), rtol=0, atol=1e-5)
    assert run_command(["inspect", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert any("mixed formats in one layer" in note and "MXFP4" in note for note in said["notes"])


def test_a_rank_larger_than_a_layer_is_refused_where_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"rank 200 .*k_proj.* \[64, 128\]") as caught:
        load_policy(builtin_folder("tiny-adder", "INT4"), AdapterConfig(type="LoRA", targets=("k_proj",), rank=200))
    assert (caught.value.where, caught.value.exit_code) == ("spec.adapter.lora.rank", 64)
