"""The documentation's index: it names every page that a reader may look for, and no page that is not there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def linked(text: str) -> set[Path]:
    """Files that the relative links of an index in `docs` lead to."""
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    return {(DOCS / target).resolve() for target in targets if "://" not in target}


def test_the_index_names_every_guide_and_every_reference_page() -> None:
    pages = {path for folder in ("guides", "python", "reference") for path in (DOCS / folder).rglob("*.md")}
    named = linked((DOCS / "README.md").read_text(encoding="utf-8"))
    assert sorted(str(path.relative_to(DOCS)) for path in pages - named) == []


def test_every_page_that_the_index_names_is_there() -> None:
    assert [str(path) for path in linked((DOCS / "README.md").read_text(encoding="utf-8")) if not path.exists()] == []


def test_the_search_finds_a_link_with_and_without_an_anchor() -> None:
    found = linked("[a](guides/models.md), [b](guides/sglang.md#experts), [c](https://example.com/x.md)")
    assert {path.name for path in found} == {"models.md", "sglang.md"}


def test_decisions_and_the_change_log_can_be_read_to_the_end() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in (DOCS / "decisions").glob("*.md")}
    assert {name: count for name, count in words.items() if count > 400} == {}
    assert sum(words.values()) <= 9000
    assert (DOCS.parent / "CHANGELOG.md").stat().st_size <= 8192


def test_what_a_contributor_touches_is_there() -> None:
    """Rows of CONTRIBUTING's table: a path begins in the repository's root, or below `orbit_runtime`."""
    root = DOCS.parent
    rows = re.findall(r"^\| an? [^|]*\| (.*) \|$", (root / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {each for row in rows for each in re.findall(r"`([\w.]+/[^`]*)`", row)}
    assert len(rows) > 15 and {"spec/objectives.py", "storage/faults.py"} <= named  # noqa: PT018
    found = [[each for base in (root, root / "orbit_runtime") for each in base.glob(re.sub("<[^>]*>", "*", name))]
             for name in sorted(named)]  # fmt: skip
    assert [name for name, paths in zip(sorted(named), found, strict=True) if not paths] == []
