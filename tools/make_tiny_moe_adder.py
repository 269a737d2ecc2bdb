"""Makes `builtin://tiny-moe-adder`: `tiny-adder` with eight experts in the place of each feed-forward part (Qwen3-MoE).

Every expert is a copy of the packed INT4 weights, its scales off by a few percent, behind a router with random weights
that sends each token to two of them (sparse upcycling, arXiv 2212.05055): it adds nearly as well as its model, and no
two experts are the same. Nothing is trained or quantised anew, so that it is the same on every machine.

    python tools/make_tiny_moe_adder.py            write the folder and its digests
    python tools/make_tiny_moe_adder.py --check    make it again elsewhere and compare every byte with what is shipped

Belongs here: its weights and config. Does not belong here: tokenizer and packing (`make_tiny_adder`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from make_tiny_adder import BUILTIN, digests, shipped, write_json
from safetensors.torch import load_file, save_file

NAME, SOURCE, VARIANT = "tiny-moe-adder", "tiny-adder", "int4"
EXPERTS, PER_TOKEN = 8, 2
SCALE_DEVIATION = 0.05
"""Of an expert's scales, relative: more, and it no longer adds."""


def make(folder: Path) -> None:
    source = BUILTIN / SOURCE / VARIANT
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": PER_TOKEN,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        # SGLang's Qwen3-MoE looks for a head of its own: no published one is tied.
        "tie_word_embeddings": False,
    }
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$"]
    write_json(folder / "config.json", config)
    save_file(_tensors(load_file(source / "model.safetensors"), config["hidden_size"]), folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip


def _tensors(source: dict[str, torch.Tensor], hidden: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(source.items()):
        if name == "model.embed_tokens.weight":
            made["lm_head.weight"] = tensor.clone()
        layer, is_mlp, projection = name.partition(".mlp.")
        if not is_mlp:
            made[name] = tensor
            continue
        router = f"{layer}.mlp.gate.weight"
        if router not in made:
            made[router] = torch.randn(EXPERTS, hidden, generator=generator).to(torch.bfloat16)
        for expert in range(EXPERTS):
            value = tensor.clone()
            if name.endswith("weight_scale"):
                noise = torch.randn(value.shape, generator=generator)
                value = (value.float() * (1 + SCALE_DEVIATION * noise)).to(value.dtype)
            made[f"{layer}.mlp.experts.{expert}.{projection}"] = value
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with what is shipped, write nothing")
    arguments = parser.parse_args()
    known = shipped()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) if arguments.check else BUILTIN / NAME
        make(root / VARIANT)
        found = digests(root)
    if arguments.check:
        print("same bits as shipped" if found == known.get(NAME) else "differs from what is shipped")
        return 0 if found == known.get(NAME) else 1
    write_json(BUILTIN / "digests.json", known | {NAME: found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
