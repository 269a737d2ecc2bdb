"""Models and prompts from a hub: what is fetched, continued, verified, shared and refused. The hub is a fake."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.hub_server import TOKEN, Fault, HubServer

from orbit_runtime.errors import (
    CredentialsError,
    DataError,
    ModelError,
    OrbitError,
    OutputError,
    StoppedOnRequest,
    StorageError,
    UsageError,
)
from orbit_runtime.spec.hub_address import HubAddress, parse_address
from orbit_runtime.storage.cache import RetryPolicy, Transfer
from orbit_runtime.storage.hub import read_access
from orbit_runtime.storage.inputs import FetchedInput, fetch_input

ROOT = Path(__file__).parents[3]
TINY = ROOT / "orbit_runtime/model_info/builtin/tiny-adder/bf16"
MODEL = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
WEIGHTS = "model.safetensors"
DIGEST = hashlib.sha256(MODEL[WEIGHTS]).hexdigest()
URI = "hf://org/tiny@main"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, deadline: float = 120.0) -> RetryPolicy:
        return RetryPolicy(deadline, sleep=self.sleep, monotonic=lambda: self.now)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add("org/tiny", {**MODEL, "README.md": b"# x", "pytorch_model.bin": b"pickle", "modeling.py": b"evil"})
        for name, value in {**server.environment(), "ORBIT_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def fetch(uri: str = URI, kind: str = "model", **settings: object) -> FetchedInput:
    settings.setdefault("patience", Clock().patience())
    return fetch_input(uri, kind, f"spec.{kind}", **settings)  # type: ignore[arg-type]


def test_a_model_is_its_weights_and_texts_and_nothing_else(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    told: list[Transfer] = []
    found = fetch(patience=RetryPolicy(tell=told.append))
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == MODEL
    assert found.revision == hub.repositories["models", "org/tiny"].head
    assert (told[-1].done, told[-1].total) == (len(MODEL[WEIGHTS]), len(MODEL[WEIGHTS]))
    (cdn,) = [request for request in hub.requests if request.role == "cdn" and DIGEST in request.path]
    assert cdn.authorization is None
    assert {request.authorization for request in hub.requests if request.role == "hub"} == {f"Bearer {TOKEN}"}


def test_a_whole_file_comes_with_those_of_an_index_that_does_not_name_it(hub: HubServer) -> None:
    index = json.dumps({"weight_map": {"a": "1.safetensors"}}).encode()
    for others in ({}, {"1.safetensors": MODEL[WEIGHTS]}):
        files = {**MODEL, "model.safetensors.index.json": index, **others}
        hub.add("org/tiny", files)
        assert {path.name for path in fetch().path.iterdir()} == files.keys()


def test_a_commit_that_is_in_the_cache_is_not_asked_for_again(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch()
    hub.requests.clear()
    hub.add("org/tiny", {**MODEL, "config.json": b"{}"})
    assert fetch(revision=first.revision) == first
    assert fetch(f"hf://org/tiny@{first.revision}").path == first.path
    assert not hub.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch() == first
    assert not hub.requests
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        fetch("hf://org/tiny@other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert fetch().revision != first.revision


def test_connections_that_are_cut_are_continued_where_they_ended(hub: HubServer) -> None:
    size = len(MODEL[WEIGHTS])
    hub.faults = [Fault(DIGEST, cut_after=1000, times=3)]
    found = fetch()
    assert (found.path / WEIGHTS).read_bytes() == MODEL[WEIGHTS]
    ranges = [request.range for request in hub.asked_for(DIGEST)]
    assert ranges == [None, "bytes=1000-", "bytes=2000-", "bytes=3000-"]
    assert size > 4000


def test_a_server_that_ignores_ranges_costs_a_new_start_only(hub: HubServer) -> None:
    hub.faults = [Fault(DIGEST, cut_after=1000), Fault(DIGEST, ignore_range=True)]
    assert (fetch().path / WEIGHTS).read_bytes() == MODEL[WEIGHTS]


def test_a_broken_part_of_an_earlier_start_is_fetched_anew(hub: HubServer, tmp_path: Path) -> None:
    part = tmp_path / "cache/parts" / DIGEST
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 100)
    assert (fetch().path / WEIGHTS).read_bytes() == MODEL[WEIGHTS]
    assert [request.range for request in hub.asked_for(DIGEST)] == ["bytes=100-", None]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_that_is_not_what_the_hub_announced_never_enters_the_cache(
    hub: HubServer, tmp_path: Path, name: str
) -> None:
    hub.faults = [Fault(DIGEST if name == WEIGHTS else f"/{name}", flip=True, times=2)]
    with pytest.raises(ModelError, match=f"{name} arrived damaged, twice") as caught:
        fetch()
    assert caught.value.exit_code == 66
    assert not (tmp_path / "cache/blobs" / DIGEST).exists()
    assert fetch().path.is_dir()


REFUSALS: list[tuple[str, str, type[OrbitError], str]] = [
    ("hf://org/none", "model", CredentialsError, "set HF_TOKEN"),
    ("hf://org/private", "model", CredentialsError, "set HF_TOKEN"),
    ("hf://org/gated", "model", CredentialsError, "accept its terms"),
    ("hf://org/tiny@v9", "model", ModelError, "no revision 'v9'"),
    ("hf://org/empty", "model", ModelError, "no config.json"),
    ("hf://org/pickled", "model", ModelError, "pytorch_model.bin: weights are .safetensors"),
    ("hf://org/torn", "model", ModelError, "b.safetensors is not there"),
    ("hf://org/index", "model", ModelError, "is not an index of weights"),
    ("hf://org", "model", ModelError, "write hf://org/name@revision"),
    ("hf://org/tiny/config.json", "model", ModelError, "write hf://org/name@revision"),
    ("hf://datasets/org/sums@main/none.jsonl", "prompts", DataError, "no file 'none.jsonl'"),
    ("hf://datasets/org/sums", "prompts", DataError, "write hf://datasets/org/name@revision/file"),
    ("hf://org/tiny", "code", UsageError, "not read here"),
    ("pvc://claim/x", "model", ModelError, "mounted by the operator"),
    ("configmap://x", "code", UsageError, "mounted by the operator"),
]


@pytest.mark.parametrize(("uri", "kind", "error", "words"), REFUSALS)
def test_what_is_refused_says_who_must_do_what(
    hub: HubServer, uri: str, kind: str, error: type[OrbitError], words: str
) -> None:
    index = "model.safetensors.index.json"
    hub.add("org/private", MODEL).is_private = True
    hub.add("org/gated", MODEL).is_gated = True
    hub.add("org/empty", {"README.md": b""})
    hub.add("org/pickled", {"config.json": b"{}", index: b'{"weight_map": {"a": "pytorch_model.bin"}}'})
    hub.add("org/torn", {"config.json": b"{}", index: b'{"weight_map": {"a": "b.safetensors"}}'})
    hub.add("org/index", {"config.json": b"{}", index: b'{"weight_map": []}'})
    hub.add("org/sums", {"train.jsonl": b'{"prompt": "1+1"}\n'}, kind="datasets")
    with pytest.raises(error, match=words) as caught:
        fetch(uri, kind)
    assert type(caught.value) is error
    assert f"spec.{kind}" in str(caught.value) or uri in str(caught.value)


def test_a_token_opens_private_repositories_and_may_stand_in_the_file_of_the_hubs_own_tools(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("org/private", MODEL).is_private = True
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text(f"{TOKEN}\n")
    assert fetch("hf://org/private").path.is_dir()
    with pytest.raises(ModelError, match="org/none is not on the hub"):
        fetch("hf://org/none")
    assert TOKEN not in repr(read_access(os.environ))


@pytest.mark.parametrize("path", ["/revision/", DIGEST])
def test_a_hub_that_is_down_for_long_ends_with_74_and_the_next_start_goes_on(hub: HubServer, path: str) -> None:
    hub.faults = [Fault(path, status=503, times=1000)]
    clock = Clock()
    with pytest.raises(StorageError, match="HTTP 503") as caught:
        fetch(patience=clock.patience(60.0))
    assert caught.value.exit_code == 74
    assert 45 < clock.now <= 60
    assert "secret" not in str(caught.value)
    assert len(hub.asked_for(path)) < 20
    hub.faults = []
    assert fetch().path.is_dir()


def test_a_hub_nobody_answers_at_is_a_storage_error(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    clock, noticed = Clock(), list[str]()
    with pytest.raises(StorageError, match="5 tries in 15 s, the last one: no connection") as end:
        fetch(patience=replace(clock.patience(), notice=noticed.append))
    assert clock.now == 15.0, "bounded, however long a store is waited for"
    assert noticed[:2] == [
        "asking 127.0.0.1:9 for org/tiny",
        "127.0.0.1:9: no connection (try 1 of 5); next in 1 s",
    ]
    assert len(noticed) == 5
    assert end.value.exit_code == 74
    assert "127.0.0.1:9 could not be reached" in str(end.value)
    assert "HF_ENDPOINT" in str(end.value)


def test_a_hub_that_takes_connections_and_never_answers_is_given_up_as_well(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StorageError, match="5 tries"):
            fetch(patience=replace(Clock().patience(), notice=noticed.append, silent_seconds=0.2))
    assert len(noticed) == 5
    assert all("no answer" in each for each in noticed[1:])


def test_a_hub_whose_host_takes_no_connection_is_given_up_after_half_a_minute_not_after_five_long_tries(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a try is simulated, like that of a name server that does not answer."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    clock = Clock()

    def monotonic() -> float:
        clock.now += 10.0
        return clock.now

    with pytest.raises(StorageError, match=r"3 tries in \d+ s, the last one: no connection"):
        fetch(patience=replace(clock.patience(3600.0), monotonic=monotonic))


def test_a_hub_that_went_away_after_its_listing_is_given_up_as_soon_however_many_files_wait(
    hub: HubServer,
) -> None:
    hub.faults = [Fault(DIGEST, status=503, times=1000)]
    with pytest.raises(StorageError, match="HTTP 503"):
        fetch(patience=Clock().patience(1.0))
    clock, noticed = Clock(), list[str]()
    hub.__exit__()
    uri = f"hf://org/tiny@{hub.repositories['models', 'org/tiny'].head}"
    with pytest.raises(StorageError, match=f"downloading {WEIGHTS} failed for .*no connection") as end:
        fetch(uri, patience=replace(clock.patience(3600.0), notice=noticed.append))
    assert 20 < clock.now <= 30
    assert f"{WEIGHTS}: no connection (try 1); next in 0 s" in noticed
    assert end.value.exit_code == 74


def test_a_pause_that_the_hub_asks_for_is_kept(hub: HubServer) -> None:
    hub.faults = [Fault("/revision/", status=429, headers={"Retry-After": "7"})]
    clock = Clock()
    assert fetch(patience=clock.patience()).path.is_dir()
    assert clock.now == pytest.approx(7.0)


@pytest.mark.parametrize("path", ["/revision/", DIGEST])
def test_a_process_that_stood_still_while_it_asked_asks_once_more(hub: HubServer, path: str) -> None:
    hub.faults = [Fault(path, status=503)]
    clock = Clock()
    later = RetryPolicy(60.0, sleep=clock.sleep, monotonic=lambda: clock.now + (3600 if hub.asked_for(path) else 0))
    assert fetch(patience=later).path.is_dir()
    assert len(hub.asked_for(path)) == 2


def test_prompts_keep_their_name(hub: HubServer) -> None:
    hub.add("org/sums", {"data/train.jsonl": b'{"prompt": "1+1"}\n'}, kind="datasets")
    found = fetch("hf://datasets/org/sums@main/data/train.jsonl", "prompts")
    assert found.path.name == "train.jsonl"
    assert found.path.read_bytes() == b'{"prompt": "1+1"}\n'


def test_a_folder_of_prompts_comes_with_its_rows_alone(hub: HubServer) -> None:
    files = {f"main/train-{number}.jsonl": b'{"prompt": "1+1"}\n' for number in (0, 1)}
    hub.add("org/sums", {**files, "main/README.md": b"#", "test/a.jsonl": b"{}", "load.py": b"evil"}, kind="datasets")
    found = fetch("hf://datasets/org/sums@main/main", "prompts")
    assert found.path.name == "main"
    assert sorted(each.name for each in found.path.iterdir()) == ["train-0.jsonl", "train-1.jsonl"]
    assert found.revision


def test_what_does_not_fit_is_said_before_a_byte_of_it_comes(hub: HubServer) -> None:
    hub.repositories["models", "org/tiny"].sizes[WEIGHTS] = 2**60
    with pytest.raises(StorageError, match="MiB are free") as caught:
        fetch()
    assert caught.value.exit_code == 74
    assert not hub.asked_for(DIGEST)


def test_a_cache_that_cannot_be_written_names_itself(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORBIT_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(OutputError, match="set ORBIT_CACHE"):
        fetch()


def test_a_request_to_stop_ends_a_download_and_keeps_what_came(hub: HubServer, tmp_path: Path) -> None:
    released = threading.Event()
    hub.faults = [Fault(DIGEST, hold=released)]
    part = tmp_path / "cache/parts" / DIGEST
    half = len(MODEL[WEIGHTS]) // 2

    def stop() -> bool:
        stopping = part.exists() and part.stat().st_size > 0
        if stopping:
            threading.Timer(1.0, released.set).start()
        return stopping

    with pytest.raises(StoppedOnRequest):
        fetch(patience=RetryPolicy(stop=stop))
    kept = part.stat().st_size
    assert kept >= min(half, 2**16)
    fetch()
    assert hub.asked_for(DIGEST)[-1].range in (f"bytes={kept}-", None)


FETCHER = """
import sys
from orbit_runtime.storage.inputs import fetch_input
print(fetch_input(sys.argv[1], "model", "spec.model.uri").path)
"""


def start_fetcher() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCHER, URI], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )


def test_a_process_that_is_killed_in_mid_download_is_continued_by_the_next(hub: HubServer, tmp_path: Path) -> None:
    # More than any buffer between here and the disk, so that some of it is there when the process dies.
    data = {**MODEL, "tokenizer.model": os.urandom(24 * 2**20)}
    hub.add("org/tiny", data)
    digest = hashlib.sha256(data["tokenizer.model"]).hexdigest()
    part = tmp_path / "cache/parts" / digest
    hub.faults = [Fault(digest, hold=threading.Event())]
    process = start_fetcher()
    until = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 4 * 2**20) and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = part.stat().st_size
    assert kept > 4 * 2**20
    assert (fetch().path / "tokenizer.model").read_bytes() == data["tokenizer.model"]
    assert hub.asked_for(digest)[-1].range == f"bytes={kept}-"


def test_processes_that_share_a_cache_fetch_each_file_once(hub: HubServer) -> None:
    processes = [start_fetcher() for _ in range(3)]
    folders = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(folders) == 1
    served = [request.path for request in hub.requests if request.role == "cdn" or "/resolve/" in request.path]
    assert len(served) == len(set(served))
    assert {path.name: path.read_bytes() for path in Path(folders.pop()).iterdir()} == MODEL


def test_addresses() -> None:
    assert parse_address("hf://org/name") == HubAddress("models", "org/name", "main", None)
    assert parse_address("hf://org/name@v1.0") == HubAddress("models", "org/name", "v1.0", None)
    assert parse_address("hf://datasets/o/n@c/a/b.jsonl") == HubAddress("datasets", "o/n", "c", "a/b.jsonl")
    for wrong in ("hf://name", "hf://a/b/../c", "hf://a/b@", "hf://a b/c"):
        assert parse_address(wrong) is None, wrong


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a\\b", "."])
def test_names_that_lead_out_of_the_folder_are_not_believed(hub: HubServer, name: str) -> None:
    hub.add("org/evil", {"config.json": b"{}", name: b"x"})
    with pytest.raises(StorageError, match="cannot be understood"):
        fetch("hf://org/evil")


def test_planning_reads_headers_only_and_leaves_nothing(hub: HubServer, tmp_path: Path) -> None:
    from orbit_runtime.api.checks import _hub_facts
    from orbit_runtime.model_info.checkpoint import folder_facts

    facts, expected = _hub_facts(URI, print), folder_facts(TINY)
    assert facts.weights == expected.weights
    assert all(request.range for request in hub.requests if request.role == "cdn")
    assert not (tmp_path / "cache").exists()
