"""Every manifest for a published model, with a tiny one of its family and format: it trains a step, proven.

What is set is what docs/guides/models.md tells a user to set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import load_manifest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/models.md"
TINY = {
    "deepseek-v4-flash": "tiny-deepseek-v4",
    "deepseek-v4-pro": "tiny-deepseek-v4",
    "glm-4-5": "tiny-glm4-moe",
    "gpt-oss-120b": "tiny-gpt-oss",
    "kimi-k2-6": "tiny-kimi-k2",
    "kimi-k2-6-oft": "tiny-kimi-k2",
    "llama-3-1-8b": "tiny-llama",
    "qwen3-0-6b": "tiny-qwen3",
    "qwen3-1-7b": "tiny-qwen3",
    "qwen3-235b-a22b": "tiny-qwen3-moe",
    "qwen3-30b-a3b": "tiny-qwen3-moe",
    "qwen3-30b-a3b-nvfp4": "tiny-qwen3-moe",
    "qwen3-4b": "tiny-qwen3",
    "qwen3-4b-bf16": "tiny-qwen3",
    "qwen3-4b-code": "tiny-qwen3",
    "qwen3-4b-dapo": "tiny-qwen3",
    "qwen3-4b-tools": "tiny-qwen3",
}
TWINS = ("deepseek-v4-pro", "qwen3-1-7b", "qwen3-235b-a22b")
"""Recipes whose family, format and adapter another one has: left to `make test-long`."""


def smaller(guide: str) -> list[str]:
    """The `--set` of the guide's command but the model's: one step of one prompt, on any machine."""
    command = guide.split("orbit run examples/kimi-k2-6.yaml", 1)[1].split("```", 1)[0]
    words = command.replace("\\\n", " ").split()
    settings = [each for before, each in pairwise(words) if before == "--set"]
    assert settings[0] == "model.uri=builtin://tiny-kimi-k2"
    return settings[1:]


def differs(completion: str, prompt: Any, fields: Mapping[str, Any], *, field: str) -> float:
    """Differs between completions of a model that knows nothing, so that there is something to learn."""
    return sum(map(ord, completion)) % 97 / 97


def test_every_manifest_of_a_published_model_is_here() -> None:
    published = {
        path.stem for path in (ROOT / "examples").glob("*.yaml") if load_manifest(path).spec.model.uri.startswith("hf:")
    }
    # Small enough to be trained itself: tests/real.
    assert published == {*TINY, "smollm2"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long) if each in TWINS else each for each in TINY]
)
def test_a_recipe_trains_a_step_with_a_tiny_model_of_its_family(name: str, tmp_path: Path) -> None:
    settings = smaller(GUIDE.read_text(encoding="utf-8"))
    spec = load_manifest(
        ROOT / f"examples/{name}.yaml", [f"spec.{each}" for each in [f"model.uri=builtin://{TINY[name]}", *settings]]
    )
    run(spec, out=str(tmp_path / name), rewards={"correct": differs}, progress=SilentProgress())
    (row,) = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((tmp_path / name / "report.json").read_text())
    assert row["grad_norm"] > 0
    assert (report["publishes"], report["publishes_proven"]) == (2, 2)
    before, after = (tmp_path / name / f"adapters/policy-v{version}/adapter_model.safetensors" for version in (0, 1))
    assert before.read_bytes() != after.read_bytes()
