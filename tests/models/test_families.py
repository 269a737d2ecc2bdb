"""Every family in every format, each with an adapter: log-probs of transformers, three steps, published and read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import ManifestError, ModelError
from orbit_runtime.model_info.families import describe
from orbit_runtime.model_info.quantization import PRECISIONS
from orbit_runtime.planner.adapter_size import adapter_size
from orbit_runtime.planner.job import Machine, build_job
from orbit_runtime.planner.support.combinations import FAMILY_NAMES, FORMATS, Combination, find_support
from orbit_runtime.policy import load_policy
from orbit_runtime.spec import OrbitRun
from tests.integration.tiny_families import CONFIGS, make_family
from tests.models.causal_types import make_type
from tests.models.family_matrix import Case, adapter_of, all_cases, check_case, pairwise

RUN = {
    "apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "a"},
    "spec": {
        "model": {"uri": "somewhere"}, "data": {"prompts": [{"uri": "p.jsonl"}]},
        "environment": {"rewards": [{"name": "r", "type": "ExactMatch"}]}, "training": {"steps": 1},
    },
}  # fmt: skip
JOB = build_job(OrbitRun.model_validate(RUN), Machine(None))


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_a_combination_has_transformers_log_probs_trains_and_loads_back(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_the_selection_has_every_pair_of_choices() -> None:
    chosen, every = pairwise(), all_cases()
    assert {pair for case in chosen for pair in case.pairs()} == {pair for case in every for pair in case.pairs()}
    assert len(chosen) < len(every) / 4


def test_the_table_of_support_names_what_is_compared_here() -> None:
    compared = {(case.family, PRECISIONS[case.layout]) for case in all_cases()}
    asked = [Combination(form, family, "LoRA", "None", "Torch", "Torch") for family in FAMILY_NAMES for form in FORMATS]
    working = {(each.family, each.format) for each in asked if find_support(each).state == "works"}
    assert working == {each for each in compared if each[0] != "kimi_k25"}


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"kimi_k25"}))
def test_the_planner_counts_the_parameters_that_are_made(family: str, tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, family, "BF16")
    described = describe(json.loads((packed / "config.json").read_text()))
    for case in all_cases():
        if (case.family, case.layout) != (family, "BF16"):
            continue
        policy = load_policy(packed, adapter_of(case))
        adapter = JOB.spec.adapter.model_copy(update={"type": case.adapter})
        spec = JOB.spec.model_copy(update={"adapter": adapter})
        job = replace(JOB, spec=spec, rank=4 if case.adapter == "LoRA" else 16, experts=case.experts)
        assert adapter_size(described, job).total == policy.injected.report.trainable_parameters, str(case)


def test_the_layer_that_engines_fold_away_is_no_target(tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, "deepseek_v3", "BF16")
    with pytest.raises(ManifestError, match="kv_b_proj is not to be adapted: engines fold") as caught:
        load_policy(packed, AdapterConfig("LoRA", ("o_proj", "kv_b_proj"), rank=4))
    assert caught.value.where == "spec.adapter.targets[1]"


def test_compressors_of_deepseek_v4_are_no_targets_whatever_their_layers_are_called(tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, "deepseek_v4", "BF16")
    policy = load_policy(packed, AdapterConfig("LoRA", ("kv_proj", "gate_proj", "q_b_proj"), rank=4))
    assert not [name for name in policy.injected.layers if "compressor" in name]
    assert {name.split(".", 3)[-1] for name in policy.injected.layers} == {
        "self_attn.kv_proj", "self_attn.q_b_proj", "mlp.experts.gate_proj", "mlp.shared_experts.gate_proj",
    }  # fmt: skip


def test_experts_of_two_formats_in_one_layer_are_refused_by_name(tmp_path: Path) -> None:
    packed, _ = make_family(tmp_path, "qwen3_moe", "INT4")
    path = packed / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"].append("model.layers.1.mlp.experts.3.up_proj")
    path.write_text(json.dumps(config))
    with pytest.raises(
        ModelError,
        match=r"experts\.3\.up_proj\.weight_packed: the tensor is I32, but .* leaves .*experts\.3\.up_proj in BF16",
    ):
        load_policy(packed, AdapterConfig("LoRA", ("o_proj",), rank=4))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    packed, _ = make_family(tmp_path, "glm4_moe", "INT4")
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.down_proj.weight_scale"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.5\.down_proj\.weight_scale"):
        load_policy(packed, AdapterConfig("LoRA", ("o_proj",), rank=4))


def test_a_missing_expert_of_a_family_without_a_row_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_type(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj of 3 experts in model\.layers\.1\.mlp\.experts, config"):
        load_policy(folder, AdapterConfig("LoRA", ("o_proj",), rank=4))
