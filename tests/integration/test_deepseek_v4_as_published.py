"""A run of DeepSeek-V4 whose folder has no chat template, as it is published."""

from __future__ import annotations

import json
from pathlib import Path

from fakes.deepseek_v4_folder import write_tokenizer

from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import load_manifest
from tests.integration.test_recipes import GUIDE, ROOT, differs, smaller
from tests.integration.tiny_families import make_family


def test_a_folder_without_a_template_trains_a_step(tmp_path: Path) -> None:
    folder, _ = make_family(tmp_path / "made", "deepseek_v4", "MXFP4V4", sizes={"vocab_size": 512})
    for path in (*folder.glob("tokenizer*"), *folder.glob("chat_template*")):
        path.unlink()
    write_tokenizer(folder)
    settings = [*smaller(GUIDE.read_text(encoding="utf-8")), f"model.uri={folder}", "model.maxSequenceLength=256"]
    spec = load_manifest(ROOT / "examples/deepseek-v4-flash.yaml", [f"spec.{each}" for each in settings])
    run(spec, out=str(tmp_path / "run"), rewards={"correct": differs}, progress=SilentProgress())
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["grad_norm"] > 0
    assert "model.chat_template.jinja" in (tmp_path / "run" / "run.json").read_text()
