"""Rewards look into no process of the run and read no token of it, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbit_runtime.errors import OutputError
from orbit_runtime.workers.child.run_token import TOKEN_VARIABLE, run_token, shared_token
from orbit_runtime.workers.user_code.confine import landlock_version
from orbit_runtime.workers.user_code.entrypoints import check_elsewhere

ROOT = Path(__file__).parents[4]

needs_landlock = pytest.mark.skipif(landlock_version() < 6, reason="needs Landlock of Linux 6.12")

LOOK = """
import json, os, sys
from orbit_runtime.workers.user_code.reward_pool import RewardPool
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget
from orbit_runtime.workers.user_code.entrypoints import check_elsewhere
from orbit_runtime.workers.child.run_token import new_token, shared_token
from pathlib import Path

report, tests = sys.argv[1:3]
file = os.environ.get("ORBIT_TOKEN_FILE")
token = shared_token(Path(file)) if file else os.environ.get("OWN_TOKEN") or new_token()
arguments = {"report": report, "beginning": token[:12], "processes": [os.getpid()], "files": [file or "/none"],
             "urls": []}
target = RewardTarget("look", "fakes.curious_rewards:look_around", arguments, timeout_seconds=60)
with RewardPool([target], num_workers=1, search_path=[tests]) as pool:
    (result,) = pool.score([RewardCall("look", "x", [{"role": "user", "content": "q"}], {})])
print(result)
"""
AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
"""Without root's rights over others, and the same user as the run."""
CAPABILITIES = "-perfmon,-sys_admin"
AS_A_CONTAINER = ["setpriv", "--bounding-set", CAPABILITIES, "--inh-caps", CAPABILITIES]
"""As root without the two rights with which a kernel lets a confined process read another's environment: no runtime of
containers gives them by default."""


@pytest.fixture
def token_folder() -> Iterator[Path]:
    """Below a folder in which nobody makes files meanwhile, as in a pod."""
    folder = Path("/run") if os.access("/run", os.W_OK) else Path.home()
    path = folder / f"orbit-test-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    for each in path.iterdir():
        each.unlink()
    path.rmdir()


def look(tmp_path: Path, *, prefix: list[str], **variables: str) -> dict[str, object]:
    """What a reward of a real pool could do to the process that started it."""
    report = tmp_path / "report.json"
    command = [*prefix, sys.executable, "-c", LOOK, str(report), str(ROOT / "tests")]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **variables}
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    return dict(json.loads(report.read_text()))


@needs_landlock
@pytest.mark.parametrize("prefix", [[], AS_USER], ids=["as it runs here", "as an ordinary user"])
def test_a_reward_opens_and_signals_no_process_of_the_run(tmp_path: Path, prefix: list[str]) -> None:
    found = look(tmp_path, prefix=prefix)
    assert (found["opened"], found["signalled"], found["seen in"]) == ([], [], [])
    assert found["temporary"] == "mine", "and does what rewards do"


@needs_landlock
@pytest.mark.parametrize(("prefix", "is_read"), [(AS_A_CONTAINER, False), (AS_USER, False), ([], None)])
def test_what_a_reward_reads_of_a_secret_in_the_runs_own_environment(
    tmp_path: Path, prefix: list[str], is_read: bool | None
) -> None:
    """None: that depends on the kernel, if this is root with every right, as decision 22 says."""
    found = look(tmp_path, prefix=prefix, OWN_TOKEN="a secret that somebody exported")
    places = [str(each).split("/")[-1] for each in found["seen in"]]  # type: ignore[union-attr]
    assert places in ([[]] if is_read is False else [[], ["environ"]])
    assert found["opened"] == []


@needs_landlock
def test_a_reward_of_a_split_pod_reads_no_token(tmp_path: Path, token_folder: Path) -> None:
    found = look(tmp_path, prefix=[], ORBIT_TOKEN_FILE=str(token_folder / "token"))
    assert (found["opened"], found["signalled"], found["seen in"]) == ([], [], [])
    assert found["variables"] == []
    assert found["temporary"] == "mine"
    assert len((token_folder / "token").read_text()) > 40, "it stands there all the same"


def test_no_code_of_a_user_inherits_a_token_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(tmp_path, prefix=[], ORBIT_SERVICE_TOKEN="secret", ORBIT_SERVE_TOKEN="secret")["variables"] == []
    monkeypatch.setenv("ORBIT_SERVICE_TOKEN", "secret")
    module = "import os\nassert 'ORBIT_SERVICE_TOKEN' not in os.environ, 'it is here'\n\ndef f(text): ...\n"
    (tmp_path / "looks_when_imported.py").write_text(module)
    check_elsewhere("looks_when_imported:f", ["text"], [str(tmp_path)], os.environ)


def test_without_confinement_the_reward_would_have_seen_all_of_it(tmp_path: Path, token_folder: Path) -> None:
    """So the tests above can fail."""
    token = shared_token(token_folder / "token")
    report = tmp_path / "report.json"
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); from fakes.curious_rewards import look_around\n"
        "look_around('', [], {}, report=sys.argv[2], beginning=sys.argv[3], processes=[os.getppid()],"
        " files=[sys.argv[4]], urls=[])"
    )
    arguments = [str(ROOT / "tests"), str(report), token[:12], str(token_folder / "token")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60)
    found = json.loads(report.read_text())
    assert str(token_folder / "token") in found["seen in"]
    assert found["signalled"] == [os.getpid()]
    assert f"/proc/{os.getpid()}/mem" in found["opened"]


def test_two_that_share_a_file_have_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    code = "import sys; from pathlib import Path; from orbit_runtime.workers.child.run_token import shared_token;" \
        "print(shared_token(Path(sys.argv[1])))"  # fmt: skip
    started = [subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True,
                                env={**os.environ, "PYTHONPATH": str(ROOT)}) for _ in range(4)]  # fmt: skip
    tokens = {process.communicate(timeout=60)[0].strip() for process in started}
    monkeypatch.setenv(TOKEN_VARIABLE, str(file))
    assert tokens == {run_token()}
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert run_token() != run_token()


def test_a_token_that_others_could_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("known")
    file.chmod(0o644)
    with pytest.raises(OutputError, match="with mode 644") as caught:
        shared_token(file)
    assert caught.value.exit_code == 73
