"""Quantisation configs: the ones we read, and what is said of those we do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import TensorInfo
from orbit_runtime.model_info.quantization import QuantFormat, from_legacy_modelopt, parse_quantization

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
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": None}, "None"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "nvfp4-pack-quantized"}, "weights.type is 'int'"),
        ({"config_groups": {}}, "0 config groups"),
        ({"config_groups": {"a": {}, "b": {}}}, "num_bits is not given"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"ignore": ["re:["]}, "a value or a pattern in it is broken: unterminated character set"),
        ({"ignore": 5}, "a value or a pattern in it is broken"),
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
        ("symmetric", "no"),
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


@pytest.mark.parametrize("changes", [{"actorder": "weight"}, {"actorder": "static"}, {"dynamic": None}])
def test_how_scales_were_found_is_no_layout(changes: dict[str, Any]) -> None:
    block = copy.deepcopy(KIMI)
    block["config_groups"]["group_0"]["weights"] |= changes
    assert parse_quantization({"quantization_config": block}) == parse_quantization({"quantization_config": KIMI})
    order = {"model.layers.0.mlp.experts.0.up_proj.weight_g_idx": TensorInfo("I32", (64,), 0, 256)}
    with pytest.raises(ModelError, match="weight_g_idx is stored"):
        parse_quantization({"quantization_config": block}, tensors=order)


def test_quantised_activations_are_refused() -> None:
    block = copy.deepcopy(KIMI)
    block["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ModelError, match="activations"):
        parse_quantization({"quantization_config": block})


def test_a_block_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ModelError, match="is a list"):
        parse_quantization({"quantization_config": [1]})


def compressed(packing: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"g": group},
        "ignore": ["lm_head"],
    }


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}


@pytest.mark.parametrize(
    ("block", "precision", "layout"),
    [
        (compressed("float-quantized", **FLOAT8, strategy="channel"), "FP8", "FP8"),
        (compressed("float-quantized", **FLOAT8, strategy="tensor"), "FP8", "FP8"),
        (compressed("float-quantized", **FLOAT8, strategy="block", block_structure=[128, 128]), "FP8", "FP8BlockCT"),
        (compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=16), "NVFP4", "NVFP4"),
        (compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", group_size=32), "MXFP4", "MXFP4"),
        (FP8, "FP8", "FP8Block"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8", "FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "NVFP4", "NVFP4ModelOpt"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "NVFP4", "NVFP4ModelOpt"),
        (GPTQ, "INT4", "GPTQ"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "INT4", "GPTQv2"),
        (AWQ, "INT4", "AWQ"),
    ],
)
def test_each_published_kind_is_recognised(block: dict[str, Any], precision: str, layout: str) -> None:
    quant = parse_quantization({"quantization_config": block})
    assert quant.name == precision
    assert quant.layout_of("model.layers.0.mlp.up_proj") == layout


def test_asymmetric_int4_has_a_layout_of_its_own() -> None:
    block = copy.deepcopy(KIMI)
    block["config_groups"]["group_0"]["weights"] |= {"symmetric": False, "group_size": 128}
    quant = parse_quantization({"quantization_config": block})
    assert (quant.name, quant.group_size) == ("INT4", 128)
    assert quant.layout_of("model.layers.3.mlp.experts.7.up_proj") == "INT4Asymmetric"


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (FP8 | {"weight_block_size": [1, 32]}, "weight_block_size"),
        (FP8 | {"weight_block_size": None}, "weight_block_size"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (GPTQ | {"desc_act": True}, "desc_act"),
        (GPTQ | {"bits": 8}, "bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "gemv"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "MXFP8"),
        (from_legacy_modelopt({"quantization": "x"}), "quant_algo is None"),
        (KIMI | {"config_groups": {"g": "x"}}, "config group g"),
        (compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=32), "group_size"),
        (compressed("mxfp8-quantized", **FLOAT8, strategy="group", group_size=32), "mxfp8"),
        (compressed("float-quantized", **FLOAT8, strategy="block", block_structure=[64, 64]), "strategy"),
    ],
)
def test_variants_that_are_not_read_are_named(block: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        parse_quantization({"quantization_config": block})
    assert caught.value.exit_code == 66


def test_a_mixed_checkpoint_is_called_after_its_routed_experts() -> None:
    experts = {"targets": [r"re:.*mlp\.experts\..*"], "format": "nvfp4-pack-quantized"}
    experts["weights"] = FLOAT4 | {"strategy": "tensor_group", "group_size": 16}
    rest = {"targets": ["Linear"], "format": "float-quantized", "weights": FLOAT8 | {"strategy": "channel"}}
    attention = rest | {"targets": ["re:.*self_attn.*"]}
    for groups in ({"a": experts, "b": rest}, {"a": rest, "b": experts}, {"a": attention, "b": experts, "c": rest}):
        block = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]}
        quant = parse_quantization({"quantization_config": block | {"config_groups": groups}})
        assert quant.name == "NVFP4"
        assert quant.layout_of("model.layers.3.mlp.experts.7.up_proj") == "NVFP4"
        assert quant.layout_of("model.layers.3.self_attn.q_proj") == "FP8"
        assert quant.layout_of("lm_head") == "BF16"


def test_modelopt_names_layers_one_by_one_and_ignores_by_wildcard() -> None:
    layers = {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    layers["model.layers.0.self_attn.q_proj"] = {"quant_algo": "FP8"}
    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    quant = parse_quantization({"quantization_config": block})
    assert quant.name == "NVFP4"
    assert [quant.layout_of(name) for name in (*layers, "lm_head")] == ["NVFP4ModelOpt", "FP8", "BF16"]
    legacy = from_legacy_modelopt({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*attn*"]}})
    quant = parse_quantization({"quantization_config": legacy})
    assert quant.layout_of("model.layers.0.self_attn.q_proj") == quant.layout_of("lm_head") == "BF16"
    assert quant.layout_of("model.layers.0.mlp.up_proj") == "NVFP4ModelOpt"


def v4_tensors(expert_dtype: str) -> dict[str, TensorInfo]:
    return {
        "layers.0.ffn.experts.0.w1.weight": TensorInfo(expert_dtype, (8, 16), 0, 128),
        "layers.0.attn.wq_a.scale": TensorInfo("F8_E8M0", (1, 1), 128, 129),
        "layers.0.attn.wq_a.weight": TensorInfo("F8_E4M3", (8, 16), 129, 257),
    }


@pytest.mark.parametrize(("dtype", "name"), [("I8", "MXFP4"), ("F8_E4M3", "FP8")])
def test_deepseek_v4_experts_are_what_their_tensors_are_whatever_the_config_says(dtype: str, name: str) -> None:
    config = {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}, "expert_dtype": "fp4"}
    quant = parse_quantization(config, tensors=v4_tensors(dtype))
    assert quant.name == name
    assert quant.layout_of("layers.0.attn.wq_a") == "FP8BlockV4"
    expected = "MXFP4V4" if name == "MXFP4" else "FP8BlockV4"
    assert quant.layout_of("layers.0.ffn.experts.0.w1") == expected
    assert parse_quantization(config).name == "MXFP4", "without headers, the config's word is taken"


def test_gpt_oss_packs_its_experts_only() -> None:
    quant = parse_quantization(
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    )
    assert quant.name == "MXFP4"
    assert quant.layout_of("model.layers.0.mlp.experts.gate_up_proj") == "MXFP4GptOss"
    assert quant.layout_of("model.layers.0.self_attn.q_proj") == "BF16"


def test_modules_to_not_convert_are_beginnings_or_ends_of_names() -> None:
    block = FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0", "mlp.gate"]}
    quant = parse_quantization({"quantization_config": block})
    assert not quant.is_quantized("model.layers.0.mlp.up_proj")
    assert not quant.is_quantized("model.layers.7.mlp.gate")
    assert quant.is_quantized("model.layers.7.mlp.gate_proj")
