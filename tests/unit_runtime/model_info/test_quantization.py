"""Quantisation configs: the ones we read, and what is said of those we do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.quantization import QuantFormat, parse_quantization

# Kimi-K2's, shortened.
KIMI: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}


def test_no_block_means_bf16() -> None:
    assert parse_quantization({"model_type": "qwen3"}) == QuantFormat("BF16")
    assert not parse_quantization({"quantization_config": None}).is_quantized("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("config", [{"quantization_config": KIMI}, {"text_config": {"quantization_config": KIMI}}])
def test_compressed_tensors_int4_at_the_top_and_inside_the_text_config(config: dict[str, Any]) -> None:
    quant = parse_quantization(config)
    assert (quant.name, quant.group_size) == ("INT4", 32)
    assert quant.is_quantized("model.layers.3.mlp.experts.7.up_proj")
    assert not quant.is_quantized("model.layers.3.self_attn.q_a_proj")
    assert not quant.is_quantized("model.layers.0.mlp.up_proj")
    assert not quant.is_quantized("lm_head")
    assert not quant.is_quantized("model.layers.3.mlp.experts.7.up_proj", "Embedding")


def test_a_whole_row_may_be_one_group() -> None:
    block = copy.deepcopy(KIMI)
    block["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    assert parse_quantization({"quantization_config": block}) == QuantFormat("INT4", None, tuple(KIMI["ignore"]))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": None}, "None"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"config_groups": {}}, "0 config groups"),
        ({"config_groups": {"a": {}, "b": {}}}, "2 config groups"),
    ],
)
def test_other_formats_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        parse_quantization({"quantization_config": KIMI | changes}, where="m/config.json")
    assert caught.value.where == "m/config.json: quantization_config"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 8),
        ("num_bits", None),
        ("type", "float"),
        ("symmetric", False),
        ("actorder", "group"),
        ("dynamic", True),
        ("strategy", "tensor"),
        ("group_size", 0),
        ("group_size", 20),
    ],
)
def test_other_weights_are_named(key: str, value: object) -> None:
    block = copy.deepcopy(KIMI)
    block["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(ModelError, match=key):
        parse_quantization({"quantization_config": block})


def test_quantised_activations_are_refused() -> None:
    block = copy.deepcopy(KIMI)
    block["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ModelError, match="activations"):
        parse_quantization({"quantization_config": block})


def test_a_block_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ModelError, match="is a list"):
        parse_quantization({"quantization_config": [1]})
