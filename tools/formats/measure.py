"""`python -m tools.formats.measure`: runs every row and writes `measured.json`; `tools/vendor_table.sh` calls it.

Belongs here: the file of figures. Does not belong here: the rows (`vendors`), the page made of it (`page`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

FILE = Path(__file__).with_name("measured.json")


def main() -> int:
    """1 where an oracle's bits are not ours."""
    from tools.formats.vendors import ORACLE, ROWS, measure

    figures, wrong = {}, []
    for row in ROWS:
        found = measure(row)
        version = metadata.version(row.library) if row.library else ""
        figures[row.name] = {"library": row.library, "version": version, "why": row.why, **asdict(found)}
        print(f"{row.name:58} {found.differing:9.4%} differ, at most by {found.largest:.1e}   {row.why}", flush=True)
        if row.why == ORACLE and found.differing:
            wrong.append(row.name)
    FILE.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"wrote {FILE}" + "".join(f"\nno longer equal: {name}" for name in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
