"""A run has servers started in another container: a real agent, real processes, and an engine that is played."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fakes.ports import free_port

from orbit_runtime import __version__
from orbit_runtime.errors import EngineDiedError, OutputError, UnsupportedError, UsageError
from orbit_runtime.planner.support.kernels import (
    DEEPGEMM_VARIABLE,
    FP8_VARIABLE,
    MXFP4_FLAG,
    NVFP4_FLAG,
    EngineKernels,
)
from orbit_runtime.rollout.sglang_server import ServerSettings, server_arguments, server_variables
from orbit_runtime.spec.engine_arguments import ALLOWED
from orbit_runtime.workers.servers.agent import FLAGS, OWN_FLAGS, VARIABLES, gpu_memory, run_agent
from orbit_runtime.workers.servers.protocol import WEIGHT_ONLY_VARIABLE, PluginSettings, read_settings
from orbit_runtime.workers.servers.remote import GONE, RemoteProcess

TOKEN = "the-token-of-this-run"
PLAYED = Path(__file__).parents[3] / "fakes" / "played_agent.py"


BEARER = {"Authorization": f"Bearer {TOKEN}"}
ORDER = {"arguments": ["live"], "environment": {}}


class AgentProcess:
    """An agent, as the kubelet starts its container."""

    def __init__(self, port: int, folder: Path, version: str = __version__) -> None:
        self.port = port
        command = [sys.executable, str(PLAYED), str(port), version, TOKEN, str(folder)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


@pytest.fixture
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    started = AgentProcess(free_port(), tmp_path_factory.mktemp("agent"))
    yield started
    if started.process.poll() is None:
        started.end(signal.SIGTERM)


def start(
    agent: AgentProcess,
    folder: Path,
    *arguments: str,
    name: str = "replica-0",
    token: str = TOKEN,
    **options: float,
) -> RemoteProcess:
    environment = {"ORBIT_SGLANG_TAPS": "/taps"}
    return RemoteProcess(
        agent.url, "SGLang", arguments, environment=environment, log=folder / name / "sglang.log", token=token,
        **options,
    )  # fmt: skip


def wait_for(probe: Callable[[], object], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < until
        time.sleep(0.05)


def said(server: RemoteProcess) -> dict[str, str]:
    return dict(line.split("=", 1) for line in server.tail().splitlines() if "=" in line)


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
    assert told["token"] == TOKEN, "by a pipe"
    for file in ("environ", "cmdline"):
        assert TOKEN not in Path(f"/proc/{told['pid']}/{file}").read_text(errors="replace")
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
    pid = int(said(server)["pid"])
    agent.end(signal.SIGKILL)
    assert f"pid={pid}" in server.tail(), "what it had said is still told"
    os.kill(pid, signal.SIGKILL)  # In a container it goes with the first process.
    assert server.exit_status() == GONE
    with pytest.raises(EngineDiedError, match=r"no agent answers at http://127.0.0.1:\d+ for 1 s") as caught:
        start(agent, tmp_path, "live", patience=1.0)
    assert "container `engine`" in caught.value.fix
    assert caplog.messages[-1] == f"no agent answers at {agent.url}; waiting for it, 1 s at most"
    again = AgentProcess(agent.port, tmp_path)
    try:
        assert start(again, tmp_path, "live").exit_status() is None
    finally:
        again.end(signal.SIGTERM)


def test_an_agent_of_another_version_is_refused(tmp_path: Path) -> None:
    other = AgentProcess(free_port(), tmp_path, "0.0.9")
    try:
        with pytest.raises(UnsupportedError, match=r"engine's image has Orbit 0\.0\.9") as caught:
            start(other, tmp_path, "live")
        assert caught.value.where == "spec.placement"
    finally:
        other.end(signal.SIGTERM)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"arguments": [], "environment": {"LD_PRELOAD": "/x"}}, "may not set LD_PRELOAD"),
        ({"arguments": [], "environment": {"SGLANG_HOST_IP": "::"}}, "may not set SGLANG_HOST_IP"),
        ({"arguments": [], "environment": {"ORBIT_SGLANG_OFT_BLOCK_SIZE": "many"}}, "'many', not a number"),
        ({"arguments": [], "environment": {"ORBIT_SGLANG_EXPERTS": "Each"}}, "'Each', not a layout"),
        ({"arguments": ["--log-level", "debug", "--trust-remote-code"], "environment": {}}, "--log-level, --trust-rem"),
        ({"arguments": ["--config=/x/y.yaml"], "environment": {}}, "with --config"),
        ({"arguments": [], "environment": {}, "log": "/x/y"}, "log"),
        ({"arguments": [], "environment": {}, "command": ["sh"]}, "command"),
        ({"arguments": [7], "environment": {}}, "arguments"),
    ],
)
def test_what_no_run_asks_for_is_refused(agent: AgentProcess, body: dict[str, object], why: str) -> None:
    with httpx.Client(base_url=agent.url, trust_env=False, headers=BEARER) as http:
        wait_for(lambda: _answers(http))
        answer = http.put("/servers/replica-0", json=body)
        assert (answer.status_code, why in answer.text) == (422, True), answer.text
        assert http.get("/servers/replica-0").status_code == 404


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fx", "a/b", "A", "-a", "a" * 64])
def test_a_name_that_could_be_a_path_is_no_server(agent: AgentProcess, name: str) -> None:
    with httpx.Client(base_url=agent.url, trust_env=False, headers=BEARER) as http:
        wait_for(lambda: _answers(http))
        assert http.put(f"/servers/{name}", json=ORDER).status_code in (404, 405, 422)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}, {"X": TOKEN}])
def test_who_does_not_know_the_token_learns_and_starts_nothing(
    agent: AgentProcess, headers: dict[str, str], tmp_path: Path
) -> None:
    live = start(agent, tmp_path, "live")
    with httpx.Client(base_url=agent.url, trust_env=False, headers=headers) as http:
        server = "/servers/replica-0"
        answers = [
            http.put("/servers/replica-1", json=ORDER), http.delete(server), http.get(server),
            http.get(f"{server}/log"), http.get(f"{server}/memory"), http.get("/version"),
            http.get("/gpus/memory", params={"first": 0, "count": 1}), http.get("/openapi.json"),
        ]  # fmt: skip
    assert {answer.status_code for answer in answers} <= {401, 404}
    assert [answer.status_code for answer in answers][:6] == [401] * 6
    assert live.exit_status() is None


def test_a_run_with_another_token_is_told(agent: AgentProcess, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="has another token") as caught:
        start(agent, tmp_path, "live", token="another")
    assert caught.value.where == "ORBIT_TOKEN_FILE"


def test_an_agent_is_told_where_the_token_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORBIT_TOKEN_FILE", raising=False)
    with pytest.raises(UsageError, match="no file for it is named"):
        run_agent(free_port())
    monkeypatch.setenv("ORBIT_TOKEN_FILE", str(tmp_path / "none" / "token"))
    with pytest.raises(OutputError, match="cannot be kept there: No such file"):
        run_agent(free_port())


def test_the_plug_in_reads_the_settings_that_a_run_writes() -> None:
    settings = ServerSettings(Path("/m"), "cuda", "bfloat16", (), 1, 1, 0, oft_block_size=32, experts="SharedOuter")
    written = server_variables(settings, Path("/taps")) | {WEIGHT_ONLY_VARIABLE: "1"}
    assert read_settings(written) == PluginSettings(32, "SharedOuter", True, "/taps")
    assert read_settings({}) == PluginSettings()


def test_all_that_a_run_says_to_a_server_is_what_an_agent_takes() -> None:
    said: set[str] = set()
    variables = {FP8_VARIABLE: "1", DEEPGEMM_VARIABLE: "0", WEIGHT_ONLY_VARIABLE: "1"}
    asked = (NVFP4_FLAG, "marlin", MXFP4_FLAG, "bf16")
    kernels = EngineKernels(asked, variables, (), requantised=False, keeps_fp8=True, family="")
    for device, sleep, deterministic in itertools.product(("cpu", "cuda"), ("None", "Cache", "All"), (False, True)):
        for experts, formats in (("None", ()), ("SharedOuter", ("BF16",)), ("PerExpert", ("BF16",)), ("Shared", ())):
            settings = ServerSettings(
                model=Path("/m"), device=device, dtype="bfloat16", targets=("q_proj", "down_proj"),
                max_running_requests=8, max_sequence_length=64, seed=0, gpu=4, tensor_parallel=2, experts=experts,
                expert_formats=formats, sleep=sleep, deterministic=deterministic, attention="triton",
                kernels=kernels, tokenizer=Path("/t"), reports_experts=True,
            )  # fmt: skip
            said |= {each for each in server_arguments(settings, 1) if each.startswith("-")}
            assert server_variables(settings, Path("/taps")).keys() <= VARIABLES
    assert said == OWN_FLAGS, "no flag that nobody says"
    assert {f"--{name}" for name in ALLOWED} >= FLAGS - OWN_FLAGS
    paths = ("path", "file", "dir", "folder", "log", "hook", "loader", "url", "addr")
    assert not [flag for flag in FLAGS - {"--model-path", "--tokenizer-path"} if any(word in flag for word in paths)]


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


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("ORBIT_TOKEN_FILE", str(tmp_path / "token"))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OutputError, match=f"port {port} is in use"):
            run_agent(port)
