"""The code of a run: which files count, what is recorded of them, and when a changed one is refused."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import DataError, OutputError, UsageError
from orbit_runtime.loop.own_code import (
    LARGEST,
    CodeSource,
    RunCode,
    check_code,
    find_code,
    imported_files,
    keep_code,
    read_records,
    recorded_path,
)
from orbit_runtime.storage import claim_execution, open_store

NAMES = [
    "r.py",
    "helper.py",
    "pkg/__init__.py",
    "pkg/deep.py",
    "pkg/sub/__init__.py",
    "space/inner/late.py",
    "named.py",
]
SOURCES = {
    "r.py": "import helper, pytest, json, nowhere_at_all\nfrom pkg import deep\nfrom orbit_runtime import run\n"
    "pattern = '\\d'\ndef f(c, p, fields):\n    import space.inner.late\n    __import__('named')\n",
    "helper.py": "import helper",
    "pkg/__init__.py": "",
    "pkg/deep.py": "from . import sub, nothing\nfrom .. import beyond\n",
    "pkg/sub/__init__.py": "def broken(",
    "space/inner/late.py": "",
    "named.py": "",
    "never.py": "",
    "table.json": "{}",
    "pkg/.hidden/x.py": "",
}


def write(folder: Path, sources: Mapping[str, str]) -> Path:
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def found(folder: Path, *targets: str, **environ: str) -> RunCode:
    return find_code([CodeSource(targets or ("r:f",), [str(folder)])], None, environ)


def test_the_files_that_an_entry_point_imports_count_and_packages_by_version(tmp_path: Path) -> None:
    code = found(write(tmp_path, SOURCES)).record
    assert sorted(code["files"]) == sorted(NAMES) == code["entrypoints"]["r:f"]
    assert code["files"]["helper.py"]["text"] == "import helper"
    assert code["packages"] == {"nowhere_at_all": None, "pytest": version("pytest")}


def test_an_archive_is_read_like_a_folder_and_files_of_elsewhere_or_in_hidden_folders_are_not_the_users(
    tmp_path: Path,
) -> None:
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as written:
        for name in ("r.py", "pkg/__init__.py", "pkg/deep.py"):
            written.writestr(name, SOURCES[name])
    assert sorted(imported_files("r", [str(archive)])[0]) == ["pkg/__init__.py", "pkg/deep.py", "r.py"]
    write(tmp_path / "run/.venv", {"r.py": ""})
    assert imported_files("r", [str(tmp_path / "run/.venv")])[0].keys() == {"r.py"}, "its own folder may be hidden"
    assert imported_files(".venv.r", [str(tmp_path / "run")])[0] == {}


def test_evaluations_with_code_of_their_own_have_files_of_their_own(tmp_path: Path) -> None:
    mine, other = write(tmp_path / "a", {"r.py": "1"}), write(tmp_path / "b", {"r.py": "2"})
    sources = [CodeSource(["r:f"], [str(mine)]), CodeSource(["r:f"], [str(other)], "evaluation/held-out/")]
    files = find_code(sources, None, {}).record["files"]
    assert {name: each["text"] for name, each in files.items()} == {"r.py": "1", "evaluation/held-out/r.py": "2"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"key = 'hf_0123456789'", "it holds the value of HF_TOKEN"),
        (b"#" * (LARGEST + 1), "all files together are more than 1 MiB"),
        (b"# coding: latin-1\n# \xe9\n", "it is not UTF-8 text"),
    ],
)
def test_only_the_digest_of_a_file_is_kept_if_it_holds_a_secret_is_large_or_no_text(
    text: bytes, why: str, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_bytes(text)
    write(tmp_path, {"other.py": ""})
    code = found(tmp_path, "r:f", "other:f", HF_TOKEN="hf_0123456789", KEY_SHORT="key", HOME=str(tmp_path))
    assert code.record["files"]["r.py"].keys() == {"digest", "withheld"}
    assert code.record["files"]["r.py"]["withheld"] == why
    assert code.record["files"]["other.py"]["text"] == ""
    store = open_store(str(tmp_path / "run"))
    told = keep_code(store, claim_execution(store, run_name="r"), 0, code, None)
    assert told == [f"r.py is recorded by its digest only: {why}"]
    assert b"hf_0123456789" not in store.get("code/000001.json")
    write(tmp_path, {"r.py": "changed"})
    with pytest.raises(OutputError, match=r"r.py: sha256:\w{12}… then, sha256:\w{12}… now"):
        check_code("run", code.record, found(tmp_path).record, accept=False)


def test_changed_code_is_refused_with_the_difference_unless_it_is_accepted(tmp_path: Path) -> None:
    before = found(write(tmp_path, SOURCES)).record
    assert check_code("run", before, found(tmp_path).record, accept=False) == []
    write(tmp_path, {"helper.py": "import pkg\n" + "x = 1\n" * 100, "never.py": "x = 1"})
    now = found(tmp_path, "r:f", "never:f").record
    with pytest.raises(OutputError) as caught:
        check_code("run", before, now, accept=False)
    assert caught.value.exit_code == 73
    first, *lines = str(caught.value.message).splitlines()
    assert first == "the code of the run in this folder has changed:"
    assert lines[:5] == [
        "  --- helper.py, then", "  +++ helper.py, now", "  @@ -1 +1,101 @@", "  -import helper", "  +import pkg",
    ]  # fmt: skip
    assert (len(lines), lines[-1]) == (41, "  … and 65 lines")
    assert "--accept-code" in str(caught.value.fix)
    assert "never.py" not in caught.value.message, "an entry point that the manifest did not have"
    assert check_code("run", before, now, accept=True) == ["the code, as accepted: helper.py"]


def test_a_module_that_a_new_file_hides_is_other_code_and_another_version_of_a_package_is_told(tmp_path: Path) -> None:
    before = found(write(tmp_path, {"r.py": "import pytest"})).record
    older = {**before, "packages": {"pytest": "1.0"}}
    said = check_code("run", older, before, accept=False)
    assert said == [f"package pytest: 1.0 then, {version('pytest')} now"]
    write(tmp_path, {"pytest.py": "x = 1"})
    with pytest.raises(OutputError, match=r"\+x = 1"):
        check_code("run", before, found(tmp_path).record, accept=False)


def test_another_folder_of_code_is_refused_even_if_no_imported_file_differs() -> None:
    then, now = ({"entrypoints": {}, "files": {}, "packages": {}, "environment.code": each * 30} for each in "ab")
    with pytest.raises(OutputError, match=r"environment.code: a{19}… then, b{19}… now"):
        check_code("run", then, now, accept=False)
    assert check_code("run", then, now, accept=True) == ["the code, as accepted: environment.code"]
    assert check_code("run", then, {**now, "environment.code": None}, accept=False) == [], "compared as content"


def test_a_record_is_written_when_the_code_is_another_and_told_if_the_run_has_steps_already(tmp_path: Path) -> None:
    folder, store = write(tmp_path / "code", {"r.py": ""}), open_store(str(tmp_path / "run"))
    execution = claim_execution(store, run_name="r")
    assert keep_code(store, execution, 0, find_code([], None, {}), None) == []
    assert read_records(store) == [], "a run without code of its own"
    told = keep_code(store, execution, 7, found(folder), None)
    assert told == ["the code is recorded from step 8 on; what it was before is not known"]
    (record,) = read_records(store)
    assert (record["step"], record["files"]["r.py"]["text"]) == (7, "")
    before = store.get("code/000001.json")
    assert keep_code(store, execution, 9, found(folder), record) == []
    assert store.get("code/000001.json") == before
    outside = [
        json.dumps({**record, "files": {name: record["files"]["r.py"]}}).encode() for name in ("../r.py", "/r.py")
    ]
    for damaged in (b"[]", json.dumps({**record, "files": []}).encode(), *outside):
        store.put("code/000002.json", damaged)
        with pytest.raises(OutputError, match="a record of the run's code is damaged"):
            read_records(store)


def test_a_file_that_is_edited_while_the_run_goes_on_is_noticed(tmp_path: Path) -> None:
    code = found(write(tmp_path, SOURCES))
    write(tmp_path, {"never.py": "x", "named.py": "x"})
    (tmp_path / "helper.py").unlink()
    assert code.changed() == ["named.py"]


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Name → text of the files that a replay of these steps imports."""

    def path(records: list[dict[str, Any]], *steps: int, here: Path = tmp_path / "nowhere") -> dict[str, str]:
        with ExitStack() as closing:
            (folder,) = map(Path, recorded_path(records, steps, ["r:f"], lambda: [str(here)], closing))
            return {each.relative_to(folder).as_posix(): each.read_text() for each in folder.rglob("*.py")}

    return path


def test_a_replay_imports_the_copy_that_counted_for_its_steps(
    tmp_path: Path, replayed: Callable[..., dict[str, str]]
) -> None:
    folder = write(tmp_path / "code", {"r.py": "import pkg.deep", "pkg/__init__.py": "", "pkg/deep.py": "1"})
    records = [{"step": 0, **found(folder).record}]
    expected = {"r.py": "import pkg.deep", "pkg/__init__.py": "", "pkg/deep.py": "1"}
    assert replayed(json.loads(json.dumps(records)), 1, 2) == expected
    records += [{"step": 2, **found(write(folder, {"pkg/deep.py": "2"})).record}]
    assert replayed(records, 1, 2) == expected
    assert replayed(records, 3, 4) == {**expected, "pkg/deep.py": "2"}
    # An execution that went back to step 1 with the first code.
    assert replayed([*records, {**records[0], "step": 1}], 1, 2, 3) == expected
    with pytest.raises(UsageError, match=r"from step 3 on the run has other code, in pkg/deep\.py") as caught:
        replayed(records, 1, 2, 3)
    assert caught.value.fix == "replay the steps before, with --steps 2"
    write(tmp_path / "here", {"r.py": "here"})
    assert replayed(records[1:], 1, here=tmp_path / "here") == {"r.py": "here"}, "nothing is recorded of step 1"


def test_a_replay_takes_a_file_without_a_copy_from_here_if_it_is_the_same(
    tmp_path: Path, replayed: Callable[..., dict[str, str]]
) -> None:
    folder = write(tmp_path / "code", {"r.py": "import helper", "helper.py": "key = 'hf_0123456789'"})
    records = [{"step": 0, **found(folder, HF_TOKEN="hf_0123456789").record}]
    assert replayed(records, 1, here=folder) == {"r.py": "import helper", "helper.py": "key = 'hf_0123456789'"}
    with pytest.raises(DataError, match=r"helper\.py is recorded by its digest only"):
        replayed(records, 1, here=write(tmp_path / "other", {"r.py": "import helper", "helper.py": ""}))
