"""`python -m tools.website`: builds the site into `build/site`, and fails where a link leads nowhere.

Belongs here: calling the generator with this site's settings. Does not belong here: pages (`pages`), checks (`checks`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.website.checks import find_faults
from tools.website.navigation import build_navigation
from tools.website.pages import ROOT, write_pages

OUT = ROOT / "build" / "website"
"""`pages/`, `mkdocs.yml` and `site/`."""
SHIM = re.compile(r"https://[^\"\s]+/iframe-worker/shim")
"""What the generator's pages load where they are opened as files: browsers start no worker from one."""


def settings() -> dict[str, Any]:
    """The generator's, in the format of MkDocs, which it reads."""
    options = {
        "docstring_style": "google",
        "docstring_section_style": "list",
        "heading_level": 3,
        "members_order": "source",
        "show_root_heading": True,
        "show_root_full_path": False,
        "show_source": False,
        "show_if_no_docstring": True,
        "separate_signature": True,
        "show_signature_annotations": True,
        "show_submodules": False,
    }
    return {
        "site_name": "Orbit",
        "docs_dir": "pages",
        "site_dir": "site",
        # Folders as addresses need a server.
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            # Nothing comes from another host.
            "font": False,
            "icon": {"logo": "material/orbit"},
            "language": "en",
            "features": ["navigation.sections", "navigation.footer", "search.highlight", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "indigo"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "indigo"},
            ],
        },
        "extra": {"generator": False},
        "extra_css": ["assets/site.css"],
        "nav": build_navigation(),
        "plugins": [
            "search",
            "offline",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": options}}}},
        ],
        "markdown_extensions": [
            "admonition",
            "attr_list",
            "tables",
            "pymdownx.highlight",
            "pymdownx.superfences",
            {"toc": {"permalink": True, "toc_depth": 3}},
        ],
    }


STYLE = """
/* Long names and wide tables stay inside a narrow page. */
.md-typeset table:not([class]) th { min-width: 0; }
.md-typeset table:not([class]) { font-size: .7rem; }
.md-typeset code { overflow-wrap: anywhere; }
.md-typeset pre > code { white-space: pre-wrap; }
.md-typeset table:not([class]) thead:not(:has(th:not(:empty))) { display: none; }
.md-typeset td:first-child code { overflow-wrap: normal; word-break: normal; }
/* On a phone a row is a block: its first cell, then each of the others behind the name of its column. */
@media (max-width: 600px) {
  .md-typeset__table, .md-typeset table:not([class]) { display: block; }
  .md-typeset table:not([class]) :is(tbody, tr, td) { display: block; }
  .md-typeset table:not([class]) thead { display: none; }
  .md-typeset table:not([class]) tr { border-top: .05rem solid var(--md-typeset-table-color); padding: .3rem 0; }
  .md-typeset table:not([class]) td { border: 0; padding: .1rem .4rem; overflow-wrap: anywhere; }
  .md-typeset table:not([class]) :is(td.none, td[data-label="set"]) { display: none; }
  .md-typeset td[data-label]::before { content: attr(data-label) ": "; color: var(--md-default-fg-color--light); }
}
"""


def build() -> list[str]:
    """Builds, and returns the faults that were found."""
    shutil.rmtree(OUT, ignore_errors=True)
    write_pages(OUT / "pages")
    (OUT / "pages/assets").mkdir()
    (OUT / "pages/assets/site.css").write_text(STYLE, encoding="utf-8")
    # JSON is YAML.
    (OUT / "mkdocs.yml").write_text(json.dumps(settings(), indent=1), encoding="utf-8")
    program = Path(sys.executable).with_name("zensical")
    command = [str(program), "build", "--strict", "--clean", "-f", str(OUT / "mkdocs.yml")]
    done = subprocess.run(command, cwd=OUT, capture_output=True, text=True)
    if done.returncode:
        return [done.stdout + done.stderr]
    _keep_here(OUT / "site")
    return find_faults(OUT / "site")


def _keep_here(site: Path) -> None:
    """Takes what pages would load from another host from the site itself."""
    shim = site / "assets" / "iframe-worker.js"
    shutil.copy(Path(__file__).with_name("iframe-worker.js"), shim)
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        here = os.path.relpath(shim, path.parent)
        path.write_text(_TABLE.sub(_with_labels, SHIM.sub(here, text)), encoding="utf-8")


_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)


def _with_labels(table: re.Match[str]) -> str:
    """A table whose cells know their column's name, for a page that is too narrow for columns."""
    names = [re.sub("<[^>]*>", "", each).strip() for each in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]

    def labelled(row: re.Match[str]) -> str:
        at = iter(names)
        next(at, None)
        first, *rest = re.split(r"(?=<td)", row[0])[1:] or [""]
        cells = [re.sub("^<td", f'<td data-label="{name}"', each) if (name := next(at, "")) else each for each in rest]
        # What says nothing takes no line of a phone.
        cells = [
            each.replace("<td", '<td class="none"', 1) if re.fullmatch("<td[^>]*>-</td>\\s*(</tr>)?", each) else each
            for each in cells
        ]
        return "<tr>" + first + "".join(cells)

    head, body, rows = table[0].partition("<tbody>")
    return head + body + re.sub(r"<tr>.*?</tr>", labelled, rows, flags=re.DOTALL)


if __name__ == "__main__":
    faults = build()
    print(*faults, sep="\n")
    if faults:
        sys.exit(1)
    print(f"open {(OUT / 'site/index.html').relative_to(Path.cwd(), walk_up=True)}")
