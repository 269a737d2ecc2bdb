"""`python -m tools.pictures`: takes the pictures of the documentation anew, by a run of the quickstart and a browser.

Writes `report.png`, `live.png` and `terminal.png` into `docs/pictures`: the report of the run, its live page half-way,
and what the run printed. `smollm2.png` is of a run with a real model, which is not made anew here.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 1 << 20
"""Bytes of all pictures together."""
LIVE_STEP = 30
SHOWN = "runs/quickstart"
"""The run folder of the pictures; the real one is a folder of this machine."""


def main() -> int:
    browser = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        print("there is no Chromium on this machine")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        run, log = Path(folder) / "quickstart", Path(folder) / "terminal.txt"
        command = [sys.executable, "-m", "orbit_runtime", "run", "examples/quickstart.yaml", "--out", str(run)]
        with log.open("w", encoding="utf-8") as out:
            # The environment says that nobody looks at a terminal: lines without colours.
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
            )
        try:
            while process.poll() is None and f" step {LIVE_STEP}/" not in log.read_text(encoding="utf-8"):
                time.sleep(0.2)
            if address := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(encoding="utf-8")):
                with urllib.request.urlopen(f"{address[0]}/report") as answer:
                    take(browser, answer.read().decode().replace(str(run), SHOWN), "live")
        finally:
            code = process.wait()
        if code:
            print(log.read_text(encoding="utf-8"))
            return code
        take(browser, (run / "report.html").read_text(encoding="utf-8").replace(str(run), SHOWN), "report")
        told = re.sub(r"(?m)^\S+Z ", "", log.read_text(encoding="utf-8")).replace(str(run), SHOWN).splitlines()
        lines = "\n".join(["$ orbit run examples/quickstart.yaml", *told[:6], "…", *told[-22:]])
        window = 760, 20 * lines.count("\n") + 56
        take(browser, f"<meta charset=utf-8>{TERMINAL}<pre>{html.escape(lines)}</pre>", "terminal", window)
    size = sum(each.stat().st_size for each in PICTURES.iterdir())
    print(f"docs/pictures: {size / 1024:.0f} KiB of {MOST_BYTES / 1024:.0f}")
    return int(size > MOST_BYTES)


TERMINAL = (
    "<style>body { margin: 0; background: #1d2327; color: #e6e9ec; } "
    "pre { margin: 18px; font: 13px/1.5 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }</style>"
)


def take(browser: str, content: str, name: str, size: tuple[int, int] = (1100, 800)) -> None:
    """A picture of the top of a page; `size` in pixels."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(content, encoding="utf-8")
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/b",
             f"--window-size={size[0]},{size[1]}", f"--screenshot={PICTURES / f'{name}.png'}", f"file://{page}"],
            check=True, capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
