"""Prompts: order, cursor, limits, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.data.prompts import check_lengths, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.data.stream import PromptStream
from orbit_runtime.errors import DataError


def source(folder: Path, *lines: str, name: str = "prompts.jsonl") -> PromptSource:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return PromptSource(str(path))


def numbered(folder: Path, count: int) -> PromptSource:
    return source(folder, *(json.dumps({"prompt": f"q{index}", "answer": str(index)}) for index in range(count)))


def test_rows_become_prompts_with_ids_messages_and_the_other_columns(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    table = load_prompts([source(tmp_path, '{"prompt": "q", "answer": 3}', json.dumps({"prompt": chat}))])
    first, second = table.prompts_P
    assert (first.prompt_id, first.messages, first.fields) == (
        "prompts/0",
        ({"role": "user", "content": "q"},),
        {"answer": 3},
    )
    assert second.messages == tuple(chat)
    assert table.digest.startswith("sha256:")


def test_a_prompt_may_hold_parts_and_calls_of_tools(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
    assert load_prompts([source(tmp_path, json.dumps({"prompt": chat}))]).prompts_P[0].messages == tuple(chat)
    for wrong, said in (
        ({"role": "user", "content": ["u"]}, r"prompt\[0\].content\[0\] is a part with a 'type', this is a string"),
        ({"role": "assistant", "content": None}, r"prompt\[0\].content is a string, this is null"),
        ({"role": "assistant", "tool_calls": "f"}, r"prompt\[0\].tool_calls is a list of objects, this is a string"),
    ):
        with pytest.raises(DataError, match=said):
            load_prompts([source(tmp_path, json.dumps({"prompt": [wrong]}))])


def test_every_epoch_visits_every_prompt_once_in_another_order(tmp_path: Path) -> None:
    stream = PromptStream(load_prompts([numbered(tmp_path, 20)]), seed=3, epochs=2)
    epochs = [stream.take(20), stream.take(20)]
    assert [{prompt.visit for prompt in epoch} for epoch in epochs] == [{0}, {1}]
    orders = [[prompt.prompt_id for prompt in epoch] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    assert stream.take(1) == []
    assert not stream.passed_over


def test_a_restored_cursor_continues_where_it_was_saved(tmp_path: Path) -> None:
    table = load_prompts([numbered(tmp_path, 7)])
    straight, first, second = (PromptStream(table, seed=1) for _ in range(3))
    first.take(5)
    state = json.loads(json.dumps(first.state()))
    second.restore(state)
    straight.take(5)
    assert second.take(12) == straight.take(12)


def test_a_cursor_of_other_prompts_is_refused(tmp_path: Path) -> None:
    state = PromptStream(load_prompts([numbered(tmp_path, 7)]), seed=1).state()
    other = PromptStream(load_prompts([numbered(tmp_path, 8)]), seed=1)
    with pytest.raises(DataError, match="changed since"):
        other.restore(state)


def test_limit_keeps_the_first_rows_and_no_shuffle_keeps_their_order(tmp_path: Path) -> None:
    stream = PromptStream(load_prompts([numbered(tmp_path, 9)], limit=3), seed=1, shuffle=False, epochs=1)
    assert [prompt.fields["answer"] for prompt in stream.take(9)] == ["0", "1", "2"]


def test_parquet_rows_equal_jsonl_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"q{index}", "answer": str(index)} for index in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    parquet = load_prompts([PromptSource(str(tmp_path / "prompts.parquet"))])
    assert [*parquet.prompts_P] == [*load_prompts([numbered(tmp_path, 4)]).prompts_P]


def test_cells_of_csv_are_text_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text(
        '\ufeffQuestion,Correct Answer,Worked\r\n"What is 1+1?",=1+1,"two,\r\nor ""2"""\r\n\r\n=A1 is?,007,\r\n'
    )
    table = load_prompts([PromptSource(str(path), prompt_field="Question")])
    assert [prompt.messages[0]["content"] for prompt in table.prompts_P] == ["What is 1+1?", "=A1 is?"]
    assert [prompt.fields["Correct Answer"] for prompt in table.prompts_P] == ["=1+1", "007"]
    assert table.prompts_P[0].fields["Worked"] == 'two,\r\nor "2"'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt,answer\n1+1=,2,3\n", "line 2: 3 cells, the header has 2"),
        ("question,answer\n1+1=,2\n", "line 2: no key 'prompt'"),
        ("prompt,prompt\n1,2\n", "names 'prompt' more than once"),
        ('prompt,answer\n"1+1=,2\n', "not CSV"),
        ("prompt,answer\n", "has no rows"),
    ],
)
def test_a_wrong_row_of_csv_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        load_prompts([PromptSource(str(tmp_path / "wrong.csv"))])


def test_the_shipped_prompts_are_every_two_digit_sum() -> None:
    table = load_prompts([PromptSource("builtin://two-digit-addition")])
    assert len(table.prompts_P) == 8100
    for prompt in table.prompts_P[::997]:
        a, b = prompt.messages[0]["content"].rstrip("=").split("+")
        assert int(a) + int(b) == int(prompt.fields["answer"])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "q"}', "{broken", '{"prompt": "r"}'], "line 2"),
        (['{"prompt": "q"}', '{"question": "r"}'], "'question'"),
        (['{"prompt": 3}'], "a number"),
        (['{"prompt": ""}'], "empty"),
        (['["q"]'], "a JSON object"),
        (['{"prompt": [{"role": "user"}]}'], "content"),
        ([""], "empty"),
        (['{"prompt": "\\ud83d\\ude00"}', '{"prompt": "\\ud83d"}'], "line 2: half of a surrogate pair"),
        (['{"prompt": "q", "answer": ["\\uDC00"]}'], "line 1: half of a surrogate pair"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(DataError) as caught:
        load_prompts([source(tmp_path, *lines)])
    assert words in str(caught.value)
    assert caught.value.exit_code == 65


def test_missing_files_and_long_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_prompts([PromptSource(str(tmp_path / "nowhere.jsonl"))])
    table = load_prompts([numbered(tmp_path, 3)])
    with pytest.raises(DataError, match="prompts/2"):
        check_lengths(
            table, lambda many: [[0] * (5 + 10 * (m[0]["content"] == "q2")) for m in many], max_prompt_tokens=9
        )
