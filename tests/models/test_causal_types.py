"""Every causal type that transformers builds small: what Orbit computes is what transformers computes, in training and
while it samples, or the type is refused before anything trains."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon_h1
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import Selection
from orbit_runtime.checkpoints.inspection import inspect_headers
from orbit_runtime.cli.main import run_command
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.loop import evaluate
from orbit_runtime.model_info.checkpoint import folder_facts, folder_headers
from orbit_runtime.model_info.families import FAMILIES
from orbit_runtime.model_info.module_tree import check_type, shipped_types
from orbit_runtime.model_info.settings import parse_settings
from orbit_runtime.planner.job import Machine
from orbit_runtime.planner.verdict import judge
from orbit_runtime.policy import Policy, load_policy, modules
from orbit_runtime.policy.attention import NO_TOWER
from orbit_runtime.policy.load import is_router
from orbit_runtime.policy.modules import FusedRMSNorm, keep_stream_fp32
from orbit_runtime.policy.packed import Branch, build_packed
from orbit_runtime.policy.recurrent import Chunks, build_chunks, delta_rule, state_space
from orbit_runtime.policy.whole import load_whole
from orbit_runtime.policy.whole_rows import OwnRows
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.cache import KVCache
from orbit_runtime.rollout.requests import sample
from orbit_runtime.serve.checkpoints import compare_weights
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.spec import OrbitRun
from orbit_runtime.types import Request, Sampling
from tests.architecture.test_light_start import light
from tests.integration.engine_inputs import random_adapter
from tests.integration.killing import small_manifest
from tests.integration.tiny_models import SIZES, load_reference, reference_logprobs
from tests.models.causal_types import LEFT_OUT, TYPES, VISION, make_type
from tests.models.family_matrix import tokens_of
from tools.make_type_records import make_type_record

SHORT = (
    "qwen2", "gpt2", "gemma2", "mixtral", "granite", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h",
    "qwen3_next", "glm_moe_dsa", "diffllama", "opt", "falcon_mamba",
)  # fmt: skip
"""One type of each kind; the others are long."""
EACH = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in TYPES]
PROMPTS = [tokens_of(count, count) for count in (3, 11, 5)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", EACH)
def test_log_probs_are_those_of_each_sequence_alone_and_those_that_were_sampled(name: str, tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", name)
    reference = load_reference(folder)
    policy = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=64)
    print(f"\n{name:<20} {policy.mode.rows:<8} {policy.mode.decode:<8} {len(policy.injected.layers)} linears")
    short, long = tokens_of(10, 1), tokens_of(40, 2)
    with torch.no_grad():
        branches = [Branch(0, long[:3], long[3:]), Branch(0, long[:3], short), Branch(1, short[:1], short[1:])]
        found, _ = policy.logprobs(policy.pack(branches))
    expected = [
        reference_logprobs(reference, long)[2:],
        reference_logprobs(reference, [*long[:3], *short])[2:],
        reference_logprobs(reference, short),
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)
    engine = TorchEngine(policy, ChatTokenizer(folder), max_running_requests=4)
    engine.load_adapter("policy-v1", adapter := random_adapter(policy, 1))
    # Rows of both kinds side by side, more requests than rows, so that rows move and leave things behind.
    requests = [
        Request(index, index, tuple(PROMPTS[index % 3]), Sampling(max_new_tokens=4 + 3 * (index % 3)), each)
        for index, each in enumerate([None, "policy-v1", None, "policy-v1", None, None])
    ]
    answers = list(sample(engine, requests))
    assert len(answers) == len(requests)
    for answer in answers:
        request = requests[answer.request_id]
        prompt = len(request.prompt_ids_T)
        if request.adapter is None:
            expected_T = reference_logprobs(reference, [*request.prompt_ids_T, *answer.token_ids_T])[prompt - 1 :]
        else:
            with torch.no_grad(), policy.injected.selection.use("policy-v1"):
                packed = policy.pack([Branch(0, request.prompt_ids_T, answer.token_ids_T)])
                expected_T = policy.logprobs(packed)[0]
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected_T, rtol=0, atol=1e-5)
    assert adapter.files
    check_plan(folder, policy)
    check_cache(folder, policy)


def check_cache(folder: Path, policy: Policy) -> None:
    """The plan counts what the engine keeps of a sequence, in fp32."""
    if policy.mode.decode == "whole":
        return
    engine = TorchEngine(policy, ChatTokenizer(folder), max_running_requests=1)
    running = sample(engine, [Request(0, 0, tuple(tokens_of(20, 1)), Sampling(max_new_tokens=4), None)])
    next(running)
    cache = engine._decoding._cache
    per_token = state = 0
    if isinstance(cache, KVCache):
        per_token = cache.block[:, :, 0, :, 0].nbytes
    else:
        for layer in cache._cache.layers:
            for name in ("keys", "values", "indexer_keys"):
                held = getattr(layer, name, None)
                per_token += 0 if held is None or not held.numel() else held[0, ..., 0, :].nbytes
            for name in ("conv_states", "recurrent_states"):
                state += sum(each[0].nbytes for each in getattr(layer, name, {}).values() if each is not None)
    kv = folder_facts(folder).architecture.kv
    assert per_token == 2 * (kv.bytes_per_token if kv.own_bytes_per_token is None else kv.own_bytes_per_token)
    assert state == kv.state_bytes
    running.close()
    engine.close()


@pytest.mark.parametrize("name", EACH)
def test_layers_add_in_fp32_where_they_multiply_in_bf16(name: str) -> None:
    name = VISION[name][0] if name in VISION else name
    config = AutoConfig.for_model(name, **copy.deepcopy(SIZES | TYPES[name]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = torch.tensor([tokens_of(12, 1)])
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits.log_softmax(-1)
    keep_stream_fp32(model.to(torch.bfloat16), torch.bfloat16)
    found = model(tokens, use_cache=False).logits.float().log_softmax(-1)
    found.sum().backward()
    assert float((found - expected).abs().mean()) < 0.02


def check_plan(folder: Path, policy: Policy) -> None:
    """`orbit plan` and `orbit inspect` say of the checkpoint what was loaded of it."""
    facts, found = folder_facts(folder), inspect_headers(folder_headers(folder))
    manifest = small_manifest(steps=1)
    manifest["spec"]["model"] = {"uri": str(folder), "maxSequenceLength": 64}
    manifest["spec"]["adapter"]["lora"] = {"rank": 2}
    verdict = judge(OrbitRun.model_validate(manifest, by_name=False), facts, Machine(None, host_bytes=1 << 34))
    assert (verdict.accepted, verdict.problem) == (True, None)
    assert verdict.plan is not None
    assert verdict.plan.adapter.total == policy.injected.report.trainable_parameters
    assert set(policy.injected.config.targets) <= set(found.targets)
    assert not any(is_router(name) for name in policy.injected.layers)
    assert facts.architecture.passes == (policy.mode.text or "packed")
    assert not facts.unknown
    head, embedding = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    assert found.tied_head == torch.equal(head.packed.qdata.float(), embedding.weight.float())
    assert policy.injected.report.passes.startswith(NO_TOWER) == (facts.architecture.family in VISION)
    assert {verdict.state for verdict in found.verdicts[:2]} == {"works"}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["GRPO", "SFT"])
@pytest.mark.parametrize("name", TYPES)
def test_two_steps_train(name: str, algorithm: str, tmp_path: Path) -> None:
    manifest = small_manifest(steps=2)
    spec = manifest["spec"]
    spec["model"] = {"uri": str(make_type(tmp_path / "model", name)), "maxSequenceLength": 64}
    spec["adapter"]["lora"] = {"rank": 2}
    if algorithm == "SFT":
        spec["algorithm"] = {"type": "SFT"}
        spec["data"]["prompts"][0] |= {"completionField": "answer"}
        del spec["environment"], spec["training"]["miniBatchPrompts"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(manifest))
    command = "sft" if algorithm == "SFT" else "run"
    assert run_command([command, str(file), "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] >= 0.0 for row in rows)
    if algorithm == "GRPO":
        assert all(row["parity_max"] < 1e-4 for row in rows)


def test_every_causal_type_of_transformers_is_known_or_refused_by_name() -> None:
    left_out = {name: why for why, names in LEFT_OUT.items() for name in names.split()}
    assert not left_out.keys() & (TYPES.keys() | FAMILIES.keys())
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= {*left_out, *TYPES, *FAMILIES}
    assert {name for name, record in shipped_types().items() if "roles" in record} == TYPES.keys() - FAMILIES.keys()
    for name, why in left_out.items():
        with pytest.raises(UnsupportedError, match=f"models of type {name} cannot be used here: {why}") as caught:
            check_type({"model_type": name}, "config.json")
        assert "\n" not in caught.value.message


def test_the_usual_sizes_of_no_type_are_taken_for_damage() -> None:
    for name in TYPES:
        parse_settings(AutoConfig.for_model(name).to_json_string(use_diff=False).encode(), name)


def test_no_default_target_is_a_router() -> None:
    for kind, record in shipped_types().items():
        for name, role in record.get("roles", {}).items():
            if {"router", "gate", "shared_expert_gate"} & {*name.split(".")}:
                assert role.split()[0] == "router", (kind, name)
                assert not {*role.split()[1:]} & {*record["targets"]}, (kind, name)


WHOLE = {"minimax": "MiniMax uses cache of its own and is not compatible"}
"""Types that are sampled from passes over the whole sequence; none has a pass for each sequence.

MiniMax: its checkpoints hold the decays of linear attention as tables, rounded to BF16. A pass multiplies blocks of
tokens by these tables, a step from a state only by `exp(-slope)`: another function (see the test below).
"""


def test_every_type_that_is_not_packed_says_why_and_few_have_whole_passes() -> None:
    passes = {name: record["passes"] for name, record in shipped_types().items() if "passes" in record}
    told = {name: each.partition(": ") for name, each in passes.items() if each != "packed"}
    states = {name for name, (how, _, _) in told.items() if "sequences are packed" in how}
    assert states == {
        "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
        "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h",
    }  # fmt: skip
    assert all("a padded row each" in how and why for name, (how, _, why) in told.items() if name not in states)
    whole = {name: why for name, (how, _, why) in told.items() if "passes over the whole sequence" in how}
    assert whole.keys() == WHOLE.keys()
    assert all(WHOLE[name] in why for name, why in whole.items())


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.float32, 0.0, 1e-5), (torch.bfloat16, 1e-4, 1e-2)])
def test_minimax_has_another_step_than_pass_where_its_decays_are_rounded(
    dtype: torch.dtype, low: float, high: float
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("minimax", **copy.deepcopy(SIZES | TYPES["minimax"]))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.05)
    for module in model.modules():
        for name, table in list(module.named_buffers(recurse=False)):
            if "decay" in name:
                setattr(module, name, table.to(dtype).float())
    tokens, cache = torch.tensor([tokens_of(40, 1)]), MiniMaxCache()
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits.log_softmax(-1)
        model(tokens[:, :11], past_key_values=cache, use_cache=True)
        steps = [
            model(tokens[:, at : at + 1], position_ids=torch.tensor([[at]]), past_key_values=cache, use_cache=True)
            for at in range(11, 40)
        ]
    found = torch.cat([each.logits for each in steps], 1).log_softmax(-1)
    assert low <= float((found - expected[:, 11:]).abs().max()) < high


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3_next", "gemma3"])
def test_a_shipped_record_is_what_transformers_says(name: str, tmp_path: Path) -> None:
    assert make_type_record(tmp_path, name) == shipped_types()[name]


REFUSED = ["bert", "xlstm", "fuyu", "dbrx", "newest", "blip"]
"""Refused by name, and types that transformers does not know, or builds no causal model of."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_cannot_be_used_is_refused_by_every_command_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = make_type(tmp_path / "model", "qwen2"), write_manifest(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": name}))
    for command in (["validate"], ["plan"], ["run", "--out", str(tmp_path / "run")]):
        assert run_command([command[0], str(file), *command[1:]]) == 78, command
        said = [line for line in capsys.readouterr().err.splitlines() if "cannot be used here" in line]
        assert len(said) == 1
        assert f"models of type {name} cannot be used here" in said[0]
    assert run_command(["inspect", str(model)]) == 0
    assert f"models of type {name} cannot be used here" in capsys.readouterr().out


def write_manifest(folder: Path) -> Path:
    manifest = small_manifest(steps=1)
    manifest["spec"]["model"] = {"uri": str(folder / "model"), "maxSequenceLength": 64}
    manifest["spec"]["adapter"]["lora"] = {"rank": 2}
    file = folder / "run.json"
    file.write_text(json.dumps(manifest))
    return file


def test_without_torch_a_shipped_type_is_planned_and_any_other_is_unknown(tmp_path: Path) -> None:
    model, file = make_type(tmp_path / "model", "mixtral"), write_manifest(tmp_path)
    for command in (["validate", str(file)], ["plan", str(file)], ["inspect", str(model)]):
        assert light(tmp_path, *command)[0] == 0
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "newest"}))
    code, said = light(tmp_path, "plan", str(file))
    assert (code, "unknown: nothing here says" in said, "fits" in said) == (78, True, False), said
    code, said = light(tmp_path, "validate", str(file))
    assert (code, "not checked, see `orbit plan`: unknown" in said) == (0, True), said


@pytest.mark.parametrize("rank", [16, None])
def test_a_rank_that_is_not_in_the_manifest_is_not_blamed(
    rank: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_type(tmp_path / "model", "qwen3", head_dim=8, num_key_value_heads=1)
    file = write_manifest(tmp_path)
    manifest = json.loads(file.read_text())
    manifest["spec"]["adapter"] = {"type": "LoRA", "targets": ["k_proj"]} | ({"lora": {"rank": rank}} if rank else {})
    file.write_text(json.dumps(manifest))
    for command in (["validate"], ["run", "--out", str(tmp_path / "run")]):
        assert run_command([command[0], str(file), *command[1:]]) == 64
        said = capsys.readouterr().err
        blamed = "spec.adapter.lora.rank: " if rank else "spec.model.uri: "
        assert blamed + "rank 16 is more than model.layers.0.self_attn.k_proj has, which is [8, 64]" in said, said
        assert "write at most 8 in spec.adapter.lora.rank" in said, said


def test_other_names_of_tensors_are_asked_of_transformers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_type(tmp_path / "model", "gpt2")
    saved = folder_facts(folder)
    # As the first releases were published.
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("transformer."): each for name, each in tensors.items()}, folder / "model.safetensors")
    facts = folder_facts(folder)
    check_plan(folder, load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=64))
    assert facts.architecture.num_parameters() == saved.architecture.num_parameters()
    assert facts.architecture.default_targets == saved.architecture.default_targets
    monkeypatch.setattr(sys, "executable", "nothing")
    assert folder_facts(folder) == facts


def test_a_whole_model_is_loaded_by_the_names_that_it_is_published_with(tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", "gpt2")
    saved = load_whole(folder, longest=64).whole
    tensors = load_file(folder / "model.safetensors")
    first = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    # The first releases also hold the causal mask of each layer, which is no weight.
    save_file({**first, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / "model.safetensors")
    published = load_whole(folder, longest=64).whole
    assert saved is not None
    assert published is not None
    assert list(published.parameters) == list(saved.parameters)
    assert all(torch.equal(published.parameters[name], each) for name, each in saved.parameters.items())


def test_a_text_part_that_was_saved_under_its_names_in_the_whole_model_is_loaded(tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", "mixtral")
    tensors = load_file(folder / "model.safetensors")
    named = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=64)
    save_file({f"language_model.{name}": each for name, each in tensors.items()}, folder / "model.safetensors")
    policy = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=64)
    assert policy.base_digest() == named.base_digest()
    check_plan(folder, policy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_command_says_that_a_checkpoint_of_wide_matrices_must_be_converted(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_type(tmp_path / "bf16", "qwen2")
    AutoModelForCausalLM.from_pretrained(made, dtype=dtype).save_pretrained(tmp_path / "model")
    for path in made.glob("*token*"):
        shutil.copy(path, tmp_path / "model")
    shutil.copy(made / "chat_template.jinja", tmp_path / "model")
    file = write_manifest(tmp_path)
    for command in (["validate"], ["plan"], ["run", "--out", str(tmp_path / "run")]):
        assert run_command([command[0], str(file), *command[1:]]) == 66, command
        assert "orbit convert FOLDER NEW --precision BF16" in capsys.readouterr().err
    assert run_command(["inspect", str(tmp_path / "model")]) == 0
    assert "orbit convert FOLDER NEW --precision BF16" in capsys.readouterr().out
    assert run_command(["convert", str(tmp_path / "model"), str(tmp_path / "new"), "--precision", "BF16"]) == 0
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "model").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "model")
    for command in (["validate"], ["plan"], ["run", "--out", str(tmp_path / "run")]):
        assert run_command([command[0], str(file), *command[1:]]) == 0, command
    assert run_command(["convert", str(tmp_path / "model"), str(tmp_path / "x"), "--precision", "BF16"]) == 64


@pytest.mark.parametrize("name", VISION)
def test_an_adapter_of_the_text_part_is_one_of_the_published_model_in_peft(name: str, tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", name)
    policy = load_policy(folder, AdapterConfig("LoRA", ("q_proj", "down_proj"), rank=2, experts="None"), longest=64)
    adapter = random_adapter(policy, 1)
    for file, content in adapter.files.items():
        (tmp_path / file).write_bytes(content)
    whole = load_reference(folder)
    tokens = tokens_of(20, 1)
    plain = reference_logprobs(whole, tokens)
    adapted = reference_logprobs(PeftModel.from_pretrained(whole, tmp_path), tokens)
    TorchEngine(policy, ChatTokenizer(folder), max_running_requests=1).load_adapter("policy-v1", adapter)
    with torch.no_grad(), policy.injected.selection.use("policy-v1"):
        found = policy.logprobs(policy.pack([Branch(0, tokens[:1], tokens[1:])]))[0]
    torch.testing.assert_close(found, adapted, rtol=0, atol=1e-4)
    assert (plain - adapted).abs().max() > 1e-3


def test_serving_and_evaluation_say_that_a_vision_tower_is_left_out(tmp_path: Path) -> None:
    folder, told = make_type(tmp_path / "model", "gemma3"), list[str]()
    open_models(ServeRequest(model=str(folder)), ServeLimits(), told.append).close()
    run = OrbitRun.model_validate_json(write_manifest(tmp_path).read_text(), by_name=False)
    (base,) = evaluate.open_models(run, [], [], told.append, base=True, started=None)
    base.engine.close()
    assert told == [NO_TOWER, NO_TOWER]


@pytest.mark.parametrize(("name", "code"), [("gemma3", 0), ("mixtral", 0), ("gpt2", 78)])
def test_an_adapter_is_merged_under_the_names_of_the_checkpoint(name: str, code: int, tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", name)
    targets = ("c_proj",) if name == "gpt2" else ("q_proj", "down_proj")
    policy = load_policy(folder, AdapterConfig("LoRA", targets, rank=2, experts="PerExpert"), longest=64)
    adapter, tokens, place = random_adapter(policy, 1), tokens_of(20, 1), tmp_path / "adapter"
    place.mkdir()
    for file, content in adapter.files.items():
        (place / file).write_bytes(content)
    merged = ["merge", str(place), "--base", str(folder), "--out", str(tmp_path / "merged"), "--measure", "none"]
    assert run_command([*merged, "--unchecked-base"]) == code
    if code == 0:
        TorchEngine(policy, ChatTokenizer(folder), max_running_requests=1).load_adapter("policy-v1", adapter)
        with torch.no_grad(), policy.injected.selection.use("policy-v1"):
            wanted = policy.logprobs(policy.pack([Branch(0, tokens[:1], tokens[1:])]))[0]
        found, plain = (reference_logprobs(load_reference(each), tokens) for each in (tmp_path / "merged", folder))
        assert (found - wanted).abs().max() < 0.1 * (found - plain).abs().max()


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3", "mixtral"])
def test_a_type_without_a_row_is_quantised_linear_by_linear(name: str, tmp_path: Path) -> None:
    made = make_type(tmp_path / "bf16", name)
    assert run_command(["convert", str(made), str(tmp_path / "model"), "--precision", "INT4"]) == 0
    policy = load_policy(tmp_path / "model", AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=64)
    assert policy.precision == "INT4"
    packed = {name.rpartition(".")[2] for name, each in policy.injected.layers.items() if each.base.format != "BF16"}
    assert packed == set(policy.injected.config.targets)
    assert run_command(["plan", str(write_manifest(tmp_path))]) == 0


def test_linears_stored_by_columns_are_not_quantised(tmp_path: Path) -> None:
    made = make_type(tmp_path / "bf16", "gpt2")
    assert run_command(["convert", str(made), str(tmp_path / "model"), "--precision", "INT4"]) == 78


@pytest.mark.parametrize("name", ["mixtral", "gemma3_text", "qwen2"])
def test_a_served_models_weights_are_compared_under_the_names_of_its_files(name: str, tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", name)
    compared, _ = compare_weights(load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0)), folder)
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        assert compared == len(file.keys())


def test_what_chooses_keys_computes_nothing_where_it_would_choose_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TYPES, "glm_moe_dsa", TYPES["glm_moe_dsa"] | {"index_topk": 20})
    folder = make_type(tmp_path / "model", "glm_moe_dsa")
    policy = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=64)
    chosen: list[int] = []
    for name, module in policy.model.named_modules():
        if name.endswith("indexer.wq_b"):
            module.register_forward_hook(lambda *passed: chosen.append(passed[2].shape[1]))
    for length, computed in ((15, []), (40, [39, 39])):
        tokens = tokens_of(length, 1)
        with torch.no_grad():
            found = policy.logprobs(policy.pack([Branch(0, tokens[:1], tokens[1:])]))[0]
        assert chosen == computed
        torch.testing.assert_close(found, reference_logprobs(load_reference(folder), tokens), rtol=0, atol=1e-5)


def test_keys_are_chosen_for_few_sequences_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modules.SCORE_BYTES, "cpu", 4 << 20)
    folder = make_type(tmp_path / "model", "glm_moe_dsa")
    policy = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=256)
    chosen: list[int] = []
    for name, module in policy.model.named_modules():
        if name.endswith("indexer.wq_b"):
            module.register_forward_hook(lambda *passed: chosen.append(passed[2].shape[0]))
    sequences = [tokens_of(181, number) for number in range(6)]
    branches = [Branch(number, each[:1], each[1:]) for number, each in enumerate(sequences)]
    with torch.no_grad():
        found = policy.logprobs(policy.pack(branches))[0]
    assert chosen == [5, 1, 5, 1]
    reference = load_reference(folder)
    expected = torch.cat([reference_logprobs(reference, each) for each in sequences])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


ROWS = build_packed(
    [Branch(prefix, [3] * prefix, [4] * count) for prefix, count in [(90, 70), (90, 1), (90, 20), (3, 150), (16, 17)]],
    torch.device("cpu"),
).rows
TOKENS = sum(row.length for row in ROWS)


@pytest.mark.parametrize("size", [16, 64])
def test_the_delta_rule_of_packed_sequences_is_transformers_own_and_so_are_its_gradients(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(TOKENS, 3, width, generator=draw) for width in (16, 16, 24)]
    given += [-torch.rand(TOKENS, 3, generator=draw), torch.rand(TOKENS, 3, generator=draw)]

    def own(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return qwen3_next.torch_chunk_gated_delta_rule(  # type: ignore[no-any-return]
            query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True
        )[0]

    compare_rule(delta_rule, own, given, size)


@pytest.mark.parametrize("size", [16, 64])
def test_the_state_space_of_packed_sequences_is_transformers_own_and_so_are_its_gradients(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(TOKENS, heads, width, generator=draw) / 4 for heads, width in ((6, 24), (2, 16), (2, 16))]
    given += [torch.rand(TOKENS, 6, generator=draw)]
    rate = -torch.rand(6, generator=draw)

    def ours(value: Tensor, key: Tensor, query: Tensor, step: Tensor, chunks: Chunks) -> Tensor:
        return state_space(value * step[..., None], key, query, rate * step, chunks)

    def own(value: Tensor, key: Tensor, query: Tensor, step: Tensor) -> Tensor:
        return falcon_h1.mamba2_chunk_scan(value, step, rate, key, query, chunk_size=8)  # type: ignore[no-any-return]

    compare_rule(ours, own, given, size)


def compare_rule(ours: Callable[..., Tensor], own: Callable[..., Tensor], given: list[Tensor], size: int) -> None:
    """`own` takes a batch of one sequence at a time, with its prompt."""
    for each in given:
        each.requires_grad_()
    found = ours(*given, build_chunks(ROWS, torch.device("cpu"), size))
    expected = torch.zeros_like(found)
    for row in ROWS:
        tokens = torch.arange(row.first, row.first + row.length)
        whole = torch.cat((torch.arange(row.prefix_first, row.prefix_first + row.prefix_length), tokens))
        expected = expected.index_copy(0, tokens, own(*(each[whole][None] for each in given))[0, row.prefix_length :])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    grads = (torch.autograd.grad((each * weights).sum(), given) for each in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_norms_that_add_1_are_fused(tmp_path: Path) -> None:
    folder = make_type(tmp_path / "model", "qwen3_next")
    policy = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=256)
    norms = [each for name, each in policy.model.named_modules() if name.endswith("layernorm")]
    assert len(norms) == 8
    assert all(isinstance(each, FusedRMSNorm) and each.plus for each in norms)


def test_a_prompt_that_answers_share_is_computed_with_them_and_not_once_more() -> None:
    """As a recurrent model does, so that a token's value says which tokens were read before it."""
    passes: list[list[int]] = []

    def decoder(token_BS: torch.Tensor, _: torch.Tensor, **__: object) -> torch.Tensor:
        passes.append([*token_BS.shape])
        return (token_BS.double() / 10).cumsum(1)[..., None]

    prompt, lone = tokens_of(30, 1), tokens_of(4, 2)
    branches = [Branch(0, prompt, tokens_of(count, count)) for count in (40, 3, 1)] + [Branch(1, lone, [7])]
    batch = build_packed(branches, torch.device("cpu"))
    for is_single, shapes in ((False, [[1, 69], [1, 32], [1, 4]]), (True, [[1, 69], [1, 32], [1, 4]])):
        passes.clear()
        hidden_TN = OwnRows(batch, is_single).hidden(decoder, Selection())
        assert passes == shapes
        expected = [
            sum([*each.prefix_T, *each.continuation_T][: len(each.prefix_T) + place])
            for each in branches
            for place in range(len(each.continuation_T))
        ]
        torch.testing.assert_close(hidden_TN[batch.target_source_R, 0], torch.tensor(expected).double() / 10)
