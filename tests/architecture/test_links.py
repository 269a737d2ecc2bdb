"""Links of every page: to files that are there, and to headings that they have; each page has a place on the site."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tools.website.navigation import placed
from tools.website.pages import OUTSIDE, find_pages, moved

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in OUTSIDE)]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them; the site's are the same (`make site` checks its own)."""
    found: dict[str, int] = {}
    names = set()
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    names |= set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    return frozenset(names)


def faults(path: Path, text: str) -> list[str]:
    found = []
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists():
            found.append(f"{target}: no such file")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_the_page_leads_somewhere(path: Path) -> None:
    assert faults(path, path.read_text(encoding="utf-8")) == []


def test_the_search_finds_a_missing_file_and_a_missing_heading() -> None:
    page = ROOT / "docs" / "README.md"
    wrong = "[a](nowhere.md) [b](guides/models.md#nothing) [c](guides/models.md#experts)\n```\n[d](gone.md)\n```\n"
    assert [each.split(":")[0] for each in faults(page, wrong)] == ["nowhere.md", "guides/models.md#nothing"]


def test_every_page_has_one_place_on_the_site() -> None:
    pages = set(find_pages().values())
    decisions = {page for page in pages if page.startswith("decisions/")}
    made = {"decisions/index.md", "python/names.md"}
    assert sorted(pages - placed() - decisions) == []
    assert sorted(placed() - pages) == sorted(made)


def test_a_moved_page_keeps_its_links_and_loses_those_to_code() -> None:
    places = {"docs/guides/a.md": "guides/a.md", "CHANGELOG.md": "changelog.md", "docs/README.md": "index.md"}
    diagram = "[n](m)\n```"
    text = (
        "[log](../../CHANGELOG.md#x) [`run`](../../run.py) [host](https://example.com) "
        "![p](../pictures/p.svg)\n```text\n" + diagram
    )
    expected = "[log](../changelog.md#x) `run` [host](https://example.com) ![p](../pictures/p.svg)\n```text\n" + diagram
    assert moved(text, "docs/guides/a.md", places) == expected


def test_diagrams_are_pictures_that_the_site_shows_as_well() -> None:
    """It has no program that would draw them."""
    for page in find_pages():
        assert "```mermaid" not in (ROOT / page).read_text("utf-8"), page
    assert "(docs/pictures/step.svg)" in (ROOT / "README.md").read_text("utf-8")
