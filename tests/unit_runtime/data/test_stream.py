"""Drawing: sources by weight, prompts that are passed over, and draws that are the same after any resume."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.data.pass_rates import PassRateBounds, PassRates
from orbit_runtime.data.prompts import PromptTable, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.data.stream import PromptStream
from orbit_runtime.errors import DataError
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Group, Prompt, Rollout


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> PromptTable:
    return sources(tmp_path_factory.mktemp("rows"), a=40, b=10, c=5)


def sources(folder: Path, limit: int | None = None, **rows: int) -> PromptTable:
    for name, count in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{n}"}}\n' for n in range(count)))
    return load_prompts([PromptSource(str(folder / f"{name}.jsonl")) for name in rows], limit=limit)


def source_of(prompt: Prompt) -> str:
    return prompt.prompt_id.partition("/")[0]


def scored(prompt: Prompt, rewards: Sequence[float | None]) -> Group:
    return Group(
        prompt,
        tuple(
            Rollout(
                run="r", step=1, prompt_id=prompt.prompt_id, sample_index=index, turns=(), token_ids_T=[1],
                loss_mask_T=[1], logprobs_T=[0.0], versions_T=[0], reward=reward,
                outcome="value" if reward is not None else "crash", reward_parts={}, finish_reason="stop",
            )
            for index, reward in enumerate(rewards)
        ),
    )  # fmt: skip


def test_sources_are_drawn_by_their_weights_each_in_epochs_of_its_own(table: PromptTable) -> None:
    stream = PromptStream(table, seed=3, weights=[1, 2, 5])
    drawn = stream.take(4000)
    shares = Counter(map(source_of, drawn))
    for name, weight in (("a", 1), ("b", 2), ("c", 5)):
        expected = 4000 * weight / 8
        assert abs(shares[name] - expected) < 4 * math.sqrt(expected)
    for name, rows in (("a", 40), ("b", 10), ("c", 5)):
        own = [prompt for prompt in drawn if source_of(prompt) == name]
        visits = Counter(prompt.visit for prompt in own)
        assert set(list(visits.values())[:-1]) == {rows}
        assert len({(prompt.prompt_id, prompt.visit) for prompt in own}) == len(own)
        assert stream.epochs(stream.state())[name] == pytest.approx(len(own) / rows)


def test_a_source_s_order_does_not_depend_on_the_others(tmp_path: Path, table: PromptTable) -> None:
    fewer = sources(tmp_path, a=40, b=10)
    own = [
        [prompt.prompt_id for prompt in stream.take(400) if source_of(prompt) == "b"][:30]
        for stream in (PromptStream(table, seed=3, weights=[1, 2, 5]), PromptStream(fewer, seed=3, weights=[9, 2]))
    ]
    assert own[0] == own[1]


def test_with_epochs_each_source_ends_by_itself_and_all_together(table: PromptTable) -> None:
    stream = PromptStream(table, seed=1, epochs=2, weights=[1, 1, 1])
    drawn = stream.take(1000)
    assert Counter(map(source_of, drawn)) == {"a": 80, "b": 20, "c": 10}
    assert not stream.passed_over
    assert stream.take(1) == []


def test_a_source_with_a_weight_and_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompt of b is used"):
        PromptStream(sources(tmp_path, limit=4, a=4, b=4), seed=1, weights=[1, 1])


def skill(prompt: Prompt, step: int) -> list[float | None]:
    """What a policy that learns scores: some prompts always, some never, others more and more; some rewards fail."""
    key = stream_key(0, "skill", prompt.prompt_id)
    hard = key % 100 / 100
    rate = 1.0 if hard < 0.2 else 0.0 if hard > 0.8 else min(1.0, 0.2 + 0.05 * step)
    draws = [stream_key(0, "sample", prompt.prompt_id, prompt.visit, index) / 2**64 for index in range(4)]
    return [None if draw > 0.97 else float(draw < rate) for draw in draws]


def play(
    table: PromptTable, delay: int, steps: int, stops: frozenset[int], weights: Sequence[float] | None
) -> list[list[tuple[str, int]]]:
    """The loop's draws: step t begins once t - 1 - delay steps are trained. At each of `stops` it is killed behind that
    step, and goes on from what a checkpoint holds."""

    def build() -> PromptStream:
        rates = PassRates(PassRateBounds(0.1, 0.9, 1.0, revisit=2), delay=delay)
        return PromptStream(table, seed=5, weights=weights, rates=rates)

    stream, done = build(), 0
    begun: dict[int, list[Prompt]] = {}
    cursors: dict[int, Any] = {}
    trained: list[list[tuple[str, int]]] = []
    while done < steps:
        for step in range(max(cursors, default=done) + 1, min(steps, done + 1 + delay) + 1):
            begun[step] = stream.take(6, step=step)
            cursors[step] = stream.state()
        done += 1
        groups = begun.pop(done)
        stream.record(done, [scored(prompt, skill(prompt, done)) for prompt in groups])
        trained.append([(prompt.prompt_id, prompt.visit) for prompt in groups])
        checkpoint = json.loads(json.dumps(stream.with_rates(cursors[done])))
        if done in stops:
            stream = build()
            stream.restore(checkpoint)
            begun, cursors = {}, {done: stream.state()}
    return trained


@settings(max_examples=25, deadline=None)
@given(
    delay=st.integers(0, 3), stops=st.frozensets(st.integers(1, 29)), weights=st.sampled_from([None, [1.0, 2.0, 1.0]])
)
def test_a_killed_run_draws_what_one_that_was_not_draws(
    table: PromptTable, delay: int, stops: frozenset[int], weights: list[float] | None
) -> None:
    assert play(table, delay, 30, stops, weights) == play(table, delay, 30, frozenset(), weights)


def test_prompts_outside_the_bounds_are_passed_over_and_looked_at_again(table: PromptTable) -> None:
    rates = PassRates(PassRateBounds(0.1, 0.9, 1.0, revisit=2))
    stream = PromptStream(table, seed=2, rates=rates)
    seen: dict[str, list[int]] = {}
    for step in range(1, 60):
        groups = [scored(prompt, [1.0] * 4 if prompt.prompt_id == "a/3" else [1.0, 0.0]) for prompt in stream.take(11)]
        for group in groups:
            seen.setdefault(group.prompt.prompt_id, []).append(group.prompt.visit)
        stream.record(step, groups)
    assert seen["a/3"] == [0, 3, 6, 9]
    assert seen["a/4"] == [*range(len(seen["a/4"]))]
    assert rates.counts() == (55, 0, 1)


def test_the_running_rate_is_the_mean_of_the_newest_visit_and_all_before() -> None:
    rates = PassRates(PassRateBounds(0.3, 0.95, passes=0.5))
    rates.record(1, [(7, 0, [1.0, 0.6, 0.2, None])])
    assert rates.state()["settled"] == [[7, 2 / 3, 0]]
    rates.record(2, [(7, 1, [0.0, 0.0])])
    assert rates.state()["settled"] == [[7, 1 / 3, 1]]
    assert rates.may_draw(7, 2, 3)
    rates.record(3, [(7, 2, [None])])
    rates.record(4, [(7, 3, [0.0])])
    assert not rates.may_draw(7, 4, 5)
    assert rates.counts() == (1, 1, 0)


def test_a_stream_whose_prompts_are_all_passed_over_ends(table: PromptTable) -> None:
    stream = PromptStream(table, seed=2, rates=PassRates(PassRateBounds(0.05, 0.95, 1.0)))
    for step in range(1, 12):
        taken = stream.take(5)
        stream.record(step, [scored(prompt, [0.0, 0.0]) for prompt in taken])
    assert taken
    assert stream.take(5, step=12) == []
    assert stream.passed_over
    again = PromptStream(table, seed=2, rates=PassRates(PassRateBounds(0.05, 0.95, 1.0)))
    again.restore(json.loads(json.dumps(stream.with_rates(stream.state()))))
    assert again.take(5, step=13) == []
