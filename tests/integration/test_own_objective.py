"""A loss and advantages of the user's: the guide's run, and every way that such a function can be wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from orbit_runtime import run
from orbit_runtime.algorithms import custom_loss
from orbit_runtime.algorithms.advantages import ScoredGroup
from orbit_runtime.algorithms.losses import LossInputs
from orbit_runtime.algorithms.objective import build_loss
from orbit_runtime.algorithms.table import build_algorithm, loss_settings
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import DivergedError, ManifestError
from orbit_runtime.spec.algorithm import Algorithm
from orbit_runtime.spec.run import find_contradictions
from tests.integration.killing import small_manifest

GUIDE = (Path(__file__).resolve().parents[2] / "docs/guides/algorithms.md").read_text()

# Whole runs and replays: seconds each, minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test has its own module of that name."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("my_objective", None)


def prepare(folder: Path, code: str | None, **algorithm: Any) -> list[str]:
    if code is not None:
        (folder / "my_objective.py").write_text(code)
    manifest = small_manifest(steps=1)
    manifest["spec"]["algorithm"] |= algorithm
    (folder / "run.yaml").write_text(json.dumps(manifest))
    return [str(folder / "run.yaml")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guides_own_objective_runs_and_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    settings = YAML(typ="safe").load(blocks("yaml")[2])["algorithm"]
    argv = prepare(tmp_path, code, **settings)
    assert run_command(["validate", *argv]) == 0
    assert "my_objective:loss" in capsys.readouterr().out
    assert run_command(["run", *argv, "--out", "out"]) == 0
    row = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    assert row["grad_norm"] > 0
    assert row["clip_fraction"] is None, "a tensor says nothing of clips"
    # The run's copy is replayed, wherever the file is now and whatever it holds.
    Path("my_objective.py").write_text("1/0")
    sys.modules.pop("my_objective")
    assert run_command(["replay", "out"]) == 0
    assert "orbit-code-" in sys.modules["my_objective"].__file__


def test_the_guides_first_manifest_is_one() -> None:
    first = Algorithm.model_validate(YAML(typ="safe").load(blocks("yaml")[0])["algorithm"])
    assert list(find_contradictions(first)) == []
    assert (first.objective.baseline, first.objective.reduction) == ("LeaveOneOut", "Constant")


LOSS = {"type": "Custom", "entrypoint": "my_objective:loss"}
ADVANTAGES = {"advantage": {"entrypoint": "my_objective:advantages"}}
IMPORTS = [
    (None, LOSS, "no module 'my_objective'"),
    ("x = 1", LOSS, "has no 'loss'"),
    ("loss = 3", LOSS, "not a function but int"),
    ("def loss(inputs): ...", LOSS, "cannot be called as (inputs, settings)"),
    ("async def loss(inputs, settings): ...", LOSS, "is async"),
    ("class L:\n async def __call__(self, inputs, settings): ...\nloss = L()", LOSS, "is async"),
    ("import nothing_of_that_name\ndef loss(a, b): ...", LOSS, "needs 'nothing_of_that_name', which is not installed"),
    ("1/0", LOSS, "importing 'my_objective' fails: ZeroDivisionError: division by zero"),
    ("def advantages(): ...", ADVANTAGES, "cannot be called as (groups)"),
]
CALLS = [
    ("def loss(i, s): return 1.0", LOSS, "returned float, not a loss for each of"),
    ("def loss(i, s): return i.logprobs_T.sum()", LOSS, "returned a tensor of shape ()"),
    ("def loss(i, s): return i.logprobs_T.detach()", LOSS, "a loss without gradient"),
    ("def loss(i, s): raise KeyError('x')", LOSS, "fails: KeyError: 'x'"),
    ("def advantages(groups): return []", ADVANTAGES, "no advantage for each rollout"),
    ("def advantages(groups): return [[float('nan')] * len(g.rewards_G) for g in groups]", ADVANTAGES, "not finite"),
    ("def advantages(groups): return [[[1.0, 2.0] * 9] * len(g.rewards_G) for g in groups]", ADVANTAGES, "18 numbers"),
    ("def advantages(groups): return [['0.5'] * len(g.rewards_G) for g in groups]", ADVANTAGES, "'0.5' is text"),
    ("def advantages(groups): return [[['1', '2']] * len(g.rewards_G) for g in groups]", ADVANTAGES, "'1' is text"),
    ("def advantages(groups): return [[b'1'] * len(g.rewards_G) for g in groups]", ADVANTAGES, "b'1' is text"),
    ("def advantages(groups): return [[10**999] * len(g.rewards_G) for g in groups]", ADVANTAGES, "too large"),
    ("def advantages(groups): return [[1e39] * len(g.rewards_G) for g in groups]", ADVANTAGES, "not finite in fp32"),
    ("def advantages(groups): return groups.nothing", ADVANTAGES, "fails: AttributeError"),
]


@pytest.mark.parametrize(("code", "settings", "said"), IMPORTS)
def test_what_cannot_be_imported_is_found_by_validate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str | None, settings: dict[str, Any], said: str
) -> None:
    assert run_command(["validate", *prepare(tmp_path, code, **settings)]) == 64
    told = "".join(capsys.readouterr())
    assert said in " ".join(told.split())
    assert "Traceback" not in told


def test_a_run_finds_it_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", *prepare(tmp_path, "x = 1", **LOSS), "--out", "out"]) == 64
    told = "".join(capsys.readouterr())
    assert "has no 'loss'" in told
    assert "loading the model" not in told
    assert not Path("out/run.json").exists()


def test_validate_runs_nothing_of_the_users_in_its_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = prepare(tmp_path, "print('noise')\ndef loss(inputs, settings): ...", **LOSS)
    assert run_command(["validate", *argv]) == 0
    assert "my_objective" not in sys.modules
    prepare(tmp_path, "import os\nos._exit(3)", **LOSS)
    assert run_command(["validate", *argv]) == 64
    assert "ends the process" in "".join(capsys.readouterr())


@pytest.mark.parametrize(("code", "settings", "said"), CALLS)
def test_what_a_function_returns_is_held_to_its_contract(
    tmp_path: Path, code: str, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "my_objective.py").write_text(code)
    chosen = Algorithm.model_validate(settings)
    own_loss, own_advantages = (
        custom_loss.load_own(chosen, field, [str(tmp_path)]) for field in (custom_loss.LOSS, custom_loss.ADVANTAGES)
    )
    algorithm = build_algorithm(chosen, own_advantages=own_advantages)
    loss = build_loss(chosen, own_loss=own_loss)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.ones(2), torch.tensor([2]))

    def step() -> None:
        algorithm.advantages([ScoredGroup([1.0, 0.0], [2, 2])])
        loss(inputs, torch.ones(2), loss_settings(chosen))

    with pytest.raises(ManifestError, match=re.escape(said)) as error:
        step()
    assert error.value.where in ("spec.algorithm.entrypoint", "spec.algorithm.advantage.entrypoint")


def test_a_function_that_fails_in_a_run_ends_it_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = prepare(tmp_path, "def loss(i, s): raise KeyError('x')", **LOSS)
    assert run_command(["run", *argv, "--out", "out"]) == 64
    told = "".join(capsys.readouterr())
    assert "spec.algorithm.entrypoint: 'my_objective:loss' fails: KeyError: 'x'" in " ".join(told.split())
    assert "Traceback" not in told


NOT_FINITE = [
    ("return -i.logprobs_T * (0 * i.advantages_T).log()", "returned {} for token 0 of"),
    (
        "return (i.logprobs_T - i.logprobs_T.detach()).sqrt()",
        "has a gradient for `inputs.logprobs_T` that is not finite",
    ),
    ("return i.logprobs_T + 0 * (0 * i.entropies_T).sqrt()", "a gradient for `inputs.entropies_T` that is not finite"),
]


@pytest.mark.parametrize(("code", "said"), NOT_FINITE)
def test_a_loss_that_is_not_finite_is_named_with_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, said: str
) -> None:
    argv = prepare(tmp_path, f"def loss(i, s): {code}", **LOSS)
    assert run_command(["run", *argv, "--out", "out"]) == 85
    told = " ".join("".join(capsys.readouterr()).split())
    assert re.search(
        "error: spec.algorithm.entrypoint: 'my_objective:loss' .*, at step 1, optimizer update 0: all that it was "
        "given is finite fix: correct the function",
        told,
    )
    assert any(said.format(value) in told for value in ("-inf", "inf", "nan"))
    assert "learningRate" not in told, "which would not help"
    assert json.loads(Path("out/failures/step-000001.json").read_text())["where"] == "spec.algorithm.entrypoint"


def test_a_loss_given_from_python_is_named_by_its_own_name(tmp_path: Path) -> None:
    def broken(inputs: LossInputs, settings: Any) -> torch.Tensor:
        return inputs.logprobs_T / 0

    with pytest.raises(DivergedError, match=r"broken' returned -inf for token 0 of .*, at step 1") as error:
        run(small_manifest(steps=1), out=tmp_path / "out", loss=broken, progress=False)
    assert error.value.where == "spec.algorithm.entrypoint"


def test_a_loss_is_not_blamed_for_what_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "my_objective.py").write_text("def loss(i, s): return -i.logprobs_T")
    loss = custom_loss.load_own(Algorithm.model_validate(LOSS), custom_loss.LOSS, [str(tmp_path)])
    assert isinstance(loss, custom_loss.OwnLoss)
    logprobs = torch.tensor([float("nan"), -2.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.ones(2), torch.tensor([2]))
    loss(inputs, loss_settings(Algorithm.model_validate(LOSS))).loss_T.sum().backward()
    assert loss.take_problems() == []
