"""Bundles: damaged, interrupted, replaced, pruned."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from fakes.faulty_store import FakeClock, FaultyBackend, faulty_store
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.errors import OutputError, StorageError
from orbit_runtime.storage import (
    Content,
    CorruptBundle,
    Execution,
    NotFound,
    Store,
    claim_execution,
    compact_rows,
    list_bundles,
    newest_readable,
    open_store,
    part_key,
    prune_bundles,
    read_bundle,
    standing_content,
    standing_parts,
    withdraw_bundle,
    write_bundle,
    write_parts,
)
from orbit_runtime.storage.bundles import Pruning, choose_pruning
from orbit_runtime.storage.store import STREAM_BYTES

PREFIX = "checkpoints/step-000002"


class KilledError(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it."""


def a_store() -> tuple[Store, FaultyBackend, Execution]:
    clock, backend = FakeClock(), FaultyBackend()
    store = faulty_store(backend, clock)
    return store, backend, claim_execution(store, run_name="r", clock=clock)


def next_execution(store: Store) -> Execution:
    return claim_execution(store, run_name="r", clock=store.clock, takeover=True)


def test_parts_come_first_and_the_manifest_last_after_the_fence() -> None:
    store, backend, execution = a_store()
    backend.calls.clear()
    write_bundle(store, execution, PREFIX, {"a.bin": b"1", "b.bin": b"2"}, {})
    assert sorted(backend.calls[1:3]) == [("put", f"{PREFIX}/a-e000001.bin"), ("put", f"{PREFIX}/b-e000001.bin")]
    fence = [("list", "executions"), ("get", "executions/000001.json")]
    assert backend.calls[3:] == [*fence, ("put", f"{PREFIX}/manifest.json")]


def test_the_manifest_is_what_the_documentation_says() -> None:
    store, _, execution = a_store()
    write_bundle(store, execution, PREFIX, {"a.tar.gz": b"1"}, {"step": 2})
    assert json.loads(store.get(f"{PREFIX}/manifest.json")) == {
        "format": 2,
        "kind": "checkpoint",
        "execution": 1,
        "parts": {
            "a.tar.gz": {
                "key": f"{PREFIX}/a-e000001.tar.gz",
                "bytes": 1,
                "pieces": [[1, "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"]],
            }
        },
        "facts": {"step": 2},
        "written": 1_000_000.0,
    }


def test_plain_names_are_kept_for_readers_that_expect_them() -> None:
    store, _, execution = a_store()
    write_bundle(store, execution, "adapters/policy-v1", {"adapter_model.safetensors": b"1"}, {}, plain_names=True)
    assert store.get("adapters/policy-v1/adapter_model.safetensors") == b"1"
    assert read_bundle(store, "adapters/policy-v1").manifest.kind == "adapter"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s: s.delete([f"{PREFIX}/a-e000001.bin"]), "a-e000001.bin is missing"),
        (lambda s: s.put(f"{PREFIX}/a-e000001.bin", b"12"), "has 2 bytes instead of 4"),
        (lambda s: s.put(f"{PREFIX}/a-e000001.bin", b"1235"), "a-e000001.bin was changed"),
        (lambda s: s.put(f"{PREFIX}/manifest.json", b"{"), "is not a manifest"),
        (lambda s: s.put(f"{PREFIX}/manifest.json", b"[]"), "is not a manifest"),
        (lambda s: s.put(f"{PREFIX}/manifest.json", b'{"format": 1, "parts": []}'), "is not a manifest"),
        (lambda s: s.put(f"{PREFIX}/manifest.json", b"\xff\xfe"), "is not a manifest"),
        (lambda s: s.put(f"{PREFIX}/manifest.json", b'{"format": 3}'), "has format 3, this version reads 2"),
    ],
)
def test_damage_is_named_and_the_bundle_before_is_used(damage: Callable[[Store], None], words: str) -> None:
    store, _, execution = a_store()
    write_bundle(store, execution, "checkpoints/step-000001", {"a.bin": b"0"}, {"step": 1})
    write_bundle(store, execution, PREFIX, {"a.bin": b"1234"}, {"step": 2})
    damage(store)
    for in_place in (False, True):
        with pytest.raises(CorruptBundle, match=words):
            read_bundle(store, PREFIX, in_place=in_place)
        bundle, skipped = newest_readable(store, "checkpoints/", in_place=in_place)
        assert bundle is not None
        assert bundle.facts == {"step": 1}
        assert len(skipped) == 1
        assert words in skipped[0]
    # The step is done again over the damaged one, by the same execution and by a later one.
    write_bundle(store, execution, PREFIX, {"a.bin": b"again"}, {"step": 2})
    assert read_bundle(store, PREFIX).parts == {"a.bin": b"again"}
    damage(store)
    write_bundle(store, next_execution(store), PREFIX, {"a.bin": b"again"}, {"step": 2})
    assert read_bundle(store, PREFIX).parts == {"a.bin": b"again"}


def test_parts_that_are_read_in_place_are_verified_in_windows_and_held_by_nobody() -> None:
    store, backend, execution = a_store()
    # Of four pieces: more than two windows.
    large = bytes(range(256)) * ((3 * STREAM_BYTES + 512) // 256)
    parts = {"a.bin": large, "b.bin": b"", "c.bin": b"c"}
    write_bundle(store, execution, PREFIX, parts, {})
    backend.calls.clear()
    bundle = read_bundle(store, PREFIX, in_place=True)
    assert ("get", f"{PREFIX}/a-e000001.bin") not in backend.calls
    assert {name: bytes(bundle.parts[name]) for name in bundle.parts} == parts
    for place in (0, STREAM_BYTES, len(large) - 1):
        damaged = bytearray(large)
        damaged[place] ^= 1
        store.put(f"{PREFIX}/a-e000001.bin", bytes(damaged))
        start = place // STREAM_BYTES * STREAM_BYTES
        with pytest.raises(CorruptBundle, match=f"its bytes {start} to"):
            read_bundle(store, PREFIX, in_place=True)
    store.put(f"{PREFIX}/a-e000001.bin", large + b"more")
    with pytest.raises(CorruptBundle, match=f"instead of {len(large)}"):
        read_bundle(store, PREFIX, in_place=True)


def test_parts_that_another_process_wrote_are_listed_and_not_written() -> None:
    store, backend, execution = a_store()
    key = part_key(PREFIX, "a.bin", execution.number)
    part = write_parts(store, {key: Content(4, lambda: [b"1234"])})[key]
    backend.calls.clear()
    write_bundle(store, execution, PREFIX, {"a.bin": standing_content(part)}, {})
    assert ("put", key) not in backend.calls
    assert read_bundle(store, PREFIX).parts == {"a.bin": b"1234"}
    assert standing_parts(store, PREFIX, execution) == {"a.bin": part}
    later = next_execution(store)
    assert standing_parts(store, PREFIX, later) == {"a.bin": part}
    with pytest.raises(OutputError):
        withdraw_bundle(store, execution, PREFIX)
    withdraw_bundle(store, later, PREFIX)
    assert standing_parts(store, PREFIX, later) == {}
    write_bundle(store, later, PREFIX, {"a.bin": b"1"}, {})
    with pytest.raises(OutputError):
        standing_parts(store, PREFIX, execution)


def test_a_manifest_that_points_outside_its_folder_is_not_followed() -> None:
    store, _, execution = a_store()
    store.put("secret", b"1")
    write_bundle(store, execution, PREFIX, {"a.bin": b"1"}, {})
    manifest = json.loads(store.get(f"{PREFIX}/manifest.json"))
    for key in ("secret", f"{PREFIX}/../../secret"):
        manifest["parts"]["a.bin"]["key"] = key
        store.put(f"{PREFIX}/manifest.json", json.dumps(manifest).encode())
        with pytest.raises(CorruptBundle, match="outside of its folder"):
            read_bundle(store, PREFIX)


def test_nothing_readable_is_no_bundle_with_every_reason() -> None:
    store, _, _ = a_store()
    assert newest_readable(store, "checkpoints/") == (None, ())
    store.put(f"{PREFIX}/a-e000001.bin", b"parts without a manifest")
    assert newest_readable(store, "checkpoints/") == (None, ())
    with pytest.raises(NotFound):
        read_bundle(store, PREFIX)
    store.put(f"{PREFIX}/manifest.json", b"")
    assert newest_readable(store, "checkpoints/") == (None, (f"{PREFIX}/manifest.json is not a manifest",))


@pytest.mark.parametrize("plain_names", [False, True])
@pytest.mark.parametrize("same_execution", [False, True])
def test_a_kill_at_any_call_leaves_the_old_bundle_the_new_one_or_none(plain_names: bool, same_execution: bool) -> None:
    """Killed before each call in turn, while one bundle replaces another of the same name."""
    new = {"a.bin": b"new a", "b.bin": b"new b"}
    seen = set()
    for calls_before_kill in range(20):
        store, backend, execution = a_store()
        write_bundle(store, execution, PREFIX, {"a.bin": b"old a", "b.bin": b"old b"}, {}, plain_names=plain_names)
        writer = execution if same_execution else next_execution(store)
        left = calls_before_kill

        def count_down(key: str) -> None:
            nonlocal left
            if left == 0:
                raise KilledError
            left -= 1

        backend.hooks = dict.fromkeys(("put", "get", "list", "delete"), count_down)
        try:
            write_bundle(store, writer, PREFIX, new, {}, plain_names=plain_names)
            finished = True
        except KilledError:
            finished = False
        backend.hooks = {}
        bundle, skipped = newest_readable(store, "checkpoints/")
        assert skipped == (), "a kill must never leave a manifest above parts that are not its own"
        assert not finished or (bundle is not None and bundle.parts == new)
        seen.add(bytes(bundle.parts["a.bin"]) if bundle else b"none")
        if finished:
            break
        write_bundle(store, next_execution(store), PREFIX, new, {}, plain_names=plain_names)
        assert read_bundle(store, PREFIX).parts == new
    assert finished
    # Numbered names never pass through "none": the old bundle stands until the new manifest replaces it.
    in_place = plain_names or same_execution
    assert seen == ({b"old a", b"none", b"new a"} if in_place else {b"old a", b"new a"})


def test_a_bundle_written_twice_with_the_same_bytes_is_never_without_manifest() -> None:
    store, backend, execution = a_store()
    write_bundle(store, execution, "adapters/policy-v1", {"a.bin": b"1"}, {}, plain_names=True)
    backend.calls.clear()
    write_bundle(store, next_execution(store), "adapters/policy-v1", {"a.bin": b"1"}, {}, plain_names=True)
    assert "delete" not in {call for call, _ in backend.calls}
    assert read_bundle(store, "adapters/policy-v1").manifest.execution == 2


def test_facts_that_are_no_json_are_refused() -> None:
    store, _, execution = a_store()
    with pytest.raises(ValueError, match="JSON"):
        write_bundle(store, execution, PREFIX, {}, {"loss": float("nan")})
    assert list_bundles(store, "checkpoints/") == []


def test_bundles_are_ordered_by_number_not_by_letters() -> None:
    store, _, execution = a_store()
    for version in (9, 10, 100):
        write_bundle(store, execution, f"adapters/policy-v{version}", {}, {})
    store.put("adapters/policy-v100/deeper/manifest.json", b"not a bundle of this level")
    assert list_bundles(store, "adapters") == [f"adapters/policy-v{version}/" for version in (100, 10, 9)]


def test_what_a_user_puts_beside_bundles_is_neither_the_newest_nor_pruned() -> None:
    store, _, execution = a_store()
    own = [f"adapters/{name}/manifest.json" for name in ("merged", "policy-v2.bak", "policy-v2_copy", "sums-3")]
    store.put_many([(key, b"{}") for key in own])
    for version in (1, 2):
        write_bundle(store, execution, f"adapters/policy-v{version}", {}, {})
    assert list_bundles(store, "adapters/") == ["adapters/policy-v2/", "adapters/policy-v1/"]
    prune_bundles(store, "adapters/", 1)
    assert store.list("adapters/") == sorted([*own, "adapters/policy-v2/manifest.json"])


STEPS = st.dictionaries(st.integers(0, 40), st.booleans(), max_size=12)


@given(steps=STEPS, keep=st.integers(0, 5), newest=st.none() | st.integers(0, 40), spared=st.sets(st.integers(0, 40)))
def test_pruning_never_takes_what_a_resume_needs(
    steps: dict[int, bool], keep: int, newest: int | None, spared: set[int]
) -> None:
    """`steps` says of each whether its manifest is there."""
    keys = [f"c/step-{step}/part" for step in steps]
    keys += [f"c/step-{step}/manifest.json" for step, complete in steps.items() if complete]
    named = [f"c/step-{step}" for step in spared]
    choice = choose_pruning(keys, keep, newest=None if newest is None else f"c/step-{newest}", spared=named)
    gone = {int(key.split("/")[1].removeprefix("step-")) for key in (*choice.manifests, *choice.parts)}
    counted = [step for step in steps if newest is None or step <= newest]
    complete = sorted((step for step in counted if steps[step]), reverse=True)
    kept = [*(complete if keep == 0 else complete[: max(1, keep)]), *spared]
    assert gone.isdisjoint(kept)
    assert {step for step in complete if step not in kept} <= gone
    top = complete[0] if complete else -1
    assert gone == {step for step in counted if step < top and step not in kept}
    assert all(key.endswith("manifest.json") for key in choice.manifests)
    assert not any(key.endswith("manifest.json") for key in choice.parts)


def test_a_good_checkpoint_does_not_make_room_for_a_corrupt_one_above_it() -> None:
    """Fallen back from step 3 to step 1, the run writes step 2 while step 3 still stands, damaged."""
    keys = [f"c/step-{step}/manifest.json" for step in (1, 2, 3)]
    assert choose_pruning(keys, 1, newest="c/step-2") == Pruning(("c/step-1/manifest.json",), ())
    assert choose_pruning(keys, 2, newest="c/step-2") == Pruning((), ())


def test_a_prune_that_is_killed_between_manifests_and_parts_is_finished_by_the_next() -> None:
    store, backend, execution = a_store()
    for step in (1, 2, 3):
        write_bundle(store, execution, f"checkpoints/step-{step}", {"a.bin": b"1"}, {})
    deletes = 0

    def kill_at_second(key: str) -> None:
        nonlocal deletes
        deletes += 1
        if deletes == 2:
            raise KilledError

    backend.hooks["delete"] = kill_at_second
    with pytest.raises(KilledError):
        prune_bundles(store, "checkpoints/", 1)
    backend.hooks = {}
    assert newest_readable(store, "checkpoints/")[1] == ()
    assert list_bundles(store, "checkpoints/") == ["checkpoints/step-3/"]
    assert "checkpoints/step-1/a-e000001.bin" in store.list()
    prune_bundles(store, "checkpoints/", 1)
    assert store.list("checkpoints/") == ["checkpoints/step-3/a-e000001.bin", "checkpoints/step-3/manifest.json"]


def test_a_row_that_is_no_json_is_named() -> None:
    store, _, _ = a_store()
    store.put("metrics/step-1.json", b"{")
    with pytest.raises(StorageError, match=r"metrics/step-1\.json is not JSON"):
        compact_rows(store, "metrics/", "metrics.jsonl")
    assert not store.exists("metrics.jsonl")


def test_rows_may_be_gathered_while_there_are_none(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert compact_rows(store, "metrics/", "metrics.jsonl") == 0
    assert store.get("metrics.jsonl") == b""


def test_execution_numbers_rise() -> None:
    store, _, first = a_store()
    numbers = [first.number, *(next_execution(store).number for _ in range(11))]
    assert all(later == earlier + 1 for earlier, later in pairwise(numbers))
