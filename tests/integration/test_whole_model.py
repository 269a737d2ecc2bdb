"""Every weight of a model trained: transformers' own steps, kills that change nothing, and the model handed on."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from orbit_runtime.adapters.buffer import AdapterBuffer
from orbit_runtime.cli.main import run_command
from orbit_runtime.data.prompts import hold_out, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.errors import ModelError, UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.planner import Machine, judge
from orbit_runtime.policy.logprobs import token_logprobs
from orbit_runtime.policy.whole import WholeMasters, load_whole, write_model
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from tests.integration.killing import kill_until_done, small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher
from tests.integration.test_sft import rows, sft_manifest, trained
from tests.integration.tiny_families import make_family
from tests.integration.tiny_models import load_reference

RATE = 1e-3


def whole_manifest(*, model: str = "builtin://tiny-adder", **given: Any) -> dict[str, Any]:
    manifest = sft_manifest(precision="BF16", **given)
    manifest["spec"]["model"]["uri"] = model
    manifest["spec"]["adapter"] = {"type": "Full"}
    manifest["spec"]["training"]["learningRate"] = RATE
    return manifest


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the guide's block, with demonstrations held out."""
    guide = Path("docs/guides/sft.md").read_text(encoding="utf-8").partition("## The whole of a model")[2]
    (block,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    out = tmp_path_factory.mktemp("whole")
    manifest = sft_manifest(steps=30, validation={"share": 0.02, "everySteps": 10})
    manifest["spec"] |= yaml.safe_load(block)
    trained(manifest, out)
    return out


def newest(out: Path) -> Path:
    return out / "models" / f"policy-v{json.loads((out / 'report.json').read_text())['policy_version']}"


def demonstrations(first: int, last: int) -> list[dict[str, str]]:
    lines = Path("orbit_runtime/data/builtin/two-digit-addition.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[first:last]]


def cost(model: PreTrainedModel, tokenizer: Any, asked: list[dict[str, str]]) -> tuple[torch.Tensor, int]:
    """transformers' own loss of the answers' tokens, one conversation a call, and how many tokens there are."""
    total, count = torch.zeros(()), 0
    for each in asked:
        before = tokenizer(f"<|user|>{each['prompt']}<|im_end|><|assistant|>", add_special_tokens=False).input_ids
        answer = tokenizer(f"{each['answer']}<|im_end|>", add_special_tokens=False).input_ids
        labels = torch.tensor([[-100] * len(before) + answer])
        total = total + model(torch.tensor([before + answer]), labels=labels).loss * len(answer)
        count += len(answer)
    return total / count, count


@pytest.mark.parametrize("name", ["tiny-adder", "tiny-llama"], ids=["tied to the embedding", "a head of its own"])
def test_three_steps_cost_what_transformers_says(tmp_path: Path, name: str) -> None:
    """Masters in fp32 beside a model whose weights are their rounding to BF16, written out."""
    trained(whole_manifest(model=f"builtin://{name}", steps=3, shuffle=False), tmp_path / "ours")
    folder = builtin_folder(name, "BF16")
    model, tokenizer = load_reference(folder), AutoTokenizer.from_pretrained(folder)
    weights = [*model.parameters()]
    masters = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=RATE, weight_decay=0.0)
    for step, row in enumerate(rows(tmp_path / "ours")):
        loss, count = cost(model, tokenizer, demonstrations(16 * step, 16 * (step + 1)))
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad, None
        norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master.bfloat16())
        assert row.number("tokens") == count
        # Adam turns what rounding left of a tiny gradient into a whole step: later ones part a little.
        within = 1e-5 if step == 0 else 2e-3
        assert row.number("loss") == pytest.approx(float(loss.detach()), rel=within)
        assert row.number("grad_norm") == pytest.approx(float(norm), rel=within)


def test_it_ends_with_a_checkpoint_that_transformers_scores_as_the_run_did(learned: Path) -> None:
    folder = newest(learned)
    model, tokenizer = load_reference(folder), AutoTokenizer.from_pretrained(folder)
    report = json.loads((learned / "report.json").read_text())
    assert report["headline"]["last"] < 0.9 * report["headline"]["first"]
    assert report["published"] == "models"
    assert report["base_digest_after"] is None, "nothing of the base is left that could be claimed to be unchanged"
    assert report["trainable_parameters"] == sum(each.numel() for each in model.parameters())
    assert {file.dtype for file in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    file = Path("orbit_runtime/data/builtin/two-digit-addition.jsonl")
    _, held = hold_out(load_prompts([PromptSource("", "JSONL", "prompt", "rows", file)]), 0.02, 0)
    asked = [{"prompt": each.messages[0]["content"], "answer": each.fields["answer"]} for each in held]
    with torch.no_grad():
        loss, _ = cost(model, tokenizer, asked)
    assert float(loss) == pytest.approx(report["headline"]["last"], rel=1e-5)


def test_large_models_are_written_in_shards_that_transformers_reads(tmp_path: Path) -> None:
    folder = builtin_folder("tiny-llama", "BF16")
    masters, buffer = load_whole(folder).whole, AdapterBuffer()
    assert isinstance(masters, WholeMasters)
    write_model(masters, buffer, shard_bytes=40_000)
    files = buffer.files()
    assert len([name for name in files if name.endswith(".safetensors")]) > 3
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    found, wanted = load_reference(tmp_path).state_dict(), load_reference(folder).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_change_no_bit(tmp_path: Path, launcher: RunLauncher) -> None:
    manifest = whole_manifest(steps=24, every_steps=2)
    started = time.monotonic()
    assert launcher.run(manifest, str(tmp_path / "alone")) == 0
    undisturbed = time.monotonic() - started
    kill_until_done(launcher, manifest, str(tmp_path / "killed"), kills=2, seed=3, alone=undisturbed)
    killed, alone = (open_store(str(tmp_path / name)) for name in ("killed", "alone"))
    assert timeless_rows(killed) == timeless_rows(alone)
    reports = [json.loads(store.get("report.json")) for store in (killed, alone)]
    assert len({each["adapter_digest"] for each in reports}) == 1
    assert reports[0]["resumed"] >= 1
    weights = [(newest(tmp_path / name) / "model.safetensors").read_bytes() for name in ("killed", "alone")]
    assert weights[0] == weights[1]


def test_rewards_evaluation_and_serving_begin_with_the_model_that_it_ended_with(
    tmp_path: Path, learned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(newest(learned))
    manifest = small_manifest(steps=2)
    manifest["spec"]["model"] = {"uri": model, "precision": "BF16"}
    report = trained(manifest, tmp_path / "rewarded")
    assert report["publishes"] == report["publishes_proven"] == 3
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    scores = {}
    for name, uri in (("before", "builtin://tiny-adder"), ("after", model)):
        command = ["eval", str(tmp_path / "run.json"), "--set", f"model.uri={uri}", "--set", "data.limit=60"]
        assert run_command([*command, "--out", str(tmp_path / name), "--json"]) == 0
        (score,) = json.loads((tmp_path / name / "summary.json").read_text())["scores"]
        scores[name] = score["average"]["mean"]
    assert scores["after"] > scores["before"]
    opened = open_models(ServeRequest(model=model), ServeLimits(), lambda _: None)
    assert opened.folder == newest(learned)
    opened.close()
    # What the run itself holds is no adapter, and nobody takes what it began with for what it ended with.
    for asked in (["serve", str(learned)], ["eval", str(learned), "--out", str(tmp_path / "no")]):
        assert run_command(asked) == 78
        assert "models/policy-v" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"algorithm": {"type": "GRPO"}, "environment": {"rewards": [{"name": "a", "type": "ExactMatch"}]}},
            "only on demonst",
        ),
        ({"model": {"uri": "builtin://tiny-adder", "precision": "INT4"}}, "INT4 weights are packed and frozen"),
        (
            {"model": {"uri": str(builtin_folder("tiny-adder", "INT4"))}},
            "the checkpoint is INT4: packed weights are frozen",
        ),
        ({"training": {"steps": 1, "trainer": "Megatron"}}, "they hold no masters"),
        ({"adapter": {"type": "Full", "targets": ["q_proj"]}}, "adapter.targets applies to an adapter"),
        ({"adapter": {"type": "Full", "initFrom": "runs/other"}}, "adapter.initFrom applies to an adapter"),
        ({"algorithm": {"type": "SFT", "kl": {"coefficient": 0.1}}}, "no base is left"),
    ],
)
def test_what_cannot_train_as_a_whole_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    manifest = whole_manifest(steps=1)
    manifest["spec"] |= change
    with pytest.raises(UnsupportedError, match=says) as caught:
        trained(manifest, tmp_path / "run")
    assert caught.value.where == "spec.adapter.type"
    assert caught.value.fix
    assert not (tmp_path / "run" / "run.json").exists()


def test_routed_experts_are_refused(tmp_path: Path) -> None:
    folder, _ = make_family(tmp_path, "qwen3_moe", "BF16")
    with pytest.raises(UnsupportedError, match="dense models only, not of qwen3_moe"):
        load_whole(folder)


def test_a_checkpoint_with_two_heads_is_refused(tmp_path: Path) -> None:
    folder = builtin_folder("tiny-llama", "BF16")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match="ties the output layer to the embedding, and the checkpoint holds another"):
        load_whole(tmp_path)


def test_the_plan_counts_every_copy_and_refuses_where_memory_ends() -> None:
    run = OrbitRun.model_validate(whole_manifest(steps=1))
    facts = folder_facts(builtin_folder("tiny-adder", "BF16"))
    count = load_whole(builtin_folder("tiny-adder", "BF16")).injected.report.trainable_parameters
    made = judge(run, facts, Machine(None, host_bytes=2**34, disk_bytes=2**34))
    assert made.accepted
    assert made.plan is not None
    parts = made.plan.phases["train"]
    assert parts["base"] + parts.get("base, replicated", 0) == 4 * count, "what passes multiply by, fp32 on a CPU"
    assert (parts["masters"], parts["optimizer"], parts["gradients"]) == (4 * count, 8 * count, 4 * count)
    assert not {name for name in parts if "adapter" in name or "KV" in name}
    refused = judge(run, facts, Machine(None, host_bytes=2**26, disk_bytes=2**34))
    assert (refused.accepted, refused.reason) == (False, "DoesNotFit")
    many = judge(OrbitRun.model_validate({**whole_manifest(steps=1)}), facts, Machine(None, host_bytes=None))
    assert many.plan is not None


@pytest.mark.parametrize("rows_at_once", [3, 64], ids=["in chunks", "at once"])
def test_a_head_that_trains_gets_the_gradient_of_autograd(rows_at_once: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 8, generator=generator, requires_grad=True)
    weight = torch.randn(20, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 20, (10,), generator=generator)
    slope = torch.randn(10, generator=generator)
    logprobs, _ = token_logprobs(
        hidden, targets, lambda x: x @ weight.T, vocabulary=20, chunk_elements=20 * rows_at_once, weights=[weight]
    )
    found = torch.autograd.grad((logprobs * slope).sum(), (hidden, weight))
    plain = torch.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((plain * slope).sum(), (hidden, weight))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
