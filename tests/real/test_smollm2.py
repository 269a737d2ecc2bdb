"""A real pretrained model, SmolLM2-135M-Instruct, through what Orbit does with models: `make test-real`.

One short run of it is in `make test-models`; the others are long.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fakes.guide import commands
from peft import PeftModel

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.cards import find_card_facts
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import start_serving
from orbit_runtime.types import Request, Sampling
from tests.integration.tiny_models import load_reference, reference_logprobs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "smollm2.yaml"
PRECISIONS = ("INT4", "NVFP4", "MXFP4", "FP8")
ADAPTERS = {"LoRA": (), "OFT": ("adapter.type=OFT", "adapter.lora=null", "adapter.oft.blockSize=32")}
FEW = (
    "training.promptsPerStep=4", "algorithm.groupSize=4", "rollout.sampling.maxNewTokens=6", "evaluation=null",
)  # fmt: skip
"""A step of seconds."""
QUESTIONS = ("What is the capital of France?", "Name a colour.", "What is two plus two? Answer with digits only.")

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def model() -> Path:
    if not (found := os.environ.get("ORBIT_REAL_MODEL")):
        pytest.skip("ORBIT_REAL_MODEL names no folder: tools/smollm2.sh could not make the model (make test-real)")
    return Path(found)


@pytest.fixture(scope="session")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in each format, as `orbit convert` writes it."""
    folders = {"BF16": model}
    for precision in PRECISIONS:
        folders[precision] = tmp_path_factory.mktemp("converted") / precision
        orbit("convert", model, folders[precision], "--precision", precision)
    return folders


def orbit(*arguments: object, code: int = 0) -> str:
    """What the command says, in a process of its own."""
    command = [sys.executable, "-m", "orbit_runtime", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def train(model: Path, out: Path, *overrides: str, steps: int = 2, command: str = "run") -> list[dict[str, Any]]:
    """Trains by the example's manifest. Returns the steps' rows of numbers; every publish was proven."""
    changed = (f"model.uri={model}", f"training.steps={steps}", *FEW, *overrides)
    orbit(command, EXAMPLE, "--out", out, *(part for each in changed for part in ("--set", f"spec.{each}")))
    report = json.loads((out / "report.json").read_text())
    assert report["status"] == "done"
    assert report["publishes"] == report["publishes_proven"]
    assert report["base_digest_before"] == report["base_digest_after"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return rows


def logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    policy = load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0))
    with torch.no_grad():
        return policy.logprobs(policy.pack([Branch(0, tokens[:1], tokens[1:])]))[0]


def prompt_of(tokenizer: ChatTokenizer, question: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_chat([{"role": "user", "content": question}]))


def test_the_shipped_card_says_what_the_folder_holds(model: Path) -> None:
    card, folder = find_card_facts("hf://HuggingFaceTB/SmolLM2-135M-Instruct"), folder_facts(model)
    assert card is not None
    assert {each.weight: each.num_bytes for each in card.weights} == {
        each.weight: each.num_bytes for each in folder.weights
    }


def test_three_steps_of_a_real_model_are_proven(model: Path, tmp_path: Path) -> None:
    rows = train(model, tmp_path / "run", steps=3)
    assert all(row["parity_mean"] <= 1e-4 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_example_learns(model: Path, tmp_path: Path) -> None:
    """As README.md and docs/guides/real_model.md have it."""
    out, changed = tmp_path / "run", ("--set", f"spec.model.uri={model}")
    assert "24 steps, about " in orbit("try", EXAMPLE, *changed)
    orbit("run", EXAMPLE, "--out", out, *changed)
    first, *_, last = json.loads((out / "report.json").read_text())["evaluation"]["held-out"]
    assert last["mean"] - first["mean"] >= 0.3
    best = json.loads((out / "report.json").read_text())["best"]
    request = ServeRequest(f"{out}@best")
    serving = start_serving(open_models(request, ServeLimits(), lambda _: None), "127.0.0.1", 0, None)
    try:
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
            assert best["step"] in [each.to_dict().get("policy_version") for each in client.models.list()]
    finally:
        serving.close()


@pytest.mark.long
def test_sums_in_words_are_learned_from_demonstrations_and_then_by_reward(model: Path, tmp_path: Path) -> None:
    """As docs/guides/real_model.md has it."""
    guide = (ROOT / "docs/guides/real_model.md").read_text()
    shown = [shlex.split(each) for each in commands(guide, "Numbers in words")[0].replace("\\\n", "").splitlines()]
    first, run = tmp_path / "first", tmp_path / "words"
    for _, *words in shown:
        given = [{"spec.model.uri=$(make -s real-model)": f"spec.model.uri={model}",
                  "spec.adapter.initFrom=../runs/words-first": f"spec.adapter.initFrom={first}"}.get(each, each)
                 for each in words]  # fmt: skip
        orbit(*given, "--out", first if words[0] == "sft" else run)
    means = [each["mean"] for each in json.loads((run / "report.json").read_text())["evaluation"]["held-out"]]
    assert max(means) >= 0.8, "the base has 0.02"


@pytest.mark.long
def test_a_naive_reward_is_satisfied_without_the_task(model: Path, tmp_path: Path) -> None:
    """docs/guides/real_model.md: any short sentence will do."""
    rewards = r"environment.rewards=[{name: short, type: Pattern, arguments: {pattern: '(\S+\s+){0,10}\S+[.]'}}]"
    few = ("training.promptsPerStep=8", "algorithm.groupSize=8", "rollout.sampling.maxNewTokens=12")
    rows = train(model, tmp_path / "run", rewards, *few, steps=8)
    assert rows[-1]["reward_mean"] - rows[0]["reward_mean"] >= 0.3


@pytest.mark.long
def test_sampled_and_packed_log_probs_are_those_of_transformers(model: Path) -> None:
    reference, tokenizer = load_reference(model), ChatTokenizer(model)
    engine = TorchEngine(
        load_policy(model, AdapterConfig("LoRA", (), rank=2, alpha=4.0)), tokenizer, max_running_requests=4
    )
    prompts = [prompt_of(tokenizer, each) for each in QUESTIONS]
    asked = [Request(index, index, each, Sampling(max_new_tokens=16), None) for index, each in enumerate(prompts)]
    for answer in sample(engine, asked):
        prompt = prompts[answer.request_id]
        whole = [*prompt, *answer.token_ids_T]
        expected = reference_logprobs(reference, whole)
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected[len(prompt) - 1 :], rtol=0, atol=2e-4)
        torch.testing.assert_close(logprobs(model, whole), expected, rtol=0, atol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_converted_model_has_the_log_probs_of_its_unpacked_weights(
    precision: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    orbit("convert", converted[precision], tmp_path / "unpacked", "--precision", "BF16")
    tokens = prompt_of(ChatTokenizer(converted[precision]), QUESTIONS[0])
    expected = reference_logprobs(load_reference(tmp_path / "unpacked"), list(tokens))
    torch.testing.assert_close(logprobs(converted[precision], tokens), expected, rtol=0, atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("compute", ["FP32", "BF16"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("precision", ["BF16", *PRECISIONS])
def test_every_format_trains_with_both_adapters(
    precision: str, adapter: str, compute: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    asked = f"model.precision={precision}", f"model.computePrecision={compute}", *ADAPTERS[adapter]
    rows = train(converted[precision], tmp_path / "run", *asked, steps=3)
    assert all(row["parity_mean"] <= row["parity_limit"] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides", [("algorithm.type=GSPO", "training.miniBatchPrompts=2"), ("algorithm.type=PPO",)], ids=["GSPO", "PPO"]
)
def test_other_algorithms_train(overrides: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    train(model, tmp_path / "run", *overrides)


WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The model's own template has no tools, and an environment with tools is refused with it."""


@pytest.mark.long
def test_an_environment_with_a_tool_trains(model: Path, tmp_path: Path) -> None:
    environment = (
        "environment.type=MultiTurn", "environment.tools=[orbit_runtime.environments.tools.calculator:calculate]",
        "environment.limits={turns: 2}", "model.maxSequenceLength=512",
    )  # fmt: skip
    changed = (f"model.uri={model}", *environment)
    said = orbit("run", EXAMPLE, "--out", tmp_path / "refused", *(
        part for each in changed for part in ("--set", f"spec.{each}")
    ), code=66)  # fmt: skip
    assert "the chat template leaves out the tools that may be called" in said
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(WITH_TOOLS)
    train(folder, tmp_path / "run", *environment)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the example with a few steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(model, out)
    return out


@pytest.mark.long
def test_demonstrations_then_rewards(model: Path, tmp_path: Path) -> None:
    sft = ("algorithm={type: SFT}", "data.prompts.0.completionField=answer", "environment=null", "rollout=null")
    train(model, tmp_path / "sft", *sft, command="sft")
    train(model, tmp_path / "run", f"adapter.initFrom={tmp_path / 'sft'}")


@pytest.mark.long
def test_a_run_is_evaluated_with_intervals(trained: Path, tmp_path: Path) -> None:
    orbit("eval", trained, "--out", tmp_path / "eval", "--set", "spec.evaluation.limit=4")
    scores = json.loads((tmp_path / "eval" / "summary.json").read_text())["scores"]
    assert "base" in [score["subject"] for score in scores]
    for score in scores:
        average = score["average"]
        assert (score["failed"], average["prompts"]) == (0, 4)
        assert average["low"] <= average["mean"] <= average["high"]


@pytest.mark.long
def test_the_adapter_is_pefts_and_merges(model: Path, trained: Path, tmp_path: Path) -> None:
    """PEFT's sums rounded to BF16, which moves log-probs by 0.05 on the mean and 0.3 at most."""
    adapter = trained / "adapters" / "policy-v2"
    tokens = list(prompt_of(ChatTokenizer(model), QUESTIONS[0]))
    orbit("merge", adapter, "--base", model, "--out", tmp_path / "merged")
    theirs = PeftModel.from_pretrained(load_reference(model), str(adapter)).merge_and_unload()
    for weight in theirs.parameters():
        weight.data = weight.data.bfloat16().float()
    torch.testing.assert_close(
        logprobs(tmp_path / "merged", tokens), reference_logprobs(theirs, tokens), rtol=0, atol=1e-3
    )


@pytest.mark.long
def test_the_openai_client_is_answered_by_base_and_adapter(trained: Path) -> None:
    serving = start_serving(
        open_models(ServeRequest(str(trained)), ServeLimits(), lambda _: None), "127.0.0.1", 0, None
    )
    try:
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
            names = [each.id for each in client.models.list()]
            assert len(names) == 2
            for name in names:
                said = client.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0, max_tokens=12
                )
                assert "Paris" in (said.choices[0].message.content or "")
    finally:
        serving.close()


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["{tensor: 3, pipeline: 2}", "{pipeline: 2, data: 2}"], ids=["TP3PP2", "PP2DP2"])
def test_ranks_train_it(parallel: str, model: Path, tmp_path: Path) -> None:
    """It has nine heads of queries and three of keys."""
    train(model, tmp_path / "run", "training.trainer=Megatron", f"training.parallel={parallel}")


@pytest.mark.long
def test_sglang_samples_from_it(model: Path, tmp_path: Path) -> None:
    if "ORBIT_SGLANG_PYTHON" not in os.environ:
        pytest.skip("ORBIT_SGLANG_PYTHON names no environment with SGLang (make test-real)")
    rows = train(model, tmp_path / "run", "rollout.engine=SGLang")
    assert all(row["parity_mean"] <= row["parity_limit"] for row in rows)
