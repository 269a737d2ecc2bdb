"""What every store promises, as tests. A test file imports these and defines the fixture `open_again`.

`open_again()` opens the same empty run folder anew each time, as another process would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from orbit_runtime.errors import OutputError
from orbit_runtime.storage import (
    AlreadyExists,
    CorruptBundle,
    NotFound,
    Store,
    claim_execution,
    compact_rows,
    list_bundles,
    newest_readable,
    prune_bundles,
    read_bundle,
    write_bundle,
)

type OpenAgain = Callable[[], Store]
PARTS = {"master.safetensors": b"m" * 5000, "cursor.json": b"{}", "empty.bin": b""}


def test_what_was_put_is_read_by_another_opener(open_again: OpenAgain) -> None:
    open_again().put("a/b.txt", b"one")
    store = open_again()
    assert (store.get("a/b.txt"), store.exists("a/b.txt"), store.exists("a/c.txt")) == (b"one", True, False)
    store.put("a/b.txt", b"two")
    assert open_again().get("a/b.txt") == b"two"


def test_a_range_is_read_alone_and_ends_with_the_object(open_again: OpenAgain) -> None:
    store = open_again()
    store.put("a/b.bin", bytes(range(100)))
    assert store.size("a/b.bin") == 100
    assert store.get_range("a/b.bin", 10, 20) == bytes(range(10, 20))
    assert store.get_range("a/b.bin", 90, 200) == bytes(range(90, 100))
    with pytest.raises(NotFound, match="a/none"):
        store.get_range("a/none", 0, 1)
    with pytest.raises(NotFound, match="a/none"):
        store.size("a/none")


def test_a_missing_key_is_not_found_by_name(open_again: OpenAgain) -> None:
    with pytest.raises(NotFound, match="a/none"):
        open_again().get("a/none")


def test_a_second_create_only_put_is_refused_and_the_first_stands(open_again: OpenAgain) -> None:
    open_again().put("run.json", b"first", create_only=True)
    with pytest.raises(AlreadyExists, match=r"run\.json"):
        open_again().put("run.json", b"second", create_only=True)
    assert open_again().get("run.json") == b"first"


def test_one_of_many_simultaneous_create_only_puts_wins(open_again: OpenAgain) -> None:
    stores = [open_again() for _ in range(6)]
    gate = threading.Barrier(len(stores))

    def race(number: int) -> bool:
        gate.wait()
        try:
            stores[number].put("race", str(number).encode(), create_only=True)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        won = [number for number, has_won in enumerate(pool.map(race, range(len(stores)))) if has_won]
    assert len(won) == 1
    assert open_again().get("race") == str(won[0]).encode()


def test_listing_is_sorted_deep_and_by_whole_folder_names(open_again: OpenAgain) -> None:
    store = open_again()
    assert (store.list(), store.list("a/"), store.list_folders()) == ([], [], [])
    for key in ("a/2/x", "a/1/y", "ab/z", "top"):
        store.put(key, b"")
    assert store.list() == ["a/1/y", "a/2/x", "ab/z", "top"]
    assert store.list("a/") == store.list("a") == ["a/1/y", "a/2/x"]
    assert store.list_folders() == ["a/", "ab/"]
    assert store.list_folders("a") == ["a/1/", "a/2/"]


def test_deleting_is_safe_to_repeat_and_leaves_no_empty_folder(open_again: OpenAgain) -> None:
    store = open_again()
    store.put("a/b/c", b"x")
    store.put("keep", b"x")
    store.delete(["a/b/c", "a/b/none"])
    store.delete(["a/b/c"])
    store.delete([])
    assert (store.list(), store.list_folders()) == (["keep"], [])


def test_a_large_object_comes_back_whole(open_again: OpenAgain) -> None:
    data = bytes(range(256)) * (11 << 12)  # 11 MiB: several parts of a multipart upload
    open_again().put("big", data)
    assert open_again().get("big") == data


def test_a_bundle_comes_back_with_facts_and_verified_parts(open_again: OpenAgain) -> None:
    execution = claim_execution(open_again(), run_name="r")
    manifest = write_bundle(open_again(), execution, "checkpoints/step-000001", PARTS, {"step": 1})
    bundle = read_bundle(open_again(), "checkpoints/step-000001/")
    assert (bundle.parts, bundle.facts, bundle.manifest) == (PARTS, {"step": 1}, manifest)
    assert manifest.parts["master.safetensors"].key == "checkpoints/step-000001/master-e000001.safetensors"
    execution.release("done")


def test_a_damaged_newest_bundle_is_skipped_with_its_reason(open_again: OpenAgain) -> None:
    store = open_again()
    execution = claim_execution(store, run_name="r")
    for step in (9, 10):
        manifest = write_bundle(store, execution, f"checkpoints/step-{step}", PARTS, {"step": step})
    store.put(manifest.parts["master.safetensors"].key, b"m" * 4999)
    with pytest.raises(CorruptBundle, match="4999 bytes instead of 5000"):
        read_bundle(store, "checkpoints/step-10")
    bundle, skipped = newest_readable(open_again(), "checkpoints/")
    assert bundle is not None
    assert bundle.facts == {"step": 9}
    assert len(skipped) == 1
    assert "step-10/master-e000001.safetensors has 4999 bytes" in skipped[0]
    execution.release("done")


def test_pruning_keeps_the_newest_complete_ones(open_again: OpenAgain) -> None:
    store = open_again()
    execution = claim_execution(store, run_name="r")
    for step in (8, 9, 10, 11):
        write_bundle(store, execution, f"checkpoints/step-{step}", PARTS, {})
    store.put("checkpoints/step-7/left-e000001.bin", b"of an interrupted write")
    store.put("checkpoints/step-12/begun-e000001.bin", b"in flight")
    prune_bundles(store, "checkpoints/", 2)
    assert list_bundles(open_again(), "checkpoints/") == ["checkpoints/step-11/", "checkpoints/step-10/"]
    assert store.list_folders("checkpoints/") == [f"checkpoints/step-{step}/" for step in (10, 11, 12)]
    execution.release("done")


def test_a_second_live_run_is_refused_and_may_start_after_the_first_ended(open_again: OpenAgain) -> None:
    first = claim_execution(open_again(), run_name="r")
    with pytest.raises(OutputError, match=r"in use by execution 1 \(pid \d+ on host"):
        claim_execution(open_again(), run_name="r")
    first.release("stopped")
    second = claim_execution(open_again(), run_name="r")
    assert second.number == 2
    second.release("done")


def test_an_execution_that_was_taken_over_writes_no_manifest(open_again: OpenAgain) -> None:
    old = claim_execution(open_again(), run_name="r")
    new = claim_execution(open_again(), run_name="r", takeover=True, attempt="r-a2")
    with pytest.raises(OutputError, match="taken over by execution 2 on host"):
        write_bundle(open_again(), old, "checkpoints/step-000001", PARTS, {"by": "old"})
    assert list_bundles(open_again(), "checkpoints/") == []
    write_bundle(open_again(), new, "checkpoints/step-000001", PARTS, {"by": "new"})
    assert read_bundle(open_again(), "checkpoints/step-000001").facts == {"by": "new"}
    new.release("done")
    old.release("taken over")


def test_of_simultaneous_claims_exactly_one_wins(open_again: OpenAgain) -> None:
    stores = [open_again() for _ in range(5)]
    gate = threading.Barrier(len(stores))

    def claim(store: Store) -> int:
        gate.wait()
        try:
            return claim_execution(store, run_name="r").number
        except OutputError:
            return 0

    with ThreadPoolExecutor(len(stores)) as pool:
        numbers = sorted(pool.map(claim, stores))
    assert numbers == [0, 0, 0, 0, 1]


def test_rows_are_gathered_in_the_order_of_their_steps(open_again: OpenAgain) -> None:
    store = open_again()
    for step in (10, 9, 1):
        store.put(f"metrics/step-{step}.json", b'{"step": %d, "loss": 0.1}' % step)
    assert compact_rows(store, "metrics/", "metrics.jsonl") == 3
    expected = b"".join(b'{"step":%d,"loss":0.1}\n' % step for step in (1, 9, 10))
    assert open_again().get("metrics.jsonl") == expected
