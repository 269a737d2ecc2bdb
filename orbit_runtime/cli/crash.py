"""The report file of a bug in Orbit: what its authors need, and nothing of the user's secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from orbit_runtime.observability.versions import PACKAGES, installed_versions
from orbit_runtime.version import __version__

_PASSWORD_IN_URI = re.compile(r"(://)[^/@\s'\"]+@")
_SECRET_OPTION = re.compile(r"((?:secret|token|password|key)[^=\s]*=)\S+", re.IGNORECASE)


def write_crash_report(error: BaseException, argv: Sequence[str], folder: Path | None = None) -> Path | None:
    """Writes `orbit-crash-<time>.json` into `folder`, the working folder or the temporary one; `None` if none can be.

    Environment variables are left out, and passwords in URIs are removed.
    """
    content = {
        "error": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": _clean(str(error)),
        "traceback": [_clean(line) for line in traceback.format_exception(error)],
        "argv": [_clean(argument) for argument in argv],
        "orbit": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": installed_versions((*PACKAGES, "typer", "rich", "fastapi", "uvicorn")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    name = time.strftime("orbit-crash-%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{os.getpid()}.json"
    for place in [folder] if folder else [Path.cwd(), Path(tempfile.gettempdir())]:
        try:
            path = place / name
            path.write_text(json.dumps(content, indent=1))
            return path
        except OSError:
            continue
    return None


def _clean(text: str) -> str:
    return _SECRET_OPTION.sub(r"\1***", _PASSWORD_IN_URI.sub(r"\1***@", text))
