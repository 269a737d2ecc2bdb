"""Adapters and states go from trainer to store to inference: the orchestrator passes addresses and digests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Buffer, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.guide import ROOT

import orbit_runtime
from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, file_pieces
from orbit_runtime.digests import cut
from orbit_runtime.errors import GateError, OrbitError, StorageError
from orbit_runtime.loop.run import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.server import HTTPServer
from orbit_runtime.services.calls import EngineCalls, TrainerCalls
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.host import Host, start_host
from orbit_runtime.services.shared_store import SharedStore, spooled, try_to_share
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Part, open_store
from orbit_runtime.types import AdapterManifest, AdapterSink, StateWriter
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.three_processes import TOKEN, Side, remote_sides, run_apart, two_sides

# --- two sides that see no store of the orchestrator's ---


@pytest.mark.parametrize(
    "blind",
    [pytest.param(("trainer",), marks=pytest.mark.long), pytest.param(("inference",), marks=pytest.mark.long)],
    ids=["trainer", "inference"],
)
def test_who_sees_no_store_gets_bytes_and_the_run_has_the_same_bits(tmp_path: Path, blind: tuple[str, ...]) -> None:
    asked = small_manifest(steps=2)
    run(OrbitRun.model_validate(asked), out=str(tmp_path / "one"), progress=SilentProgress())
    with two_sides(asked) as sides:
        for kind in blind:
            cover(sides[kind])
        run_apart(asked, tmp_path / "three", sides)
        # Continued from a checkpoint, which is read where it lies.
        longer = small_manifest(steps=3)
        run_apart(longer, tmp_path / "three", sides)
    run(OrbitRun.model_validate(longer), out=str(tmp_path / "one"), progress=SilentProgress())
    three = open_store(str(tmp_path / "three"))
    assert timeless_rows(three) == timeless_rows(open_store(str(tmp_path / "one")))
    assert not three.list("handover/")


def cover(side: Side) -> None:
    side.host._calls = {**side.host._calls, "share": lambda *_: False}


def test_a_folder_of_the_same_name_on_another_machine_is_not_shared(tmp_path: Path) -> None:
    ours, depot = open_store(str(tmp_path / "ours")), SharedStore()
    theirs = str(tmp_path / "theirs")

    def tell(_: str, uri: str, key: str, word: str) -> bool:
        return depot.share(uri.replace("ours", "theirs"), key, word)

    assert try_to_share(lambda _, *given: depot.share(*given), ours, 1)
    assert not try_to_share(tell, ours, 1)
    open_store(theirs).put("handover/e000001/other", b"a word")
    assert not try_to_share(tell, ours, 1)
    # It reads the store and writes to another one.
    reading = SharedStore()

    def half(_: str, uri: str, key: str, word: str) -> bool:
        assert reading.share(uri, key, word)
        ours.delete([f"{key}-answer"])
        return True

    assert not try_to_share(half, ours, 1)
    assert not ours.list("handover/")


def test_what_was_changed_in_the_store_is_not_loaded(tmp_path: Path) -> None:
    asked = small_manifest(steps=2)
    with two_sides(asked) as sides:
        load = sides["inference"].host._calls["load_adapter"]

        def changed(name: str, version: int, digest: str, files: Mapping[str, Any]) -> None:
            if version == 1:
                path = tmp_path / "out" / files[MODEL_FILE].key
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
            load(name, version, digest, files)

        sides["inference"].host._calls = {**sides["inference"].host._calls, "load_adapter": changed}
        with pytest.raises(OrbitError) as caught:
            run(
                OrbitRun.model_validate(asked), out=str(tmp_path / "out"), progress=SilentProgress(),
                sides=remote_sides(sides),
            )  # fmt: skip
    assert isinstance(caught.value, GateError)
    assert "adapters/policy-v1/adapter_model.safetensors is not what was written there" in str(caught.value)


def test_a_part_that_is_gone_or_another_is_named(tmp_path: Path) -> None:
    store, depot = open_store(str(tmp_path)), SharedStore()
    assert try_to_share(lambda _, *given: depot.share(*given), store, 1)
    store.put("a", b"as it was")
    (piece,) = tuple(map(piece_of, [b"as it was"]))
    assert bytes(depot.read({"x": Part("a", (piece,))})["x"]) == b"as it was"
    store.put("a", b"otherwise")
    for key in ("a", "b"):
        with pytest.raises(StorageError) as caught:
            depot.read({"x": Part(key, (piece,))})
        assert key in str(caught.value)
        assert caught.value.exit_code == 74


def piece_of(data: bytes) -> Any:
    from orbit_runtime.digests import hash_pieces

    return hash_pieces([data])[0]


# --- memory ---

BYTES = 300 << 20
ORCHESTRATOR = """
import json, resource, sys
from functools import partial
from pathlib import Path

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.storage import CheckpointParts
from orbit_runtime.loop.publish import write_adapter_bundle
from orbit_runtime.services.connection import Connection
from orbit_runtime.services.shared_store import try_to_share
from orbit_runtime.services.remote_engine import RemoteEngine
from orbit_runtime.services.remote_trainer import RemoteTrainer
from orbit_runtime.storage import claim_execution, newest_readable, open_store, write_bundle

trainer_url, inference_url, token, out, scratch = sys.argv[1:]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = open_store(out)
execution = claim_execution(store, run_name="large")
share = partial(try_to_share, store=store, execution=execution.number)
urls = {"trainer": trainer_url, "inference": inference_url}
lines = [Connection(kind, url, token, patience=30.0) for kind, url in urls.items()]
for line in lines:
    line.open(store.uri, execution.number)
trainer, engine = RemoteTrainer(lines[0], store, execution, share, Path(scratch), None), RemoteEngine(lines[1], share)
before = peak()
for version in (1, 2):
    adapter = publishable(trainer, version)
    expected_applied_digest(adapter.files, adapter.pieces)
    engine.load_adapter(f"policy-v{version}", adapter)
    write_adapter_bundle(store, execution, adapter, {"version": version})
parts = CheckpointParts("checkpoints/step-000001")
trainer.save_state(parts)
write_bundle(store, execution, parts.folder, parts.contents, {})
bundle, _ = newest_readable(store, "checkpoints/", in_place=True)
trainer.load_state(bundle.parts)
print(json.dumps({"before": before, "grew": peak() - before}))
for line in lines:
    line.close()
execution.release("done")
"""


class LargeTrainer:
    """300 MB of adapter, and as much of state; it computes nothing."""

    update = column = score = None

    def __init__(self) -> None:
        named = {"base_model.model.layer.lora_A.weight": {"dtype": "BF16", "shape": [1 << 10, BYTES >> 11],
                                                          "data_offsets": [0, BYTES]}}  # fmt: skip
        head = json.dumps(named).encode()
        head += b" " * (-len(head) % 8)
        self.data = len(head).to_bytes(8, "little") + head + bytes(BYTES)
        self.config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False}).encode()
        self.loaded = 0

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        return AdapterManifest(
            {
                CONFIG_FILE: sink.write(CONFIG_FILE, len(self.config), [self.config]),
                MODEL_FILE: sink.write(MODEL_FILE, len(self.data), file_pieces(self.data, where=MODEL_FILE)),
            }
        )

    def save_state(self, writer: StateWriter) -> None:
        writer.write("trainer.safetensors", len(self.data), partial(cut, self.data))

    def load_state(self, parts: Mapping[str, Buffer]) -> None:
        self.loaded = memoryview(parts["trainer.safetensors"]).nbytes


class LargeEngine:
    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}

    def load_adapter(self, name: str, adapter: Any) -> None:
        self.loaded[name] = memoryview(adapter.files[MODEL_FILE]).nbytes

    def abort(self) -> None: ...

    def advance(self) -> list[Any]:
        return []

    def close(self) -> None: ...


@contextmanager
def hosted(kind: str, calls: Any) -> Iterator[HTTPServer]:
    stopped = threading.Event()
    host = Host(
        {"kind": kind, "version": orbit_runtime.__version__, "identity": {}}, calls.calls(), calls.reset
    )  # fmt: skip
    server = start_host(host, "127.0.0.1", 0, TOKEN)
    threading.Thread(target=host.work, args=(stopped.is_set,), daemon=True).start()
    try:
        yield server
    finally:
        stopped.set()
        server.close()


def test_the_orchestrators_memory_does_not_grow_with_adapter_or_state(tmp_path: Path) -> None:
    trainer, engine = LargeTrainer(), LargeEngine()
    side: Any = SimpleNamespace(trainer=trainer, probing=None, base_digest=None, begin=None)
    engine_calls = EngineCalls(lambda: engine, {}, None)  # type: ignore[arg-type, return-value]
    (tmp_path / "scratch").mkdir()
    with hosted("trainer", TrainerCalls(side)) as one, hosted("inference", engine_calls) as other:
        told = subprocess.run(
            [sys.executable, "-c", ORCHESTRATOR, one.url, other.url, TOKEN, str(tmp_path / "run"),
             str(tmp_path / "scratch")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )  # fmt: skip
    assert told.returncode == 0, told.stderr
    grew = json.loads(told.stdout)["grew"] / 1024
    assert trainer.loaded == len(trainer.data)
    assert engine.loaded == {f"policy-v{version}": len(trainer.data) for version in (1, 2)}
    # Two adapters and a state that was written and read: four times 300 MB. Windows of pieces are 16 MiB each.
    assert grew < 100, f"{grew:.0f} MiB for {BYTES >> 20} MiB of adapter"


class Echo:
    def calls(self) -> dict[str, Any]:
        return {"echo": lambda data: data}

    def reset(self) -> None: ...


def test_large_bytes_go_over_http_in_chunks_and_come_back_as_they_were() -> None:
    data = bytes(range(256)) * (3 << 12) + b"end"
    with hosted("trainer", Echo()) as server:
        connection = Connection("trainer", server.url, TOKEN, patience=30.0)
        connection.open("a folder", 1)
        assert bytes(connection.call("echo", data)) == data
        assert bytes(connection.call("echo", b"")) == b""
        connection.close()


def test_what_is_large_lies_on_the_disk_and_what_is_cut_off_is_seen() -> None:
    pieces = [b"a" * (1 << 20), b"b" * 5]
    assert bytes(spooled(pieces, (1 << 20) + 5)) == b"".join(pieces)
    assert spooled([b"ab", b"c"], 3) == b"abc"
    with pytest.raises(AssertionError):
        spooled(pieces, 1 << 21)
