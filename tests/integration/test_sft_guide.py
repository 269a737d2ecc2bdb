"""The commands of `docs/guides/sft.md` in order: from the shipped base to OpenAI's client, better at each stage."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import start_serving

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guides/sft.md").read_text(encoding="utf-8")


def shell(text: str, folder: Path) -> None:
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", text], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def score(folder: Path, model: str) -> float:
    scores: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())["scores"]
    (found,) = [each for each in scores if each["subject"] == model]
    return float(found["average"]["mean"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_stage_of_the_guide_is_better_than_the_one_before(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    train, measure, serve = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    for text in (train, measure):
        shell(text, tmp_path)
    base, demonstrated = (score(tmp_path / "measured-sft", model) for model in ("base", "step-30"))
    rewarded = score(tmp_path / "measured-rl", "step-30")
    assert base + 0.2 < demonstrated
    assert demonstrated + 0.02 < rewarded

    (asked,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    said: list[str] = []
    (folder,) = re.fullmatch(r"orbit serve (\S+)\n", serve).groups()  # type: ignore[union-attr]
    serving = start_serving(
        open_models(ServeRequest(str(tmp_path / folder)), ServeLimits(), lambda _: None), "127.0.0.1", 0, None
    )
    try:
        exec(asked.replace("http://127.0.0.1:8000", serving.url), {"print": said.append})
    finally:
        serving.close()
    assert said == ["46"]
