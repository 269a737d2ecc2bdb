"""Every block of docs/python, in order, in a folder that holds what `orbit init` writes."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.cli.main import run_command

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs/python").glob("*.md"))

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "cache"))
    path, modules = list(sys.path), set(sys.modules)
    assert run_command(["init", "run.yaml"]) == 0
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if not str(getattr(sys.modules[name], "__file__", None) or "").find(str(tmp_path)):
            sys.modules.pop(name)


def execute(source: str, name: str, names: dict[str, Any]) -> None:
    """Executes code as a notebook's cell: `await` may stand by itself, and a function's source can be found."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_page_runs(page: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for index, block in enumerate(blocks):
        named = re.match(r"# file: (\S+)\n", block)
        if named:
            Path(named[1]).write_text(block)
        else:
            execute(block, f"<{page.name} {index}>", names)


def test_every_seam_has_a_page_that_the_first_one_links_to() -> None:
    linked = set(re.findall(r"\]\(([a-z]+\.md)\)", (PAGES[0].parent / "README.md").read_text(encoding="utf-8")))
    assert linked == {page.name for page in PAGES} - {"README.md"}
