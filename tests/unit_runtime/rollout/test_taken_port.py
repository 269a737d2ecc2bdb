"""The port of an SGLang server is taken by another process between the choice and the listening: real uvicorn."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
import pytest

from orbit_runtime.errors import EngineDiedError
from orbit_runtime.rollout.sglang_server import PORT_TRIES, ServerSettings, SGLangServer
from orbit_runtime.rollout.wire import requires_token
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

PLAYED = Path(__file__).parents[2] / "fakes" / "played_taken_port.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    played = tmp_path / "python"
    played.write_text(f'#!/bin/sh\nexec {sys.executable} {PLAYED} "$@"\n')
    played.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(played))
    monkeypatch.setenv("PLAYED_FOLDER", str(tmp_path))
    (tmp_path / "foreign").write_text("silent")
    return tmp_path


def build(folder: Path) -> SGLangServer:
    settings = ServerSettings(
        model=folder, device="cpu", dtype="float32", targets=("q_proj",), max_running_requests=1,
        max_sequence_length=16, seed=0,
    )  # fmt: skip
    return SGLangServer(settings, log=folder / "replica-0" / "sglang.log")


def test_a_port_that_was_taken_meanwhile_is_replaced_and_the_log_of_the_first_start_misleads_nobody(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "taken").write_text("1")
    server = build(folder)
    try:
        server.start()
        assert httpx.get(f"{server.url}/health", trust_env=False).text == '"up"'
        assert f"cannot listen on port {server.port}" not in caplog.text
        assert "another process has it; starting it again on another" in caplog.text
    finally:
        server.stop()


def test_ports_that_are_taken_again_and_again_end_the_start_long_before_its_time_is_over(folder: Path) -> None:
    (folder / "taken").write_text("1000")
    server, started = build(folder), time.monotonic()
    with pytest.raises(EngineDiedError, match=r"SGLang cannot listen on port \d+: another process has it") as caught:
        server.start()
    assert (folder / "taken").read_text() == str(1000 - PORT_TRIES)
    assert time.monotonic() - started < 90
    assert caught.value.exit_code == 82
    assert str(caught.value.where).endswith("sglang.log")
    assert not server.is_alive(), "the one that could not listen is ended"


@pytest.mark.parametrize("foreign", ["open", "closed"])
def test_a_server_of_somebody_else_that_says_it_is_up_is_not_taken_for_ours(
    folder: Path, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It listens on the port that ours was told to take, and answers /health with 200."""
    (folder / "taken").write_text("1")
    (folder / "foreign").write_text(foreign)
    server = build(folder)
    try:
        server.start()
        assert requires_token(server.url, seconds=30.0, headers=server.headers)
        assert "cannot listen on port" in caplog.text
    finally:
        server.stop()


def test_a_server_is_known_by_its_token(folder: Path) -> None:
    (folder / "taken").write_text("0")
    server = build(folder)
    try:
        server.start()
        assert requires_token(server.url, seconds=30.0, headers=server.headers) is True
        assert requires_token(server.url, seconds=30.0, headers={"Authorization": "Bearer other"}) is False
    finally:
        server.stop()
    assert requires_token(server.url, seconds=30.0, headers=server.headers) is None, "nothing listens there"
