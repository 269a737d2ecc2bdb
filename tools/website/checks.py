"""What a built site must not have: a link to nothing, an anchor that is not there, anything from another host.

Belongs here: reading the finished HTML. Does not belong here: the repository's pages (`tests/architecture`).
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src"}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in _LOADED and _LOADED[tag] in values and values.get("rel") != "canonical":
            self.loaded.append(values[_LOADED[tag]])


def find_faults(site: Path) -> list[str]:
    """One line for each; empty for a site that is whole by itself."""
    pages = {path.resolve(): _read(path) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        faults += [f"{name}: loads {each}" for each in page.loaded if re.match(r"(https?:)?//", each)]
        for link in [*page.links, *page.loaded]:
            fault = _fault(path, link, pages)
            if fault and path.name != "404.html":
                faults.append(f"{name}: {link}: {fault}")
    for path in [*site.rglob("*.js"), *site.rglob("*.css")]:
        for host in re.findall(r"""(?:import|src=|url)\(?["'](https?://[^"']+)""", path.read_text(encoding="utf-8")):
            faults.append(f"{path.relative_to(site)}: loads {host}")
    return faults


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _fault(path: Path, link: str, pages: dict[Path, _Page]) -> str | None:
    if re.match(r"[a-z]+:|//", link):
        return None
    target, _, anchor = link.partition("#")
    found = (path.parent / unquote(target)).resolve() if target else path
    if found.is_dir():
        found /= "index.html"
    if not found.is_file():
        return "no such page"
    if anchor and found in pages and unquote(anchor) not in pages[found].ids:
        return "no such anchor"
    return None
