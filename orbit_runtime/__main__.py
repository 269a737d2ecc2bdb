"""`python -m orbit_runtime` is `orbit`."""

from __future__ import annotations

from orbit_runtime.cli.main import main

main()
