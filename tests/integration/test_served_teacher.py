"""Distillation from a model behind an endpoint: what is asked of it, what is kept, and how a run ends that lost it.

The server is `fake_servers`' without a model, so that its log-probs are known; a real SGLang teaches in
`tests/engines/test_served_teacher.py`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.errors import EngineDiedError, GateError, ManifestError, OrbitError, UnsupportedError
from orbit_runtime.loop.replay import replay
from orbit_runtime.loop.run import RunResult, run
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from orbit_runtime.types import FLOATS, TOKENS, Rollout
from tests.fakes.fake_servers import FakeServer, once
from tests.integration.killing import adapter_digests, timeless_rows
from tests.integration.test_distillation_runs import manifest, rows_of
from tests.integration.three_processes import run_apart, two_sides

pytestmark = pytest.mark.timeout(600)  # whole runs, on machines that may be busy


class Teacher(FakeServer):
    """With the tokenizer of the built-in model."""

    beyond = 0
    """Added to the ids of its likeliest tokens."""

    def top(self, adapter: str | None, prompt: list[int], place: int, count: int) -> list[tuple[float, int]]:
        return [(each, token + self.beyond) for each, token in super().top(adapter, prompt, place, count)]

    def text(self, tokens: list[int]) -> str:
        return ChatTokenizer(builtin_folder("tiny-adder", "INT4")).decode(tokens)


@pytest.fixture
def server() -> Iterator[Teacher]:
    made = Teacher(lora=False, plugin=False, vocabulary=104)
    made.start()
    yield made
    made.stop()


def taught(url: str, steps: int = 2, **fields: Any) -> dict[str, Any]:
    """Preflight only reports: the server's answers are worth nothing."""
    teacher = {"type": "Served", "over": "Sampled", "endpoints": [{"url": url}], "preflight": "Report"} | fields
    return manifest(steps, 4, type="Distillation", groupSize=2, teacher=teacher)


def start(spec: dict[str, Any], out: Path) -> RunResult:
    return run(OrbitRun.model_validate(spec), out=str(out))


def rollouts_of(out: Path, step: int) -> list[Rollout]:
    return decompress_rollouts(open_store(str(out)).get(f"rollouts/step-{step:06d}.jsonl.zst"))


def test_every_trained_token_is_scored_once_and_a_replay_asks_nobody(server: Teacher, tmp_path: Path) -> None:
    asked: list[list[int]] = []

    def see(_: FakeServer, path: str, body: dict) -> None:
        if path == "/generate" and not body.get("stream"):
            asked.extend(body["input_ids"])

    server.faults.append(see)
    out = tmp_path / "run"
    assert start(taught(server.url, preflightPrompts=4), out).ended == "done"
    server.stop()
    kept = [each for step in (1, 2) for each in rollouts_of(out, step)]
    assert len(kept) == 16
    for each in kept:
        expected = [
            server.logprob(None, at, token) if mask else 0.0
            for at, (token, mask) in enumerate(zip(each.token_ids_T, each.loss_mask_T, strict=True))
        ]
        assert each.teacher_logprobs_T == array(FLOATS, expected)
    # Four of preflight's answers of the policy, four of the teacher itself, and each rollout once.
    assert len(asked) == 8 + len(kept)
    found = replay(open_store(str(out)), steps=None, show=lambda done, of: None)
    assert found.is_equal
    assert [step.replayed for step in found.steps] == adapter_digests(open_store(str(out)))


def test_likeliest_tokens_are_part_of_the_rollout_and_a_replay_asks_nobody(server: Teacher, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def see(_: FakeServer, path: str, body: dict) -> None:
        if path == "/generate" and not body.get("stream"):
            asked.append(body)

    server.faults.append(see)
    out = tmp_path / "run"
    assert start(taught(server.url, over="TopK", topK=5, preflightPrompts=4), out).ended == "done"
    server.stop()
    kept = [each for step in (1, 2) for each in rollouts_of(out, step)]
    assert len(kept) == 16
    for each in kept:
        assert each.teacher_logprobs_T is None
        assert each.teacher_top is not None
        ids = list(each.token_ids_T)
        expected = [pair for at in trained_places(each) for pair in server.top(None, ids, at, 5)]
        assert each.teacher_top == (array(TOKENS, [t for _, t in expected]), array(FLOATS, [p for p, _ in expected]))
    # The servers once; preflight's answers of the policy and of the teacher; and each rollout from its answer on.
    assert len(asked) == 1 + 8 + len(kept)
    assert {body["top_logprobs_num"] for body in asked} == {5}
    starts = {tuple(body["input_ids"]): body["logprob_start_len"] for body in asked}
    assert all(starts[tuple(each.token_ids_T)] == trained_places(each)[0] - 1 for each in kept)
    assert all(row["teacher_divergence"] > 0 for row in rows_of(out))
    found = replay(open_store(str(out)), steps=None, show=lambda done, of: None)
    assert found.is_equal
    assert [step.replayed for step in found.steps] == adapter_digests(open_store(str(out)))


def trained_places(rollout: Rollout) -> list[int]:
    return [place for place, flag in enumerate(rollout.loss_mask_T) if flag]


def test_a_teacher_whose_answer_is_wrong_ends_the_run_and_it_goes_on(server: Teacher, tmp_path: Path) -> None:
    """A token that the policy does not know: 84 and not a step; with a server that answers well, the run continues."""
    out, fields = tmp_path / "run", {"over": "TopK", "topK": 5, "preflightPrompts": 4}
    start(taught(server.url, steps=1, **fields), out)
    server.beyond = 10**6
    with pytest.raises(
        GateError, match=r"\d+ with the log-prob .*the policy's vocabulary has the ids 0 to \d+"
    ) as caught:
        start(taught(server.url, steps=2, **fields), out)
    assert (caught.value.exit_code, caught.value.where) == (84, "spec.algorithm.teacher.endpoints")
    server.beyond = 0
    assert start(taught(server.url, steps=2, **fields), out).ended == "done"
    assert len(rows_of(out)) == 2


def test_the_divergence_is_that_of_the_recorded_numbers(server: Teacher, tmp_path: Path) -> None:
    """K3 of Schulman, Approximating KL Divergence (2020), over the sampled tokens, as the first step found them."""
    start(taught(server.url, steps=1, preflightPrompts=4), tmp_path / "run")
    differences = [
        taught - own
        for each in rollouts_of(tmp_path / "run", 1)
        for taught, own, mask in zip(each.teacher_logprobs_T or (), each.logprobs_T, each.loss_mask_T, strict=True)
        if mask
    ]
    k3 = np.exp(np.array(differences)) - 1 - np.array(differences)
    assert rows_of(tmp_path / "run")[0]["teacher_divergence"] == pytest.approx(k3.mean(), rel=1e-3)


def test_a_teacher_that_answers_worse_than_the_policy_stops_the_run(server: Teacher, tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"the teacher earns 0\.000, the policy 0\.\d+") as caught:
        start(taught(server.url, preflight="Enforce"), tmp_path / "run")
    assert caught.value.where == "spec.algorithm.teacher.endpoints"
    assert json.loads((tmp_path / "run" / "teacher.json").read_text())["teacher_reward"] == 0.0


def test_a_run_that_lost_its_teacher_goes_on_from_its_checkpoint(server: Teacher, tmp_path: Path) -> None:
    out = tmp_path / "run"
    start(taught(server.url, steps=1, preflightPrompts=4), out)
    server.faults += [once("/generate", 500, {"error": "gone"}, when=lambda body: "stream" not in body)] * 100
    with pytest.raises(EngineDiedError, match=r"teacher 0 .* was lost 3 times") as caught:
        start(taught(server.url, steps=2), out)
    assert caught.value.exit_code == 82
    server.faults.clear()
    assert start(taught(server.url, steps=2), out).ended == "done"
    assert len(rows_of(out)) == 2


@pytest.mark.parametrize("over", ["Sampled", "TopK"])
def test_the_orchestrator_of_three_processes_asks_it(server: Teacher, tmp_path: Path, over: str) -> None:
    asked = taught(server.url, over=over, preflightPrompts=4)
    start(asked, tmp_path / "one")
    with two_sides(asked) as sides:
        assert run_apart(asked, tmp_path / "three", sides).ended == "done"
    one, three = open_store(str(tmp_path / "one")), open_store(str(tmp_path / "three"))
    assert timeless_rows(three) == timeless_rows(one)
    assert [(each.teacher_logprobs_T, each.teacher_top) for each in rollouts_of(tmp_path / "three", 2)] == [
        (each.teacher_logprobs_T, each.teacher_top) for each in rollouts_of(tmp_path / "one", 2)
    ]


def refused(spec: dict[str, Any], out: Path) -> OrbitError:
    with pytest.raises(OrbitError) as caught:
        start(spec, out)
    assert not (out / "run.json").exists()
    return caught.value


def test_a_teacher_that_no_server_can_be_is_refused(server: Teacher, tmp_path: Path) -> None:
    cold = taught(server.url)
    cold["spec"]["rollout"]["sampling"] |= {"temperature": 0.7}
    found = refused(cold, tmp_path / "cold")
    assert isinstance(found, UnsupportedError)
    assert found.where == "spec.rollout.sampling.temperature"
    for fields, where in (
        ({"over": "Full"}, "over"),
        ({"over": "TopK", "topK": 65}, "topK"),
        ({"endpoints": []}, "type"),
        ({"uri": "runs/other/adapters/policy-v1"}, "uri"),
        ({"endpoints": [{"url": server.url}, {"url": server.url}]}, "endpoints"),
    ):
        with pytest.raises((ManifestError, ValueError), match=where):
            OrbitRun.model_validate(taught(server.url, **fields))
