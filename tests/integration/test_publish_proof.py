"""Six ways to lose an adapter between trainer and engine: each stops the run at that publish, whatever its size."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.faulty_engine import FaultyEngine, drop_one, swap_two, wrong_prefix, zero_one

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT, Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.algorithms.constants import PolicyLossSettings
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import EngineDiedError, GateError, OrbitError
from orbit_runtime.loop.fault_finder import FaultFinder
from orbit_runtime.loop.publish import BackgroundWriter, PolicyVersions, Publication, Publisher
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.liveness import CHANGE_LIMITS
from orbit_runtime.policy import load_policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.spec.training import Training
from orbit_runtime.storage import claim_execution, open_store
from orbit_runtime.training import TorchTrainer, TrainerSettings
from orbit_runtime.types import AdapterManifest, AdapterSink, Sampling, Scored
from tests.integration.tiny_models import TARGETS

SETTINGS = TrainerSettings(
    Training(steps=1, learning_rate=1e-3, micro_batch_tokens=4096),
    1,
    PolicyLossSettings(),
    "Token",
    4,
    None,
    Sampling(),
    "builtin://tiny-adder",
)
ADAPTERS = {
    "LoRA": AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0),
    "OFT": AdapterConfig(type="OFT", targets=TARGETS, block_size=32),
}


class Rig:
    """A publisher over a trainer and an engine that can be told to fail."""

    def __init__(self, folder: Path, adapter: str, compute_dtype: str = "float32") -> None:
        model = builtin_folder("tiny-adder", "INT4")
        policy = load_policy(model, ADAPTERS[adapter], compute_dtype=getattr(torch, compute_dtype))
        tokenizer = ChatTokenizer(model)
        self.policy = policy
        self.masters_owner = policy.injected.masters
        self.masters = policy.injected.masters.parameters
        self.store = open_store(str(folder))
        self.execution = claim_execution(self.store, run_name="faults")
        self.trainer = TorchTrainer(policy, SETTINGS)
        self.engine = FaultyEngine(TorchEngine(policy, tokenizer, max_running_requests=8), policy.injected.layers)
        canary = (*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 5, 6, 7)
        self.publisher = Publisher(
            self.store,
            self.execution,
            BackgroundWriter(),
            self.engine,
            self.trainer,
            canary,
            CHANGE_LIMITS[compute_dtype],
            "tree:0",
            FaultFinder(self.engine, canary, compute_dtype, explain=self.trainer.explain),
        )
        self.versions = PolicyVersions(self.engine)
        self.publication: Publication | None = None

    def train(self, seed: int, scale: float) -> None:
        """Moves every master, as an optimizer update of that size would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.masters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)

    def publish(self) -> Publication:
        version = 0 if self.publication is None else self.publication.adapter.version + 1
        try:
            self.publication = self.publisher.publish(version, self.publication)
        finally:
            self.publisher.keeper.wait()
        self.versions.activate(self.publication)
        return self.publication


@pytest.fixture(params=sorted(ADAPTERS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    made = Rig(tmp_path / "run", request.param)
    made.publish()
    made.train(1, 0.02)
    made.publish()
    return made


def spoil(change: Callable, *, strict: bool = False) -> Callable[[FaultyEngine], None]:
    def plant(engine: FaultyEngine) -> None:
        engine.spoil, engine.strict = change, strict

    return plant


def stale(engine: FaultyEngine) -> None:
    engine.stale = True


def never_switches(engine: FaultyEngine) -> None:
    engine.never_switches = True


FAULTS = {
    "tensor dropped": spoil(drop_one),
    "tensor dropped, strict reader": spoil(drop_one, strict=True),
    "tensor zeroed": spoil(zero_one),
    "stale version": stale,
    "wrong name prefix": spoil(wrong_prefix),
    "wrong name prefix, strict reader": spoil(wrong_prefix, strict=True),
    "two tensors swapped": spoil(swap_two, strict=True),
    "slot never switched": never_switches,
}


class Meeting:
    """A copy that answers once all copies were asked."""

    def __init__(self, engine: FaultyEngine, name: str, all_asked: threading.Barrier, turn: threading.Lock) -> None:
        self.engine, self.name, self.all_asked, self.turn = engine, name, all_asked, turn

    def score(self, *asked: Any, **how: Any) -> list[Scored]:
        self.all_asked.wait(30)
        with self.turn:
            return self.engine.score(*asked, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_copies_are_proven_at_the_same_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.publication is not None
    all_asked, turn = threading.Barrier(3), threading.Lock()
    copies = tuple(Meeting(rig.engine, f"replica {index}", all_asked, turn) for index in range(3))
    monkeypatch.setattr(rig.engine, "copies", lambda: copies)
    rig.publication = replace(rig.publication, readings=rig.publication.readings * 3)
    rig.train(2, 0.02)
    proofs = rig.publish().proofs
    assert [proof.engine for proof in proofs] == ["replica 0", "replica 1", "replica 2"]
    assert all(proof.proven for proof in proofs)
    assert not all_asked.broken


def test_an_engine_of_its_own_loads_while_the_trainer_computes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other, so that neither could be first."""
    beside = replace(rig.publisher, loads_beside=True)
    both, load, score = threading.Barrier(2, timeout=60), rig.engine.load_adapter, rig.trainer.score

    def met(call: Callable[..., Any]) -> Callable[..., Any]:
        def meet(*given: Any) -> Any:
            both.wait()
            return call(*given)

        return meet

    monkeypatch.setattr(rig.engine, "load_adapter", met(load))
    monkeypatch.setattr(rig.trainer, "score", met(score))
    rig.train(2, 0.02)
    assert beside.publish(2, rig.publication).is_proven
    rig.publisher.keeper.wait()


def publish_without_a_load(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: OrbitError, told: type[OrbitError], words: str
) -> None:
    """Whether the engine loads beside the trainer or after it, what its load raises is told as `told`."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(rig.engine, "load_adapter", fail)
    for beside in (False, True):
        publisher = replace(rig.publisher, loads_beside=beside)
        with pytest.raises(told, match=words):
            publisher.publish(2 + beside, rig.publication)
        rig.publisher.keeper.wait()


def test_a_load_that_fails_beside_the_trainer_is_told_as_any_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "could not be proven live: the engine did not load it: no room for it"
    publish_without_a_load(rig, monkeypatch, GateError("no room for it"), GateError, words)


def test_an_engine_that_is_lost_says_nothing_about_the_adapter(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "the inference does not answer"
    publish_without_a_load(rig, monkeypatch, EngineDiedError(words), EngineDiedError, words)
    assert not [key for key in rig.store.list("parity/") if "publish-v" in key]


@pytest.mark.parametrize("scale", [0.02, 3e-4])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_stops_the_run_at_the_next_publish(rig: Rig, fault: str, scale: float) -> None:
    rig.train(2, scale)
    FAULTS[fault](rig.engine)
    with pytest.raises(GateError) as caught:
        rig.publish()
    assert caught.value.exit_code == 84
    evidence = [key for key in rig.store.list("parity/") if "publish-v2" in key]
    assert evidence, "the evidence of the failed publish is stored"
    assert json.loads(rig.store.get(evidence[0]))["proven"] is False


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_found_in_the_noise_of_bf16(fault: str, adapter: str, tmp_path: Path) -> None:
    made = Rig(tmp_path / "run", adapter, "bfloat16")
    made.publish()
    for seed in (1, 2):
        made.train(seed, 0.02)
        assert made.publish().is_proven
    made.train(3, 3e-4)
    FAULTS[fault](made.engine)
    with pytest.raises(GateError):
        made.publish()


def test_what_the_trainer_itself_applied_otherwise_is_named(rig: Rig) -> None:
    layer = "model.layers.1.mlp.down_proj"
    built = rig.trainer._policy.injected.selection.applied_masters
    honest = built[TRAINER_SLOT]

    def zeroed(*which: Any) -> dict[str, Slot]:
        slots = honest(*which)
        field = "lora_B" if isinstance(slots[layer], LoRASlot) else "rotation"
        return slots | {layer: replace(slots[layer], **{field: torch.zeros_like(getattr(slots[layer], field))})}

    rig.train(2, 0.02)
    built[TRAINER_SLOT] = zeroed
    with pytest.raises(GateError, match=rf"did not apply what was published: {layer}\.(lora_B|oft_R) is zero"):
        rig.publish()


def test_the_small_fault_is_smaller_than_the_gate_on_effects(tmp_path: Path) -> None:
    """The premise of the small scale above: only the digests can see such a fault."""
    made = Rig(tmp_path / "run", "LoRA")
    made.publish()
    made.train(1, 0.02)
    made.publish()
    made.train(2, 3e-4)
    moved = made.publish().proof.change_from_previous
    assert moved is not None
    assert 0 < moved < 10 * CHANGE_LIMITS["float32"], "sha256:0"
    made.engine.stale = True
    made.train(3, 2e-6)
    with pytest.raises(GateError) as caught:
        made.publish()
    assert "effect" not in str(caught.value)
    assert "slot holds" in str(caught.value)


def test_a_healthy_publish_is_proven_and_retires_its_predecessor(rig: Rig) -> None:
    assert rig.publication is not None
    assert rig.publication.proof.proven
    for version in range(2, 8):
        rig.train(version, 0.01)
        publication = rig.publish()
        assert publication.proof.proven
        assert publication.adapter.version == version
        assert rig.engine.adapters() == (f"policy-v{version}",)
        assert publication.proof.change_error < CHANGE_LIMITS["float32"] / 5
    manifest = json.loads(rig.store.get("adapters/policy-v7/manifest.json"))
    assert manifest["facts"]["digest"] == rig.publication.adapter.digest
    assert len(manifest["facts"]["canary"]["logprobs"]) == len(rig.publisher.canary_T)


def test_publishing_unchanged_masters_is_no_fault(rig: Rig) -> None:
    first = rig.publication
    second = rig.publish()
    assert first is not None
    assert second.adapter.digest == first.adapter.digest


def test_masters_that_change_behind_the_publish_are_noticed(rig: Rig) -> None:
    """The trainer's own pass must apply what was published, or trainer and engine would drift apart unseen."""
    trainer = rig.trainer

    class Moving:
        def __getattr__(self, name: str) -> object:
            return getattr(trainer, name)

        def publish(self, sink: AdapterSink) -> AdapterManifest:
            manifest = trainer.publish(sink)
            rig.train(9, 0.01)
            return manifest

    rig.publisher = replace(rig.publisher, trainer=Moving())  # type: ignore[arg-type]
    with pytest.raises(GateError, match="trainer's layers applied"):
        rig.publish()


@pytest.mark.long
@pytest.mark.parametrize("compute_dtype", CHANGE_LIMITS)
@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_no_false_alarm_in_250_healthy_publishes(tmp_path: Path, adapter: str, compute_dtype: str) -> None:
    """500 with both adapters: small and large updates in turn, as an optimizer makes them early and late."""
    made = Rig(tmp_path / "run", adapter, compute_dtype)
    worst = 0.0
    for version in range(250):
        made.train(version, 10 ** -(2 + version % 4))
        worst = max(worst, made.publish().proof.change_error)
    assert worst < CHANGE_LIMITS[compute_dtype] / 2, "the limit keeps its distance from healthy publishes"
