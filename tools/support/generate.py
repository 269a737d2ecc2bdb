"""Writes the page of what SGLang serves: `python -m tools.support.generate`, with `--check` only compares.

Belongs here: which file is written. Does not belong here: its content (`page`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.reference.generate import write_pages
from tools.support.page import render_page

if __name__ == "__main__":
    pages = {"docs/reference/sglang.md": render_page()}
    sys.exit(write_pages(pages, sys.argv[1:], Path(__file__).resolve().parents[2]))
