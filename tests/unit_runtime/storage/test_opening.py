"""From a URI to a store: what is found out before anything is written."""

from __future__ import annotations

import http.server
import os
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbit_runtime.errors import CredentialsError, OutputError, StorageError, UsageError
from orbit_runtime.storage import claim_execution, list_bundles, open_store, write_bundle


def test_a_path_and_its_file_uri_are_one_folder(tmp_path: Path) -> None:
    open_store(str(tmp_path / "a b" / "ü")).put("k", b"v")
    quoted = (tmp_path / "a b" / "ü").as_uri()
    assert "%20" in quoted
    assert open_store(quoted).get("k") == b"v"


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert open_store("~/runs/a").root == tmp_path / "home" / "runs" / "a"
    assert open_store("~nobody-is-called-so/a").root == tmp_path / "~nobody-is-called-so" / "a"


def test_opening_creates_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "deep" / "run"))
    assert (store.list(), store.exists("run.json")) == ([], False)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="file is a file, not a folder") as caught:
        open_store(f"{tmp_path}/file{below}")
    assert caught.value.exit_code == 73


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; see the read-only mount below")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="may not write"):
        open_store(f"{tmp_path}/run")


OPENED = """
import os, sys
from orbit_runtime.errors import OutputError
from orbit_runtime.storage import open_store
if os.geteuid() == 0:
    # Not before: the interpreter itself may lie where others may not look.
    os.setgroups([])
    os.setuid(65534)
try:
    open_store(sys.argv[1])
except OutputError as error:
    print(error)
"""


def refusal_of(uri: str) -> str:
    """What a user without any rights is told, in a process of its own. Root gives up its rights for it."""
    command = [sys.executable, "-c", OPENED, uri]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


@pytest.mark.parametrize(("mode", "below", "words"), [
    (0o500, "", "may not write"), (0o500, "run", "may not write"), (0o000, "run", "permission denied"),
    (0o000, "deep/run", "permission denied"),
])  # fmt: skip
def test_a_folder_of_another_user_is_refused(mode: int, below: str, words: str) -> None:
    # Below the system's folder: pytest's own may not be entered by others.
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "theirs"
        folder.mkdir()
        os.chmod(made, 0o755)
        folder.chmod(mode if os.geteuid() else mode | 0o55 if mode else mode)
        said = refusal_of(str(folder / below))
        folder.chmod(0o700)
    assert words in said
    assert str(folder) in said
    assert "fix: choose a folder that this user may write" in said


def test_a_folder_that_may_not_change_is_refused_for_root_too(tmp_path: Path) -> None:
    """Permission bits say that root may write there."""
    folder = tmp_path / "fixed"
    folder.mkdir()
    if subprocess.run(["chattr", "+i", folder], check=False).returncode:
        pytest.skip("only root can make a folder immutable, and not on every file system")
    try:
        for uri in (str(folder), str(folder / "run")):
            with pytest.raises(OutputError, match=r"may not write in .*: Operation not permitted") as caught:
                open_store(uri)
            assert caught.value.exit_code == 73
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="file name too long") as caught:
        open_store(str(tmp_path / ("x" * 300) / "run"))
    assert caught.value.exit_code == 73


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a system without /proc")
def test_a_place_where_nothing_can_be_created_is_refused() -> None:
    with pytest.raises(OutputError, match="may not write in /proc"):
        open_store("/proc/run")


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("ftp://host.example/x", "ftp:// is not a kind of store"),
        ("s3:///x", "names no bucket"),
        ("s3://key:hunter2@bucket/x", "nothing else"),
        ("file://otherhost/x", "names no local folder"),
        ("", "no name"),
    ],
)
def test_a_uri_that_means_nothing_is_a_usage_error(uri: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        open_store(uri)
    assert "hunter2" not in str(caught.value)
    assert "spec." not in str(caught.value), "an address of a command line has no field"


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_deadline_that_is_no_number_is_a_usage_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match="not a number of seconds"):
        open_store(str(tmp_path), environ={"ORBIT_STORE_DEADLINE_SECONDS": value})


def test_the_deadline_comes_from_the_environment(tmp_path: Path) -> None:
    assert open_store(str(tmp_path), environ={"ORBIT_STORE_DEADLINE_SECONDS": "7.5"}).deadline_seconds == 7.5
    assert open_store(str(tmp_path), environ={}).deadline_seconds == 120


def test_a_folder_where_a_file_is_wanted_is_told_at_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"")
    with pytest.raises(OutputError, match="a file and a folder would have the same name"):
        store.put("a", b"")
    with pytest.raises(OutputError, match="a file and a folder would have the same name"):
        store.put("a/b/c", b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this root may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_74_with_the_space_left_and_leaves_the_old_bundle_whole(small_disk: Path) -> None:
    store = open_store(str(small_disk / "run"))
    execution = claim_execution(store, run_name="r")
    write_bundle(store, execution, "checkpoints/step-1", {"a.bin": b"x" * 100_000}, {})
    with pytest.raises(StorageError, match=r"no space left on device \(0\.\d MiB free of 0\.2 MiB\)") as caught:
        write_bundle(store, execution, "checkpoints/step-2", {"a.bin": b"x" * 90_000, "b.bin": b"x" * 90_000}, {})
    assert caught.value.exit_code == 74
    assert list_bundles(store, "checkpoints/") == ["checkpoints/step-1/"]
    assert not [*small_disk.rglob("*#*")]
    execution.release("StorageError")


def test_a_disk_that_is_full_from_the_start_is_74(small_disk: Path) -> None:
    with (small_disk / "filler").open("wb") as file, pytest.raises(OSError, match="No space"):
        file.write(b"x" * 400_000)
    store = open_store(str(small_disk / "run"))
    with pytest.raises(StorageError, match="no space left") as caught:
        claim_execution(store, run_name="r")
    assert caught.value.exit_code == 74


def test_a_read_only_file_system_is_73(small_disk: Path) -> None:
    store = open_store(str(small_disk / "run"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OutputError, match="may not write"):
        open_store(str(small_disk / "run"))
    with pytest.raises(OutputError, match=r"(?i)read-only"):
        store.put("k", b"v")
    with pytest.raises(OutputError, match=r"(?i)read-only"):
        claim_execution(store, run_name="r")


def test_a_store_whose_certificate_is_not_trusted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real TLS server with an authority of its own. Nothing is retried: it never heals by itself."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that goes is what is expected
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {"ENDPOINT_URL": f"https://127.0.0.1:{server.server_port}", "REGION": "x",
                        "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        with pytest.raises(CredentialsError, match=r"store is not trusted \(\w+\)(?s:.)*SSL_CERT_FILE"):
            open_store("s3://bucket/run")
    finally:
        server.shutdown()
