"""What the table of served adapters says of SGLang, read from the source of the version that is installed."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from orbit_runtime.model_info.weights import SGLANG_TARGETS
from orbit_runtime.planner.support.combinations import PINNED
from orbit_runtime.planner.support.kernels import (
    DEEPGEMM_VARIABLE,
    FP8_VARIABLE,
    LORA_RUNNERS,
    MXFP4_FLAG,
    NVFP4_FLAG,
)
from orbit_runtime.rollout.sglang_server import deterministic_attention
from orbit_runtime.sglang_plugin import deepseek_v4
from orbit_runtime.sglang_plugin.mxfp4_experts import PACKED_AS
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

ROOT = Path(__file__).parents[2]
QUANTIZATION = "srt/layers/quantization"
SCHEMES = f"{QUANTIZATION}/compressed_tensors/schemes/compressed_tensors"
CLASSES = {
    "BF16": (f"{QUANTIZATION}/unquant.py", "UnquantizedFusedMoEMethod"),
    "FP8Block": (f"{QUANTIZATION}/fp8.py", "Fp8MoEMethod"),
    "INT4": (f"{SCHEMES}_wNa16_moe.py", "CompressedTensorsWNA16MoE"),
    "INT4Asymmetric": (f"{SCHEMES}_wNa16_moe.py", "CompressedTensorsWNA16MoE"),
    "NVFP4ModelOpt": (f"{QUANTIZATION}/modelopt_quant.py", "ModelOptNvFp4FusedMoEMethod"),
    "FP8": (f"{SCHEMES}_w8a8_fp8_moe.py", "CompressedTensorsW8A8Fp8MoE"),
    "NVFP4": (f"{SCHEMES}_w4a4_nvfp4_moe.py", "CompressedTensorsW4A4Nvfp4MoE"),
    "GPTQ": (f"{QUANTIZATION}/gptq/gptq.py", "GPTQMarlinMoEMethod"),
    "AWQ": (f"{QUANTIZATION}/awq/awq.py", "AWQMoEMethod"),
    "MXFP4GptOss": (f"{QUANTIZATION}/mxfp4.py", "Mxfp4MoEMethod"),
    "FP8BlockV4": (f"{QUANTIZATION}/fp8.py", "Fp8MoEMethod"),
}
"""Layout of experts → the class that multiplies by them on a GPU."""
V4_MODEL = "srt/models/deepseek_v4.py"


@pytest.fixture(scope="module")
def package() -> Path:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    ask = (
        "import importlib.util as u, importlib.metadata as m; print(u.find_spec('sglang').origin, m.version('sglang'))"
    )
    answer = subprocess.run([os.environ[PYTHON_VARIABLE], "-c", ask], capture_output=True, text=True, check=True)
    origin, version = answer.stdout.split()
    assert version == PINNED["sglang"]
    return Path(origin).parent


def test_gpt_oss_is_deterministic_on_a_b200_with_the_attention_that_it_is_told_to_use(package: Path) -> None:
    """Its own choice is none of those that are; the one that a run asks for is, and serves gpt-oss."""
    told = deterministic_attention("gpt_oss", (10, 0))
    (deterministic,) = assigned(package / "srt/arg_groups/choices.py", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES")
    assert told in deterministic
    assert "trtllm_mha" not in deterministic
    chosen = (package / "srt/arg_groups/model_overrides/gpt_oss.py").read_text()
    assert 'is_sm100:\n            overrides["attention_backend"] = "trtllm_mha"' in chosen
    served = [each for each in assigned(package / "srt/arg_groups/model_hook.py", "supported_backends") if told in each]
    assert any("trtllm_mha" in each for each in served)


def test_the_guide_says_what_flashinfer_downloads_for_blackwell_and_how_to_bring_it(package: Path) -> None:
    """The attention that SGLang chooses there comes as files that no wheel holds: without them no server comes up."""
    flashinfer = package.parent / "flashinfer"
    (installed,) = package.parent.glob("flashinfer_python-*.dist-info")
    version = installed.stem.rpartition("-")[2]
    guide, pins, image = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/guides/sglang.md", "images/constraints/node.txt", "Dockerfile")
    )
    assert f"FlashInfer {version} downloads" in " ".join(guide.split())
    assert f"flashinfer-python=={version}" in pins
    assert "get_artifact" in (flashinfer / "jit/attention/modules.py").read_text()
    reads = {"FLASHINFER_CUBIN_DIR": "jit/env.py", "FLASHINFER_CUBINS_REPOSITORY": "jit/cubin_loader.py"}
    for variable, file in reads.items():
        assert f'"{variable}"' in (flashinfer / file).read_text()
        assert variable in guide
    assert '@cli.command("download-cubin")' in (flashinfer / "__main__.py").read_text()
    assert "-m flashinfer download-cubin" in guide
    assert "-m flashinfer download-cubin" in image


def assigned(file: Path, name: str) -> list[list[str]]:
    """Every list that is assigned to this name."""
    found = [each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.Assign)]
    return [
        ast.literal_eval(each.value)
        for each in found
        if isinstance(each.targets[0], ast.Name) and each.targets[0].id == name and isinstance(each.value, ast.List)
    ]


@pytest.mark.parametrize("layout", CLASSES)
def test_lora_on_experts_is_served_where_their_class_tells_how_they_are_packed(package: Path, layout: str) -> None:
    file, name = CLASSES[layout]
    tree = ast.parse((package / file).read_text())
    (found,) = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name]
    methods = {each.name for each in found.body if isinstance(each, ast.FunctionDef)}
    runners = {"triton": "get_triton_quant_info", "marlin": "get_marlin_quant_info"}
    if layout in LORA_RUNNERS:
        assert runners[LORA_RUNNERS[layout]] in methods
    else:
        assert not methods & set(runners.values())


def test_every_layout_with_a_runner_is_looked_up() -> None:
    """DeepSeek-V4's FP4 has none of SGLang's own: `sglang_plugin.mxfp4_experts` stands there."""
    assert LORA_RUNNERS.keys() - CLASSES.keys() == {"MXFP4V4"}


@pytest.fixture(scope="module")
def attention(package: Path) -> tuple[ast.ClassDef, ast.ClassDef]:
    """DeepSeek-V4's, the base of all its kinds and the one of whole layers."""
    return find_class(package, V4_MODEL, "MqaAttentionBase"), find_class(package, V4_MODEL, "MQALayer")


def test_deepseek_v4s_attention_has_the_modules_that_the_plug_in_wraps(attention: tuple[ast.ClassDef, ...]) -> None:
    made = {target: call for target, call in assignments(attention[0]).items() if isinstance(call, ast.Call)}
    kinds = {name: getattr(made[f"self.{name}"].func, "id", "") for name in deepseek_v4.PROJECTIONS}
    assert kinds == {"wqkv_a": "ReplicatedLinear", "wq_b": "ColumnParallelLinear", "wo_b": "RowParallelLinear"}


def test_deepseek_v4s_attention_reads_nothing_of_its_wrapped_modules_but_what_they_have(
    attention: tuple[ast.ClassDef, ...], package: Path
) -> None:
    """A wrapper of SGLang's has `weight`, `bias` and `reduce_results`; the plug-in gives `wq_b` its `quant_method`.

    What stands here is read on other hardware, with expert packs, with several ranks outside CUDA, or by V4.1 alone.
    """
    reads = {
        (node.value.attr, node.attr)
        for part in attention
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in deepseek_v4.PROJECTIONS
    }
    mega_attention = {("wqkv_a", "deepgemm_mxfp8_input"), ("wo_b", "deepgemm_mxfp8_input"), ("wo_b", "weight")}
    mega_attention |= {("wq_b", "weight"), ("wq_b", "weight_scale_inv")}
    elsewhere = {("wo_b", "reduce_results"), ("wo_b", "use_decode_attn_tp")}
    assert reads == {("wq_b", "quant_method")} | mega_attention | elsewhere
    assert "self.is_dsv41\n            and _is_cuda" in (package / V4_MODEL).read_text()


def test_deepseek_v4s_attention_gets_quantised_inputs_on_other_hardware_and_in_v41_alone(package: Path) -> None:
    """Else a wrapper would be handed a tuple where its adapter needs tokens."""
    body = ast.unparse(find_function(find_class(package, V4_MODEL, "DeepseekV4DecoderLayerBase"), "_input_norm"))
    assert body.count("return") == 2
    assert "if _is_hip:\n        return _hip.input_norm" in body
    assert "return (self.input_layernorm(hidden_states), None)" in body
    normed = ast.unparse(find_function(find_class(package, V4_MODEL, "MQALayer"), "_normalize_q_lora"))
    assert "_is_cuda and self.is_dsv41" in normed
    assert normed.rstrip().endswith("return (q, q)")


def test_sglangs_lora_has_no_names_for_deepseek_v4_and_those_that_stand_in(package: Path) -> None:
    known = ast.literal_eval(
        ast.unparse(assignments(parse(package, "srt/utils/common.py"))["SUPPORTED_LORA_TARGET_MODULES"])
    )
    assert not SGLANG_TARGETS.keys() & set(known)
    assert {*SGLANG_TARGETS.values(), "q_a_proj", "q_b_proj"} <= set(known)
    names = assignments(parse(package, "srt/lora/utils.py"))
    rows = ast.literal_eval(ast.unparse(names["ROW_PARALLELISM_LINEAR_LORA_NAMES"]))
    assert "o_proj" in rows
    assert "'q_b_proj', 'kv_b_proj', 'o_proj'" in ast.unparse(names["ATTN_TP_LORA_MODULE_NAMES"])
    assert "'fused_qkv_a_proj_with_mqa'" in ast.unparse(names["REPLICATED_LINEAR_LORA_NAMES"])
    model = find_class(package, V4_MODEL, "DeepseekV4ForCausalLM")
    own = {node.name for node in model.body if isinstance(node, ast.FunctionDef)}
    assert not own & {"get_hidden_dim", "should_apply_lora", "get_stacked_multiply", "supported_lora_modules"}


def test_marlins_pass_over_fp4_is_what_the_plug_in_builds_on(package: Path) -> None:
    method = find_class(package, f"{QUANTIZATION}/mxfp4_marlin_moe.py", PACKED_AS)
    assert "fuse_routed_scaling_factor_in_topk = True" in ast.unparse(method)
    assert "build_marlin_moe_quant_info" in {
        node.name
        for node in parse(package, f"{QUANTIZATION}/mxfp4_marlin_moe.py").body
        if isinstance(node, ast.FunctionDef)
    }
    assert "is_sm90 and (not get_platform().is_sm120)" in ast.unparse(method)
    core = find_class(package, "srt/lora/lora_moe_runner_marlin.py", "MarlinLoraRunnerCore")
    steps = ast.unparse(find_function(core, "run_from_dispatch"))
    first, cut, last = (steps.index(step) for step in ("hooks.after_gate_up(", "silu_and_mul(", "hooks.after_down("))
    assert first < cut < last
    assert "swiglu_limit" not in steps
    wrapper = find_class(package, "srt/lora/layers.py", "FusedMoEWithLoRA")
    assert [each.arg for each in find_function(wrapper, "_forward_with_lora").args.args][1:] == [
        "hidden_states", "topk_output", "lora_info",
    ]  # fmt: skip
    hooks = find_class(package, "srt/lora/lora_moe_runners.py", "LoRAHooks")
    assert {"after_gate_up", "after_down"} <= {
        getattr(each.target, "id", "") for each in hooks.body if isinstance(each, ast.AnnAssign)
    }


def parse(package: Path, file: str) -> ast.Module:
    return ast.parse((package / file).read_text())


def find_class(package: Path, file: str, name: str) -> ast.ClassDef:
    (found,) = [each for each in parse(package, file).body if isinstance(each, ast.ClassDef) and each.name == name]
    return found


def find_function(part: ast.ClassDef, name: str) -> ast.FunctionDef:
    (found,) = [each for each in part.body if isinstance(each, ast.FunctionDef) and each.name == name]
    return found


def assignments(part: ast.AST) -> dict[str, ast.expr]:
    """Name as it stands there → the last value it is given."""
    return {
        ast.unparse(target): node.value
        for node in ast.walk(part)
        if isinstance(node, ast.Assign)
        for target in node.targets
    }


def test_the_kernels_that_read_requests_segments_know_experts(package: Path) -> None:
    """Another back end than the one that is asked for could leave adapters of experts out."""
    assert "_add_moe_lora_info" in (package / "srt/lora/backend/triton_backend.py").read_text()


def test_kernels_that_round_nothing_are_asked_for_by_names_that_sglang_has(package: Path) -> None:
    fields = (package / "srt/arg_groups/fields/exec_.py").read_text()
    assert f'cli_name="{NVFP4_FLAG}"' in fields
    assert f'{MXFP4_FLAG.removeprefix("--").replace("-", "_")}: A[\n        Literal["default", "bf16"' in fields
    choices = package / "srt/arg_groups/choices.py"
    for name in ("FP4_GEMM_RUNNER_BACKEND_CHOICES", "MOE_RUNNER_BACKEND_CHOICES"):
        (listed,) = assigned(choices, name)
        assert "marlin" in listed
    asking = {
        name for name in ("fp8.py", "modelopt_quant.py", "compressed_tensors/compressed_tensors.py")
        if FP8_VARIABLE in (package / QUANTIZATION / name).read_text()
    }  # fmt: skip
    assert asking == {"fp8.py", "modelopt_quant.py"}, "who wrote the FP8 decides"


def test_block_wise_fp8_is_quantised_anew_for_deepgemm_alone(package: Path) -> None:
    configured = (package / "srt/layers/deep_gemm_wrapper/configurer.py").read_text()
    assert f"if not envs.{DEEPGEMM_VARIABLE}.get():\n        return False" in configured
    tree = ast.parse((package / "srt/model_loader/utils.py").read_text())
    (found,) = [
        each for each in tree.body
        if isinstance(each, ast.FunctionDef) and each.name == "should_deepgemm_weight_requant_ue8m0"
    ]  # fmt: skip
    assert "not (deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM and deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0" in ast.unparse(found)
