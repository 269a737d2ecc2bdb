"""Servers that the inference process starts: SGLang by hand over a real model, lost and found in every way.

A real SGLang is in `tests/engines/test_three_processes.py`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.errors import EngineDiedError, GateError, ModelError
from orbit_runtime.loop.run import RunResult, run
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.rollout.transport import FolderMailbox
from orbit_runtime.services.calls import ServerCalls
from orbit_runtime.services.host import Host
from orbit_runtime.services.side_manifest import SideManifest, common_facts
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import Store, open_store
from orbit_runtime.storage.cache import Cache
from tests.integration.killing import small_manifest, timeless_rows
from tests.integration.policy_server import PolicyServer
from tests.integration.three_processes import Side, remote_sides, run_apart

pytestmark = pytest.mark.timeout(600)


class Inference(Side):
    """An inference process whose server ends with it."""

    def __init__(self, manifest: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.made: list[PolicyServer] = []
        super().__init__("inference", manifest)

    @property
    def server(self) -> PolicyServer:
        return self.made[-1]

    def build(self, asked: SideManifest) -> Host:
        self.made.append(PolicyServer())
        self.server.start()
        desk = FolderMailbox(self.folder / f"process-{len(self.made)}")
        calls = ServerCalls([self.server], desk)  # type: ignore[list-item]
        weights = cached_weights_digest(asked.folder, Cache(self.folder))
        facts = {**common_facts("inference", asked, weights, {}), "servers": 1}
        return Host(facts, calls.calls(), calls.reset, calls.looks())

    def kill(self) -> None:
        super().kill()
        self.server.kill()


@pytest.fixture
def asked() -> dict[str, Any]:
    manifest = small_manifest(steps=5, every_steps=2)
    manifest["spec"]["rollout"] |= {"engine": "SGLang", "adapterTransport": "File"}
    return manifest


def sides_of(asked: dict[str, Any], folder: Path) -> dict[str, Side]:
    return {"trainer": Side("trainer", asked), "inference": Inference(asked, folder / "inference")}


def proven(store: Store, steps: int) -> dict[str, Any]:
    """The report of a run that ended, with every row there and every publish proven."""
    report: dict[str, Any] = json.loads(store.get("report.json"))
    assert report["status"] == "done"
    assert [row["step"] for row in timeless_rows(store)] == list(range(1, steps + 1))
    assert report["publishes"] == report["publishes_proven"]
    return report


@pytest.mark.long
def test_rows_are_those_of_one_process_and_a_second_run_finds_the_servers_empty(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    outside = PolicyServer()
    outside.start()
    attached = json.loads(json.dumps(asked))
    attached["spec"]["rollout"] |= {"engine": "OpenAI", "endpoints": [{"url": outside.url}]}
    del attached["spec"]["rollout"]["adapterTransport"]
    run(OrbitRun.model_validate(attached), out=str(tmp_path / "one"), progress=SilentProgress())
    outside.stop()
    sides = sides_of(asked, tmp_path)
    try:
        for name in ("first", "second"):
            assert run_apart(asked, tmp_path / name, sides).ended == "done"
        inference = sides["inference"]
        assert isinstance(inference, Inference)
        assert (len(inference.made), inference.server.starts) == (1, 1), "the second run found the same server"
    finally:
        for side in sides.values():
            side.kill()
    one = timeless_rows(open_store(str(tmp_path / "one")))
    assert timeless_rows(open_store(str(tmp_path / "first"))) == one
    assert timeless_rows(open_store(str(tmp_path / "second"))) == one


LOST: dict[str, Callable[[dict[str, Side]], None]] = {
    "server": lambda sides: sides["inference"].server.kill(),  # type: ignore[attr-defined]
    "inference": lambda sides: (sides["inference"].kill(), sides["inference"].start()),  # type: ignore[func-returns-value, return-value]
    "trainer": lambda sides: (sides["trainer"].kill(), sides["trainer"].start()),  # type: ignore[func-returns-value, return-value]
}


def test_whatever_is_lost_every_step_is_there_and_every_publish_is_proven(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    asked["spec"]["training"]["steps"] = 8
    sides, out = sides_of(asked, tmp_path), tmp_path / "run"
    lost: list[str] = []

    def lose() -> None:
        for step, name in enumerate(["server", "inference", "trainer", "inference", "server"], 1):
            until = time.monotonic() + 300
            while not (out / f"metrics/step-{step:06d}.json").exists() and time.monotonic() < until:
                time.sleep(0.005)
            LOST[name](sides)
            lost.append(name)

    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    try:
        assert run_apart(asked, out, sides).ended == "done"
    finally:
        thread.join()
        for side in sides.values():
            side.kill()
    assert len(lost) == 5
    report = proven(open_store(str(out)), 8)
    assert report["publishes"] == 9
    inference = sides["inference"]
    assert isinstance(inference, Inference)
    assert len(inference.made) == 3


def refused(asked: dict[str, Any], out: Path, sides: dict[str, Side]) -> RunResult:
    spec = OrbitRun.model_validate(asked)
    return run(spec, out=str(out), progress=SilentProgress(), sides=remote_sides(sides, patience=1.0))


def test_a_server_with_another_adapter_or_other_weights_and_one_that_never_comes_back(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    sides = sides_of(asked, tmp_path)
    inference = sides["inference"]
    assert isinstance(inference, Inference)
    try:
        weights = inference.host._facts["base_digest"]
        inference.host._facts["base_digest"] = "tree:another"
        with pytest.raises(ModelError, match="serves other weights"):
            refused(asked, tmp_path / "weights", sides)
        assert not (tmp_path / "weights").exists()
        inference.host._facts["base_digest"] = weights

        load = inference.server._load

        def spoiled(name: str, folder: Path) -> None:
            inference.server.serves_stale = name == "policy-v1"
            load(name, folder)

        inference.server._load = spoiled  # type: ignore[method-assign]
        with pytest.raises(GateError, match="policy version 1 could not be proven live") as caught:
            refused(asked, tmp_path / "stale", sides)
        assert "`orbit parity`" in str(caught.value)
        inference.server._load = load  # type: ignore[method-assign]
        inference.server.serves_stale = False

        asked["spec"]["training"]["steps"] = 50
        mark = tmp_path / "gone/metrics/step-000001.json"
        thread = threading.Thread(target=_kill_at, args=(inference, mark), daemon=True)
        thread.start()
        with pytest.raises(EngineDiedError) as died:
            refused(asked, tmp_path / "gone", sides)
        thread.join()
        assert inference.url in str(died.value)
    finally:
        for side in sides.values():
            with suppress(RuntimeError):
                side.kill()


def _kill_at(side: Side, mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.01)
    side.kill()
