"""Orbit: RL post-training of adapters on a frozen, quantised base.

`from orbit_runtime import run, load_manifest, Report`: docs/python/README.md. Each name is imported when it is asked
for, and `import orbit_runtime` loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbit_runtime.lazy import lazily
from orbit_runtime.version import __version__ as __version__

if TYPE_CHECKING:
    from orbit_runtime.api.manifest import load_manifest
    from orbit_runtime.api.report import Compared, Headline, Report
    from orbit_runtime.api.running import run
    from orbit_runtime.api.samples import Sample
    from orbit_runtime.errors import OrbitError
    from orbit_runtime.spec import OrbitRun

__all__ = ["Compared", "Headline", "OrbitError", "OrbitRun", "Report", "Sample", "load_manifest", "run"]

__getattr__ = lazily(
    __name__,
    {
        "Compared": "orbit_runtime.api.report",
        "Headline": "orbit_runtime.api.report",
        "OrbitError": "orbit_runtime.errors",
        "OrbitRun": "orbit_runtime.spec",
        "Report": "orbit_runtime.api.report",
        "Sample": "orbit_runtime.api.samples",
        "load_manifest": "orbit_runtime.api.manifest",
        "run": "orbit_runtime.api.running",
    },
)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
