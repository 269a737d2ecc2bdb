"""A reward beside the manifest that is edited between two starts, and while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit_runtime.cli.main import run_command
from tests.integration.killing import small_manifest

REWARD = "def score(completion, prompt, fields):\n    return float(completion == fields['answer'])\n"
EDITS_ITSELF = (
    "from pathlib import Path\n"
    "def score(completion, prompt, fields):\n    Path(__file__).write_text('# edited')\n    return 0.5\n"
)


@pytest.mark.timeout(600)
def test_an_edited_reward_is_refused_with_the_difference_and_goes_on_only_if_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = small_manifest(steps=1)
    made["spec"]["environment"]["rewards"] = [{"name": "own", "entrypoint": "edited_reward:score"}]
    made["spec"]["training"]["schedule"] = {"type": "Constant"}
    reward, out = tmp_path / "edited_reward.py", tmp_path / "run"
    Path("run.yaml").write_text(json.dumps(made))

    def start(steps: int, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run_command(["run", "run.yaml", "--out", str(out), f"--set=spec.training.steps={steps}", *options])
        return code, capsys.readouterr().err

    reward.write_text(REWARD)
    assert start(1)[0] == 0
    record = json.loads((out / "code/000001.json").read_text())
    assert (record["step"], record["files"]["edited_reward.py"]["text"]) == (0, REWARD)

    # Who has the run only evaluates it by the reward that it kept.
    reward.unlink()
    assert run_command(["eval", str(out), "--set=spec.evaluation.limit=2", "--no-eval-base"]) == 0

    reward.write_text(EDITS_ITSELF)
    code, told = start(2)
    assert code == 73
    assert "-    return float(completion == fields['answer'])\n" in told
    assert "+    return 0.5\n" in told
    assert "--accept-code" in told

    code, told = start(2, "--accept-code")
    assert code == 0
    assert "changed since the last start: the code, as accepted: edited_reward.py\n" in told
    assert "warning: edited_reward.py was changed during execution 3: " in told
    record = json.loads((out / "code/000003.json").read_text())
    assert (record["step"], record["files"]["edited_reward.py"]["text"]) == (1, EDITS_ITSELF)
    assert any("edited_reward.py" in each for each in json.loads((out / "report.json").read_text())["warnings"])

    # A run of before there were records: the code that it finds is recorded.
    reward.write_text(REWARD)
    for each in (out / "code").iterdir():
        each.unlink()
    code, told = start(3)
    assert code == 0
    assert "the code is recorded from step 3 on; what it was before is not known\n" in told
