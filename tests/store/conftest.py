"""A real S3 server for the tests of this folder. Not here: the server itself (`fakes.s3_server`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.s3_server import S3Server, versitygw_path


@pytest.fixture(scope="session")
def shared_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server that nobody kills."""
    server = S3Server(versitygw_path(), tmp_path_factory.mktemp("s3") / "data")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3_bucket(shared_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty bucket, with the credentials for it in the environment."""
    for name, value in shared_s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return shared_s3_server.make_bucket(f"bucket-{len([*shared_s3_server.folder.iterdir()])}")


@pytest.fixture
def own_s3_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of the test's own, running, to be killed and started again; the environment leads to it."""
    server = S3Server(versitygw_path(), tmp_path / "s3")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.start()
    yield server
    server.kill()
