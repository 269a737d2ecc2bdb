"""The contract of a store, on a real S3 server."""

from __future__ import annotations

import pytest
from fakes.store_contract import *  # noqa: F403
from fakes.store_contract import OpenAgain

from orbit_runtime.storage import open_store

pytestmark = pytest.mark.store


@pytest.fixture
def open_again(s3_bucket: str) -> OpenAgain:
    return lambda: open_store(f"{s3_bucket}/runs/x")
