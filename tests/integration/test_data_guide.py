"""The commands of `docs/guides/data.md`, as a reader would give them."""

from __future__ import annotations

import io
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fakes.chat_api import ChatApi
from fakes.guide import ROOT, commands, run_in_process, write_files
from fakes.hub_server import HubServer
from ruamel.yaml import YAML

from orbit_runtime.data.records import decompress_rollouts

GUIDE = (ROOT / "docs/guides/data.md").read_text(encoding="utf-8")
FILES = ROOT / "tests/data/files"

pytestmark = pytest.mark.timeout(300)


def test_a_run_reads_the_folder_that_datasets_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.yaml").write_text((ROOT / "examples/quickstart.yaml").read_text())
    write_files(GUIDE, tmp_path)
    monkeypatch.chdir(tmp_path)
    (text,) = commands(GUIDE, "Files")
    save, run = text.split("\n", 1)
    assert save == "python save.py"
    runpy.run_path("save.py")
    run_in_process(run.replace("\\\n", ""), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    (first, *_) = decompress_rollouts((tmp_path / "runs/quickstart/rollouts/step-000001.jsonl.zst").read_bytes())
    assert first.prompt_id.startswith("sums/")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder in which the guide's files were prepared, from a hub that holds made-up ones of their names."""
    folder = tmp_path_factory.mktemp("prepared")
    (text,) = commands(GUIDE, "Well-known files")
    asked = re.findall(r"hf://datasets/([\w.-]+/[\w.-]+)@main/(\S+) (\S+)\.jsonl", text)
    assert len(asked) == len(text.splitlines()) == 6
    with HubServer() as hub:
        for repository, path, name in asked:
            source = FILES / {"dapo": "verl.jsonl", "gpqa": "gpqa.csv"}.get(name, f"{name}.jsonl")
            hub.add(repository, {path: as_parquet(source) if path.endswith("parquet") else source.read_bytes()},
                    kind="datasets")  # fmt: skip
        environment = {**hub.environment(), "ORBIT_CACHE": str(folder / "cache")}
        run_in_process(text, folder, environment)
        yield folder, environment


def as_parquet(path: Path) -> bytes:
    buffer = io.BytesIO()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        # A column of one kind, as Parquet has it.
        row.update({"answer": str(row["answer"])} if "answer" in row else {})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def test_the_files_of_the_guide_are_prepared_with_their_commits(prepared: tuple[Path, dict[str, str]]) -> None:
    folder, _ = prepared
    counts = {"gsm8k": 3, "math-500": 2, "aime": 2, "gpqa": 3, "dapo": 2, "mbpp": 2}
    for name, count in counts.items():
        assert len((folder / f"{name}.jsonl").read_text().splitlines()) == count
        manifest = json.loads((folder / f"{name}.jsonl.manifest.json").read_text())
        assert re.fullmatch(r"[0-9a-f]{40}", manifest["source"]["revision"])


def test_what_was_prepared_is_measured_as_it_is(
    prepared: tuple[Path, dict[str, str]],
) -> None:
    folder, environment = prepared
    write_files(GUIDE, folder)
    whole = YAML(typ="safe").load((ROOT / "examples/quickstart.yaml").read_text())
    whole["spec"] |= YAML(typ="safe").load((folder / "measured.yaml").read_text())
    (folder / "run.yaml").write_text(json.dumps(whole))
    rows = [json.loads(line) for name in ("gpqa", "math-500") for line in (folder / f"{name}.jsonl").open()]
    # The last as it is on the hub: its prompts have no instruction, its answers stand behind ####.
    rows += [{"prompt": row["question"], "answer": row["answer"].rpartition("#### ")[2]}
             for row in map(json.loads, (FILES / "gsm8k.jsonl").open())]  # fmt: skip
    right = {row["prompt"]: row["answer"] for row in rows}

    def answer(body: dict[str, Any]) -> str:
        said = right[body["messages"][-1]["content"]]
        return f"Answer: {said}" if said in "ABCD" else f"$\\boxed{{{said}}}$"

    with ChatApi(answer) as api:
        run_in_process(f"orbit eval run.yaml --base-url {api.url} --model m --out measured", folder, environment)
    scores = json.loads((folder / "measured/summary.json").read_text())["scores"]
    found = {each["environment"]: (each["samples"], each["average"]["mean"]) for each in scores}
    assert found == {"gpqa": (3, 1.0), "math-500": (2, 1.0), "gsm8k-as-it-is": (3, 1.0)}
