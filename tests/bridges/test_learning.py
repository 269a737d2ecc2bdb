"""The examples that need other packages learn: a game of Gymnasium, and an environment of verifiers.

Needs an environment with these packages: `make test-bridges`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(any(find_spec(name) is None for name in ("gymnasium", "verifiers")), reason="make test-bridges"),
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("example", "steps", "gain"), [("gymnasium.yaml", 10, 0.1), ("verifiers.yaml", 8, 0.06)])
def test_an_example_learns(example: str, steps: int, gain: float, tmp_path: Path) -> None:
    """The mean of the last three steps against that of the first three."""
    command = [sys.executable, "-m", "orbit_runtime", "run", str(ROOT / "examples" / example), "--out", "out"]
    done = subprocess.run(
        [*command, "--set", f"training.steps={steps}"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows]
    assert len(rewards) == steps
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 >= gain, rewards
    assert all(row["reward_crash"] == row["reward_timeout"] == 0 for row in rows)
    assert all(row["parity_max"] < 1e-3 for row in rows), "the trainer finds the log-probs of every turn again"
