"""What a step trains on, where a teacher behind endpoints was asked as the rollouts ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from orbit_runtime.algorithms.table import build_algorithm
from orbit_runtime.loop.advantages import build_batch
from orbit_runtime.spec import OrbitRun
from orbit_runtime.types import Group, Trainer
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
