"""Two real SGLang servers that get adapters in the host's memory; one is killed, or lied to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import httpx
import pytest

from orbit_runtime.adapters.files import MODEL_FILE
from orbit_runtime.adapters.ticket import NOT_ARRIVED, read_ticket
from orbit_runtime.errors import GateError
from orbit_runtime.parity.liveness import Limits, check_proofs, prove
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.transport import AdapterTransfer, Transport, shared_memory
from orbit_runtime.types import AdapterFiles
from tests.engines.servers import OFT, Adder, desk_of, post_to, start_server
from tests.engines.test_sglang_faults import canary, policy_scores
from tests.integration.engine_inputs import random_adapter

NewName = Callable[[], str]
RunInside = Callable[..., None]


class Chosen:
    """The transport that a test asks for."""

    def __init__(self) -> None:
        self.now: Transport | None = None

    def __call__(
        self, adapter: AdapterFiles, folder: Path, copies: Iterable[str]
    ) -> AbstractContextManager[AdapterTransfer | None]:
        return nullcontext() if self.now is None else self.now(adapter, folder, copies)


def spoiled(
    adapter: AdapterFiles, folder: Path, copies: Iterable[str]
) -> AbstractContextManager[AdapterTransfer | None]:
    """One bit of what it carries is another one."""
    name = max(adapter.files)
    data = bytes(adapter.files[name])
    files = {**adapter.files, name: data[:-1] + bytes([data[-1] ^ 1])}
    return shared_memory(AdapterFiles(adapter.version, files, adapter.digest), folder, copies)


@pytest.fixture(scope="module")
def chosen() -> Chosen:
    return Chosen()


@pytest.fixture(scope="module")
def pair(
    oft_adder: Adder, inside: Path, chosen: Chosen, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedEngine]:
    """It serves LoRA as well."""
    folder = tmp_path_factory.mktemp("transports")
    yield from start_server(oft_adder, folder, oft_block_size=OFT.block_size, replicas=2, transport=chosen)


@pytest.fixture
def engine(pair: ServedEngine, chosen: Chosen) -> Iterator[ServedEngine]:
    yield pair
    for name in pair.adapters():
        pair.unload_adapter(name)
    chosen.now = None


@pytest.fixture(params=["LoRA", "OFT"])
def adder(request: pytest.FixtureRequest) -> Adder:
    found: Adder = request.getfixturevalue("oft_adder" if request.param == "OFT" else "lora_adder")
    return found


def check_live(engine: ServedEngine, adder: Adder, name: str, adapter: AdapterFiles) -> None:
    """On every copy."""
    policy, tokenizer = adder
    trainer = policy_scores(policy, adapter, canary(tokenizer))
    proofs = [
        prove(adapter, name, copy, trainer, canary(tokenizer), limits=Limits(1e-3, 0.02), previous=None)[0]
        for copy in engine.copies()
    ]
    check_proofs(proofs)
    assert [proof.slot_digest for proof in proofs] == [adapter.digest] * 2


def generate(engine: ServedEngine, name: str) -> httpx.Response:
    return post_to(
        engine, "/generate", {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}, "lora_path": name}
    )


def memory_of_transports() -> list[str]:
    """What this process holds open, and what is left with a name."""
    opened = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(os.readlink(each))
    return [each for each in (*opened, *os.listdir("/dev/shm")) if "orbit" in each]


def folders_told(engine: ServedEngine, name: str) -> list[str]:
    """By copy: `ticket` where it came by the transport, else the adapter's own folder."""
    told = [engine.call(replica.facts())[name]["path"] for replica in engine.replicas]
    return [Path(each).name for each in told]


def test_a_publish_arrives_without_files_is_proven_and_is_gone_when_it_is_retired(
    engine: ServedEngine, chosen: Chosen, adder: Adder, new_name: NewName
) -> None:
    chosen.now = shared_memory
    for version in (1, 2):
        name, adapter = new_name(), random_adapter(adder[0], version)
        engine.load_adapter(name, adapter)
        assert folders_told(engine, name) == ["ticket", "ticket"]
        check_live(engine, adder, name, adapter)
        assert not list(desk_of(engine).home(name).rglob(MODEL_FILE))
        assert memory_of_transports() == []
        assert read_ticket(desk_of(engine).ticket(name)) is not None
        assert generate(engine, name).status_code == 200
        engine.unload_adapter(name)
        answer = generate(engine, name)
        assert answer.status_code == 400
        assert "Failed to implicitly load" in answer.text


def test_one_that_somebody_unloaded_cannot_come_back_by_its_ticket(
    engine: ServedEngine, chosen: Chosen, lora_adder: Adder, new_name: NewName
) -> None:
    chosen.now = shared_memory
    name, adapter = new_name(), random_adapter(lora_adder[0], 3)
    engine.load_adapter(name, adapter)
    assert post_to(engine, "/unload_lora_adapter", {"lora_name": name}).status_code == 200
    answer = generate(engine, name)
    assert answer.status_code == 400
    assert NOT_ARRIVED in answer.text
    again = {"lora_name": name, "lora_path": str(engine.loaded[name].files())}
    assert post_to(engine, "/load_lora_adapter", again).status_code == 200
    check_live(engine, lora_adder, name, adapter)


def test_other_bytes_on_the_way_are_found_where_they_stand(
    engine: ServedEngine, chosen: Chosen, lora_adder: Adder, new_name: NewName
) -> None:
    chosen.now = spoiled
    name, adapter = new_name(), random_adapter(lora_adder[0], 4)
    engine.load_adapter(name, adapter)
    assert folders_told(engine, name) == ["ticket", "ticket"]
    # The last tensor of the file, of which one bit is another one.
    with pytest.raises(
        GateError, match=r"replica 0: the engine's slot holds .*layers\.3\.self_attn\.v_proj\.lora_B"
    ) as caught:
        check_live(engine, lora_adder, name, adapter)
    assert caught.value.exit_code == 84


def test_a_rotation_that_changed_on_the_way_is_refused_because_its_layer_shares_it(
    engine: ServedEngine, chosen: Chosen, oft_adder: Adder, new_name: NewName
) -> None:
    chosen.now = spoiled
    name, adapter = new_name(), random_adapter(oft_adder[0], 4)
    with pytest.raises(GateError, match=rf"refused adapter {name}: .*v_proj\.oft_R differs from .*q_proj") as caught:
        engine.load_adapter(name, adapter)
    assert caught.value.exit_code == 84
    assert engine.adapters() == ()


def test_what_differs_is_told_of_one_that_came_without_files(
    engine: ServedEngine, chosen: Chosen, lora_adder: Adder, new_name: NewName, run_inside: RunInside
) -> None:
    chosen.now = shared_memory
    name, adapter = new_name(), random_adapter(lora_adder[0], 5)
    engine.load_adapter(name, adapter)
    check_live(engine, lora_adder, name, adapter)
    code = (
        f"key = next(key for key, each in manager.lora_refs.items() if each.lora_name == {name!r})\n"
        "manager.lora_modules[0]['model.layers.0.self_attn.o_proj']"
        ".A_buffer[manager.memory_pool.uid_to_buffer_id[key]].mul_(2)\n"
    )
    run_inside(engine, code, index=1)
    with pytest.raises(GateError, match=r"replica 1: the engine's slot holds .*layers\.0\.self_attn\.o_proj\.lora_A"):
        check_live(engine, lora_adder, name, adapter)


DIES = (
    "import os, signal\nfrom orbit_runtime.sglang_plugin import adapter_loading\n"
    "def die(ticket):\n    os.killpg(0, signal.SIGKILL)\n"
    "adapter_loading.from_memory = die\n"
)


def test_a_copy_killed_while_it_maps_the_memory_comes_back_on_the_policy_and_gets_the_next_by_it(
    engine: ServedEngine, chosen: Chosen, lora_adder: Adder, new_name: NewName, run_inside: RunInside
) -> None:
    chosen.now = shared_memory
    old, new, after = (new_name() for _ in range(3))
    adapters = {name: random_adapter(lora_adder[0], seed) for seed, name in enumerate((old, new, after))}
    engine.load_adapter(old, adapters[old])
    assert folders_told(engine, old) == ["ticket", "ticket"]
    restarts = engine.replicas[1].restarts
    run_inside(engine, DIES, index=1)
    engine.load_adapter(new, adapters[new])
    assert [each.restarts for each in engine.replicas] == [0, restarts + 1]
    assert [folders_told(engine, name)[1] for name in (old, new)] == [old, new]
    for name in (old, new):
        check_live(engine, lora_adder, name, adapters[name])
    engine.load_adapter(after, adapters[after])
    assert folders_told(engine, after) == ["ticket", "ticket"]
    check_live(engine, lora_adder, after, adapters[after])
    assert memory_of_transports() == []
