"""What tests of ranks share.

Belongs here: fixtures of several files. Does not belong here: starting ranks (`ranks`).
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for a file's checkpoints."""
    return tmp_path_factory.mktemp("models")
