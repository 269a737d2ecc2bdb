"""Samples, micro-batches and the rollout record."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.data.packing import batch_cost, pack_micro_batches, split_mini_batches
from orbit_runtime.data.records import compress_rollouts, decompress_rollouts, rollout_from_line, rollout_to_line
from orbit_runtime.data.samples import build_samples, spread, trained, with_column, with_end
from orbit_runtime.errors import DataError
from orbit_runtime.types import Group, Prompt, Rollout, Sample, Turn


def rollout(prompt: int, sample: int, reward: float | None, answer: int = 3) -> Rollout:
    tokens = (1, 2, 3 + prompt, *range(50, 50 + answer))
    return Rollout(
        run="r",
        step=1,
        prompt_id=f"p/{prompt}",
        sample_index=sample,
        turns=(Turn("user", 0, 3, "q"), Turn("assistant", 3, 3 + answer, "a\u2028é")),
        token_ids_T=tokens,
        loss_mask_T=(0,) * 3 + (1,) * answer,
        logprobs_T=(0.0,) * 3 + tuple(-random.Random(sample).random() for _ in range(answer)),
        versions_T=(-1,) * 3 + (4,) * answer,
        reward=reward,
        outcome="value" if reward is not None else "timeout",
        reward_parts={"correct": reward},
        finish_reason="stop",
    )


def group(prompt: int, rewards: list[float | None]) -> Group:
    made = tuple(rollout(prompt, sample, reward) for sample, reward in enumerate(rewards))
    return Group(Prompt(f"p/{prompt}", 0, ()), made)


def test_failed_rewards_become_no_sample_and_groups_share_their_prompt() -> None:
    groups = [group(0, [1.0, None, 0.0]), group(1, [0.5, 0.5, 0.5])]
    samples = build_samples(groups)
    assert [sample.prefix_id for sample in samples] == [0, 0, 1, 1, 1]
    assert samples[1].columns == {"sampled": groups[0].rollouts_G[2].logprobs_T}
    assert {sample.prefix_length for sample in samples} == {3}


def test_a_column_says_something_of_the_tokens_that_train() -> None:
    (sample,) = build_samples([group(0, [1.0])])
    (sample,) = with_column([sample], "advantage", [spread(0.5, sample.loss_mask_T)])
    assert sample.columns["advantage"].tolist() == [0, 0, 0, 0.5, 0.5, 0.5]
    assert trained(sample.columns["advantage"], sample.loss_mask_T).tolist() == [0.5] * 3
    assert set(sample.columns) == {"sampled", "advantage"}


@pytest.mark.parametrize("mask", [[1, 1], [0, 1, 1], [1, 1, 0], [0, 1, 0], [0, 1, 1, 0, 0, 1], [0, 0]])
def test_one_number_for_all_tokens_that_train_stands_where_the_mask_is(mask: list[int]) -> None:
    mask_T = array("b", mask)
    column = spread(-0.5, mask_T)
    assert column == array("f", [-0.5 if flag else 0.0 for flag in mask])
    assert column.tobytes() == spread([-0.5] * sum(mask), mask_T).tobytes()


def test_a_token_of_a_rollout_takes_13_bytes_and_is_shared_with_its_sample() -> None:
    """Python's numbers took 88 (`sys.getsizeof` of the tuples and of what they hold)."""
    one = rollout(0, 0, 1.0, answer=1000)
    columns = (one.token_ids_T, one.loss_mask_T, one.logprobs_T, one.versions_T)
    assert sum(each.itemsize for each in columns) == 13
    (sample,) = build_samples([Group(Prompt("p/0", 0, ()), (one,))])
    assert sample.token_ids_T is one.token_ids_T
    assert sample.columns["sampled"] is one.logprobs_T


def test_a_rollout_record_survives_its_file_to_the_bit() -> None:
    rollouts = [rollout(0, index, None if index == 1 else index / 3) for index in range(4)]
    assert decompress_rollouts(compress_rollouts(rollouts)) == rollouts
    with pytest.raises(DataError):
        decompress_rollouts(b"not zstandard")


def test_likeliest_tokens_of_a_teacher_take_eight_bytes_and_survive_the_file_to_the_bit() -> None:
    ids, logprobs = array("i", range(262_000, 262_000 + 12)), array("f", [-index / 3 for index in range(12)])
    one = replace(rollout(0, 0, 1.0), teacher_top=(ids, logprobs))
    assert sum(each.itemsize for each in (ids, logprobs)) == 8
    assert decompress_rollouts(compress_rollouts([one])) == [one]
    line = rollout_to_line(one)
    assert rollout_from_line(line) == one
    assert json.loads(line)["teacher_top"] == [
        base64.b64encode(each.tobytes()).decode() for each in one.teacher_top or ()
    ]
    (sample,) = build_samples([Group(Prompt("p/0", 0, ()), (one,))])
    assert sample.teacher_top is one.teacher_top
    assert with_end(sample).teacher_top is None
    for damaged in (b'"teacher_top":["AAA="]', b'"teacher_top":["AAA=","AAAAAA=="]'):
        rest = line[: line.index(b'"teacher_top"')] + damaged + b',"cohort":""}'
        with pytest.raises(DataError):
            decompress_rollouts(zstandard.ZstdCompressor().compress(rest))


def test_records_are_read_where_there_is_little_memory() -> None:
    """On a machine that cannot set aside the 16 GiB that a line may have at most."""
    record = base64.b64encode(compress_rollouts([rollout(0, 0, 1.0)] * 3)).decode()
    code = (
        "import base64, resource, sys\n"
        "from orbit_runtime.data.records import decompress_rollouts\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "print(len(decompress_rollouts(base64.b64decode(sys.argv[1]))))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, record], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("3\n", 0), ended.stderr


def test_lines_are_put_together_from_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbit_runtime.data.records.FED_BYTES", (7, 7))
    rollouts = [rollout(0, index, 1.0) for index in range(4)]
    assert decompress_rollouts(compress_rollouts(rollouts)) == rollouts
    monkeypatch.setattr("orbit_runtime.data.records.MAX_BYTES", max(len(rollout_to_line(each)) for each in rollouts))
    assert decompress_rollouts(compress_rollouts(rollouts)) == rollouts, "together they may be larger"
    monkeypatch.setattr("orbit_runtime.data.records.MAX_BYTES", 100)
    with pytest.raises(DataError, match="a line of more than 100 bytes"):
        decompress_rollouts(zstandard.ZstdCompressor().compress(bytes(10**7)))


def sample(prefix: int, prompt: int, answer: int) -> Sample:
    length = prompt + answer
    return Sample([7] * length, [0] * prompt + [1] * answer, {"sampled": [0.0] * length}, prefix, prompt)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=40),
    st.integers(1, 60),
)
def test_micro_batches_hold_every_sample_once_and_keep_the_budget(pairs: list[tuple[int, int]], budget: int) -> None:
    samples = [sample(prefix, 3 + prefix, answer) for prefix, answer in pairs]
    batches = pack_micro_batches(samples, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
    for batch in batches:
        assert batch_cost(samples, batch) <= budget or len(batch) == 1
    assert batches == pack_micro_batches(samples, budget)


def test_mini_batches_are_cut_by_prompts() -> None:
    samples = [sample(prefix, 3, 2) for prefix in (0, 0, 1, 1, 1, 2)]
    assert split_mini_batches(samples, None) == [(0, 1, 2, 3, 4, 5)]
    assert split_mini_batches(samples, 2) == [(0, 1, 2, 3, 4), (5,)]
