"""The first page, from nothing to an own reward: its commands and code, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime import Report
from orbit_runtime.cli.main import run_command
from tests.integration.test_python_pages import execute

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("my_rewards", None)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_page_gets_from_nothing_to_an_own_reward(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "first_page"}
    blocks = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "python", "sh", "sh", "python"]
    for index, (language, block) in enumerate(blocks):
        named = re.match(r"# file: (\S+)\n", block)
        if named:
            Path(named[1]).write_text(block)
        elif language == "python":
            execute(block, f"<first page {index}>", names)
        else:
            for command in block.splitlines():
                program, *arguments = shlex.split(command)
                assert program == "orbit"
                code = run_command(arguments)
                said = capsys.readouterr()
                assert code == 0, f"{command}\n{said.out}{said.err}"
    for folder in ("given", "near"):
        assert Report(folder).status == "done"
        rewards = Report(folder).curves["reward_mean"]
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.15, folder  # type: ignore[arg-type]
        assert (Path(folder) / "report.html").exists()


def test_what_it_installs_with_is_a_target_of_the_makefile() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert block.split()[:2] == ["make", "install"]
    assert re.search(r"^install:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
