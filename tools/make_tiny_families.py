"""Makes `builtin://tiny-<family>`: random weights in the form in which a model of that family is published.

They know nothing, and never will: they show in seconds, on any machine, that a manifest for a large model of the same
family and format runs from its first line to its last (docs/guides/models.md). Sizes divide in two, scales included.

    python -m tools.make_tiny_families            write the folders and their digests
    python -m tools.make_tiny_families --check    make them again elsewhere and compare every byte with what is shipped

Belongs here: which families, in which formats, how large. Does not belong here: random values and packing, which the
tests' checkpoints share (`tests.integration.tiny_families`), or models that can learn (`make_tiny_adder`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.tiny_families import make_family
from tools.make_tiny_adder import BUILTIN, digests, shipped, write_json

LONG = {"max_position_embeddings": 1 << 17}
"""As much as any manifest asks for."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256}
"""Halves of matrices under scales of 128 x 128."""
MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64}
AS_PUBLISHED = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
"""What Kimi-K2's config.json says; SGLang's DeepSeek layers know no rotary angles but such."""
FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "tiny-qwen3": ("qwen3", {"bf16": "BF16", "fp8": "FP8Block"}, BLOCKS),
    "tiny-llama": ("llama", {"bf16": "BF16"}, HEADS | {"intermediate_size": 128}),
    "tiny-qwen3-moe": (
        "qwen3_moe", {"fp8": "FP8Block", "nvfp4": "NVFP4ModelOpt"}, BLOCKS | {"moe_intermediate_size": 128},
    ),
    "tiny-glm4-moe": (
        "glm4_moe", {"fp8": "FP8"}, HEADS | {"intermediate_size": 128, "moe_intermediate_size": 64},
    ),
    "tiny-gpt-oss": ("gpt_oss", {"mxfp4": "MXFP4GptOss"}, HEADS),
    "tiny-kimi-k2": ("kimi_k2", {"int4": "INT4"}, MLA | AS_PUBLISHED),
    "tiny-deepseek-v4": ("deepseek_v4", {"mxfp4": "MXFP4V4"}, {}),
}  # fmt: skip
"""Name → family, its layout by variant, its sizes."""


def make(name: str, root: Path) -> None:
    family, variants, sizes = FAMILIES[name]
    root.mkdir(parents=True)
    for variant, layout in variants.items():
        with tempfile.TemporaryDirectory() as temporary:
            packed, _ = make_family(Path(temporary), family, layout, sizes=sizes | LONG)
            config = _without_version(json.loads((packed / "config.json").read_text(encoding="utf-8")))
            write_json(packed / "config.json", config)
            shutil.copytree(packed, root / variant)


def _without_version(config: dict[str, Any]) -> dict[str, Any]:
    """Else another release of transformers would make another model of the same weights."""
    kept = {key: value for key, value in config.items() if key != "transformers_version"}
    return {key: _without_version(value) if isinstance(value, dict) else value for key, value in kept.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with what is shipped, write nothing")
    arguments = parser.parse_args()
    known = shipped()
    differ = []
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary) / name
            make(name, root)
            found = digests(root)
            if arguments.check:
                differ += [name] if found != known.get(name) else []
                continue
            shutil.rmtree(BUILTIN / name, ignore_errors=True)
            shutil.copytree(root, BUILTIN / name)
        known |= {name: found}
    if arguments.check:
        print(f"differ from what is shipped: {', '.join(differ)}" if differ else "same bits as shipped")
        return 1 if differ else 0
    write_json(BUILTIN / "digests.json", known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
