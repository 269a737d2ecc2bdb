"""What the plug-in tells of a pass: copied at once, digested later, and read by whoever waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.state import CONFIG_FILE, MODEL_FILE, PEFT_PREFIX, files_digest
from orbit_runtime.rollout.taps import FACTS, asked_facts
from orbit_runtime.sglang_plugin import readback, taps

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


def described(taken: list[readback.Taken]) -> dict[str, dict[str, Any]]:
    return readback.describe(taken, [readback.tell(taken, is_alone=True)])


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


class Held:
    """Facts that are worked out when the test says so."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._facts = facts

    def __call__(self, *_: Collection[str]) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            self.begun.set()
            assert self.go.wait(30)
            return self._facts

        return make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where both sides look."""
    monkeypatch.setenv(taps.VARIABLE, str(tmp_path))
    return tmp_path


def passed(*adapters: str) -> tuple[Any, Any]:
    """A runner that knows two adapters, and its pass with these."""
    known = {f"key of {name}": SimpleNamespace(lora_name=name) for name in ("policy-v1", "policy-v2")}
    runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=known))
    return runner, SimpleNamespace(lora_ids=[None, *(f"key of {name}" for name in adapters)])


def test_what_is_told_is_of_the_newest_pass_though_an_older_one_was_begun_for_the_same_request(folder: Path) -> None:
    older, newer = Held({"of": "older"}), Held({"of": "newer"})

    async def ask() -> Any:
        with asked_facts(folder, ["policy-v2"]) as told:
            taps.tell(*passed("policy-v1", "policy-v2"), older)
            taps.tell(*passed("policy-v2"), newer)
            waiting = asyncio.create_task(told())
            older.go.set()
            assert await asyncio.to_thread(newer.begun.wait, 30)
            await asyncio.sleep(0.05)
            assert not waiting.done()
            newer.go.set()
            return await waiting

    assert asyncio.run(ask()) == {"of": "newer"}
    assert not [*folder.iterdir()]


def test_what_stands_in_other_slots_is_told_with_a_pass_that_does_not_use_it(folder: Path) -> None:
    taken = []

    def take(names: Collection[str], standing: Collection[str]) -> Callable[[], dict[str, Any]]:
        taken.append((list(names), list(standing)))
        return dict

    async def ask() -> Any:
        with asked_facts(folder, ["policy-v2"], standing=["policy-v1"]) as told:
            taps.tell(*passed("policy-v1"), take)
            taps.tell(*passed("policy-v2"), take)
            return await told()

    assert asyncio.run(ask()) == {}
    assert taken == [(["policy-v2"], ["policy-v1"])]


def test_nobody_waits_for_a_pass_without_the_adapters_or_for_an_answer_to_somebody_else(folder: Path) -> None:
    facts = Held({"of": "the first"})
    facts.go.set()

    async def ask() -> list[Any]:
        found = []
        with asked_facts(folder, ["policy-v2"]) as told:
            taps.tell(*passed("policy-v1"), facts)
            found.append(await told())
            taps.tell(*passed("policy-v2"), facts)
            found.append(await told())
            left = (folder / FACTS).read_bytes()
        with asked_facts(folder, ["policy-v2"]) as told:
            (folder / FACTS).write_bytes(left)
            found.append(await told())
        return found

    assert asyncio.run(ask()) == [None, {"of": "the first"}, None]
