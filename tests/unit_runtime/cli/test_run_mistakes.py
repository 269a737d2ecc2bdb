"""`orbit run`: what is wrong with prompts, rewards and the model's folder is said before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ALL_IN_ONE = (
    "import json, sys; from orbit_runtime.cli.main import run_command; "
    "codes = [run_command(['run', 'run.yaml', '--out', 'out', *each]) for each in json.loads(sys.argv[1])]; "
    "print(json.dumps([codes, 'torch' in sys.modules]))"
)
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml"
REWARD = "environment.rewards=[{name: mine, entrypoint: %s}]"
MEASURED = "evaluation={everySteps: 1, environments: [{name: held-out, %s}]}"
OWN = "prompts: [{uri: one.jsonl}], environment: {%s}"
FIELD = "spec.evaluation.environments[0].environment"
CASES = [
    (["data.prompts=[{uri: none.jsonl}]"], 65, "the prompts file does not exist"),
    (["data.prompts=[{uri: bare.jsonl}]"], 65, "answer"),
    ([REWARD % "nowhere:score"], 64, "nowhere"),
    ([REWARD % "mine:nothing"], 64, "nothing"),
    (["environment={type: MultiTurn, entrypoint: nowhere:Game}"], 64, "nowhere"),
    (["algorithm.type=SFT", "data.prompts=[{uri: bare.jsonl, completionField: answer}]"], 65, "answer"),
    (["algorithm.type=SFT", "data.prompts=[{uri: bare.jsonl}]"], 65, "there is no answer to learn"),
    ([MEASURED % "prompts: [{uri: none.jsonl}]"], 65, "the prompts file does not exist"),
    ([MEASURED % "prompts: [{uri: bare.jsonl}]"], 65, "answer"),
    ([MEASURED % OWN % "code: {uri: none}, rewards: [{name: a, type: Math}]"], 64, f"{FIELD}.code.uri: "),
    ([MEASURED % OWN % "rewards: [{name: mine, entrypoint: 'nowhere:score'}]"], 64, f"{FIELD}.rewards[mine]: "),
    ([MEASURED % OWN % "type: MultiTurn, entrypoint: 'mine:Nothing'"], 64, f"{FIELD}.entrypoint: "),
    (["algorithm.type=Distillation", "algorithm.teacher={type: Adapter, uri: none}"], 66, "there is no such folder"),
    (
        [
            "algorithm.type=SFT",
            "data.prompts=[{uri: one.jsonl, completionField: answer}]",
            "data.validation={share: 0.5}",
        ],
        65,
        "spec.data.validation.share",
    ),
    (["model.uri=models/none"], 66, "the model folder does not exist"),
]


def test_a_mistake_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(EXAMPLE.read_text())
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "one.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def score(completion, prompt, fields):\n    return 1.0\n")
    asked = [[part for change in changes for part in ("--set", f"spec.{change}")] for changes, *_ in CASES]
    ended = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, json.dumps(asked)], cwd=tmp_path, capture_output=True, text=True
    )
    codes, has_torch = json.loads(ended.stdout.splitlines()[-1])
    assert codes == [code for _, code, _ in CASES], ended.stderr
    assert not has_torch
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(CASES), ended.stderr
    for line, (_, _, words) in zip(errors, CASES, strict=True):
        assert words in line
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out" / "executions").exists(), "what never ran leaves nothing behind"


def test_a_teacher_that_refuses_connections_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(EXAMPLE.read_text())
    teacher = "{type: Served, over: Sampled, endpoints: [{url: 'http://127.0.0.1:9'}]}"
    asked = [["--set", f"spec.algorithm={{type: Distillation, teacher: {teacher}}}"]]
    ended = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, json.dumps(asked)], cwd=tmp_path, capture_output=True, text=True
    )
    assert json.loads(ended.stdout.splitlines()[-1]) == [[82], False], ended.stderr
    field, url = "spec.algorithm.teacher.endpoints[0]", "http://127.0.0.1:9"
    assert f"error: {field}: {url} did not answer within 5 s: the connection is refused" in ended.stderr
    assert f"{field}: {url} does not answer (the connection is refused); waiting for it" in ended.stderr
