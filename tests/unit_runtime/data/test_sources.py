"""Sources of rows: every format holds the same rows, a large file is not in memory, and what is broken is named."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import random
import re
import subprocess
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.data import rows
from orbit_runtime.data.permutation import Permutation, shuffled
from orbit_runtime.data.prompts import (
    ALL_ENCODED,
    check_fields,
    check_lengths,
    load_prompts,
)
from orbit_runtime.data.readers import IN_MEMORY
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.data.scan import MAX_ROW
from orbit_runtime.data.stream import PromptStream
from orbit_runtime.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": f"q{index} \u2028 é", "answer": str(index), "level": index % 5} for index in range(100)
]
CHAT = [
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"u{index}"}], "answer": "1"}
    for index in range(3)
]


def write_dictionary(path: Path, rows: Sequence[Any]) -> None:
    table = pyarrow.Table.from_pylist([*rows])
    coded = table.set_column(1, "answer", table["answer"].dictionary_encode())
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, coded.schema) as stream:
        stream.write_table(coded, max_chunksize=30)


@pytest.mark.parametrize("suffix", ["", ".dictionary"])
def test_arrow_that_becomes_shorter_while_it_is_read_is_an_error_and_no_signal(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}.arrow"
    (write_dictionary if suffix else write_stream)(path, ROWS)
    source = rows.open_rows(PromptSource(str(path)))
    assert [source.store.read(number) for number in (99, 0, 50)] == [ROWS[99], ROWS[0], ROWS[50]]
    large = tmp_path / "large.arrow"
    write_stream(large, [{"prompt": "x" * 1000, "answer": str(index)} for index in range(20000)])
    store = rows.open_rows(PromptSource(str(large))).store
    store.read(0)
    os.truncate(large, 5000)
    with pytest.raises(DataError, match="the file was changed while the run reads from it"):
        store.read(19999)


def test_arrow_with_offsets_outside_of_its_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    write_stream(path, ROWS)
    data = bytearray(path.read_bytes())
    last = data.index(sum(len(each["prompt"].encode()) for each in ROWS[:10]).to_bytes(4, "little"))
    data[last : last + 4] = (2**31 - 2).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match="not Arrow that can be read"):
        rows.open_rows(PromptSource(str(path)))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"prompt": "1"}\n{"prompt": "2", "answer": "3", "answer": "4"}\n', "line 2: .*'answer' is there"),
        ("a.jsonl", '{"prompt": "2", "more": [{"b": 1, "b": 1}]}\n', "line 1: .*'b' is there twice"),
        ("a.json", '[{"prompt": "2", "prompt": "3"}]', "'prompt' is there twice in one object"),
    ],
)
def test_a_name_that_is_twice_in_a_row_is_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=told) as caught:
        rows.open_rows(PromptSource(str(tmp_path / name)))
    assert caught.value.exit_code == 65


@pytest.mark.timeout(30)
def test_a_pipe_and_a_link_to_itself_are_named_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("link.jsonl")
    for name, told in (("pipe.jsonl", "a pipe or a device"), ("link.jsonl", "Too many levels of symbolic links")):
        with pytest.raises(DataError, match=told):
            rows.open_rows(PromptSource(str(tmp_path / name)))


def jsonl(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write_parquet(path: Path, rows: Sequence[Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows]), path, row_group_size=7)


def write_feather(path: Path, rows: Sequence[Any]) -> None:
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist([*rows]), str(path), chunksize=9)


def write_stream(path: Path, rows: Sequence[Any]) -> None:
    table = pyarrow.Table.from_pylist([*rows])
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=11)


def write_shards(path: Path, rows: Sequence[Any]) -> None:
    path.mkdir()
    for number, start in enumerate(range(0, len(rows), 30)):
        (path / f"part-{number}.jsonl").write_bytes(jsonl(rows[start : start + 30]))
    (path / "README.md").write_text("not rows")


def write_saved(path: Path, rows: Sequence[Any]) -> None:
    import datasets

    datasets.Dataset.from_list([*rows]).save_to_disk(path, num_shards=min(3, len(rows)))


WRITERS: dict[str, Callable[[Path, Sequence[Any]], Any]] = {
    "rows.jsonl": lambda path, rows: path.write_bytes(jsonl(rows)),
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(jsonl(rows))),
    "rows.jsonl.zst": lambda path, rows: path.write_bytes(zstandard.compress(jsonl(rows))),
    "rows.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps([*rows]).encode())),
    "rows.json.zst": lambda path, rows: path.write_bytes(zstandard.compress(json.dumps([*rows]).encode())),
    "rows.parquet": write_parquet,
    "rows.feather": write_feather,
    "rows.arrow": write_stream,
    "shards": write_shards,
    "saved": write_saved,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("rows", [ROWS, CHAT], ids=["text", "chat"])
def test_every_format_holds_the_same_rows_read_in_any_order(name: str, rows: list[Any], tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, rows)
    table = load_prompts([PromptSource(str(tmp_path / name))])
    found = table.prompts_P
    assert len(found) == len(rows)
    order = random.Random(1).sample(range(len(rows)), len(rows))
    for index in [*range(len(rows)), *order]:
        prompt = rows[index]["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        assert found[index].messages == tuple(messages)
        assert found[index].fields == {key: value for key, value in rows[index].items() if key != "prompt"}
        assert found[index].prompt_id == f"{Path(name).name.split('.')[0]}/{index}"
    check_fields(table, {"answer": "correct"})
    again = load_prompts([PromptSource(str(tmp_path / name))])
    assert again.digest == table.digest


def test_csv_that_is_compressed_is_the_same_csv(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows({"prompt": 'two\nlines, "quoted"', "answer": str(index)} for index in range(40))
    (tmp_path / "rows.csv.zst").write_bytes(zstandard.compress((tmp_path / "rows.csv").read_bytes()))
    plain, packed = (load_prompts([PromptSource(str(tmp_path / f"rows.csv{end}"))]) for end in ("", ".zst"))
    assert [*plain.prompts_P] == [*packed.prompts_P]
    assert packed.prompts_P[39].messages[0]["content"] == 'two\nlines, "quoted"'


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["", "  ", "\r", "row"]), min_size=1, max_size=70), st.randoms(use_true_random=False))
def test_blank_lines_do_not_move_a_row_or_its_line(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], order: random.Random
) -> None:
    kinds.append("row")
    lines = [
        json.dumps({"prompt": f"line {number}"}) if kind == "row" else kind for number, kind in enumerate(kinds, 1)
    ]
    path = tmp_path_factory.getbasetemp() / "blank.jsonl"
    path.write_text("\n".join(lines))
    rows = load_prompts([PromptSource(str(path))]).prompts_P
    for index in order.sample(range(len(rows)), len(rows)):
        assert rows.place(index).endswith(rows[index].messages[0]["content"])


def test_a_large_file_is_not_in_memory_and_is_refused_once_it_was_written_to(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for index in range(IN_MEMORY // 1_000_000 + 4):
            file.write(json.dumps({"prompt": f"q{index}", "text": "x" * 1_000_000}) + "\n")
    tracemalloc.start()
    table = load_prompts([PromptSource(str(path))])
    stream = PromptStream(table, seed=1)
    taken = [prompt.messages[0]["content"] for _ in range(10) for prompt in stream.take(2)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < IN_MEMORY / 6
    assert len(set(taken)) == 20
    os.replace(path, tmp_path / "aside.jsonl")
    path.write_text('{"prompt": "another file of this name"}\n')
    assert table.prompts_P[3].messages[0]["content"] == "q3"
    with (tmp_path / "aside.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(DataError, match="changed while the run reads from it"):
        table.prompts_P[4]


def broken_parquet(path: Path) -> None:
    write_parquet(path, ROWS)
    path.write_bytes(path.read_bytes()[:-40])


def broken_page(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[40:160] = bytes(120)
    path.write_bytes(bytes(data))


def long_line(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"prompt": "q"}\n{"prompt": "')
        for _ in range(200):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n')


def table_of(**columns: Any) -> Callable[[Path], None]:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path)


def flushed_zst(data: bytes) -> bytes:
    """As programs write it that flush, so that a cut may fall behind a whole line."""
    writer = zstandard.ZstdCompressor().compressobj()
    return writer.compress(data) + writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + writer.flush()


FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("long.jsonl", long_line, "line 2 is longer than 128 MiB, .* 200,000,015 bytes"),
    ("long.csv", lambda path: path.write_bytes(b"prompt\n" + b"y" * (MAX_ROW + 1)), "line 2 is longer than 128 MiB"),
    ("cut.parquet", broken_parquet, "not Parquet that can be read"),
    ("page.parquet", broken_page, "not Parquet that can be read"),
    ("text.parquet", lambda path: path.write_text("prompt,answer\n"), "not Parquet that can be read"),
    ("cut.arrow", lambda path: (write_stream(path, ROWS), os.truncate(path, 900)), "not Arrow that can be read"),
    ("text.arrow", lambda path: path.write_text('{"prompt": 1}\n' * 9), "not Arrow that can be read"),
    ("cut.jsonl.gz", lambda path: path.write_bytes(gzip.compress(jsonl(ROWS))[:-9]), "not a gzip file, or cut off"),
    ("not.jsonl.gz", lambda path: path.write_bytes(jsonl(ROWS)), "not a gzip file"),
    ("cut.jsonl.zst", lambda path: path.write_bytes(flushed_zst(jsonl(ROWS))[:-3]), "zstd file, .*it is cut off"),
    ("cut.csv.zst", lambda path: path.write_bytes(flushed_zst(b"prompt\na\n")[:-3]), "zstd file, .*it is cut off"),
    ("not.jsonl.zst", lambda path: path.write_bytes(jsonl(ROWS)), "not a zstd file"),
    ("nan.jsonl", lambda path: path.write_text('{"prompt": "q"}\n{"prompt": "r", "score": NaN}\n'), "line 2.*NaN"),
    ("deep.jsonl", lambda path: path.write_text('{"prompt": ' + "[" * 200_000 + "\n"), "line 1: nested too deeply"),
    ("nan.parquet", table_of(prompt=["q", "r"], score=[1.0, float("nan")]), "row 2: column 'score' holds NaN"),
    ("null.parquet", table_of(prompt=["q", None]), "row 2: 'prompt' is a string or a list of chat messages.*null"),
    ("bytes.parquet", table_of(prompt=["q"], image=[b"x"]), "row 1: column 'image' holds a bytes"),
    ("column.parquet", table_of(question=["q"]), "row 1: no key 'prompt'; the row has: 'question'"),
    ("none.parquet", table_of(prompt=pyarrow.array([], pyarrow.string())), "has no rows"),
    ("empty.parquet", lambda path: path.touch(), "is empty"),
    ("rows.xlsx", lambda path: path.write_bytes(b"PK\x03\x04\x14"), "a zip archive, as files of Excel are"),
    (
        "rows.jsonl.bz2",
        lambda path: path.write_bytes(bz2.compress(jsonl(ROWS))),
        "packed by bzip2.*\n  fix: .*bzip2 -dk",
    ),
    ("rows.jsonl.xz", lambda path: path.write_bytes(lzma.compress(jsonl(ROWS))), "packed by xz"),
    ("packed.jsonl", lambda path: path.write_bytes(gzip.compress(jsonl(ROWS))), "gzip, which its name does not say"),
    ("parquet.jsonl", lambda path: write_parquet(path, ROWS), "Parquet, which its name does not say"),
    ("pointer.jsonl", lambda path: path.write_text("version https://git-lfs\noid"), "git lfs pull"),
    ("page.jsonl", lambda path: path.write_text("<!DOCTYPE html>\n<html>"), "this is a web page"),
    ("semi.csv", lambda path: path.write_text("prompt;answer\n1+1=;2\n"), "separate cells by commas, and not by ';'"),
    ("folder", lambda path: path.mkdir(), "no files in this folder"),
    ("saved", lambda path: (path.mkdir(), (path / "state.json").write_text("{}")), "not what `datasets` writes"),
    (
        "splits",
        lambda path: (path.mkdir(), (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')),
        "several splits: train, test",
    ),
]


@pytest.mark.parametrize(("name", "write", "words"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_broken_source_is_one_error_that_names_it(
    name: str, write: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    with pytest.raises(DataError) as caught:
        load_prompts([PromptSource(str(tmp_path / name))])
    assert re.search(words, f"{caught.value}", re.DOTALL)
    assert caught.value.exit_code == 65
    assert name in str(caught.value.where)


def test_a_row_without_a_prompt_tells_which_field_names_the_column(tmp_path: Path) -> None:
    source = PromptSource(str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n' * 3)
    with pytest.raises(DataError, match="3 broken rows") as caught:
        load_prompts([source])
    assert "`promptField`, beside the `uri` of this file" in str(caught.value.fix)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n{"prompt": \n')
    with pytest.raises(DataError, match="2 broken rows") as caught:
        load_prompts([source])
    assert "one JSON object a line" in str(caught.value.fix)
    write_parquet(tmp_path / "rows.parquet", [{"prompt": None, "answer": "1"}, {"prompt": "1", "answer": "1"}])
    with pytest.raises(DataError, match="1 broken row") as caught:
        load_prompts([PromptSource(str(tmp_path / "rows.parquet"))])
    assert "a table whose column of prompts" in str(caught.value.fix)


TEXT = '{"prompt": "wie spät?", "answer": "früh"}\n{"prompt": "größer"}\n'
PACKED_TEXT = gzip.compress(TEXT.encode("utf-16"), mtime=0)  # without the time: two workers must collect the same names
CSV_TEXT = "prompt,answer\nwie spät?,früh\n"
JSON_TEXT = '[{"prompt": "plain"},\n {"prompt": "größer"}]'


@pytest.mark.parametrize(
    ("name", "data", "words", "convert"),
    [
        ("a b.jsonl", TEXT.encode("utf-16"), "line 1: this file is UTF-16", "iconv -f utf-16 -t utf-8 'a b.jsonl' > "),
        ("a.jsonl", TEXT.encode("utf-16-le"), "line 1: this file is UTF-16LE", "iconv -f utf-16le -t utf-8 a.jsonl"),
        ("a.jsonl", TEXT.encode("utf-16-be"), "line 1: this file is UTF-16BE", "iconv -f utf-16be -t utf-8 a.jsonl"),
        ("a.jsonl", TEXT.encode("utf-32"), "line 1: this file is UTF-32", "iconv -f utf-32 -t utf-8 a.jsonl"),
        ("a.csv", CSV_TEXT.encode("utf-16"), "line 1: this file is UTF-16", "iconv -f utf-16 -t utf-8 a.csv"),
        ("a.json", JSON_TEXT.encode("utf-16"), "line 1: this file is UTF-16", "iconv -f utf-16 -t utf-8 a.json"),
        ("a.jsonl.gz", PACKED_TEXT, "this file is UTF-16", "gzip -dc a.jsonl.gz | iconv"),
        (
            "a.jsonl",
            TEXT.encode("latin1"),
            r"line 1: not UTF-8 \(byte 19 .* 0xe4\)",
            "iconv -f latin1 -t utf-8 a.jsonl",
        ),
        ("a.csv", CSV_TEXT.encode("latin1"), "line 2: not UTF-8", "iconv -f latin1 -t utf-8 a.csv > a.utf8.csv"),
        ("a.json", JSON_TEXT.encode("latin1"), "line 2: not UTF-8", "iconv -f latin1 -t utf-8 a.json > a.utf8.json"),
    ],
)
def test_a_file_in_another_encoding_is_named_with_the_line_and_the_command_that_converts_it(
    name: str, data: bytes, words: str, convert: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        load_prompts([PromptSource(str(tmp_path / name))])
    assert name in str(caught.value.where)
    assert convert in str(caught.value.fix)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", TEXT), ("a.csv", CSV_TEXT), ("a.json", JSON_TEXT)])
def test_a_mark_before_utf_8_is_skipped(name: str, text: str, tmp_path: Path) -> None:
    """As editors on Windows write it."""
    (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
    rows = load_prompts([PromptSource(str(tmp_path / name))]).prompts_P
    assert rows[0].messages[0]["content"] in ("wie spät?", "plain")


def test_the_command_that_an_error_names_converts_the_file(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_bytes(TEXT.encode("utf-16"))
    with pytest.raises(DataError) as caught:
        load_prompts([PromptSource(str(tmp_path / "a b.jsonl"))])
    subprocess.run(str(caught.value.fix).removeprefix("convert it: "), shell=True, cwd=tmp_path, check=True)
    assert len(load_prompts([PromptSource(str(tmp_path / "a b.utf8.jsonl"))]).prompts_P) == 2


def test_finding_out_how_long_a_line_is_takes_no_memory_of_its_length(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "q"}\n{"prompt": "')
        file.truncate(2 << 30)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"line 2 is longer than 128 MiB, .* 2,147,483,632 bytes"):
        load_prompts([PromptSource(str(path))])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * MAX_ROW


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_line_that_ends_too_early_is_told_at_its_end(end: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "q", "answer"' + end.encode())
    with pytest.raises(DataError, match="line 1: not JSON: Expecting ':' delimiter at column 25"):
        load_prompts([PromptSource(str(tmp_path / "rows.jsonl"))])


def test_a_prompts_file_that_is_absent_is_named_once(tmp_path: Path) -> None:
    path = str(tmp_path / "none.jsonl")
    with pytest.raises(DataError) as caught:
        load_prompts([PromptSource(path)])
    assert str(caught.value).count(path) == 1
    assert "relative to the manifest's folder" in str(caught.value.fix)


def test_what_a_folder_hides_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part").mkdir()
    write_parquet(tmp_path / "part" / "a.parquet", ROWS)
    for hidden in (".venv", "_old", "part/.cache"):
        (tmp_path / hidden / "deep").mkdir(parents=True)
        (tmp_path / hidden / "deep" / "b.parquet").write_text("never opened")
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    assert len(load_prompts([PromptSource(str(tmp_path))]).prompts_P) == len(ROWS)
    assert not [path for path in listed if "deep" in path]


def test_a_folder_of_too_many_files_is_refused_without_counting_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(ROWS))
    with pytest.raises(DataError, match="more than 2 files in this folder contain rows"):
        load_prompts([PromptSource(str(tmp_path))])


def test_kinds_of_one_folder_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    write_parquet(tmp_path / "b.parquet", ROWS)
    with pytest.raises(DataError, match="files of this folder are JSONL and Parquet"):
        load_prompts([PromptSource(str(tmp_path))])
    assert len(load_prompts([PromptSource(str(tmp_path), "Parquet")]).prompts_P) == 100


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "a", "answer": "1"}', "", '{"prompt": "b"}'], ("line 3", "no key 'answer'", "'correct'")),
        (['{"prompt": "a", "answer": "1"}', '{"prompt": "b", "answer": null}'], ("line 2", "'answer'", "null")),
        (['{"prompt": "a", "answer": null}'], ("line 1", "'answer'", "null")),
        (
            ['{"prompt": "a", "answer": "1"}', '{"prompt": "b", "answer": [1]}'],
            ("line 2", "holds a list here, and a string in line 1"),
        ),
    ],
)
def test_a_column_that_a_reward_reads_is_there_and_of_one_kind(
    lines: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines))
    table = load_prompts([PromptSource(str(tmp_path / "mixed.jsonl"))])
    with pytest.raises(DataError) as caught:
        check_fields(table, {"answer": "correct"})
    for word in ("mixed.jsonl", *words):
        assert word in str(caught.value)
    # Rows beyond the limit are not asked.
    if len(lines) > 1:
        check_fields(load_prompts([PromptSource(str(tmp_path / "mixed.jsonl"))], limit=1), {"answer": "correct"})


def test_of_many_prompts_only_those_that_could_be_too_long_are_counted_in_tokens(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    count = ALL_ENCODED + 500
    texts = ("x" * 50 if index == count - 3 else "short" for index in range(count))
    path.write_bytes(b"".join(b'{"prompt": "%s"}\n' % text.encode() for text in texts))
    asked = 0

    def encode_many(many: Sequence[Sequence[Any]]) -> list[list[int]]:
        nonlocal asked
        asked += len(many)
        return [[0] * len(messages[0]["content"]) for messages in many]

    table = load_prompts([PromptSource(str(path))])
    check_lengths(table, encode_many, max_prompt_tokens=50)
    assert asked < ALL_ENCODED + 40
    with pytest.raises(DataError, match=rf"\(many/{count - 3}\): 50 tokens"):
        check_lengths(table, encode_many, max_prompt_tokens=49)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**64 - 1))
def test_an_order_that_takes_no_memory_visits_every_row_once(count: int, key: int) -> None:
    order = Permutation(count, key)
    assert sorted(order) == [*range(count)]
    assert [*order[3:9]] == [*order][3:9]
    assert [*Permutation(count, key)] == [*order]


def test_the_order_of_a_huge_source_is_another_in_each_epoch_and_costs_nothing() -> None:
    first, second = (shuffled(100_000_000, key) for key in (1, 2))
    assert isinstance(first, Permutation)
    places = {*first[:1000]}
    assert len(places) == 1000
    assert len(places & {*second[:1000]}) < 5
    assert 0.4 < sum(place < 50_000_000 for place in places) / 1000 < 0.6
