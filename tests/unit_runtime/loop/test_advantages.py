"""What a step trains on, where a teacher behind endpoints was asked as the rollouts ended; the drift from the base."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from orbit_runtime.algorithms.table import build_algorithm
from orbit_runtime.data.records import compress_rollouts, decompress_rollouts, decompressed_lines
from orbit_runtime.data.samples import build_samples, with_column
from orbit_runtime.loop.advantages import build_batch, describe_training, measure_drift, with_shown
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.objectives import OBJECTIVES
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Group, Sample, Trainer
from tests.unit_runtime.loop.test_collect import EQUAL, FAILED, MIXED, group


class NoTeacher:
    """A trainer whose teacher is elsewhere."""

    def column(self, name: str, samples_D: Sequence[Any]) -> list[Any]:
        raise AssertionError("it has none")


def batch(groups: Sequence[Group], over: str = "Sampled") -> list[Any]:
    teacher = {"type": "Served", "over": over, "endpoints": [{"url": "http://teacher:30000"}]}
    run = OrbitRun.model_validate({
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "taught"},
        "spec": {
            "model": {"uri": "builtin://tiny-adder"},
            "algorithm": {"type": "DAPO", "teacher": teacher},
            "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
            "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
            "training": {"steps": 1},
        },
    })  # fmt: skip
    return build_batch(run.spec, build_algorithm(run.spec.algorithm), cast("Trainer", NoTeacher()), groups)


def taught(rewards: Sequence[float | None]) -> Group:
    made = group(rewards)
    return replace(made, rollouts_G=tuple(replace(each, teacher_logprobs_T=(0.0, -0.25)) for each in made.rollouts_G))


def test_the_column_of_the_teacher_comes_from_the_rollouts() -> None:
    assert [list(each.columns["teacher"]) for each in batch([taught(MIXED), taught(EQUAL)])] == [[0.0, -0.25]] * 2


def test_likeliest_tokens_come_with_their_rollout_and_nothing_is_scored() -> None:
    made, top = group(MIXED), (array("i", [7, 8]), array("f", [-0.5, -1.5]))
    rollouts = tuple(replace(each, teacher_top=top) for each in made.rollouts_G)
    found = batch([replace(made, rollouts_G=rollouts)], "TopK")
    assert [each.teacher_top for each in found] == [top, top]
    assert all("teacher" not in each.columns for each in found)


@pytest.mark.parametrize("rewards", [EQUAL, FAILED])
def test_a_step_in_which_nothing_teaches_asks_no_teacher(rewards: Sequence[float | None]) -> None:
    assert batch([taught(rewards)]) == []


class Base:
    """A trainer whose base gives every token the log-prob -1; it keeps what it was asked to score."""

    def __init__(self) -> None:
        self.asked: list[Sample] = []

    def column(self, name: str, samples_D: Sequence[Sample]) -> list[array[float]]:
        assert name == "base"
        self.asked += samples_D
        return [array("f", [-1.0 * flag for flag in each.loss_mask_T]) for each in samples_D]


def answered(prompt: int, answer: int, prefix_id: int = 0) -> Sample:
    """Every token of the answer was sampled with the log-prob -0.5."""
    tokens, flags = [0] * (prompt + answer), [0] * prompt + [1] * answer
    columns = {"sampled": array("f", [-0.5 * flag for flag in flags])}
    return Sample(tokens, flags, columns, prefix_id, prompt)  # type: ignore[arg-type]


def drift(samples_D: Sequence[Sample], adapter: str = "LoRA") -> tuple[float | None, list[Sample]]:
    spec, base = SimpleNamespace(adapter=SimpleNamespace(type=adapter)), Base()
    return measure_drift(cast("RunSpec", spec), cast("Trainer", base), samples_D), base.asked


K3 = math.exp(-0.5) - 1 + 0.5


@pytest.mark.parametrize(
    ("samples_D", "asked", "tokens"),
    [
        # 128 prompts of 40 tokens with 8 answers of 24 each are 29,696 tokens to pass; 464 are a 64th of them.
        ([answered(40, 24, index // 8) for index in range(1024)], 7, 448),
        # However large the step, 2,048 tokens.
        ([answered(0, 128, index) for index in range(4096)], 16, 2048),
        # However small, one sample; however long that, the first 2,048 tokens of its answer.
        ([answered(1, 5), answered(1, 5)], 1, 6),
        ([answered(100, 9000), answered(100, 9000)], 1, 2148),
    ],
)
def test_a_few_samples_tell_how_far_the_policy_is_from_its_base(
    samples_D: list[Sample], asked: int, tokens: int
) -> None:
    found, scored = drift(samples_D)
    assert found == pytest.approx(K3)
    assert (len(scored), sum(len(each.token_ids_T) for each in scored)) == (asked, tokens)


def test_nothing_is_scored_for_it_where_the_algorithm_has_the_bases_log_probs() -> None:
    known = with_column([answered(4, 4)], "reference", [array("f", [0.0] * 4 + [-1.0] * 4)])
    assert drift(known) == (pytest.approx(K3), [])


def test_a_model_that_trains_as_a_whole_and_a_step_without_samples_have_no_drift() -> None:
    assert drift([answered(4, 4)], "Full") == (None, [])
    assert drift([]) == (None, [])


def test_one_answer_of_a_step_is_kept_token_by_token() -> None:
    groups = [group(EQUAL, "a"), group((1.0, 0.0, 0.0, 0.0), "b"), group((0.0, 9.0), "c")]
    samples_D = with_shown([
        replace(each, columns={"advantage": array("f", [0.0, value])})
        for each, value in zip(build_samples(groups), (0, 0, 1.5, -0.5, -0.5, -0.5, -1, 1), strict=True)
    ])  # fmt: skip
    told = describe_training(OBJECTIVES["GRPO"], groups, samples_D, [0.25], lambda token: f"<{token}>")
    shown = {key: each["tokens"] for key, each in told.items() if "tokens" in each}
    assert shown == {("b", 0, 0): [["<6>", -1.0, 1.5, 0, 0.25]]}, (
        "the largest advantage of the first group that teaches"
    )
    assert len(told) == 8
    made = [rollout for each in groups for rollout in each.rollouts_G]
    data = compress_rollouts(made, [{}, {}, told["b", 0, 0], *[{}] * 5])
    assert decompress_rollouts(data) == made, "who trains on them again reads the same rollouts"
    assert [orjson.loads(line).get("tokens", []) for line in decompressed_lines(data)][2] == shown["b", 0, 0]
