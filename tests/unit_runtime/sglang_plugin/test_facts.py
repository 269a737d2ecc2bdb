"""What the plug-in tells of a pass: copied at once, digested later, and read by whoever waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.buffer import MemoryOpening
from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, PEFT_PREFIX, files_digest
from orbit_runtime.rollout.taps import asked_facts
from orbit_runtime.sglang_plugin import readback, taps
from orbit_runtime.sglang_plugin.readback import RankReport
from orbit_runtime.sglang_plugin.shards import ShardPiece, SharedTensor
from orbit_runtime.workers.servers.protocol import TAPS_VARIABLE

RANK, WIDTH = 2, 4
NAME = "model.layers.0.mlp.down_proj"
SETTINGS = b"{}\n"


def manager(folder: Path) -> Any:
    """What the plug-in reads of SGLang's: one layer with two slots, an adapter in the second."""
    (folder / CONFIG_FILE).write_bytes(SETTINGS)
    layer = SimpleNamespace(A_buffer=torch.zeros(2, RANK, WIDTH), B_buffer=torch.zeros(2, WIDTH, RANK))
    layer.A_buffer[1] = torch.arange(RANK * WIDTH).view(RANK, WIDTH)
    layer.B_buffer[1] = torch.arange(RANK * WIDTH).view(WIDTH, RANK) - 3
    config = SimpleNamespace(r=RANK, lora_alpha=2 * RANK, path=str(folder), hf_config={})
    return SimpleNamespace(
        lora_refs={"key": SimpleNamespace(lora_name="policy-v1", lora_path=str(folder))},
        loras={"key": SimpleNamespace(config=config, scaling=2.0)},
        lora_modules=[{NAME: layer}],
        memory_pool=SimpleNamespace(uid_to_buffer_id={"key": 1}, get_buffer_id=lambda key: 1),
        lora_backend=SimpleNamespace(batch_info=SimpleNamespace(scalings=torch.tensor([0.0, 2.0]))),
        experts_shared_outer_loras=False,
    )


def digest_of(layer: Any) -> str:
    """Of the files that hold what stands in the second slot."""
    tensors = {f"{PEFT_PREFIX}{NAME}.lora_{kind}.weight": getattr(layer, f"{kind}_buffer")[1] for kind in "AB"}
    return files_digest({MODEL_FILE: tensorfile.dump(tensors, torch.bfloat16), CONFIG_FILE: SETTINGS})


def described(adapters: list[readback.HeldAdapter]) -> dict[str, dict[str, Any]]:
    return readback.describe(adapters, [readback.report_adapters(adapters, is_alone=True)])


def test_digests_are_of_the_moment_at_which_the_slot_was_read_however_late_they_are_made(tmp_path: Path) -> None:
    found = manager(tmp_path)
    layer = found.lora_modules[0][NAME]
    expected = digest_of(layer)
    readback.note_batch(found, ["key"])
    before = readback.take_adapters(found, ["policy-v1"])
    layer.B_buffer[1] += 1
    (told,) = described(before).values()
    assert told["slot_digest"] == expected != digest_of(layer)
    (now,) = described(readback.take_adapters(found)).values()
    assert now["slot_digest"] == digest_of(layer)
    assert None is not told["applied_digest"] != now["applied_digest"]
    assert readback.take_adapters(found, ["policy-v2"]) == []
    (beside,) = described(readback.take_adapters(found, ["policy-v2"], ["policy-v1"])).values()
    assert (beside["slot_digest"], beside["applied_digest"]) == (digest_of(layer), None)


TOKENS = [5, 6, 7]
OTHERS = [5, 6, 8, 9]


class Held:
    """Facts that are worked out when the test says so."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[tuple[list[str], list[str]]] = []

    def take(self, _: Any, names: Collection[str], standing: Collection[str]) -> Held:
        self.asked.append((list(names), list(standing)))
        return self

    def own(self) -> dict[str, Any]:
        assert self.go.wait(30)
        return {"rank": taps.ranks.own_rank()}

    def received(self, own: dict[str, Any]) -> dict[str, Any]:
        return own | {"received": True}

    def facts(self, every: list[Any]) -> dict[str, Any]:
        return {"every": every}


@pytest.fixture
def held() -> Held:
    found = Held()
    found.go.set()
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where both sides look."""
    monkeypatch.setenv(TAPS_VARIABLE, str(tmp_path))
    be_rank(monkeypatch, 0, 1)
    return tmp_path


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    monkeypatch.setattr(taps.ranks, "own_rank", lambda: rank)
    monkeypatch.setattr(taps.ranks, "count", lambda: count)


def passed(*readings: tuple[str | None, list[int]], extends: bool = True) -> tuple[Any, Any]:
    """A runner that knows two adapters, and its pass with these."""
    known = {f"key of {name}": SimpleNamespace(lora_name=name) for name in ("policy-v1", "policy-v2")}
    runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=known))
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extends),
        input_ids=torch.tensor([token for _, tokens in readings for token in tokens]),
        extend_seq_lens_cpu=[len(tokens) for _, tokens in readings],
        lora_ids=[name and f"key of {name}" for name, _ in readings],
    )
    return runner, batch


def test_whoever_has_the_readings_waits_for_what_is_worked_out_beside_the_passes_that_follow(folder: Path) -> None:
    held = Held()

    async def ask() -> Any:
        with asked_facts(folder, TOKENS, ["policy-v2"], standing=["policy-v1"]) as told:
            taps.tell(*passed((None, TOKENS), ("policy-v2", OTHERS), ("policy-v2", TOKENS)), held.take)
            waiting = asyncio.create_task(told())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            held.go.set()
            return await waiting

    assert asyncio.run(ask()) == {"every": [{"rank": 0}]}
    assert held.asked == [(["policy-v2"], ["policy-v1"])]
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    "other",
    [
        passed(("policy-v1", TOKENS), ("policy-v2", OTHERS)),
        passed(("policy-v2", TOKENS[:2]), ("policy-v2", TOKENS[2:])),
        passed(("policy-v2", [*TOKENS, 1])),
        passed(("policy-v2", TOKENS), extends=False),
        passed(("policy-v2", [])),
    ],
    ids=["another adapter's", "in two parts", "longer", "decoding", "from the cache"],
)
def test_a_pass_that_does_not_read_the_tokens_whole_under_the_adapter_tells_nothing(
    folder: Path, held: Held, other: tuple[Any, Any]
) -> None:
    async def ask() -> Any:
        with asked_facts(folder, TOKENS, ["policy-v2"]) as told:
            taps.tell(*other, held.take)
            return await told()

    assert asyncio.run(ask()) is None
    assert held.asked == []


def test_one_pass_answers_a_request_and_the_next_request_is_answered_anew(folder: Path, held: Held) -> None:
    async def ask() -> list[Any]:
        found = []
        for _ in range(2):
            with asked_facts(folder, TOKENS, ["policy-v2"]) as told:
                for _ in range(3):
                    taps.tell(*passed(("policy-v2", TOKENS)), held.take)
                found.append(await told())
        taps.tell(*passed(("policy-v2", TOKENS)), held.take)
        return found

    assert asyncio.run(ask()) == [{"every": [{"rank": 0}]}] * 2
    assert len(held.asked) == 2


def test_the_first_rank_waits_for_what_the_others_tell_of_the_same_pass(
    folder: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> Any:
        with asked_facts(folder, TOKENS, ["policy-v2"]) as told:
            be_rank(monkeypatch, 1, 2)
            taps.tell(*passed(("policy-v2", TOKENS)), held.take)
            await asyncio.to_thread(taps._worker.submit(int).result)
            assert await told() is None, "rank 0 did not say yet that it will tell"
            be_rank(monkeypatch, 0, 2)
            # Two processes, each with an answer of its own.
            taps._answered.clear()
            taps.tell(*passed(("policy-v2", TOKENS)), held.take)
            return await told()

    assert asyncio.run(ask()) == {"every": [{"rank": 0}, {"rank": 1, "received": True}]}
    assert not [*folder.iterdir()]


def test_a_rank_that_tells_nothing_is_said_to(folder: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 0, 2)

    async def ask() -> Any:
        with asked_facts(folder, TOKENS, ["policy-v2"]) as told:
            request = folder / taps.FACTS_REQUEST
            asked = json.loads(request.read_text())
            # Half of what the client itself waits; with 10 GB of adapters it is that much more.
            assert asked["seconds"] == 30.0
            request.write_text(json.dumps(asked | {"seconds": 0.05}))
            taps.tell(*passed(("policy-v2", TOKENS)), held.take)
            return await told()

    (_, silent) = asyncio.run(ask())["every"]
    assert "reported nothing of the pass" in silent["error"]


def test_a_report_of_another_rank_is_what_it_sent_and_calls_nothing(tmp_path: Path) -> None:
    lent = ShardPiece("q.A", SharedTensor(64, (2, 3), torch.bfloat16), axis=1, part=1)
    sent = ShardPiece("q.B", torch.arange(6.0).view(2, 3))
    copy = ShardPiece("q.R", "digest", is_copy=True)
    report = RankReport(1, None, 0.5, "mark", {0: [lent, sent, copy]}, MemoryOpening("/proc/1/fd/7", "memory"))
    own = {"unhooked": ["a"], "reports": {"policy-v2": report}, "error": None}

    (tmp_path / "report").write_bytes(pickle.dumps(own))
    told = taps._receive(tmp_path / "report", 1.0)
    found = told["reports"]["policy-v2"]
    first, second, third = found.pieces[0]
    assert (told["unhooked"], told["error"]) == (["a"], None)
    assert (found.slot, found.passed, found.scaling, found.mark) == (1, None, 0.5, "mark")
    assert found.opening == report.opening
    assert (first.data, first.axis, first.part) == (lent.data, 1, 1)
    assert torch.equal(second.data, sent.data)
    assert (third.data, third.is_copy) == ("digest", True)

    (tmp_path / "report").write_bytes(pickle.dumps(own | {"error": Calls(tmp_path / "called")}))
    refused = taps._receive(tmp_path / "report", 1.0)
    assert refused == {"unhooked": [], "reports": {}, "error": "its report cannot be read: KeyError"}
    assert not [*tmp_path.iterdir()]


@dataclass
class Calls:
    """Makes a folder where it is unpickled."""

    folder: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_the_longest_wait_for_facts_follows_from_the_bytes_that_are_hashed(folder: Path) -> None:
    with asked_facts(folder, TOKENS, ["policy-v2"], num_bytes=10_000_000_000):
        assert json.loads((folder / taps.FACTS_REQUEST).read_text())["seconds"] == 30.0 + 100.0
