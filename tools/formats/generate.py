"""Writes the page of the formats: `python -m tools.formats.generate`, with `--check` only compares.

Belongs here: which file is written. Does not belong here: its content (`page`), measuring (`measure`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.formats.page import render_page
from tools.reference.generate import write_pages

if __name__ == "__main__":
    pages = {"docs/reference/formats.md": render_page()}
    sys.exit(write_pages(pages, sys.argv[1:], Path(__file__).resolve().parents[2]))
