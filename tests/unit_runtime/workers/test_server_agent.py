"""A run has servers started in another container: a real agent, real processes, and an engine that is played."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from orbit_runtime import __version__
from orbit_runtime.errors import EngineDiedError, OutputError, UnsupportedError
from orbit_runtime.workers.remote_process import GONE, RemoteProcess
from orbit_runtime.workers.server_agent import gpu_memory, run_agent
from orbit_runtime.workers.server_process import free_port

PLAYED = Path(__file__).parents[2] / "fakes" / "played_agent.py"


class AgentProcess:
    """An agent, as the kubelet starts its container."""

    def __init__(self, port: int, version: str = __version__) -> None:
        self.port = port
        self.process = subprocess.Popen([sys.executable, str(PLAYED), str(port), version], stderr=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    started = AgentProcess(free_port())
    yield started
    if started.process.poll() is None:
        started.end(signal.SIGTERM)


def start(
    agent: AgentProcess, folder: Path, *arguments: str, name: str = "replica-0", **options: float
) -> RemoteProcess:
    environment = {"ORBIT_SGLANG_TAPS": "/taps"}
    return RemoteProcess(
        agent.url, "SGLang", arguments, environment=environment, log=folder / name / "sglang.log", **options
    )


def wait_for(probe: Callable[[], object], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < until
        time.sleep(0.05)


def said(server: RemoteProcess) -> dict[str, str]:
    return dict(line.split("=", 1) for line in server.log.read_text().splitlines() if "=" in line)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_lives_where_the_agent_is_and_ends_when_asked(agent: AgentProcess, tmp_path: Path) -> None:
    server = start(agent, tmp_path, "child")
    wait_for(lambda: "child" in said(server))
    told = said(server)
    assert told["ORBIT_SGLANG_TAPS"] == "/taps"
    assert told["ORBIT_SGLANG_PARENT"] == str(agent.process.pid), "it ends with the agent"
    assert server.exit_status() is None
    assert (server.resident_bytes() or 0) > 2**20
    assert server.gpu_bytes(0, 1) is None, "there is no GPU here"
    server.stop(1.0)
    wait_for(lambda: not is_there(int(told["pid"])) and not is_there(int(told["child"])), 60)
    assert server.exit_status() == GONE
    server.stop()


def test_one_that_ends_by_itself_says_how_and_its_log_is_read(agent: AgentProcess, tmp_path: Path) -> None:
    server = start(agent, tmp_path, "end", "3")
    with pytest.raises(EngineDiedError, match=r"SGLang ended with 3 while it started: pid=\d+") as caught:
        server.wait_until(lambda: False, seconds=20)
    assert "ORBIT_SGLANG_TAPS=/taps" in caught.value.fix


def test_a_name_that_is_taken_ends_the_server_before(agent: AgentProcess, tmp_path: Path) -> None:
    first = start(agent, tmp_path, "live")
    wait_for(lambda: "pid" in said(first))
    old = int(said(first)["pid"])
    other = start(agent, tmp_path, "live", name="replica-1")
    second = start(agent, tmp_path, "live")
    assert not is_there(old)
    assert (second.exit_status(), other.exit_status()) == (None, None)


def test_an_agent_that_ends_ends_its_servers(agent: AgentProcess, tmp_path: Path) -> None:
    servers = [start(agent, tmp_path, "live", name=f"replica-{index}") for index in range(2)]
    wait_for(lambda: all("pid" in said(server) for server in servers))
    agent.end(signal.SIGTERM)
    assert not any(is_there(int(said(server)["pid"])) for server in servers)
    assert [server.exit_status() for server in servers] == [GONE, GONE]
    servers[0].stop()


def test_an_agent_that_was_killed_is_waited_for(
    agent: AgentProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(agent, tmp_path, "live")
    wait_for(lambda: "pid" in said(server))
    agent.end(signal.SIGKILL)
    os.kill(int(said(server)["pid"]), signal.SIGKILL)  # In a container it goes with the first process.
    assert server.exit_status() == GONE
    with pytest.raises(EngineDiedError, match=r"no agent answers at http://127.0.0.1:\d+ for 1 s") as caught:
        start(agent, tmp_path, "live", patience=1.0)
    assert "container `engine`" in caught.value.fix
    assert caplog.messages[-1] == f"no agent answers at {agent.url}; waiting for it, 1 s at most"
    again = AgentProcess(agent.port)
    try:
        assert start(again, tmp_path, "live").exit_status() is None
    finally:
        again.end(signal.SIGTERM)


def test_an_agent_of_another_version_is_refused(tmp_path: Path) -> None:
    other = AgentProcess(free_port(), "0.0.9")
    try:
        with pytest.raises(UnsupportedError, match=r"engine's image has Orbit 0\.0\.9") as caught:
            start(other, tmp_path, "live")
        assert caught.value.where == "spec.placement"
    finally:
        other.end(signal.SIGTERM)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"arguments": [], "environment": {"LD_PRELOAD": "/x"}, "log": "log"}, "may not set LD_PRELOAD"),
        ({"arguments": [], "environment": {}, "log": "/proc/no/log"}, "/proc/no"),
        ({"arguments": [], "environment": {}, "log": "log", "command": ["sh"]}, "command"),
        ({"arguments": [7], "environment": {}, "log": "log"}, "arguments"),
    ],
)
def test_what_no_run_asks_for_is_refused(agent: AgentProcess, body: dict[str, object], why: str) -> None:
    with httpx.Client(base_url=agent.url, trust_env=False) as http:
        wait_for(lambda: _answers(http))
        answer = http.put("/servers/replica-0", json=body)
        assert (answer.status_code, why in answer.text) == (422, True), answer.text
        assert http.get("/servers/replica-0").status_code == 404


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/version").status_code == 200
    except httpx.TransportError:
        return False


def test_memory_of_gpus_is_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvidia-smi` is played: there is no GPU here."""
    played = tmp_path / "nvidia-smi"
    played.write_text("#!/bin/sh\nprintf '100\\n20\\n3\\n'\n")
    played.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_memory(1, 2) == 23 * 2**20
    played.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert gpu_memory(0, 1) is None
    played.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_memory(0, 1) is None


def test_a_port_that_is_taken_is_named() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OutputError, match=f"port {port} is in use"):
            run_agent(port)
