"""The table of faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TABLE = Path(__file__).parents[1] / "cluster" / "README.md"


def test_every_test_that_the_table_of_faults_names_exists() -> None:
    named = re.findall(r"`([\w./]+\.py)::(\w+)`", TABLE.read_text(encoding="utf-8"))
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"^def {test}\(|^{test} =", (TABLE.parent / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []
    assert len(named) > 30
