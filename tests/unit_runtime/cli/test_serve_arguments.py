"""`orbit serve` and `orbit chat`: what is wrong with their arguments is said before torch is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ALL_IN_ONE = (
    "import json, sys; from orbit_runtime.cli.main import run_command; "
    "codes = [run_command(each) for each in json.loads(sys.argv[1])]; "
    "print(json.dumps([codes, 'torch' in sys.modules]))"
)


def test_a_busy_port_is_told_before_torch_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        example = str(Path(__file__).resolve().parents[3] / "examples" / "quickstart.yaml")
        commands = [
            [*each, "--listen", f"127.0.0.1:{port}"]
            for each in (["serve", "--model", "builtin://tiny-adder"], ["trainer", example], ["inference", example])
        ]
        commands.append(["serve", "--model", "builtin://tiny-adder", "--port", str(port)])
        ended = subprocess.run([sys.executable, "-c", ALL_IN_ONE, json.dumps(commands)], capture_output=True, text=True)
    assert json.loads(ended.stdout) == [[73] * 4, False], ended.stderr
    assert ended.stderr.count(f"error: --listen: port {port} is in use\n  fix: choose another port") == 4


def test_a_wrong_argument_is_one_error_at_once(tmp_path: Path) -> None:
    here, none = str(tmp_path), str(tmp_path / "none")
    tiny = ["--model", "builtin://tiny-adder"]
    for version in (9, 10, 11):
        (tmp_path / "adapters" / f"policy-v{version}").mkdir(parents=True)
    (tmp_path / "run.json").write_text('{"resolved": {}}')
    for version in (9, 10):
        # An adapter exists once it has a manifest.
        (tmp_path / "adapters" / f"policy-v{version}" / "manifest.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    cases = [
        (["serve", none], f"{none}: there is no such run folder or manifest"),
        (["serve", f"{here}/adapters"], f"{here}/adapters: there is no run here"),
        (["serve"], "name either a run or a model"),
        (["serve", *tiny, "--adapter", f"a={none}"], f"{none}: there is no such adapter or run folder"),
        (["serve", *tiny, "--adapter", "sums"], "--adapter: 'sums' names no adapter"),
        (["serve", here, "--limit", "choice=1"], "--limit: there is no limit 'choice'"),
        (["chat", none, "--prompt", "1+1="], f"{none}: there is no such run folder or manifest"),
        (["chat", "--prompt", "1+1="], "name either a run or a model"),
        (["chat", here, "--step", "11"], f"{here}, --step: the run keeps no adapter of step 11; it keeps: 9, 10"),
        (["serve", f"{here}@step-11"], f"{here}, @step-11: the run keeps no adapter of step 11; it keeps: 9, 10"),
        (["chat", f"{here}@best"], f"{here}@best: no adapter that this run keeps was evaluated, so none is its best"),
        (["serve", f"{none}@best"], f"{none}@best: there is no such run folder or manifest"),
        (["chat", f"{here}/empty", "--step", "3"], f"{here}/empty: this folder holds no adapter"),
        (["chat", here, "--adapter", none], f"{none}: there is no such adapter or run folder"),
    ]
    said = refused([arguments for arguments, _ in cases])
    assert said[::2] == [f"error: {words}" for _, words in cases]
    assert "  fix: choose from those; a larger spec.checkpoint.keep keeps more" in said


def refused(commands: list[list[str]], **environment: str) -> list[str]:
    """The lines of the errors. All end with 64, have a second line that tells the fix, and import no torch."""
    ended = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, json.dumps(commands)], capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert json.loads(ended.stdout) == [[64] * len(commands), False], ended.stderr
    said = ended.stderr.splitlines()
    assert all(line.startswith("  fix: ") for line in said[1::2]), ended.stderr
    return said


@pytest.mark.parametrize(
    "uri", ["hf://x", "hf://", "hf://org/", "hf://datasets/org/name", "hf://org/name/file", "ftp://x"]
)
def test_an_address_that_is_none_is_refused_at_once(uri: str) -> None:
    said = refused([["serve", "--model", uri], ["chat", "--model", uri, "--prompt", "1"]])[::2]
    expected = f"--model: {uri} is not the address of a model on a hub"
    assert said == [f"error: {'ftp://x: there is no address ftp://' if uri == 'ftp://x' else expected}"] * 2


def test_a_hub_that_is_out_of_reach_is_told_before_torch_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    command = [["chat", "--model", "hf://org/name", "--prompt", "1"]]
    ended = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE, json.dumps(command)], capture_output=True, text=True,
        env={**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    assert json.loads(ended.stdout) == [[74], False], ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[0] == f"asking 127.0.0.1:{port} for org/name"
    assert lines[-2].startswith(f"error: hf://org/name: 127.0.0.1:{port} could not be reached: 5 tries in")
    assert lines[-1].startswith("  fix: check the network")


def test_a_token_that_is_none_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    serve = ["serve", "--model", "builtin://tiny-adder"]
    files = [[*serve, "--token-file", str(tmp_path / name)] for name in ("empty", "none")]
    said = refused([serve, *files], ORBIT_SERVE_TOKEN="")[::2]
    assert said[:2] == ["error: ORBIT_SERVE_TOKEN: the token is empty", f"error: {tmp_path}/empty: the token is empty"]
    assert said[2].startswith(f"error: {tmp_path}/none: the token cannot be read: ")
    assert refused([serve], ORBIT_SERVE_TOKEN="two words")[::2] == [
        "error: ORBIT_SERVE_TOKEN: the token is not plain letters, digits and signs"
    ]


def test_a_folder_without_a_model_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    problems = {"none": "the model folder does not exist", "empty": "the model folder holds no config.json"}
    commands = [
        [command, "--model", str(tmp_path / name), *more]
        for name in problems
        for command, *more in (["serve"], ["chat", "--prompt", "1+1="])
    ]
    ended = subprocess.run([sys.executable, "-c", ALL_IN_ONE, json.dumps(commands)], capture_output=True, text=True)
    assert json.loads(ended.stdout) == [[66] * 4, False], ended.stderr
    told = [f"error: {tmp_path / name}: {problem}\n  fix: correct --model\n" for name, problem in problems.items()]
    assert ended.stderr == "".join(each for each in told for _ in range(2))
