"""The shipped cards against what is published about the models: parameters, bytes of files, bytes of the KV cache."""

from __future__ import annotations

import json

import pytest

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.cards import FOLDER, card_facts, card_names, find_card_facts, load_card, repositories
from orbit_runtime.model_info.families import describe
from orbit_runtime.model_info.weights import EXPERT

PUBLISHED = {
    # repository: (parameters without MTP and vision, of MTP, bytes of the files, KV bytes a token)
    "moonshotai/Kimi-K2.6": (1026.4e9, 0, 595.15e9, 70272),
    "deepseek-ai/DeepSeek-V4-Flash": (284.3e9, 6.6e9, 148.66 * 2**30, 3850),
    "deepseek-ai/DeepSeek-V4-Pro": (1573.0e9, 25.8e9, 864.7e9, 5511),
    # Their files hold the tied head again.
    "Qwen/Qwen3-0.6B": (751.6e6, 0, 1.5033e9, 114688),
    "Qwen/Qwen3-1.7B": (2.0317e9, 0, 4.0635e9, 114688),
    "Qwen/Qwen3-4B": (4.02e9, 0, 8.04e9, 147456),
    "Qwen/Qwen3-4B-FP8": (4.02e9, 0, 4.41e9, 147456),
    "Qwen/Qwen3-30B-A3B": (30.53e9, 0, 61.1e9, 98304),
    "Qwen/Qwen3-30B-A3B-FP8": (30.53e9, 0, 31.2e9, 98304),
    "meta-llama/Llama-3.1-8B": (8.03e9, 0, 16.06e9, 131072),
    "Qwen/Qwen3-235B-A22B": (235.09e9, 0, 470.2e9, 192512),
    "Qwen/Qwen3-235B-A22B-FP8": (235.09e9, 0, 236.5e9, 192512),
    "nvidia/Qwen3-235B-A22B-NVFP4": (235.09e9, 0, 134.1e9, 192512),
    "openai/gpt-oss-120b": (116.83e9, 0, 65.25e9, 36864),
    "zai-org/GLM-4.5": (352.8e9, 5.5e9, 716.7e9, 376832),
}


@pytest.mark.parametrize("repository", PUBLISHED)
def test_a_card_gives_the_published_sizes(repository: str) -> None:
    parameters, extra, size, kv = PUBLISHED[repository]
    facts = card_facts(repository)
    assert facts.architecture.num_parameters() == pytest.approx(parameters, rel=1e-3)
    assert facts.architecture.num_parameters("mtp") == pytest.approx(extra, rel=1e-2)
    assert facts.checkpoint_bytes == pytest.approx(size, rel=2e-3)
    assert facts.architecture.kv.bytes_per_token == pytest.approx(kv, rel=1e-3)


def test_every_card_names_its_source_and_agrees_with_the_published_bytes_it_quotes() -> None:
    for name in card_names():
        card = load_card(name)
        assert card["source"]
        published = card.get("published_bytes")
        for repository in card["repositories"] if published else ():
            assert card_facts(repository).checkpoint_bytes == pytest.approx(published, rel=1e-3), repository


def test_the_precision_is_that_of_the_routed_experts_where_a_checkpoint_is_mixed() -> None:
    precisions = {name: card_facts(name).precision for name in repositories()}
    assert precisions["deepseek-ai/DeepSeek-V4-Pro"] == "MXFP4"
    assert precisions["moonshotai/Kimi-K2.6"] == "INT4"
    assert precisions["nvidia/Qwen3-235B-A22B-NVFP4"] == "NVFP4"
    assert precisions["Qwen/Qwen3-4B-FP8"] == "FP8"
    assert precisions["Qwen/Qwen3-4B"] == "BF16"
    attention = [
        s for s in card_facts("deepseek-ai/DeepSeek-V4-Pro").weights if s.weight.name == "layers.5.attn.wq_b.weight"
    ]
    assert [s.format for s in attention] == ["FP8"]


def test_what_stays_in_bf16_stays_in_bf16() -> None:
    for repository in repositories():
        for stored in card_facts(repository).weights:
            if stored.weight.role in ("embedding", "head", "norm", "vision") or stored.weight.name.endswith(
                "gate.weight"
            ):
                assert stored.format == "BF16", stored.weight.name


def test_a_card_is_found_by_its_hub_address_in_any_case_and_with_a_revision() -> None:
    found = find_card_facts("hf://qwen/qwen3-4b-fp8@main")
    assert found is not None
    assert found.name == "Qwen/Qwen3-4B-FP8"
    assert find_card_facts("hf://someone/else") is None
    assert find_card_facts("runs/model") is None
    assert find_card_facts("s3://bucket/Qwen/Qwen3-4B") is None


def test_experts_of_a_layer_stand_once_with_their_number() -> None:
    weights = card_facts("moonshotai/Kimi-K2.6").architecture.weights
    experts = [w for w in weights if w.role == "routed_expert"]
    assert len(experts) == 60 * 3
    assert {w.count for w in experts} == {384}
    assert all(EXPERT in w.name for w in experts)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, "does not know models of type 'mamba'"),
        ({}, "does not know models of type None"),
        ({"model_type": "qwen3", "hidden_size": 64}, "has no 'vocab_size'"),
        ({"model_type": "qwen3", "hidden_size": "big"}, "hidden_size is 'big', not a whole number"),
        ({"model_type": "qwen3", "hidden_size": 8, "vocab_size": 8, "num_hidden_layers": []}, "is not consistent"),
    ],
)
def test_a_configuration_that_cannot_be_described_is_one_error(config: dict, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        describe(config)


def test_cards_are_plain_json_with_known_fields() -> None:
    for path in FOLDER.glob("*.json"):
        assert set(json.loads(path.read_text())) <= {"name", "source", "repositories", "config", "published_bytes"}
        assert json.loads(path.read_text())["name"] == path.stem
