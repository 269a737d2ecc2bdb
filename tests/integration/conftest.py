"""One process for all whole runs of this folder: it imports what a run needs once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.run_launcher import RunLauncher


@pytest.fixture(scope="session")
def launcher() -> Iterator[RunLauncher]:
    made = RunLauncher()
    yield made
    made.close()
