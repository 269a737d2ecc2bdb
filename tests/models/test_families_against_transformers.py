"""Every weight that the planner believes in, by name and size, against transformers' own modules on the meta device.

The configurations are those of the shipped cards: real models, no weights. Checkpoint names go through transformers'
own table of renamings, so that a name that transformers could not load fails as well.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from orbit_runtime.model_info.cards import card_names, load_card
from orbit_runtime.model_info.families import describe
from orbit_runtime.model_info.weights import EXPERT

LLAMA_3_1_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {name: load_card(name)["config"] for name in card_names()} | {"Llama-3.1-8B": LLAMA_3_1_8B}
VISION_NAMES = {
    "vt_hidden_size": "hidden_size", "vt_intermediate_size": "intermediate_size",
    "vt_num_hidden_layers": "num_hidden_layers", "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}  # fmt: skip


def build_on_meta(config: dict) -> torch.nn.Module:
    if "vision_config" in config:
        vision = {VISION_NAMES.get(key, key): value for key, value in config["vision_config"].items()}
        config = {**config, "vision_config": vision, "tie_word_embeddings": False}
        loader = AutoModelForImageTextToText
    else:
        loader = AutoModelForCausalLM
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return loader.from_config(AutoConfig.for_model(config["model_type"], **fields))


def sizes_of(model: torch.nn.Module) -> dict[str, int]:
    """Parameters and saved buffers, a tied one once."""
    seen, found = set(), {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.numel()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_of_a_family_is_one_that_transformers_has_and_none_is_missing(name: str) -> None:
    architecture = describe(CONFIGS[name])
    model = build_on_meta(CONFIGS[name])
    theirs = sizes_of(model)
    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    states = model.state_dict()
    ours: Counter[str] = Counter()
    for weight in architecture.weights:
        if weight.role == "mtp":
            continue  # transformers leaves these layers out
        key, _ = rename_source_key(
            weight.name.replace(EXPERT, "0"), renamings, converters, model.base_model_prefix, states
        )
        ours[key] += weight.num_parameters
    fused = {key: size for key, size in ours.items() if key.endswith("attn.q_proj.weight") and "vision" in key}
    assert ours.total() == sum(theirs.values())
    if not fused:
        assert dict(ours) == theirs
    else:
        # One fused tensor of the tower becomes three: transformers names the first of them.
        same = {key for key in ours if ".attn." not in key or "vision" not in key}
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
        assert set(ours) <= set(theirs)


@pytest.mark.parametrize("name", CONFIGS)
def test_default_targets_are_linears_that_the_family_has(name: str) -> None:
    architecture = describe(CONFIGS[name])
    assert set(architecture.default_targets) <= set(architecture.targets())
    assert not {"lm_head", "kv_b_proj", "mlp.gate"} & set(architecture.default_targets)


@pytest.mark.parametrize("name", CONFIGS)
def test_linears_that_share_an_input_are_equally_wide(name: str) -> None:
    widths: dict[str, set[int]] = {}
    for weight in describe(CONFIGS[name]).weights:
        if weight.is_linear:
            widths.setdefault(weight.input, set()).add(weight.shape[-1])
    assert all(len(each) == 1 for each in widths.values())
