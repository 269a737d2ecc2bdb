"""A checkpoint folder with every packed weight written out in BF16: for engines that cannot read the packed format.

Belongs here: the same values in plain tensors. Does not belong here: any other conversion.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from orbit_runtime.model_info.headers import TensorInfo
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.policy.load import IGNORED_SUFFIXES, CheckpointReader, layout_of, read_config, read_weight
from orbit_runtime.quant.formats import FORMATS

KEPT = (".json", ".jinja", ".txt", ".model")
"""Ends of the files beside the weights that are copied."""


def write_dequantized(folder: Path, target: Path) -> Path:
    """Writes `target`, the model of `folder` in BF16, one file per layer's worth of tensors; returns `target`.

    Where the checkpoint is BF16 already, `folder` itself is returned and nothing is written.
    """
    config = read_config(folder)
    reader = CheckpointReader(folder, "cpu")
    headers = reader.headers()
    quant = parse_quantization(config, where=str(folder / "config.json"), tensors=headers)
    if quant.name == "BF16":
        return folder
    target.mkdir(parents=True)
    packed: dict[str, str] = {}
    modules: dict[str, str] = {}
    for tensor in headers:
        module = tensor.rpartition(".")[0]
        layout = layout_of(quant, module, reader)
        names = FORMATS[layout].tensor_names(module)
        if layout != "BF16" and tensor in names and all(name in headers for name in names):
            packed |= dict.fromkeys(names, module)
            modules[module] = layout
    written = {}
    for number, group in enumerate(_groups(headers, packed, modules)):
        tensors = {}
        for name in group:
            if name in modules:
                codec = FORMATS[modules[name]]
                tensors[f"{name}.weight"] = codec.dequantize(read_weight(reader, codec, name)).contiguous()
            else:
                tensors[name] = reader.read(name)
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, target / file, metadata={"format": "pt"})
        written |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": written}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in folder.iterdir():
        if path.suffix in KEPT and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    (target / "config.json").write_text(json.dumps(plain | {"dtype": "bfloat16"}, indent=1))
    return target


def _groups(
    headers: Mapping[str, TensorInfo], packed: dict[str, str], modules: dict[str, str], size: int = 64
) -> list[list[str]]:
    names = [name for name in headers if name not in packed and not name.endswith(IGNORED_SUFFIXES)]
    every = [*names, *modules]
    return [every[start : start + size] for start in range(0, len(every), size)]
