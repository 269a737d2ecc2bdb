"""What can be wrong between the processes of a run: one clear error each, and nothing done twice."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.ports import free_port

import orbit_runtime
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import (
    CredentialsError,
    DataError,
    EngineDiedError,
    GateError,
    GPUFaultError,
    ModelError,
    OrbitError,
    OutputError,
    UnsupportedError,
    UsageError,
)
from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.server import start_server
from orbit_runtime.services.children import Children
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.frames import frame, pack, unpack
from orbit_runtime.services.host import CALL, SESSION, Host, start_host
from orbit_runtime.services.orchestrate import RemoteSides, check_inference, check_pair
from orbit_runtime.spec import OrbitRun
from orbit_runtime.workers.child.heartbeat import sign, silent_seconds
from tests.integration.killing import small_manifest
from tests.integration.three_processes import TOKEN, Side, two_sides

ASKED = small_manifest(steps=1)


@pytest.fixture(scope="module")
def sides() -> Iterator[dict[str, Side]]:
    with two_sides(ASKED) as made:
        yield made


def failure(out: Path, manifest: dict[str, Any], trainer: Connection, inference: Connection) -> OrbitError:
    with pytest.raises(OrbitError) as caught:
        run(
            OrbitRun.model_validate(manifest), out=str(out), progress=SilentProgress(),
            sides=RemoteSides(trainer, inference),
        )  # fmt: skip
    return caught.value


def line(kind: str, url: str, *, token: str | None = TOKEN, patience: float = 5.0) -> Connection:
    return Connection(kind, url, token, patience=patience)


def lines(sides: dict[str, Side]) -> tuple[Connection, Connection]:
    return line("trainer", sides["trainer"].url), line("inference", sides["inference"].url)


@pytest.mark.parametrize("token", [None, "another"])
def test_a_wrong_token_is_refused(tmp_path: Path, sides: dict[str, Side], token: str | None) -> None:
    trainer, _ = lines(sides)
    error = failure(tmp_path / "out", ASKED, trainer, line("inference", sides["inference"].url, token=token))
    assert (type(error), error.where) == (CredentialsError, "--inference")
    assert "ORBIT_SERVICE_TOKEN" in str(error)
    assert not (tmp_path / "out").exists()


def test_nobody_there_is_said_with_the_address_after_the_patience(tmp_path: Path, sides: dict[str, Side]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error = failure(tmp_path, ASKED, line("trainer", url, patience=0.3), lines(sides)[1])
    assert isinstance(error, EngineDiedError)
    assert url in str(error)


def test_addresses_that_are_none_or_of_something_else(sides: dict[str, Side]) -> None:
    from orbit_runtime.observability.metrics import RunMetrics
    from orbit_runtime.observability.status import LiveStatus

    other = start_server(LiveStatus("other", total=1), RunMetrics(run="other"))
    cases = {
        sides["inference"].url: "is the inference",
        other.url: "is no process of a run",
        "not an address": "is no address",
    }
    for url, said in cases.items():
        with pytest.raises(UsageError, match=said) as caught:
            line("trainer", url).facts()
        assert caught.value.where == "--trainer"
    other.close()


def test_another_manifest_is_refused_with_every_field_that_differs(tmp_path: Path, sides: dict[str, Side]) -> None:
    other = copy.deepcopy(ASKED)
    other["spec"]["training"]["learningRate"] = 2e-3
    other["spec"]["data"]["seed"] = 5
    error = failure(tmp_path / "out", other, *lines(sides))
    assert isinstance(error, UsageError)
    assert "spec.training.learningRate: 0.001 there, 0.002 here" in str(error)
    assert "spec.data.seed: 0 there, 5 here" in str(error)


def test_two_bases_threads_or_torches_are_refused() -> None:
    ours = {"base_digest": "tree:1", "rounding": {"threads": "2", "torch": "2.9", "instructions": "AVX2"}}
    check_pair(ours, ours)
    with pytest.raises(ModelError, match="different bases"):
        check_pair(ours, ours | {"base_digest": "tree:2"})
    for name in ("threads", "torch", "instructions"):
        with pytest.raises(UsageError, match=name):
            check_pair(ours, ours | {"rounding": {**ours["rounding"], name: "4"}})  # type: ignore[dict-item]


def test_another_engine_or_other_weights_are_refused() -> None:
    facts = {"engine": "SGLang", "base_digest": "tree:1"}
    check_inference(facts, "SGLang", "tree:1")
    check_inference({"engine": "Torch", "base_digest": "tree:2"}, "Torch", "tree:1")
    with pytest.raises(UsageError, match="started with engine SGLang, this run's is Torch") as caught:
        check_inference(facts, "Torch", "tree:1")
    assert caught.value.where == "spec.rollout.engine"
    with pytest.raises(ModelError, match="serves other weights"):
        check_inference(facts, "SGLang", "tree:2")


# --- one host ---

LOST_AT: set[int] = set()
"""Ports whose side has lost its device."""


class Counter:
    """A side whose calls are counted."""

    def __init__(self, port: int = 0) -> None:
        self.calls = 0
        self.is_over = False
        self.ended: OrbitError | None = None
        self.host = Host(
            {"kind": "trainer", "version": orbit_runtime.__version__, "identity": {}},
            {"add": self.add, "fail": self.fail, "crash": self.crash, "lose": self.lose},
            self.reset,
            is_over=lambda: self.is_over,
        )
        self.stopped = threading.Event()
        self.server = start_host(self.host, "127.0.0.1", port, TOKEN, body_bytes=1000)
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        try:
            self.host.work(self.stopped.is_set)
        except OrbitError as error:
            self.ended = error

    def add(self, number: int) -> int:
        self.calls += number
        return self.calls

    def fail(self) -> None:
        raise GateError("it fails", where="there", fix="mend it")

    def lose(self) -> str:
        """Its device, the first time."""
        if self.server.port not in LOST_AT:
            LOST_AT.add(self.server.port)
            raise GPUFaultError("the device has fallen off the bus")
        return "there"

    def crash(self) -> None:
        raise ZeroDivisionError("a mistake of ours")

    def reset(self) -> None:
        self.calls = 0


@pytest.fixture
def counter() -> Iterator[Counter]:
    made = Counter()
    yield made
    made.stopped.set()
    made.server.close()


def test_a_call_that_is_asked_again_is_answered_again_and_done_once(counter: Counter) -> None:
    connection = line("trainer", counter.server.url)
    connection.open("a folder", 1)
    assert connection.call("add", 2) == 2
    headers = {"Authorization": f"Bearer {TOKEN}", SESSION: connection._session, CALL: "1"}
    for _ in range(3):
        again = httpx.post(f"{counter.server.url}/call/add", headers=headers, content=pack([2]))
        assert unpack(again.content) == 2
    assert connection.call("add", 3) == 5
    for number, status in (("1", 409), ("4", 409), ("x", 400), ("", 400)):
        told = httpx.post(f"{counter.server.url}/call/add", headers=headers | {CALL: number}, content=pack([2]))
        assert told.status_code == status
    assert counter.calls == 5


def test_what_a_side_raises_is_raised_here_with_its_words_and_code(counter: Counter) -> None:
    connection = line("trainer", counter.server.url)
    connection.open("a folder", 1)
    with pytest.raises(GateError) as caught:
        connection.call("fail")
    assert (caught.value.message, caught.value.where, caught.value.fix) == ("it fails", "there", "mend it")
    with pytest.raises(OrbitError, match="ZeroDivisionError: a mistake of ours") as crashed:
        connection.call("crash")
    assert crashed.value.exit_code == 70
    assert connection.call("add", 1) == 1


def test_a_side_that_lost_its_device_ends_with_its_code_and_its_successor_is_told_again() -> None:
    first = Counter()
    connection, told = line("trainer", first.server.url, patience=60.0), list[int]()
    connection.on_restart = lambda: told.append(connection.tell("add", 7))
    connection.open("a folder", 1)
    connection.call("add", 2)
    successors: list[Counter] = []

    def restart() -> None:
        while first.ended is None:
            time.sleep(0.01)
        # As long as it is there, nobody gets anything else from it.
        for path in ("facts", "call/add"):
            answer = httpx.request(
                "GET" if path == "facts" else "POST", f"{first.server.url}/{path}",
                headers={"Authorization": f"Bearer {TOKEN}"},
            )  # fmt: skip
            assert (answer.status_code, answer.json()["error"]) == (503, "GPUFaultError")
        first.server.close()
        successors.append(Counter(first.server.port))

    thread = threading.Thread(target=restart)
    thread.start()
    assert connection.call("lose") == "there"
    thread.join()
    assert first.ended is not None
    assert first.ended.exit_code == 80
    assert (told, connection.restarts) == ([7], 1)
    successors[0].stopped.set()
    successors[0].server.close()


def test_a_side_that_can_do_nothing_more_answers_its_last_call_and_ends_with_that_error(counter: Counter) -> None:
    connection = line("trainer", counter.server.url, patience=0.3)
    connection.open("a folder", 1)
    with pytest.raises(GateError):
        connection.call("fail")
    assert counter.ended is None, "another side goes on after such an error"
    counter.is_over = True
    with pytest.raises(GateError, match="it fails"):
        connection.call("fail")
    with pytest.raises(EngineDiedError, match="it ends: it fails"):
        connection.call("add", 1)
    assert isinstance(counter.ended, GateError)


def test_a_newer_execution_takes_over_and_another_run_does_not(counter: Counter) -> None:
    older, newer, other = (line("trainer", counter.server.url) for _ in range(3))
    older.open("a folder", 1)
    older.call("add", 1)
    newer.open("a folder", 2)
    assert newer.call("add", 5) == 5, "it begins as a first step finds it"
    with pytest.raises(OutputError, match="execution 2 of the run took over"):
        older.call("add", 1)
    with pytest.raises(OutputError, match="took over"):
        line("trainer", counter.server.url).open("a folder", 1)
    with pytest.raises(OutputError, match="works for the run in a folder"):
        other.open("another folder", 9)
    newer.close()
    line("trainer", counter.server.url).open("another folder", 1)


def test_garbage_is_refused_and_the_side_goes_on(counter: Counter) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = counter.server.url
    assert httpx.post(f"{url}/open", headers=headers, content=b"\xff\xfe").status_code == 422
    assert httpx.post(f"{url}/open", headers=headers, content=pack([1])).status_code == 400
    assert httpx.post(f"{url}/call/add", headers=headers, content=pack([1])).status_code == 409
    assert httpx.get(f"{url}/nothing", headers=headers).status_code == 404
    assert httpx.get(f"{url}/facts").status_code == 401
    assert httpx.post(f"{url}/open", headers=headers, content=bytes(1001)).status_code == 413
    assert httpx.get(f"{url}/health").json() == {"ok": True}
    connection = line("trainer", url)
    connection.open("a folder", 1)
    with pytest.raises(DataError):
        connection.call_framed("add", [b"no frame"])


def test_another_version_is_refused(counter: Counter) -> None:
    counter.host._facts["version"] = "0.0.1"
    with pytest.raises(UnsupportedError, match=r"runs Orbit 0\.0\.1, this is") as caught:
        line("trainer", counter.server.url).facts()
    assert caught.value.exit_code == 78


# --- at the door ---

APART = {
    "spec.rollout.sleep": {"rollout": {"engine": "SGLang", "sleep": "All"}},
    "spec.training.trainer": {"placement": {"nodes": 2}, "rollout": {"engine": "SGLang"}},
    "spec.adapter.type": {"adapter": {"type": "Full"}},
}


@pytest.mark.parametrize("field", APART)
@pytest.mark.parametrize("command", ["rl", "trainer", "inference"])
def test_what_one_process_does_alone_is_refused_with_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, field: str
) -> None:
    asked = copy.deepcopy(ASKED)
    for section, changes in APART[field].items():
        asked["spec"][section] = {**asked["spec"].get(section, {}), **changes}
    (tmp_path / "run.json").write_text(json.dumps(asked))
    assert run_command([command, str(tmp_path / "run.json")]) == 78
    assert field in capsys.readouterr().err


def test_a_child_of_orbit_rl_that_ends_with_a_mistake_of_the_user_is_not_started_again(tmp_path: Path) -> None:
    asked = copy.deepcopy(ASKED)
    asked["spec"]["model"] = {"uri": str(tmp_path / "nowhere")}
    (tmp_path / "run.json").write_text(json.dumps(asked))
    notes: list[str] = []
    with Children(("trainer",), tmp_path / "run.json", (), notes.append) as children:
        shown = [Path(f"/proc/{children.pid('trainer')}/{each}").read_bytes() for each in ("environ", "cmdline")]
        assert children.token.encode() not in b"".join(shown), "rewards of root may read it"
        os.waitid(os.P_PID, children.pid("trainer"), os.WEXITED | os.WNOWAIT)
        with pytest.raises(ModelError, match=r"the trainer process ended: .*nowhere"):
            children.check()
    assert notes == []


STOPS = """
import os
import signal

os.kill(os.getpid(), signal.SIGTERM)


def loss(inputs, settings):
    raise AssertionError("it was stopped before")
"""


def test_a_process_that_is_stopped_while_it_is_built_ends_with_75_and_never_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = copy.deepcopy(ASKED)
    asked["spec"]["algorithm"] |= {"type": "Custom", "entrypoint": "stopping_objective:loss"}
    (tmp_path / "stopping_objective.py").write_text(STOPS)
    (tmp_path / "run.json").write_text(json.dumps(asked))
    assert run_command(["trainer", str(tmp_path / "run.json"), "--listen", "127.0.0.1:0"]) == 75
    assert "http://" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["trainer", "--listen", "nowhere"], 64, "is not an address"),
        (["trainer", "--listen", "0.0.0.0:0"], 64, "anyone who can reach 0.0.0.0 could send requests"),
        (["inference", "--token-file", "missing"], 64, "the token cannot be read"),
        (["orchestrator", "--patience", "0"], 64, "is not a valid time to wait"),
    ],
)
def test_impossible_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(ASKED))
    command, *options = arguments
    assert run_command([command, str(tmp_path / "run.json"), *options]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("silent", "is_sign"), [("1.5", True), ("1800.0", False), ("inf", False)])
def test_a_side_that_works_on_says_how_long_ago_it_last_showed_it(silent: str, is_sign: bool) -> None:
    answers = [(202, silent.encode()), (200, b"".join(frame("done")))]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, content = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sign()
        time.sleep(0.2)
        began = time.monotonic()
        assert line("trainer", f"http://127.0.0.1:{server.server_port}").tell("update") == "done"
        assert (silent_seconds() <= time.monotonic() - began) == is_sign
        server.shutdown()
    assert not answers
