"""The memory that loading a base takes above its packed bytes, and that a frozen linear saves for backward, by format.

Loading: each format in a process of its own. The packed tensors stay in the mapped file; measured is the peak, sampled
every half millisecond, of memory that is not backed by a file, above what the process held before. The target is one
layer in BF16 plus 5 % of it and of the packed bytes: nothing is ever dequantised as a whole.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.frozen_linear import saved_bytes
from benchmarks.harness import Measured, PeakMemory, run
from orbit_runtime.quant.formats import FORMATS, Codec
from orbit_runtime.quant.linear import FrozenLinear
from tools.make_tiny_adder import model_config, quantization_config, repacked_config

MEASURES = ("orbit_runtime/policy", "orbit_runtime/quant", "orbit_runtime/model_info", "orbit_runtime/adapters")
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 128}
SMALLEST = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
LAYOUTS = {"BF16": "BF16", "INT4": "INT4", "FP8": "FP8Block", "NVFP4": "NVFP4", "MXFP4": "MXFP4"}


def make_checkpoint(folder: Path, precision: str, sizes: dict[str, int]) -> None:
    """A Qwen3 of 109 M random parameters; their values do not matter here."""
    codec = FORMATS[LAYOUTS[precision]]
    assert codec.to_checkpoint is not None
    config = model_config() | sizes | HEADS
    blocks = {"BF16": None, "INT4": quantization_config()}
    block = blocks[precision] if precision in blocks else repacked_config(precision.lower())
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": block} if block else {})))
    generator, width, inner = torch.Generator().manual_seed(0), config["hidden_size"], config["intermediate_size"]
    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], width, generator=generator).bfloat16()}
    tensors["model.norm.weight"] = torch.ones(width).bfloat16()
    shapes = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(width).bfloat16()
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(config["head_dim"]).bfloat16()
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator).mul(0.02).bfloat16()
            parts = codec.to_checkpoint(pack(codec, weight))
            tensors.update({f"{prefix}.{name}.{part}": tensor for part, tensor in parts.items()})
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def pack(codec: Codec, weight: torch.Tensor) -> Any:
    assert codec.quantize is not None
    return codec.quantize(weight, *((32,) if codec.precision == "INT4" else ()))


def mapped_ranges(file: Path) -> list[range]:
    """Address ranges at which the file is mapped into this process."""
    found = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return [range(*(int(end, 16) for end in fields[0].split("-"))) for fields in found]


def load_and_measure(folder: Path) -> dict[str, int]:
    """In a process of its own; loads a small model first, so that one-time allocations are not counted."""
    from orbit_runtime.adapters.config import AdapterConfig
    from orbit_runtime.model_info.builtin_models import builtin_folder
    from orbit_runtime.policy import load_policy

    config = AdapterConfig(type="LoRA", targets=("o_proj",), rank=1, alpha=1.0)
    load_policy(builtin_folder("tiny-adder", "BF16"), config)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with PeakMemory() as peak:
        policy = load_policy(folder, config)
    base = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in policy._base_tensors().values()}
    ranges = mapped_ranges(folder / "model.safetensors")
    mapped = sum(size for pointer, size in base.items() if any(pointer in each for each in ranges))
    packed = sum(base.values())
    # The mapped file is not memory of this process. The rest of the base is, but does not count as "above".
    return {"packed": packed, "mapped": mapped, "above": peak.above - (packed - mapped)}


def measure(options: argparse.Namespace) -> Measured:
    sizes = SMALLEST if options.smallest else SIZES
    one_layer = 2 * (4 * sizes["hidden_size"] ** 2 + 3 * sizes["hidden_size"] * sizes["intermediate_size"])
    facts = {"one_layer_in_bf16": one_layer, "parameters": one_layer // 2 * sizes["num_hidden_layers"]}
    figures: dict[str, object] = {}
    print(f"{'format':8} {'packed MiB':>11} {'peak above MiB':>15} {'allowed MiB':>12} {'saved / packed':>15}")
    for precision, layout in list(LAYOUTS.items())[: 2 if options.smallest else None]:
        with tempfile.TemporaryDirectory() as name:
            make_checkpoint(Path(name), precision, sizes)
            program = [sys.executable, __file__, "--load", name]
            found = json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
        above, allowed = found["above"], one_layer + 0.05 * (one_layer + found["packed"])
        codec = FORMATS[layout]
        weight = pack(codec, torch.randn(1024, 1024))
        saved = saved_bytes(FrozenLinear(weight), torch.randn(64, 1024, requires_grad=True)) / codec.num_bytes(weight)
        figures[precision] = {**found, "allowed": int(allowed), "saved_share": saved}
        print(
            f"{precision:8} {found['packed'] / 2**20:11.1f} {above / 2**20:15.1f} {allowed / 2**20:12.1f} {saved:15.4f}"
        )
    return Measured(figures=figures, facts=facts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        print(json.dumps(load_and_measure(Path(sys.argv[2]))))
    else:
        raise SystemExit(run(__file__, __doc__, measure))
