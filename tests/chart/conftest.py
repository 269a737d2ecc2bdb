"""The chart's checks put their own folder on the path as the package `chart`; each Helm runs every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from chart.kube_schemas import make_schemas
from chart.programs import HELMS
from chart.rendering import COMBINATIONS


@pytest.fixture(params=HELMS)
def helm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=COMBINATIONS)
def combination(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict schemas by Kubernetes version."""
    return make_schemas(tmp_path_factory.mktemp("schemas"))
