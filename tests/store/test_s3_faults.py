"""A real S3 server that is down, dies and comes back, or refuses."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from fakes.s3_server import SECRET_KEY, S3Server

from orbit_runtime.errors import CredentialsError, StorageError
from orbit_runtime.storage import (
    claim_execution,
    newest_execution,
    newest_readable,
    open_store,
    prune_bundles,
    write_bundle,
)

pytestmark = pytest.mark.store


def test_a_server_that_is_down_at_the_start_is_74_within_the_deadline(
    own_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = own_s3_server.make_bucket("bucket")
    own_s3_server.kill()
    monkeypatch.setenv("ORBIT_STORE_DEADLINE_SECONDS", "1.5")
    began = time.monotonic()
    with pytest.raises(StorageError, match="Connection refused") as caught:
        open_store(f"{uri}/run")
    assert time.monotonic() - began < 3
    assert caught.value.exit_code == 74
    assert SECRET_KEY not in str(caught.value)


def test_a_server_that_dies_in_mid_run_and_comes_back_loses_nothing(
    own_s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(f"{own_s3_server.make_bucket('bucket')}/run")
    execution = claim_execution(store, run_name="r")
    execution.start_heartbeat()
    outages = 0
    finished = threading.Event()

    def kill_and_start() -> None:
        nonlocal outages
        while not finished.wait(0.6):
            own_s3_server.kill()
            time.sleep(0.2)
            own_s3_server.start()
            outages += 1

    chaos = threading.Thread(target=kill_and_start)
    chaos.start()
    step = 0
    try:
        while outages < 4:
            step += 1
            write_bundle(store, execution, f"checkpoints/step-{step}", {"a.bin": step.to_bytes(4) * 5000}, {"s": step})
            prune_bundles(store, "checkpoints/", 3)
    finally:
        finished.set()
        chaos.join()
    bundle, skipped = newest_readable(store, "checkpoints/")
    assert bundle is not None
    assert (bundle.facts, bundle.parts, skipped) == ({"s": step}, {"a.bin": step.to_bytes(4) * 5000}, ())
    assert any("trying again" in record.message for record in caplog.records)
    execution.release("done")
    found = newest_execution(store)
    assert found is not None
    assert found[1] is not None
    assert (found[0].execution, found[1].state) == (1, "ended")


def test_a_server_that_dies_for_good_is_74_and_the_last_bundle_is_there_later(own_s3_server: S3Server) -> None:
    store = open_store(f"{own_s3_server.make_bucket('bucket')}/run").with_deadline(1.0)
    execution = claim_execution(store, run_name="r")
    write_bundle(store, execution, "checkpoints/step-1", {"a.bin": b"1"}, {"step": 1})
    own_s3_server.kill()
    with pytest.raises(StorageError, match=r"failed for \d+ s: Connection refused") as caught:
        write_bundle(store, execution, "checkpoints/step-2", {"a.bin": b"2"}, {"step": 2})
    assert caught.value.exit_code == 74
    execution.release("StorageError")
    own_s3_server.start()
    bundle, skipped = newest_readable(store, "checkpoints/")
    assert bundle is not None
    assert (bundle.facts, skipped) == ({"step": 1}, ())


def test_a_wrong_secret_is_77_and_shown_nowhere(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-wrong")
    with pytest.raises(CredentialsError, match="SignatureDoesNotMatch") as caught:
        open_store(f"{s3_bucket}/run")
    assert caught.value.exit_code == 77
    assert "hunter2" not in str(caught.value)


def test_an_unknown_access_key_is_77(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(CredentialsError):
        open_store(f"{s3_bucket}/run")


def test_a_bucket_that_does_not_exist_is_74_and_not_created(s3_bucket: str, shared_s3_server: S3Server) -> None:
    with pytest.raises(StorageError, match="bucket does not exist") as caught:
        open_store("s3://no-such-bucket/run")
    assert caught.value.exit_code == 74
    assert not (shared_s3_server.folder / "no-such-bucket").exists()


def test_opening_writes_nothing(s3_bucket: str, shared_s3_server: S3Server) -> None:
    open_store(f"{s3_bucket}/run")
    assert [*Path(shared_s3_server.folder / s3_bucket.removeprefix("s3://")).iterdir()] == []
