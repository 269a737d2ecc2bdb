"""The contract of a store, on a local folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.store_contract import *  # noqa: F403
from fakes.store_contract import OpenAgain

from orbit_runtime.storage import open_store


@pytest.fixture
def open_again(tmp_path: Path) -> OpenAgain:
    return lambda: open_store(str(tmp_path / "not there yet" / "run"))
