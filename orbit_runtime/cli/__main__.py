"""`python -m orbit_runtime.cli` is `orbit`."""

from orbit_runtime.cli.main import main

main()
