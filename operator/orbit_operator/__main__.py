"""`python -m orbit_operator`."""

from __future__ import annotations

from orbit_operator.main import main

if __name__ == "__main__":
    main()
