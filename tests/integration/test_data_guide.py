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


@pytest.mark.long
def test_a_mixture_that_passes_over_prompts_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(GUIDE, tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("save.py")
    whole = YAML(typ="safe").load((ROOT / "examples/quickstart.yaml").read_text())
    whole["spec"] |= YAML(typ="safe").load((tmp_path / "mixed.yaml").read_text())
    whole["spec"]["rollout"] = {"sampling": {"maxNewTokens": 4}}
    whole["spec"]["algorithm"] = {"type": "GRPO", "groupSize": 4}
    # Few prompts, so that they come again: two rows of the first source, and the folder's first thirteen.
    Path("few.jsonl").write_text("".join(f'{{"question": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in (11, 12)))
    whole["spec"]["data"]["prompts"][0] = {"uri": "few.jsonl", "promptField": "question", "weight": 3}
    whole["spec"]["data"]["limit"] = 15
    whole["spec"]["training"] = {"promptsPerStep": 4, "learningRate": 2e-3, "schedule": {"type": "Constant"}}
    Path("run.yaml").write_text(json.dumps(whole))
    run_in_process("orbit run run.yaml --out whole --set training.steps=6", tmp_path)
    for steps in (3, 6):
        run_in_process(f"orbit run run.yaml --out parts --set training.steps={steps}", tmp_path)
    rows = {
        name: [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    }
    for one, other in zip(rows["whole"], rows["parts"], strict=True):
        assert {k: v for k, v in one.items() if k in SAME} == {k: v for k, v in other.items() if k in SAME}
    last = rows["whole"][-1]
    assert last["source_few_groups"] + last["source_sums_groups"] == last["groups"] == 4
    assert last["source_few_epochs"] + last["source_sums_epochs"] > 1
    assert last["prompts_tried"] <= 15
    assert last["prompts_too_hard"] + last["prompts_too_easy"] > 0


SAME = ("step", "adapter_digest", "reward_mean", "prompts_tried", "prompts_too_hard", "prompts_too_easy",
        "source_few_reward", "source_sums_reward", "source_few_epochs", "source_sums_epochs")  # fmt: skip


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
