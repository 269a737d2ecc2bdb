"""What each kind of child process may do and is bound by: one table, so that no kind changes unnoticed."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import probed

from orbit_runtime.observability.live import LivePage
from orbit_runtime.services.children import Children
from orbit_runtime.workers.child.process import descendants
from orbit_runtime.workers.servers.process import ServerProcess, launch_environment
from orbit_runtime.workers.user_code.confine import landlock_version
from orbit_runtime.workers.user_code.entrypoints import check_elsewhere
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentLimits, EnvironmentTarget
from orbit_runtime.workers.user_code.reward_pool import RewardPool
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget
from orbit_runtime.workers.user_code.sandbox import run_program

TESTS = str(Path(__file__).resolve().parents[2])
ROOT = str(Path(__file__).resolve().parents[3])
PROMPT = [{"role": "user", "content": "q"}]
needs_landlock = pytest.mark.skipif(landlock_version() < 6, reason="needs Landlock of Linux 6.12")

FREE = {
    "limits": {}, "seccomp": False, "no new privileges": False, "dumpable": True, "dies with its parent": False,
    "reaps orphans": False, "own group": True, "own session": True, "ignores": [], "tells stacks": False,
    "streams": ["device", "pipe", "pipe"], "hands on": [], "forks": True, "opens sockets": True, "reads files": True,
    "signals the run": True,
}  # fmt: skip
"""A child of Orbit's that nothing restricts; each row below says what differs."""
USERS = {"no new privileges": True, "dies with its parent": True, "signals the run": False}
"""Code of a user's."""
CELL = {"limits": {"DATA": "less", "CORE": 0}, "seccomp": True, "forks": False, "ignores": ["SIGINT", "SIGTERM"]}
CELL |= {"tells stacks": True, "hands on": ["socket", "file"]}
TABLE: dict[str, dict[str, Any]] = {
    "reward": USERS | {"tells stacks": True},
    "template": USERS | {"reaps orphans": True},
    "environment": USERS | CELL,
    "environment that forks": USERS | CELL | {"seccomp": False, "forks": True},
    "tool": USERS | CELL,
    "sandbox": USERS
    | {"limits": {"CPU": 5, "DATA": 256 << 20, "FSIZE": 1 << 24, "NOFILE": 64, "CORE": 0}, "seccomp": True}
    | {"dumpable": False, "forks": False, "opens sockets": False, "reads files": False}
    | {"streams": ["pipe", "pipe", "pipe"], "signals the run": None},
    "check of an entry point": {"own group": False, "own session": False},
    "server": {"streams": ["device", "file", "file"], "hands on": ["pipe"]},
}
TOKENS = ("ORBIT_SERVE_TOKEN", "ORBIT_SERVE_UPDATE_TOKEN", "ORBIT_SERVICE_TOKEN")
SECRETS = ("MY_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
USERS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", **dict.fromkeys(TOKENS), **dict.fromkeys(SECRETS)}
ENVIRONMENT: dict[str, dict[str, str]] = {
    "server": {"HF_HUB_OFFLINE": "1", "ORBIT_SGLANG_PARENT": str(os.getpid()), "OWN": "1"},
}
"""What differs from its parent's, by kind, beside Orbit on PYTHONPATH; None for a variable that is taken away."""


@pytest.fixture(autouse=True)
def _no_signal_is_ignored_already() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore some, and children inherit that."""
    before = {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    for each, handler in before.items():
        if handler == signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def rewards(path: Path) -> None:
    target = RewardTarget("look", "fakes.probed:score", {"path": str(path), "run": os.getpid()}, timeout_seconds=60)
    with RewardPool([target], num_workers=1, search_path=[TESTS]) as pool:
        pool.score([RewardCall("look", "x", PROMPT, {})] * 2)


def environments(path: Path, *, may_fork: bool = False) -> None:
    target = EnvironmentTarget("fakes.probed:Episode", {"path": str(path), "run": os.getpid()})
    with EnvironmentPool(target, limits=EnvironmentLimits(may_fork=may_fork), search_path=[TESTS]) as pool:

        async def play() -> None:
            for _ in range(2):
                episode = pool.open_episode()
                await episode.reset(PROMPT, {}, 7)
                await episode.close()

        asyncio.run(play())


def templates(path: Path) -> None:
    environments(path.with_name("cells"))
    path.with_name("cells.template").rename(path)


def tools(path: Path) -> None:
    with EnvironmentPool(EnvironmentTarget(tools=("fakes.probed:tool",)), search_path=[TESTS]) as pool:

        async def call() -> None:
            for _ in range(2):
                await pool.call_tool("tool", {"path": str(path), "run": os.getpid()})

        asyncio.run(call())


def sandboxes(path: Path) -> None:
    for _ in range(2):
        result = run_program(Path(probed.__file__).read_text())
        assert result.ended == "done", result
        with path.open("a") as file:
            file.write(result.output)


def checks(path: Path) -> None:
    module = path.with_name("looks.py")
    module.write_text(f"from fakes.probed import keep\nkeep({str(path)!r}, {os.getpid()})\ndef own(x): ...\n")
    check_elsewhere("looks:own", ["x"], [str(path.parent), TESTS], ())


def servers(path: Path) -> None:
    environment = launch_environment({"OWN": "1"})
    command = [sys.executable, probed.__file__, str(path), str(os.getpid())]
    server = ServerProcess("server", command, environment=environment, log=path.with_name("log"), token="secret")
    while server.exit_status() is None:
        time.sleep(0.05)
    server.stop()


def differences(seen: dict[str, Any]) -> dict[str, Any]:
    """Limits that are not this process's own, by name."""
    found = {}
    for name, limit in seen["limits"].items():
        if tuple(limit) != resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) or (
            name == "CORE" and limit[1] == 0
        ):
            assert limit[0] == limit[1], name
            found[name] = limit[0]
    return found


@needs_landlock
@pytest.mark.parametrize(
    ("kind", "start", "calls"),
    [
        ("reward", rewards, [1, 2]),
        ("template", templates, [1]),
        ("environment", environments, [2, 3]),
        ("environment that forks", lambda path: environments(path, may_fork=True), [2, 3]),
        ("tool", tools, [1, 2]),
        ("sandbox", sandboxes, [1, 1]),
        ("check of an entry point", checks, [1]),
        ("server", servers, [1]),
    ],
)
def test_a_child_may_do_what_its_kind_may(
    kind: str, start: Callable[[Path], None], calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Args: calls: counted by a variable of a module, which a cell has from its template and keeps."""
    for name in os.environ.keys() - {"PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "PYTEST_CURRENT_TEST"}:
        monkeypatch.delenv(name)
    for name in ("https_proxy", "SSL_CERT_FILE", "HF_HOME", "CUDA_VISIBLE_DEVICES", "LC_NUMERIC", "TZ"):
        monkeypatch.setenv(name, "C")
    for name in (*TOKENS, *SECRETS):
        monkeypatch.setenv(name, "secret")
    start(tmp_path / "seen")
    looks = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [each.pop("calls") for each in looks] == calls
    seen = looks[0]
    given = seen.pop("environment")
    seen["limits"] = differences(seen)
    expected = FREE | TABLE[kind]
    if expected["limits"].get("DATA") == "less":
        assert seen["limits"]["DATA"] >= 1 << 30, "beyond what importing took"
        seen["limits"]["DATA"] = "less"
    assert seen == expected
    if kind == "sandbox":
        assert given.keys() - {"LC_CTYPE"} == {
            "PYTHONPATH", "PATH", "LANG", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "HOME",
            "TMPDIR",
        }  # fmt: skip
        return
    assert ROOT in given.pop("PYTHONPATH").split(os.pathsep)
    names = (os.environ.keys() | given.keys()) - {"PYTHONPATH", "PYTEST_CURRENT_TEST"}
    changed = {name: given.get(name) for name in names if given.get(name) != os.environ.get(name)}
    if kind == "server":
        assert changed.pop("ORBIT_SGLANG_TOKEN_FD").isdecimal()
    assert changed == ENVIRONMENT.get(kind, USERS_ENVIRONMENT)


@pytest.mark.parametrize(("kind", "shown"), [("rewards", 1 << 20), ("environments", 1 << 18)])
def test_what_users_code_prints_is_shown_up_to_a_limit(
    kind: str, shown: int, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind == "rewards":
        target = RewardTarget("look", "fakes.probed:score", {"path": "", "run": 0}, timeout_seconds=60)
        with RewardPool([target], num_workers=1, search_path=[TESTS]) as pool:
            pool.score([RewardCall("look", "print", PROMPT, {})])
    else:
        with EnvironmentPool(EnvironmentTarget(tools=("fakes.probed:prints",)), search_path=[TESTS]) as pool:
            asyncio.run(pool.call_tool("prints", {}))
    printed = capfd.readouterr().err
    assert printed.startswith("x" * shown + f"\n({kind} printed too much")
    assert len(printed) < shown + 300


def test_a_sandbox_that_prints_too_much_is_ended() -> None:
    result = run_program("while True: print('x' * 1000)")
    assert (result.ended, len(result.output)) == ("output", 1 << 16)


def from_outside(pid: int) -> dict[str, Any]:
    """What the kernel says of another process."""
    folder = Path(f"/proc/{pid}")
    while not (environment := (folder / "environ").read_text()):  # empty for a moment after a program was started
        time.sleep(0.01)
    given = dict(each.split("=", 1) for each in environment.split("\0") if each)
    names = (os.environ.keys() | given.keys()) - {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES"}
    return {
        "streams": [os.readlink(folder / "fd" / str(each)).partition(":")[0] for each in range(3)],
        "own session": os.getsid(pid) == pid,
        "changed": {name for name in names if given.get(name) != os.environ.get(name)},
    }


def test_the_process_of_the_live_page_is_apart_and_speaks_through_pipes(tmp_path: Path) -> None:
    page = LivePage(str(tmp_path))
    try:
        page.page()
        page.rollouts(0, 0)
        (pid,) = (each for each in descendants(os.getpid()) if b"observability.live" in command(each))
        seen = from_outside(pid)
        errors = os.readlink("/proc/self/fd/2").partition(":")[0]
        assert seen["streams"] == ["pipe", errors, errors], "what libraries print goes where the run's errors go"
        assert seen["own session"]
        assert seen["changed"] <= {"PYTHONPATH", "OMP_NUM_THREADS"}
    finally:
        page.close()


def test_trainer_and_inference_are_apart_and_end_with_their_input(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("apiVersion: orbit.dev/v1\n")
    with Children(["trainer", "inference"], file, [], lambda _: None) as children:
        for kind in ("trainer", "inference"):
            seen = from_outside(children.pid(kind))
            assert (seen["streams"][:2], seen["own session"]) == (["pipe", "/dev/null"], True)
            assert seen["changed"] == set()
            assert b"--end-with-input" in command(children.pid(kind))
            assert children.token.encode() not in command(children.pid(kind))


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
