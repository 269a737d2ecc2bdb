"""One process for all whole runs of this folder: it imports what a run needs once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.run_nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
