"""A real API server that knows OrbitRuns. Not here: the server itself (`fakes.api_server`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.api_server import ApiServer, programs_folder

from tests.cluster.crd_api import RunsApi


@pytest.fixture(scope="session")
def shared_runs_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunsApi]:
    """One server for all tests, with the CRD installed."""
    server = ApiServer(programs_folder(), tmp_path_factory.mktemp("kubernetes"))
    try:
        server.start()
        with server.client() as client:
            api = RunsApi(client)
            api.install()
            yield api
    finally:
        server.stop()


@pytest.fixture
def runs_api(shared_runs_api: RunsApi) -> RunsApi:
    """The same, without any run."""
    shared_runs_api.delete_all()
    return shared_runs_api
