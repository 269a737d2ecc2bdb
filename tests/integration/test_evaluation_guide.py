"""The guide's commands, as a reader would give them: a run, its checkpoints measured, an API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.chat_api import ChatApi
from fakes.guide import ROOT, commands, run_in_process, write_files
from ruamel.yaml import YAML

from orbit_runtime.evaluation.journal import read_samples
from orbit_runtime.spec import load_manifest
from orbit_runtime.storage import open_store

GUIDE = (ROOT / "docs/guides/evaluation.md").read_text()
QUICKSTART = (ROOT / "examples/quickstart.yaml").read_text()

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of the first section were given."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "quickstart.yaml").write_text(QUICKSTART)
    for text in commands(GUIDE, "The base, and the checkpoints of a run"):
        run_in_process(text, folder)
    return folder


def test_every_checkpoint_is_measured_on_the_same_prompts(read: Path) -> None:
    summary = json.loads((read / "runs/quickstart-eval/summary.json").read_text())
    assert [score["subject"] for score in summary["scores"]] == ["base", "step-1", "step-2", "step-3"]
    assert {(score["samples"], score["failed"]) for score in summary["scores"]} == {(60, 0)}
    assert [each["second"] for each in summary["comparisons"]] == ["step-1", "step-2", "step-3"]
    samples = read_samples(open_store(str(read / "runs/quickstart-eval")))
    said = {name: {each.key[2:]: each.turns for each in samples if each.subject == name} for name in ("base", "step-3")}
    assert said["base"].keys() == said["step-3"].keys()
    assert said["base"] != said["step-3"]


def test_one_step_alone_answers_as_it_did_beside_others(read: Path) -> None:
    (score,) = json.loads((read / "one-step.json").read_text())["scores"]
    assert score["subject"] == "step-3"
    (adapter,) = [each for each in json.loads((read / "one-adapter/summary.json").read_text())["scores"]
                  if each["subject"] == "policy-v3"]  # fmt: skip
    answers = {
        folder: {
            each.key[2:]: each.turns for each in read_samples(open_store(str(read / folder))) if each.subject == name
        }
        for folder, name in (("one-step", "step-3"), ("one-adapter", "policy-v3"), ("runs/quickstart-eval", "step-3"))
    }
    # The same policy, prompts and seeds draw the same tokens, whatever else was measured.
    assert adapter["samples"] == 20 * 4
    for folder in ("one-step", "one-adapter"):
        shared = answers[folder].keys() & answers["runs/quickstart-eval"].keys()
        assert len(shared) == 20 * 2
        assert all(answers[folder][key] == answers["runs/quickstart-eval"][key] for key in shared)


def test_an_api_is_asked_as_the_guide_says(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(QUICKSTART)
    (text,) = commands(GUIDE, "A model behind an API")
    with ChatApi(lambda body: "46", key="secret") as api:
        run_in_process(text, tmp_path, {"BASE_URL": api.url, "MY_KEY": "secret"})
    assert len(api.asked) == 20 * 4


@pytest.mark.parametrize(
    ("file", "names"), [("held-out.yaml", ["held-out", "products"]), ("during.yaml", ["held-out"])]
)
def test_the_blocks_of_the_guide_are_ones_that_a_manifest_takes(file: str, names: list[str], tmp_path: Path) -> None:
    write_files(GUIDE, tmp_path)
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    whole = YAML(typ="safe").load(QUICKSTART)
    whole["spec"] |= YAML(typ="safe").load((tmp_path / file).read_text())
    (tmp_path / "run.yaml").write_text(json.dumps(whole))
    environments = load_manifest(tmp_path / "run.yaml").spec.evaluation.environments
    assert [each.name for each in environments] == names
