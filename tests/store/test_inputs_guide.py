"""What the guide to inputs says about a hub and code of one's own. The hub is a fake, the commands are real."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.guide import commands, run_shell, write_files
from fakes.hub_server import HubServer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "orbit_runtime/model_info/builtin/tiny-adder/int4"
PROMPTS = ROOT / "orbit_runtime/data/builtin/two-digit-addition.jsonl"
GUIDE = (ROOT / "docs/guides/inputs.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_guide_work(tmp_path: Path) -> None:
    write_files(GUIDE, tmp_path)
    with HubServer() as hub:
        hub.add("example/tiny-adder", {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()})
        hub.add("example/sums", {"train.jsonl": PROMPTS.read_bytes()}, kind="datasets")
        environment = {**hub.environment(), "ORBIT_CACHE": str(tmp_path / "cache")}
        for heading in ("A run from the hub", "Code of your own"):
            for text in commands(GUIDE, heading):
                done = run_shell(text, tmp_path, environment)
                assert done.returncode == 0, done.stdout + done.stderr
    for name in ("first", "second", "zip"):
        assert (tmp_path / f"runs/{name}/report.html").is_file()
