"""Reading what was sampled: in pieces, from broken files, and which of it a page shows."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard

from orbit_runtime.observability.groups import read_groups, spread
from orbit_runtime.observability.pairs import BeforeAfter, read_pairs
from orbit_runtime.observability.samples import READ_BYTES, File, read_samples, shorten
from orbit_runtime.storage import Store, open_store


def record(prompt: str, index: int = 0, *, reward: float | None = 0.0, said: str = "4", **more: Any) -> dict[str, Any]:
    return {
        "prompt_id": prompt,
        "sample_index": index,
        "turns": [{"role": "user", "text": "2+2="}, {"role": "assistant", "text": said}],
        "loss_mask_T": [0, 1, 1],
        "reward": reward,
        "outcome": "value" if reward is not None else "timeout",
        "reward_parts": {},
        "finish_reason": "stop",
        **more,
    }


def answer(prompt: str, index: int, reward: float, said: str) -> dict[str, Any]:
    """As an evaluation keeps it."""
    return {
        **record(prompt, index, reward=reward),
        "environment": "held-out",
        "turns": [["user", "2+2="], ["assistant", said]],
        "expected": "4",
    }


def write(folder: Path, key: str, records: Sequence[Mapping[str, Any]]) -> File:
    path = folder / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress("".join(json.dumps(each) + "\n" for each in records).encode()))
    return File(int(path.name[5:11]) if path.name.startswith("step-") else int(path.parent.name[5:]), key)


def store_of(folder: Path) -> Store:
    return open_store(str(folder), writable=False)


def pairs_of(folder: Path, evaluations: Sequence[File], rollouts: Sequence[File]) -> BeforeAfter:
    found = read_pairs(store_of(folder), evaluations, rollouts)
    assert found is not None
    return found


def test_a_file_is_read_in_pieces_and_a_record_without_its_columns(tmp_path: Path) -> None:
    long = [record(f"p/{prompt}", said="7" * 1_000_000, token_ids_T=[123456] * 50_000) for prompt in range(80)]
    file = write(tmp_path, "rollouts/step-000001.jsonl.zst", long)
    del long
    store = store_of(tmp_path)
    tracemalloc.start()
    count = sum(1 for _ in read_samples(store, file.key))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 80
    # Of 108 MB of records: some pieces, one record, and what its JSON makes of it.
    assert peak < 10 * READ_BYTES


def test_columns_of_tokens_are_passed_over_and_a_text_that_looks_like_one_is_not(tmp_path: Path) -> None:
    """As a run writes its records: without a space."""
    said = '"token_ids_T":[1,2] \\"loss_mask_T":[9]'
    more = record("p/1", said=said, token_ids_T=[11, 12, 13], logprobs_T=[-1.5, -0.1, 0.0], versions_T=[-1, 1, 1])
    path = tmp_path / "rollouts/step-000001.jsonl.zst"
    path.parent.mkdir()
    path.write_bytes(zstandard.compress(json.dumps(more, separators=(",", ":")).encode()))
    ((sample, _),) = read_samples(store_of(tmp_path), "rollouts/step-000001.jsonl.zst")
    assert (sample.completion, sample.tokens) == (said, 2)


def test_a_broken_file_ends_early_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    file = write(tmp_path, "rollouts/step-000001.jsonl.zst", [record(f"p/{n}", said=str(n) * 999) for n in range(900)])
    path = tmp_path / file.key
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert len([*read_samples(store_of(tmp_path), file.key)]) < 900
    path.write_bytes(b"\0 no zstandard")
    assert [*read_samples(store_of(tmp_path), file.key)] == []
    assert [*read_samples(store_of(tmp_path), "rollouts/step-000009.jsonl.zst")] == []


def test_files_that_were_appended_to_each_other_are_one(tmp_path: Path) -> None:
    first, second = (write(tmp_path, f"rollouts/step-00000{n}.jsonl.zst", [record(f"p/{n}")]) for n in (1, 2))
    both = (tmp_path / first.key).read_bytes() + (tmp_path / second.key).read_bytes()
    (tmp_path / first.key).write_bytes(both)
    assert [sample.prompt_id for sample, _ in read_samples(store_of(tmp_path), first.key)] == ["p/1", "p/2"]


def test_several_turns_say_who_spoke(tmp_path: Path) -> None:
    said = [("system", "add"), ("user", "2+2="), ("assistant", "add(2,2)"), ("tool", "4"), ("assistant", "4")]
    turns = [{"role": role, "text": text} for role, text in said]
    file = write(tmp_path, "rollouts/step-000001.jsonl.zst", [record("p/1", turns=turns)])
    ((sample, _),) = read_samples(store_of(tmp_path), file.key)
    assert sample.prompt == "add\n2+2="
    assert sample.completion == "assistant: add(2,2)\ntool: 4\nassistant: 4"


def test_a_long_text_keeps_its_end_where_the_answer_stands() -> None:
    assert shorten("short") == "short"
    assert shorten("a" * 400 + "b" * 1000 + "c" * 200) == "a" * 400 + " … (1000 more characters) … " + "c" * 200


def test_held_out_prompts_come_before_those_that_were_trained_on(tmp_path: Path) -> None:
    evaluations = [
        write(tmp_path, f"evaluation/step-{step:06d}/samples.jsonl.zst",
              [answer("h/1", 0, float(step > 0), "4" if step else "5"), answer("h/2", 0, 1.0, "4")])
        for step in (0, 10, 20)
    ]  # fmt: skip
    rollouts = [write(tmp_path, f"rollouts/step-{step:06d}.jsonl.zst", [record("t/1")]) for step in (1, 20)]
    both = pairs_of(tmp_path, evaluations, rollouts)
    assert both.held_out
    assert (both.better, both.worse, both.equal) == (1, 0, 1)
    changed = both.pairs[0]
    assert (changed.before.step, changed.before.shown.completion) == (0, "5")
    assert (changed.after.step, changed.after.shown.completion, changed.after.shown.expected) == (20, "4", "4")


def test_what_changed_most_is_shown_and_the_worst_with_it(tmp_path: Path) -> None:
    def of(step: int, rewards: Mapping[str, float]) -> File:
        key = f"rollouts/step-{step:06d}.jsonl.zst"
        return write(tmp_path, key, [record(name, reward=reward) for name, reward in rewards.items()])

    names = [f"p/{n}" for n in range(10)]
    first = of(1, dict.fromkeys(names, 0.5))
    last = of(9, {name: 0.1 * n for n, name in enumerate(names)})
    both = pairs_of(tmp_path, [], [first, last])
    assert not both.held_out
    assert (both.better, both.worse, both.equal) == (4, 5, 1)
    assert [pair.before.shown.prompt_id for pair in both.pairs] == ["p/9", "p/8", "p/7", "p/6", "p/0"]


def test_of_several_answers_the_one_closest_to_their_mean_stands_for_them(tmp_path: Path) -> None:
    rewards = {1: (0.0, 0.0, 1.0), 9: (1.0, 0.6, 0.0)}
    files = [
        write(tmp_path, f"rollouts/step-{step:06d}.jsonl.zst",
              [record("p/1", n, reward=each, said=f"{step}.{n}") for n, each in enumerate(found)])
        for step, found in rewards.items()
    ]  # fmt: skip
    (pair,) = pairs_of(tmp_path, [], files).pairs
    assert (pair.before.shown.completion, pair.before.mean) == ("1.0", pytest.approx(1 / 3))
    assert (pair.after.shown.completion, pair.after.mean) == ("9.1", pytest.approx(1.6 / 3))


def test_prompts_of_the_first_step_are_looked_for_in_the_last_ones(tmp_path: Path) -> None:
    steps = {1: ["a", "b"], 20: ["c"], 21: ["a", "c"], 22: ["d"], 23: ["b"]}
    files = [
        write(tmp_path, f"rollouts/step-{step:06d}.jsonl.zst", [record(name) for name in names])
        for step, names in steps.items()
    ]
    both = pairs_of(tmp_path, [], files)
    assert [(pair.after.shown.prompt_id, pair.after.step) for pair in both.pairs] == [("a", 21), ("b", 23)]
    assert read_pairs(store_of(tmp_path), [], [files[0], files[1]]) is None
    assert read_pairs(store_of(tmp_path), [], files[:1]) is None


def test_a_failed_reward_is_no_score(tmp_path: Path) -> None:
    files = [
        write(tmp_path, f"rollouts/step-{step:06d}.jsonl.zst", [record("p/1", reward=None), record("p/2", reward=0.0)])
        for step in (1, 2)
    ]
    assert pairs_of(tmp_path, [], files).compared == 1


def test_groups_are_whole_and_a_page_ends_before_it_is_too_large(tmp_path: Path) -> None:
    records = [
        record(f"p/{prompt}", n, reward=float(n == 0), said="x" * 300, advantage=1.5 if n == 0 else -0.5)
        for prompt in range(6) for n in range(4)
    ]  # fmt: skip
    file = write(tmp_path, "rollouts/step-000007.jsonl.zst", records)
    store, starts, seen, start = store_of(tmp_path), [], [], 0
    while start is not None:
        page = read_groups(store, file, {"p/0": "4"}, start=start, most_bytes=3500)
        starts.append(start)
        seen += [(group["id"], len(group["rows"])) for group in page.groups]
        start = page.following
    assert starts == [0, 2, 4]
    assert seen == [(f"p/{prompt}", 4) for prompt in range(6)]
    first = read_groups(store, file, {"p/0": "4"}).groups[0]
    assert first["expected"] == "4"
    assert first["rows"][0] == [0, "x" * 300, 1.0, 1.5, 2, "value", "stop", []]


def test_a_group_larger_than_a_page_still_makes_one(tmp_path: Path) -> None:
    file = write(tmp_path, "rollouts/step-000001.jsonl.zst", [record("p/1", n, said="x" * 999) for n in range(9)])
    page = read_groups(store_of(tmp_path), file, {}, most_bytes=100)
    assert (len(page.groups[0]["rows"]), page.following) == (9, None)


def test_steps_of_a_page_are_spread_over_the_run() -> None:
    files = [File(step, "") for step in range(1, 101)]
    assert [file.step for file in spread(files, 4)] == [1, 34, 67, 100]
    assert spread(files[:3], 4) == files[:3]
