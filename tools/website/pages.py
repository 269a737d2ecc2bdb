"""From the repository's pages to the site's: where each comes to stand, and its links with it.

Belongs here: that. Does not belong here: building (`build`), the order of pages (`navigation`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = {
    "README.md": "about.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "charts/orbit/README.md": "guides/cluster/chart.md",
}
"""Pages that are not in `docs`, and where the site has them."""
FOLDERS = {"docs/decisions": "decisions/index.md", "docs/guides": "index.md"}
"""Folders that pages link to."""
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def find_pages(root: Path = ROOT) -> dict[str, str]:
    """Path in the repository → path in the site, of everything that becomes a page."""
    found = dict(OUTSIDE)
    for path in sorted((root / "docs").rglob("*")):
        if path.suffix in (".md", ".ipynb"):
            inside = path.relative_to(root / "docs").with_suffix(".md")
            name = inside.with_name("index.md") if inside.name == "README.md" else inside
            found[path.relative_to(root).as_posix()] = name.as_posix()
    return found


def write_pages(target: Path, root: Path = ROOT) -> None:
    """Every page with its links, and those that only the site has."""
    places = find_pages(root)
    for source, place in places.items():
        text = (root / source).read_text(encoding="utf-8")
        if source.endswith(".ipynb"):
            text = notebook_text(text, source)
        _write(target / place, moved(text, source, places, root))
    shutil.copytree(root / "docs/pictures", target / "pictures")
    _write(target / "decisions/index.md", _decisions(root))
    _write(target / "python/names.md", _names())


def moved(text: str, source: str, places: Mapping[str, str], root: Path = ROOT) -> str:
    """A page's text where the site has it: links follow, those to code become its path."""
    here = places[source]

    def follow(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        repository = os.path.normpath(os.path.join(os.path.dirname(source), path))
        place = places.get(repository) or FOLDERS.get(repository)
        if repository.endswith((".png", ".svg")):
            place = repository.removeprefix("docs/")
        if place is None:
            return words if "`" in words else f"{words} (`{repository}`)"
        relative = os.path.relpath(place, os.path.dirname(here) or ".")
        return f"[{words}]({relative}{hash_}{anchor})"

    pieces, start = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(follow, text[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*pieces, _LINK.sub(follow, text[start:])])


def notebook_text(content: str, source: str) -> str:
    """A notebook's cells, one after the other."""
    parts = []
    for index, cell in enumerate(json.loads(content)["cells"]):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        if index == 0:
            parts.append(f"*A notebook: `{source}`. A test executes every cell.*")
    return "\n\n".join(parts) + "\n"


def _decisions(root: Path) -> str:
    """Newest first."""
    lines = ["# Decisions", "", "Why it is so, and what was rejected.", ""]
    for path in sorted((root / "docs/decisions").glob("*.md"), reverse=True):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})".replace(". ", "\\. ", 1))
    return "\n".join(lines) + "\n"


DOCUMENTED = {
    "Running": ["orbit_runtime.run", "orbit_runtime.load_manifest"],
    "Reading": [f"orbit_runtime.{name}" for name in ("Report", "Headline", "Sample", "Compared")],
    "What functions get and return": [
        "orbit_runtime.algorithms.LossInputs",
        "orbit_runtime.algorithms.TokenLosses",
        "orbit_runtime.algorithms.ScoredGroup",
        "orbit_runtime.environments.Step",
        "orbit_runtime.environments.rewards.WrongAnswer",
    ],
    "Errors": ["orbit_runtime.errors"],
    "Agents": ["orbit_runtime.agents"],
}
"""The public names, as docs/python/README.md groups them."""


def _names() -> str:
    parts = ["# Names and signatures", "", "From the code; [what is stable](index.md#what-is-stable).", ""]
    for title, names in DOCUMENTED.items():
        parts += [f"## {title}", "", *(f"::: {name}\n" for name in names)]
    return "\n".join(parts) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
