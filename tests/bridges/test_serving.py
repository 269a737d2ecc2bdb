"""`vf-eval`, the program of verifiers, against `orbit serve`: unmodified.

Needs an environment with verifiers: `make test-bridges`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("verifiers") is None, reason="make test-bridges"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-tests"
ENVIRONMENT = {**os.environ, "ORBIT_SERVE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "orbit_runtime", "serve", "--model", "builtin://tiny-adder"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    serving = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert serving.stdout is not None
    said = serving.stdout.readline()
    try:
        yield said.split(" at ")[1].strip()
    finally:
        serving.terminate()
        assert serving.wait(60) == 0


def test_vf_eval_plays_an_environment_against_the_server(url: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "vf-eval"), "orbit_sums", "-m", "tiny-adder", "-b", url]
    command += ["-k", "ORBIT_SERVE_TOKEN", "-n", "3", "-r", "2", "-t", "4", "-T", "1.0"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parent), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Rollouts per example: 2" in done.stdout
    assert "stop_conditions: max_turns_reached: 1.000" in done.stdout, "an answer that was an error"
    asked = urllib.request.Request(url.removesuffix("/v1") + "/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked) as answer:
        lines = answer.read().decode().splitlines()
    ended = [line for line in lines if line.startswith("orbit_serve_completions_total")]
    assert sum(float(line.split()[-1]) for line in ended) == 6, json.dumps(lines)
