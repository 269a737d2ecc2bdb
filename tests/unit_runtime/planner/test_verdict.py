"""May it start? Every example on every kind of machine, and why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.cards import card_facts, find_card_facts
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import Machine, check_verdict, judge
from orbit_runtime.planner.verdict import check_alone, plan_as_run
from orbit_runtime.spec import OrbitRun, load_manifest
from orbit_runtime.spec.resolve import with_sequences
from tests.unit_runtime.planner.test_planner import build

GIB = 2**30
EXAMPLES = Path(__file__).parents[3] / "examples"
MACHINES = {
    "laptop": Machine(None, 0, 16 * GIB),
    "1 RTX4090": Machine(find_gpu("RTX4090"), 1, 64 * GIB),
    "1 H100": Machine(find_gpu("H100"), 1, 256 * GIB),
    "1 B200": Machine(find_gpu("B200"), 1, 256 * GIB),
    "8 H100": Machine(find_gpu("H100"), 8, 2048 * GIB),
    "8 B200": Machine(find_gpu("B200"), 8, 2048 * GIB),
}
YES, SMALL, LATER = "Fits", "DoesNotFit", "NotInThisVersion"
NEEDS_NODE = (SMALL, SMALL, SMALL, SMALL, SMALL, YES)
WANTED = {
    "quickstart": (YES,) * 6,
    "quickstart-oft": (YES,) * 6,
    "calculator": (YES,) * 6,
    "ppo": (YES,) * 6,
    "code": (YES,) * 6,
    "gymnasium": (YES,) * 6,
    "verifiers": (YES,) * 6,
    "distillation": (YES,) * 6,
    "smollm2": (YES,) * 6,
    "sft": (YES,) * 6,
    "sft-rl": (YES,) * 6,
    "qwen3-4b": (SMALL, SMALL, YES, YES, YES, YES),
    # With fewer requests at a time these two would do on one B200.
    "qwen3-30b-a3b": (SMALL, SMALL, SMALL, SMALL, YES, SMALL),
    "qwen3-235b-a22b": (SMALL, SMALL, SMALL, SMALL, YES, YES),
    # One B200 is too small for all its requests at a time, and eight would need ranks.
    "deepseek-v4-flash": (SMALL, SMALL, SMALL, SMALL, LATER, LATER),
    "deepseek-v4-pro": (SMALL,) * 6,
    "kimi-k2-6": NEEDS_NODE,
    "kimi-k2-6-oft": NEEDS_NODE,
    "glm-4-5": NEEDS_NODE,
    "llama-3-1-8b": (SMALL, SMALL, YES, YES, YES, YES),
    "qwen3-4b-bf16": (SMALL, SMALL, YES, YES, YES, YES),
    "qwen3-4b-dapo": (SMALL, SMALL, YES, YES, YES, YES),
    "qwen3-4b-tools": (SMALL, SMALL, YES, YES, YES, YES),
    # A CPU keeps keys and values in FP32: 14 GiB.
    "qwen3-0-6b": (SMALL, YES, YES, YES, YES, YES),
    "qwen3-1-7b": (SMALL, YES, YES, YES, YES, YES),
    "qwen3-4b-code": (SMALL, SMALL, YES, YES, YES, YES),
    "qwen3-30b-a3b-nvfp4": (SMALL, SMALL, YES, YES, YES, YES),
    # SGLang computes its attention on GPUs only; base and backward pass need more than an H100 has:
    # there, ranks on eight.
    "gpt-oss-120b": ("Unsupported", SMALL, SMALL, YES, YES, YES),
    # Two ranks: a machine without a GPU starts as many as are asked for.
    "ranks": (YES, "Unsupported", "Unsupported", "Unsupported", YES, YES),
}
"""By example, the reason on each machine."""
NEEDS_RANKS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "kimi-k2-6", "kimi-k2-6-oft", "glm-4-5", "ranks")


def facts_of(run: OrbitRun) -> ModelFacts:
    uri = run.spec.model.uri
    if uri.startswith("builtin://"):
        return folder_facts(builtin_folder(uri.removeprefix("builtin://"), run.spec.model.precision))
    found = find_card_facts(uri)
    assert found is not None
    return found


def test_every_example_is_in_the_table() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(WANTED)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", WANTED)
def test_every_example_on_every_machine(name: str, machine: str) -> None:
    run = load_manifest(EXAMPLES / f"{name}.yaml")
    verdict = judge(run, facts_of(run), MACHINES[machine])
    assert verdict.reason == WANTED[name][list(MACHINES).index(machine)], verdict.problem
    assert verdict.accepted == (verdict.reason == YES)
    assert verdict.plan is not None
    if verdict.accepted:
        assert verdict.problem is None
        needs_ranks = name in NEEDS_RANKS or (name, machine) == ("gpt-oss-120b", "8 H100")
        assert verdict.plan.trainer == ("Megatron" if needs_ranks else "Torch")
        check_verdict(verdict)
    else:
        assert verdict.problem is not None
        assert verdict.problem.fix
        with pytest.raises(UnsupportedError) as caught:
            check_verdict(verdict)
        assert caught.value.exit_code == 78


def test_three_processes_refuse_auto_where_it_would_be_ranks() -> None:
    small, large = (load_manifest(EXAMPLES / f"{name}.yaml") for name in ("qwen3-4b", "kimi-k2-6"))
    assert small.spec.training.trainer == large.spec.training.trainer == "Auto"
    check_alone(plan_as_run(small, facts_of(small), MACHINES["8 B200"]))
    with pytest.raises(UnsupportedError, match="one GPU of 8 x B200 is not enough") as caught:
        check_alone(plan_as_run(large, facts_of(large), MACHINES["8 B200"]))
    assert caught.value.where == "spec.training.trainer"


def test_what_one_gpu_trains_does_so_on_a_node_of_eight_and_says_what_stands_idle() -> None:
    facts = card_facts("Qwen/Qwen3-4B")
    eight = Machine(find_gpu("H100"), 8, 2048 * GIB)
    small = {
        "model": {"maxSequenceLength": 1024}, "training": {"microBatchTokens": 4096, "promptsPerStep": 8},
        "algorithm": {"groupSize": 8},
    }  # fmt: skip
    alone = judge(build(**small), facts, eight)
    assert alone.plan is not None
    assert (alone.accepted, alone.plan.trainer, alone.plan.engine) == (True, "Torch", "Torch")
    (idle,) = [note for note in alone.plan.notes if "idle" in note]
    assert idle.startswith(
        "7 of 8 GPUs are idle (1, 2, 3, 4, 5, 6, 7): one is enough for the trainer; lower placement.gpus"
    )
    served = judge(build(**small, rollout={"engine": "SGLang", "replicas": 8}), facts, eight)
    assert served.plan is not None
    assert (served.accepted, served.plan.servers, served.plan.server_gpus) == (True, 8, 1)
    assert not [note for note in served.plan.notes if "idle" in note]
    split = judge(build(**small, rollout={"engine": "SGLang"}, placement={"layout": "Split"}), facts, eight)
    assert split.plan is not None
    assert [note.partition(";")[0] for note in split.plan.notes if "idle" in note] == [
        "3 of 8 GPUs are idle (1, 2, 3): one is enough for the trainer"
    ]
    apart = judge(
        build(**small, rollout={"engine": "SGLang", "replicas": 7}, placement={"layout": "Split", "trainerGpus": 1}),
        facts, eight,
    )  # fmt: skip
    assert apart.plan is not None
    assert not [note for note in apart.plan.notes if "idle" in note]
    assert apart.plan.devices.trainer == range(1)
    assert [list(gpus) for gpus in apart.plan.server_devices] == [[1], [2], [3], [4], [5], [6], [7]]


def test_a_trainer_that_leaves_the_engine_no_gpu_of_a_smaller_machine_is_refused() -> None:
    run = build(rollout={"engine": "SGLang"}, placement={"layout": "Split", "trainerGpus": 4})
    verdict = judge(run, card_facts("Qwen/Qwen3-4B"), Machine(find_gpu("H100"), 4, 2048 * GIB))
    assert verdict.problem is not None
    assert (verdict.accepted, verdict.problem.where) == (False, "spec.placement.trainerGpus")
    assert "leave the engine none of this machine's 4" in verdict.problem.message
    assert verdict.problem.fix.startswith("write trainerGpus: 3 or less")


@pytest.mark.parametrize("machine", ["1 B200", "8 B200"])
def test_sampling_that_the_engine_does_not_give_is_refused_like_any_other_limit(machine: str) -> None:
    for rollout, accepted in (
        ({"engine": "SGLang", "sampling": {"topK": 5}}, True),
        ({"engine": "SGLang", "deterministic": True, "sampling": {"topK": 5}}, False),
        ({"engine": "Torch", "sampling": {"topK": 5, "repetitionPenalty": 1.1}}, True),
    ):
        verdict = judge(build(rollout=rollout), card_facts("Qwen/Qwen3-4B"), MACHINES[machine])
        assert verdict.accepted is accepted, (rollout, verdict.problem)
    refused = judge(
        build(rollout={"engine": "SGLang", "sampling": {"repetitionPenalty": 1.1}}), card_facts("Qwen/Qwen3-4B"),
        MACHINES[machine],
    )  # fmt: skip
    assert refused.problem is not None
    assert (refused.reason, refused.problem.where) == ("Unsupported", "spec.rollout.sampling.repetitionPenalty")
    assert "engine: Torch" in refused.problem.fix


def test_the_torch_trainer_and_a_server_cannot_share_one_copy_of_the_base() -> None:
    for copies, reason in (("Auto", YES), ("Two", YES), ("Shared", SMALL)):
        run = build(
            rollout={"engine": "SGLang"}, placement={"baseCopies": copies}, model={"maxSequenceLength": 1024},
            training={"microBatchTokens": 1024},
        )  # fmt: skip
        verdict = judge(run, card_facts("Qwen/Qwen3-4B"), MACHINES["1 B200"])
        assert (verdict.reason, verdict.plan and verdict.plan.base_copies) == (reason, "Two"), copies
    assert verdict.problem is not None
    assert verdict.problem.where == "spec.placement.baseCopies"


def test_one_device_samples_fewer_at_a_time_where_eight_gpus_are_asked_to_choose() -> None:
    fields: dict[str, Any] = {"training": {"microBatchTokens": 65536}, "model": {"maxSequenceLength": 2048}}
    run, fixed = build(**fields), build(**fields, rollout={"maxRunningRequests": 512})
    for manifest, gpus, reason in ((run, 1, YES), (run, 8, SMALL), (fixed, 1, SMALL), (fixed, 8, SMALL)):
        verdict = judge(manifest, card_facts("Qwen/Qwen3-4B"), Machine(find_gpu("H100"), gpus, 2048 * GIB))
        assert verdict.reason == reason
        if verdict.problem is not None:
            assert verdict.problem.fix == "write rollout.maxRunningRequests: 128", gpus
        elif verdict.plan is not None:
            assert 128 <= verdict.plan.kv_sequences < 256


def test_a_small_machine_takes_smaller_micro_batches_and_fewer_requests_by_itself() -> None:
    """Of a small real model with defaults, more was planned than a laptop has."""
    small, answers = Machine(None, 0, 8 * GIB), {"sampling": {"maxNewTokens": 256}}
    run, facts = build(rollout=answers), card_facts("HuggingFaceTB/SmolLM2-135M-Instruct")
    verdict = judge(run, facts, small)
    assert verdict.reason == YES
    made = verdict.plan
    assert made is not None
    assert made.waits
    assert made.micro_batch_tokens < 16384
    assert any("a run, which knows its prompts, may need less" in note for note in made.notes)
    short = plan_as_run(with_sequences(run, 40), facts, small)
    assert not short.waits
    assert short.micro_batch_tokens > made.micro_batch_tokens
    asked = build(training={"microBatchTokens": 16384}, rollout=answers | {"maxRunningRequests": 512})
    fixed = plan_as_run(asked, facts, small)
    assert (fixed.micro_batch_tokens, fixed.waits) == (16384, False), "what the manifest sets is not lowered"


def test_a_run_that_samples_nothing_is_told_of_no_requests() -> None:
    prompts = [{"uri": "p.jsonl", "completionField": "a"}]
    written = build().model_dump(mode="json", by_alias=True, exclude_unset=True)
    del written["spec"]["environment"]
    written["spec"] |= {"algorithm": {"type": "SFT"}, "data": {"prompts": prompts}}
    run = OrbitRun.model_validate(written)
    made = plan_as_run(run, card_facts("Qwen/Qwen3-4B"), Machine(None, 0, 1000 * GIB))
    assert (made.waits, made.notes) == (False, ())


def test_oft_on_a_dense_model_is_not_refused_for_what_only_experts_cannot_do() -> None:
    run = build(adapter={"type": "OFT"}, rollout={"engine": "SGLang"}, model={"maxSequenceLength": 1024})
    verdict = judge(run, card_facts("Qwen/Qwen3-4B"), MACHINES["1 B200"])
    assert verdict.reason != "Unsupported", verdict.problem


def test_a_machine_whose_memory_nobody_knows_is_the_only_unknown() -> None:
    verdict = judge(build(), card_facts("Qwen/Qwen3-4B"), Machine(None, 0, None))
    assert (verdict.accepted, verdict.reason) == (None, "MemoryUnknown")
    check_verdict(verdict)


def test_a_manifest_that_contradicts_the_model_is_refused_as_such() -> None:
    verdict = judge(build(model={"precision": "INT4"}), card_facts("Qwen/Qwen3-4B"), MACHINES["1 H100"])
    assert (verdict.accepted, verdict.reason, verdict.plan) == (False, "ModelMismatch", None)
    with pytest.raises(ManifestError, match="the manifest says INT4, the checkpoint is BF16"):
        check_verdict(verdict)
    assert verdict.to_json()["problem"]["where"] == "spec.model.precision"
