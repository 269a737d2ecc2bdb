"""`orbit validate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from orbit_runtime.api.checks import local_facts
from orbit_runtime.cli.main import run_command
from orbit_runtime.cli.plan import plan
from orbit_runtime.cli.validate import validate
from orbit_runtime.environments.targets import check_arguments
from orbit_runtime.errors import DataError, ManifestError, ModelError, UnsupportedError
from orbit_runtime.model_info.builtin_models import any_builtin_folder
from orbit_runtime.planner.job import Machine
from orbit_runtime.planner.verdict import judge
from orbit_runtime.spec import load_manifest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"


def test_a_valid_manifest_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    validate(EXAMPLE, ["training.steps=7"], as_json=False)
    out = capsys.readouterr().out
    assert "builtin://tiny-adder (INT4)" in out
    assert "LoRA: rank 16, alpha 32, 7 targets" in out
    assert "7 of 32 prompts x 16 samples" in out
    assert out.endswith(f"{EXAMPLE} is valid\n")


def test_the_oft_example_is_summed_up_with_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    validate(EXAMPLE.with_name("quickstart-oft.yaml"), [], as_json=False)
    assert "OFT: block size 32, CayleyNeumann" in capsys.readouterr().out


def test_json_holds_name_and_identity(capsys: pytest.CaptureFixture[str]) -> None:
    validate(EXAMPLE, [], as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["valid"], result["name"]) == (True, "quickstart")
    assert result["identity"].startswith("sha256:")


def test_dropout_that_the_gate_of_parity_takes_for_a_fault_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    dropped = "adapter.lora={rank: 16, dropout: 0.1}"
    validate(EXAMPLE, [dropped], as_json=False)
    assert "\nwarning: spec.adapter.lora.dropout is 0.1: " in capsys.readouterr().out
    validate(EXAMPLE, [dropped], as_json=True)
    assert "limit of parity" in json.loads(capsys.readouterr().out)["warning"]
    for others in ([dropped, "parity.preflight=Report"], []):
        validate(EXAMPLE, others, as_json=False)
        assert "warning" not in capsys.readouterr().out


def test_a_group_of_one_and_what_this_machine_would_refuse_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    huge = "model.maxSequenceLength=1000000", "rollout.maxRunningRequests=1000", "algorithm.groupSize=64"
    validate(EXAMPLE, ["algorithm.groupSize=1"], as_json=False)
    assert "\nwarning: a group of one has no gradient" in capsys.readouterr().out
    validate(EXAMPLE, [*huge], as_json=False)
    said = capsys.readouterr().out
    assert "is valid\nbut not on this machine: builtin://tiny-adder needs" in said
    assert "write rollout.maxRunningRequests" in said
    validate(EXAMPLE, [*huge], as_json=True)
    assert "needs" in json.loads(capsys.readouterr().out)["refused_here"]


def test_problems_are_raised_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ManifestError, match=r"spec\.training\.steps"):
        validate(EXAMPLE, ["training.steps=0"], as_json=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("overrides", "problem", "fix"),
    [
        (["model.uri=builtin://tiny-ader"], "no shipped model is called `tiny-ader`", "did you mean `tiny-adder`, "),
        (
            ["model.uri=builtin://tiny-caller", "model.precision=FP8"],
            "`tiny-caller` is not shipped in FP8",
            "set `spec.model.precision` to one of `INT4`",
        ),
    ],
)
def test_a_model_that_does_not_ship_with_orbit_is_no_valid_manifest(
    overrides: list[str], problem: str, fix: str
) -> None:
    with pytest.raises(ModelError, match=problem) as caught:
        validate(EXAMPLE, overrides, as_json=True)
    assert caught.value.exit_code == 66
    assert fix in str(caught.value.fix)


def test_sampling_that_the_named_engine_does_not_give_is_no_valid_manifest() -> None:
    with pytest.raises(UnsupportedError, match="repetitionPenalty") as caught:
        validate(EXAMPLE, ["rollout.engine=SGLang", "rollout.sampling.repetitionPenalty=1.2"], as_json=True)
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.rollout.sampling.repetitionPenalty")


MOE = "model.uri=builtin://tiny-moe-adder"
QWEN = ["model.uri=hf://Qwen/Qwen3-30B-A3B-FP8", "model.precision=Auto", "training.trainer=Megatron"]
H100 = "placement.gpuProduct=NVIDIA-H100"
IMPOSSIBLE = {
    "heads": ["training.trainer=Megatron", "training.parallel.tensor=3"],
    "experts": [MOE, "training.trainer=Megatron", "training.parallel.expert=3"],
    "layers": [MOE, "training.trainer=Megatron", "training.parallel.pipeline=64"],
    "servers": ["rollout.engine=SGLang", "rollout.tensorParallel=3"],
    "a card's heads": [*QWEN, "training.parallel.tensor=5", H100],
    "more ranks than GPUs": [*QWEN, "training.parallel.tensor=4", "training.parallel.data=4", H100],
    "parts on two nodes": [*QWEN, "training.parallel.tensor=4", "placement.gpus=2", "placement.nodes=3", H100],
    "more servers than GPUs": [*QWEN, "rollout.engine=SGLang", "rollout.tensorParallel=4", "rollout.replicas=3", H100],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_sizes_that_the_plan_refuses_are_no_valid_manifest_with_the_same_words(name: str) -> None:
    with pytest.raises(UnsupportedError) as planned:
        plan(EXAMPLE, overrides=IMPOSSIBLE[name])
    with pytest.raises(UnsupportedError) as caught:
        validate(EXAMPLE, IMPOSSIBLE[name], as_json=True)
    assert caught.value.exit_code == 78
    # A plan tells all of its problems, this one first.
    assert planned.value.message.startswith(caught.value.message)
    assert (caught.value.where, caught.value.fix) == (planned.value.where, planned.value.fix)


def test_of_several_nodes_the_number_of_gpus_is_enough_to_refuse_sizes() -> None:
    asked = [*QWEN, "training.parallel.tensor=4", "placement.gpus=2", "placement.nodes=3"]
    with pytest.raises(UnsupportedError, match="4, must stay on one node, which has 2 GPUs"):
        validate(EXAMPLE, asked, as_json=True)


POSSIBLE = {
    "no sizes": (QWEN, []),
    "on the machine that is named": ([*QWEN, "training.parallel.tensor=4", H100], []),
    "on any machine": ([MOE, "training.trainer=Megatron", "training.parallel.tensor=2"], ["suit the GPUs"]),
    "on GPUs alone": ([*QWEN, "rollout.engine=SGLang", "rollout.tensorParallel=4"], ["suit the GPUs"]),
    "a model that lies elsewhere": (
        ["model.uri=s3://bucket/model", "training.parallel.tensor=3", "training.trainer=Megatron"],
        ["s3://bucket/model, which is not on this machine"],
    ),
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_what_only_the_plan_can_know_of_sizes_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked, said = POSSIBLE[name]
    validate(EXAMPLE, asked, as_json=True)
    told = json.loads(capsys.readouterr().out)["not_checked"]
    assert len(told) == len(said)
    assert all(words in line for words, line in zip(said, told, strict=True))
    validate(EXAMPLE, asked, as_json=False)
    assert ("not checked, see `orbit plan`" in capsys.readouterr().out) == bool(said)


def test_a_model_that_is_not_on_this_machine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(EXAMPLE, [f"model.uri={tmp_path}/none"], as_json=False)
    assert f"not opened, as it is not on this machine: {tmp_path}/none\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reward", "words", "fix"),
    [
        ("{name: a, type: ExactMatch, arguments: {fields: answer}}", "ExactMatch has no argument `fields`", "`field`"),
        ("{name: a, type: Pattern}", "Pattern needs the argument `pattern`", "`pattern`, `whole`, `most`"),
        ("{name: a, type: Length, arguments: {free: 4}}", "Length needs the argument `limit`", "`free`, `limit`"),
    ],
)
def test_what_a_shipped_reward_does_not_take_or_lacks_is_no_valid_manifest(reward: str, words: str, fix: str) -> None:
    with pytest.raises(ManifestError, match=words) as caught:
        validate(EXAMPLE, [f"environment.rewards=[{reward}]"], as_json=True)
    assert caught.value.where == "spec.environment.rewards[0].arguments"
    assert fix in str(caught.value.fix)


def test_every_shipped_reward_takes_the_arguments_that_the_guide_names() -> None:
    rewards = (
        "{name: a, type: Math, arguments: {field: answer}}",
        "{name: b, type: MultipleChoice, arguments: {choices: ABCD}}",
        "{name: c, type: Code, arguments: {field: answer, all_or_nothing: false, seconds: 1, memory_mib: 64}}",
        "{name: d, type: Length, arguments: {free: 4, limit: 9, unit: words}}",
        "{name: e, type: Pattern, arguments: {pattern: a, whole: false, most: 2}}",
        "{name: f, type: Judge, arguments: {url: 'http://a/v1', model: m, rubric: r, api_key_env: KEY}}",
    )
    run = load_manifest(EXAMPLE, [f"environment.rewards=[{', '.join(rewards)}]"])
    assert len(run.spec.environment.rewards) == 6
    check_arguments(run.spec, {})


def test_the_prompts_of_an_evaluation_are_opened_too(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(own / "run.yaml", [], as_json=True)
    capsys.readouterr()
    asked = "evaluation.environments=[{name: held-out, prompts: [{uri: none.jsonl}]}]"
    with pytest.raises(DataError, match="the prompts file does not exist"):
        validate(own / "run.yaml", [asked], as_json=True)
    (own / "none.jsonl").write_text('{"prompt": "1+1="}\n')
    validate(own / "run.yaml", [asked], as_json=True)
    assert json.loads(capsys.readouterr().out)["not_opened"] == []
    scored = "environment: {rewards: [{name: correct, type: ExactMatch, arguments: {field: answer}}]}"
    with pytest.raises(DataError, match="no key 'answer'"):
        validate(own / "run.yaml", [asked.replace("}]}]", "}], " + scored + "}]")], as_json=True)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A manifest with prompts and a reward of its own beside it."""
    text = EXAMPLE.read_text()
    text = text.replace("uri: builtin://two-digit-addition", "uri: mine.jsonl")
    text = text.replace("type: ExactMatch", "entrypoint: mine:score").replace("field: answer", "limit: 3")
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def score(completion, prompt, fields, limit):\n    return 1.0\n")
    return tmp_path


def test_prompts_and_rewards_of_ones_own_are_opened(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(own / "run.yaml", [], as_json=False)
    assert capsys.readouterr().out.endswith("is valid\n")


def test_a_model_folder_that_is_not_here_is_told_last(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(own / "run.yaml", ["spec.model.uri=models/none"], as_json=False)
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].endswith("is valid")
    assert last[1].startswith("but its model is not on this machine: ")
    assert str(own / "models" / "none") in last[1]


def test_prompts_without_their_column_are_no_valid_manifest(own: Path) -> None:
    (own / "mine.jsonl").write_text('{"question": "1+1="}\n')
    with pytest.raises(DataError, match="prompt"):
        validate(own / "run.yaml", [], as_json=True)


def test_prompts_that_are_not_there_are_no_valid_manifest(own: Path) -> None:
    (own / "mine.jsonl").unlink()
    with pytest.raises(DataError, match=r"mine\.jsonl"):
        validate(own / "run.yaml", [], as_json=True)


REWARDS = [
    ("import nothing_of_this_name\n", "nothing_of_this_name"),
    ("def other(): ...\n", "score"),
    ("def score(completion, prompt, fields):\n    return 1.0\n", "limit"),
    ("raise SystemExit(0)\n", "SystemExit"),
]


@pytest.mark.parametrize(("code", "said"), REWARDS, ids=["import", "function", "argument", "exit"])
def test_a_reward_that_cannot_be_called_is_no_valid_manifest(own: Path, code: str, said: str) -> None:
    (own / "mine.py").write_text(code)
    with pytest.raises(ManifestError, match=said):
        validate(own / "run.yaml", [], as_json=True)
    assert "mine" not in sys.modules, "code of the user's runs in a worker only"


def test_what_is_found_after_the_file_was_read_is_named_with_file_and_line(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, file = (own / "run.yaml").read_text(), own / "run.yaml"
    file.write_text(text.replace("mine:score", "nobody:score"))
    lines = file.read_text().splitlines()
    (item,) = (number for number, line in enumerate(lines, 1) if "name: " in line and "nobody" in lines[number])
    field = "spec.environment.rewards[correct]"
    assert run_command(["validate", str(file)]) == 64
    assert capsys.readouterr().err.startswith(f"error: {file}:{item}: {field}: no module 'nobody'")

    rewards = "spec.environment.rewards=[{name: a, entrypoint: nobody:score}]"
    assert run_command(["validate", str(file), "--set", rewards]) == 64
    assert capsys.readouterr().err.startswith(f"error: --set {rewards}: spec.environment.rewards[a]: no module")

    file.write_text(text.replace("  environment:\n", "  environment:\n    code: {uri: ./nowhere}\n"))
    line = 1 + file.read_text().splitlines().index("    code: {uri: ./nowhere}")
    assert run_command(["validate", str(file)]) == 64
    assert capsys.readouterr().err.startswith(f"error: {file}:{line}: spec.environment.code.uri: there is neither")


def test_what_lies_elsewhere_is_named_as_not_opened(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(own / "run.yaml", ["spec.data.prompts.0.uri=s3://bucket/mine.jsonl"], as_json=False)
    assert "not opened, as it is not on this machine: s3://bucket/mine.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.precision=BF16", "the manifest says BF16, the checkpoint is INT4"),
        ("adapter.targets=[qq_proj]", "q_proj"),
        ("adapter.lora.rank=1000", "rank 1000 is more than"),
    ],
)
def test_a_manifest_that_contradicts_a_model_on_this_machine_is_refused_as_orbit_plan_refuses_it(
    override: str, problem: str
) -> None:
    overrides = [f"model.uri={any_builtin_folder('tiny-adder', 'INT4')}", override]
    if "precision" not in override:
        overrides.append("model.precision=Auto")
    with pytest.raises(ManifestError, match=problem) as found:
        validate(EXAMPLE, overrides, as_json=False)
    run = load_manifest(EXAMPLE, overrides)
    facts = local_facts(run, EXAMPLE.parent)
    assert facts is not None
    verdict = judge(run, facts, Machine(None))
    assert verdict.problem is not None
    assert found.value.message == verdict.problem.message
