"""How a model's passes run follows from what its code does; what nothing computes rightly is refused before training.

Every model is tiny, random, and made by transformers.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy, probe
from orbit_runtime.policy.attention import Mode
from orbit_runtime.policy.packed import Branch
from orbit_runtime.policy.probe import STATES, Behaviour
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.storage.cache import Cache
from tests.integration.killing import small_manifest
from tests.integration.tiny_models import SIZES, load_reference, reference_logprobs

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDING = {"num_hidden_layers": 4, "sliding_window": 6, "head_dim": 16}
LAST_FULL = {**SLIDING, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
ACCEPTED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2 with windows": {
        **SLIDING, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "mistral": {"sliding_window": 6},
    "ministral": LAST_FULL,
    "phi3": {"sliding_window": 6},
    "phi3 with longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "phi": {},
    "starcoder2": {"sliding_window": 6},
    "olmo2": {},
    "olmo3": LAST_FULL,
    "smollm3": {"num_hidden_layers": 4},
    "exaone4": LAST_FULL,
    "gemma3_text": {**LAST_FULL, "tie_word_embeddings": True},
    "glm4": {"head_dim": 16},
    "granite": {},
    "apertus": {},
    "seed_oss": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "persimmon": {},
    "llama with longrope": {"rope_parameters": LONGROPE},
}  # fmt: skip
"""Type, and what tells its models apart → settings. Sequences are longer than the windows."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
GEMMA4 = {
    **LAST_FULL, "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 128,
}  # fmt: skip
CHANGED = "sequences that share a row change each other, so more than attention connects their tokens"
PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (CHANGED, {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "diffllama": ("its layers do not call attention exactly once each", {}),
    "nemotron": ("NemotronAttention: its layers do not hand arguments of a pass to the attention", {"head_dim": 16}),
    "gemma4_text": ("a step from pages of keys and values is not what a pass over the whole sequence computes", GEMMA4),
}  # fmt: skip
"""Type → why sequences have a padded row each, settings."""
BESIDE_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid": (
        STATES,
        {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 96},
    ),
}
"""Type → why sequences are packed and tokens sampled from the model's own cache, settings."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("encoders: a token sees later ones", {}),
    "gemma3_text of both directions": (
        "its hidden states at a token depend on later tokens",
        {"use_bidirectional_attention": True, "head_dim": 16},
    ),
    "gpt2": ("its table of positions is shorter than 64 tokens", {"max_position_embeddings": 32}),
    "llama with dynamic rope": (
        "rotary embeddings of type dynamic depend on the longest sequence of a pass",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
}  # fmt: skip
"""Type → part of the message, settings."""


def make_model(folder: Path, name: str) -> Path:
    """A BF16 checkpoint with the tokenizer of the shipped model; the first word of `name` is its type."""
    settings = ACCEPTED[name] if name in ACCEPTED else (PADDED | BESIDE_STATES | REFUSED)[name][1]
    config = AutoConfig.for_model(name.split()[0], **copy.deepcopy(SIZES | settings))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in builtin_folder("tiny-adder", "BF16").iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder / path.name)
    return folder


def load(folder: Path, longest: int | None = 64) -> Policy:
    targets = {"phi": ("dense",), "persimmon": ("dense",), "phi3": ("o_proj",)}
    config = json.loads((folder / "config.json").read_text())
    return load_policy(
        folder,
        AdapterConfig("LoRA", targets.get(config["model_type"], ("q_proj",)), rank=2, alpha=4.0),
        longest=longest,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def meta_model(architecture: str, **settings: Any) -> Any:
    """A model without storage."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings))


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_model_in_which_only_attention_connects_tokens_is_what_transformers_is(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", name)
    policy, reference = load(folder), load_reference(folder)
    short, long = list(range(20, 30)), list(range(40, 80))
    with torch.no_grad():
        batch = policy.pack([Branch(0, long[:3], long[3:]), Branch(1, short[:1], short[1:])])
        found, _ = policy.logprobs(batch)
    expected = torch.cat([reference_logprobs(reference, long)[2:], reference_logprobs(reference, short)])
    assert torch.allclose(found, expected, atol=1e-5)
    assert policy.mode == Mode(scale=policy.mode.scale)


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        *((name, "padded", "have a padded row each") for name in PADDED),
        *((name, "packed", "are packed") for name in BESIDE_STATES),
    ],
)
def test_a_model_in_which_more_connects_tokens_says_how_its_rows_stand_and_why(
    name: str, rows: str, said: str, tmp_path: Path
) -> None:
    folder, why = make_model(tmp_path / "model", name), (PADDED | BESIDE_STATES)[name][0]
    mode = load(folder).mode
    assert (mode.rows, mode.decode, mode.why) == (rows, "cache", why)
    assert mode.text == f"sequences {said}, and tokens are sampled from the model's own cache: {why}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_wrong_or_crash_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", name)
    with pytest.raises(UnsupportedError, match=re.escape(REFUSED[name][0])) as refused:
        load(folder)
    assert refused.value.exit_code == 78
    assert "\n" not in refused.value.message


def write_manifest(folder: Path, model: Path, algorithm: str, target: str = "q_proj", longest: int = 64) -> Path:
    manifest = small_manifest(steps=1)
    spec = manifest["spec"]
    spec["model"] = {"uri": str(model), "maxSequenceLength": longest}
    spec["adapter"]["targets"] = [target]
    if algorithm == "SFT":
        spec["algorithm"] = {"type": "SFT"}
        spec["data"]["prompts"][0]["completionField"] = "answer"
        del spec["environment"], spec["training"]["miniBatchPrompts"]
    path = folder / "run.json"
    path.write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize("command", ["run", "sft", "eval", "serve"])
def test_every_command_refuses_it_before_it_trains_or_samples(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "bert")
    out = ["--out", str(tmp_path / "run")]
    asked = [str(write_manifest(tmp_path, model, "SFT" if command == "sft" else "GRPO")), *out]
    assert run_command([command, *(["--model", str(model)] if command == "serve" else asked)]) == 78
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert REFUSED["bert"][0] in said[0]
    assert not list((tmp_path / "run").glob("metrics.jsonl"))


@pytest.mark.parametrize("command", ["run", "sft", "eval"])
def test_every_command_says_how_the_passes_of_an_unusual_model_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "lfm2")
    manifest = write_manifest(tmp_path, model, "SFT" if command == "sft" else "GRPO", "out_proj")
    assert run_command([command, str(manifest), "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("sequences have a padded row each") == 1


def test_what_is_served_says_it_too(tmp_path: Path) -> None:
    notes: list[str] = []
    model = str(make_model(tmp_path / "model", "lfm2"))
    opened = open_models(ServeRequest(model=model), ServeLimits(sequence=64), notes.append)
    opened.closing.close()
    assert [note for note in notes if note.startswith("sequences have a padded row each")]


def test_rotary_tables_that_change_with_length_are_refused_where_sequences_may_be_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "phi3 with longrope")
    out = ["--out", str(tmp_path / "run")]
    for algorithm, command in (("SFT", "sft"), ("GRPO", "run")):
        asked = [command, str(write_manifest(tmp_path, model, algorithm, "qkv_proj", longest=65)), *out]
        assert run_command(asked) == 78
        told = capsys.readouterr().err
        assert "of more than 64 tokens, and 65 are allowed" in told
        assert "set spec.model.maxSequenceLength to 64 or less" in told
    assert run_command(["sft", str(write_manifest(tmp_path, model, "SFT", "qkv_proj")), *out]) == 0
    assert "the frozen base changed" not in capsys.readouterr().out


def test_the_models_own_length_counts_where_no_other_is_given(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama with longrope")
    with pytest.raises(UnsupportedError, match="of more than 64 tokens, and 512 are allowed"):
        load(folder, longest=None)


def test_the_copy_of_a_large_model_is_small_and_has_every_kind_of_its_layers() -> None:
    """The probe costs the same at any size."""
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    layer_types = [*["full_attention"] * 30, *["sliding_attention"] * 10]
    model = meta_model(
        "qwen2", **large, num_hidden_layers=40, layer_types=layer_types, use_sliding_window=True, sliding_window=4096
    )
    config = probe._small_copy(model)
    plain, ours = (probe._build(type(model), config, attention) for attention in ("eager", "orbit"))
    assert [layer.self_attn.sliding_window for layer in ours.model.layers] == [None, 4]
    assert sum(parameter.numel() for parameter in ours.parameters()) < 3_000_000
    weights = dict(plain.named_parameters())
    assert all(torch.equal(each, weights[name]) for name, each in ours.named_parameters())


def test_a_position_far_away_shows_what_depends_on_the_length_of_a_pass() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = meta_model("qwen2", **SIZES, rope_parameters=rope)
    assert probe.measure(model, 512).mode == Mode()
    far = probe.measure(model, 4096).mode
    assert (far.rows, far.decode) == ("single", "whole")
    assert far.why == "a sequence's hidden states depend on the longest sequence of the pass"


def test_measuring_touches_no_global_generator() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert probe.measure(meta_model("mistral", **SIZES), 64) == Behaviour()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_answer_is_kept_by_configuration_and_length(cache: Path) -> None:
    model, kept = meta_model("mistral", **SIZES), Cache(cache)
    assert probe.cached_behaviour(model, {"a": 1}, 64, kept).mode.rows == "packed"
    (file,) = (cache / "listings").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rows": "padded"}))
    assert probe.cached_behaviour(model, {"a": 1}, 64, kept).mode.rows == "padded"
    assert probe.cached_behaviour(model, {"a": 2}, 64, kept).mode.rows == "packed"
    assert probe.cached_behaviour(model, {"a": 1}, 65, kept).mode.rows == "packed"


def test_families_that_the_tests_prove_are_not_measured(cache: Path) -> None:
    policy = load_policy(builtin_folder("tiny-adder", "INT4"), AdapterConfig("LoRA", ("q_proj",), rank=2, alpha=4.0))
    assert policy.mode == Mode()
    assert not cache.exists()
