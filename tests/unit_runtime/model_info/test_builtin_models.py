"""Shipped models are found by name and refused when a byte of them differs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_runtime.cli.addresses import local_folder, needed_folder
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.builtin_models import ROOT, builtin_folder


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of everything shipped, free to be damaged."""
    return Path(shutil.copytree(ROOT, tmp_path / "builtin"))


@pytest.mark.parametrize("precision", ["BF16", "FP8", "INT4", "MXFP4", "NVFP4"])
def test_each_variant_is_a_whole_hugging_face_folder(precision: str) -> None:
    folder = builtin_folder("tiny-adder", precision)
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert ("quantization_config" in config) == (precision != "BF16")


def test_auto_takes_the_quantised_variant() -> None:
    assert builtin_folder("tiny-adder", "Auto") == builtin_folder("tiny-adder", "INT4")


def shipped(folder: Path) -> dict[Path, int]:
    """File → bytes, without what Python compiled beside its sources."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: path.stat().st_size for path in files}


def test_everything_shipped_is_small() -> None:
    assert sum(shipped(ROOT / "tiny-adder").values()) <= 3_000_000
    for name in ("tiny-caller", "tiny-pupil"):
        assert sum(shipped(ROOT / name).values()) <= 500_000
    assert sum(shipped(ROOT).values()) <= 9_000_000
    assert set(json.loads((ROOT / "digests.json").read_text())) == {
        path.relative_to(ROOT).parts[0] for path in shipped(ROOT) if path.parent != ROOT
    }


def test_one_altered_bit_is_named_by_file(copied: Path) -> None:
    weights = copied / "tiny-adder" / "int4" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(bytes(damaged))
    with pytest.raises(ModelError, match="altered") as caught:
        builtin_folder("tiny-adder", "INT4", copied)
    assert caught.value.where == str(weights)
    assert caught.value.exit_code == 66
    assert builtin_folder("tiny-adder", "BF16", copied) == copied / "tiny-adder" / "bf16"


def test_a_missing_file_and_an_added_file_are_named(copied: Path) -> None:
    folder = copied / "tiny-adder" / "bf16"
    added = folder / "model-00001-of-00002.safetensors"
    added.write_bytes(b"")
    with pytest.raises(ModelError, match="not shipped") as caught:
        builtin_folder("tiny-adder", "BF16", copied)
    assert caught.value.where == str(added)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="No such file") as caught:
        builtin_folder("tiny-adder", "BF16", copied)
    assert caught.value.where == str(folder / "tokenizer.json")


def test_an_unreadable_list_of_digests_is_a_model_error(copied: Path) -> None:
    (copied / "digests.json").write_text("{")
    with pytest.raises(ModelError, match="digests") as caught:
        builtin_folder("tiny-adder", "BF16", copied)
    assert caught.value.exit_code == 66


def test_an_unknown_name_offers_the_near_one() -> None:
    with pytest.raises(ModelError) as caught:
        builtin_folder("tiny-ader", "INT4")
    assert caught.value.fix == "did you mean `tiny-adder`, `tiny-caller`, `tiny-moe-adder`?"
    with pytest.raises(ModelError) as caught:
        builtin_folder("opus", "INT4")
    assert caught.value.fix is not None
    assert caught.value.fix.startswith("shipped models: `tiny-adder`, `tiny-caller`, `tiny-deepseek-v4`, ")


def test_a_precision_that_is_not_shipped_offers_those_that_are() -> None:
    with pytest.raises(ModelError, match="INT8") as caught:
        builtin_folder("tiny-adder", "INT8")
    offered = "`BF16`, `FP8`, `INT4`, `MXFP4`, `NVFP4`"
    assert caught.value.fix == f"set `spec.model.precision` to one of {offered}"


def test_a_command_names_its_own_option_or_takes_what_is_shipped() -> None:
    with pytest.raises(ModelError) as caught:
        local_folder("builtin://tiny-qwen3", precision="INT4", option="--precision")
    assert caught.value.fix == "set `--precision` to one of `BF16`, `FP8`"
    # Where nothing can be chosen, or was: INT4 is not shipped.
    root = builtin_folder("tiny-qwen3", "BF16").parent
    assert local_folder("builtin://tiny-qwen3") == root / "bf16"
    assert local_folder("builtin://tiny-qwen3", option="--precision") == root / "bf16"
    assert needed_folder("builtin://tiny-adder") == builtin_folder("tiny-adder", "INT4")
    assert needed_folder("builtin://tiny-gpt-oss", precision="BF16").name == "mxfp4"
    with pytest.raises(ModelError, match="no shipped model"):
        local_folder("builtin://opus")


def test_finding_a_shipped_model_never_loads_torch() -> None:
    program = (
        "import sys; from orbit_runtime.model_info.builtin_models import builtin_folder;"
        "builtin_folder('tiny-adder', 'Auto'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
