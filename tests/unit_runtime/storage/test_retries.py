"""Calls that fail: what is retried, for how long, and what is said in the end."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from fakes.faulty_store import FakeClock, FaultyBackend, faulty_store

from orbit_runtime.errors import CredentialsError, OutputError, StorageError
from orbit_runtime.storage import AlreadyExists, claim_execution, open_store, read_bundle, write_bundle
from orbit_runtime.storage.faults import read_fault


def test_a_busy_store_is_asked_again_with_growing_pauses() -> None:
    backend, clock = FaultyBackend(), FakeClock()
    backend.fail("put", 6)
    store = faulty_store(backend, clock)
    store.put("k", b"v")
    assert store.get("k") == b"v"
    assert len(clock.slept) == 6
    assert clock.slept[0] < 0.25
    assert 3.0 < clock.slept[-1] < 3.5
    assert clock.slept == sorted(clock.slept)


def test_the_deadline_ends_it_with_74_and_without_the_stores_own_text() -> None:
    backend, clock = FaultyBackend(), FakeClock()
    backend.fail("get", 1000)
    with pytest.raises(StorageError) as caught:
        faulty_store(backend, clock, deadline=30).get("k")
    assert sum(clock.slept) <= 30
    assert caught.value.exit_code == 74
    assert "503 SlowDown" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_process_that_stood_still_in_the_midst_of_a_call_asks_once_more() -> None:
    """A laptop that slept, a container that was paused: the deadline has passed, and nothing is known of the store."""
    backend, clock = FaultyBackend(), FakeClock()
    store = faulty_store(backend, clock, deadline=30)
    store.put("k", b"v")
    backend.fail("get", 1)

    def stand_still(_: str) -> None:
        if len(backend.calls) == 2:
            clock.now += 3600

    backend.hooks["get"] = stand_still
    assert store.get("k") == b"v"
    assert [call for call, _ in backend.calls] == ["put", "get", "get"]


def test_a_lost_reply_to_a_create_only_put_is_no_clash() -> None:
    backend, clock = FaultyBackend(), FakeClock()
    backend.fail("put", 1, lost_reply=True)
    faulty_store(backend, clock).put("k", b"mine", create_only=True)
    assert [call for call, _ in backend.calls] == ["put", "put", "get"]


def test_a_clash_that_shows_on_a_retry_is_a_clash() -> None:
    backend, clock = FaultyBackend(), FakeClock()
    store = faulty_store(backend, clock)
    store.put("k", b"theirs")
    backend.fail("put", 1)
    with pytest.raises(AlreadyExists):
        store.put("k", b"mine", create_only=True)


def test_an_equal_object_of_somebody_else_is_a_clash_at_the_first_try() -> None:
    store = faulty_store(FaultyBackend(), FakeClock())
    store.put("k", b"same", create_only=True)
    with pytest.raises(AlreadyExists):
        store.put("k", b"same", create_only=True)


def test_a_claim_whose_reply_was_lost_is_one_claim() -> None:
    backend, clock = FaultyBackend(), FakeClock()
    backend.fail("put", 1, lost_reply=True)
    execution = claim_execution(faulty_store(backend, clock), run_name="r", clock=clock)
    assert execution.number == 1
    assert execution.record.process.pid > 0


def test_each_call_of_a_bundle_may_fail_once_and_nothing_is_lost() -> None:
    backend, clock = FaultyBackend(), FakeClock()
    store = faulty_store(backend, clock)
    execution = claim_execution(store, run_name="r", clock=clock)
    for call in ("put", "get", "list"):
        for lost_reply in (False, True):
            backend.fail(call, 1, lost_reply=lost_reply)
    write_bundle(store, execution, "checkpoints/step-1", {"a.bin": b"1", "b.bin": b"2"}, {})
    assert read_bundle(store, "checkpoints/step-1").parts == {"a.bin": b"1", "b.bin": b"2"}


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("status code: 403 Forbidden: <Code>SignatureDoesNotMatch</Code> AKIAX", CredentialsError, "SignatureDoesNot"),
        ("status code: 403 Forbidden: <Code>InvalidAccessKeyId</Code> AKIAX", CredentialsError, "InvalidAccessKeyId"),
        ("status code: 404 Not Found: <Code>XAdminUserNotFound</Code> AKIAX", CredentialsError, "XAdminUserNotFound"),
        ("status code: 403 Forbidden: AKIAX", CredentialsError, "403"),
        ("Error performing PUT 169.254.169.254/latest/api/token AKIAX", CredentialsError, "no credentials"),
        ("status code: 403 Forbidden: <Code>RequestTimeTooSkewed</Code> AKIAX", CredentialsError, "clock"),
        ("status code: 404 Not Found: <Code>NoSuchBucket</Code> AKIAX", StorageError, "bucket does not exist"),
        (
            "status code: 400 Bad Request: <Code>InvalidBucketName</Code> AKIAX",
            OutputError,
            "this is not a valid bucket name",
        ),
        ("status code: 301 Moved: <Code>PermanentRedirect</Code> AKIAX", OutputError, "301 PermanentRedirect"),
        ("status code: 501 Not Implemented: <Code>NotImplemented</Code> AKIAX", OutputError, "501 NotImplemented"),
        ("File name too long (os error 36) AKIAX", OutputError, "file name too long"),
        ('Os { code: 40, kind: FilesystemLoop, message: "Too many levels" } AKIAX', OutputError, "too many levels"),
        ("Invalid argument (os error 22) AKIAX", OutputError, "invalid argument"),
        ("Is a directory (os error 21) AKIAX", OutputError, "is a directory"),
    ],
)
def test_what_waiting_cannot_mend_is_told_at_once_and_without_secrets(
    text: str, error: type[Exception], word: str
) -> None:
    backend, clock = FaultyBackend(), FakeClock()
    backend.fail("list", 1, text=text)
    with pytest.raises(error, match=word) as caught:
        faulty_store(backend, clock).list("a")
    assert clock.slept == []
    assert "AKIAX" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("status code: 500 Internal Server Error: <Code>InternalError</Code>", "500 InternalError"),
        ("status code: 400 Bad Request: <Code>RequestTimeout</Code>", "RequestTimeout"),
        ("status code: 429 Too Many Requests", "429"),
        ("status code: 409 Conflict: <Code>ConditionalRequestConflict</Code>", "409 ConditionalRequestConflict"),
        ('tcp connect error Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }', "refused"),
        ("operation timed out", "timed out"),
        ("dns error: failed to lookup", "host name"),
        ("something new", "the request failed"),
    ],
)
def test_what_may_pass_is_retried_and_named(text: str, reason: str) -> None:
    fault = read_fault(RuntimeError(text))
    assert fault.kind == "transient"
    assert reason in fault.reason


def test_a_name_that_no_file_system_holds_is_not_tried_twice(tmp_path: Path) -> None:
    slept: list[float] = []
    store = open_store(f"{tmp_path}/{'x' * 300}", writable=False)
    store.sleep = slept.append
    with pytest.raises(OutputError, match="file name too long"):
        store.exists("config.json")
    assert not slept


def test_a_file_larger_than_this_user_may_write_is_not_tried_twice(tmp_path: Path) -> None:
    slept: list[float] = []
    store = open_store(str(tmp_path))
    store.sleep = slept.append
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OutputError, match="file too large") as caught:
            store.put("large", bytes(1 << 21))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in str(caught.value)
    assert not slept


def test_a_mistake_of_ours_is_no_fault_of_the_store() -> None:
    store = faulty_store(FaultyBackend(), FakeClock())
    with pytest.raises(AssertionError, match="not a key"):
        store.put("../outside", b"")
