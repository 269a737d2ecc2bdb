"""Before a token is sampled: both sides agree with the adapter off, at identity, random and as it stands."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from fakes.faulty_engine import zero_one

from orbit_runtime.errors import GateError, StoppedOnRequest
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.parity.preflight import (
    GATED,
    ComparedSides,
    Preflight,
    build_sequences,
    check_preflight,
    measure_preflight,
)
from orbit_runtime.parity.statistics import TAIL_TOKENS, ParityLimits, build_limits, resolve_limit
from orbit_runtime.spec import OrbitRun
from orbit_runtime.types import Engine, Sample
from tests.fakes.held_state import hold_state
from tests.integration.killing import small_manifest
from tests.integration.test_publish_proof import Rig

SEQUENCES = [list(range(3, 3 + length)) for length in (9, 14, 6)]


def limits_of(floor: float) -> ParityLimits:
    absolute = build_limits("INT4")
    mean = resolve_limit(floor, factor=4.0, absolute=absolute.mean, widest=0.05, rounded="float32")
    return replace(absolute, mean=mean)


def measure(
    rig: Rig,
    engine: Engine | None = None,
    sampled: Mapping[int, Sequence[float]] | None = None,
    check: Callable[[], None] | None = None,
    sequences: Sequence[Sequence[int]] = SEQUENCES,
    when: str = "preflight",
) -> Preflight:
    assert rig.publication is not None
    masters = rig.masters_owner
    (result,) = measure_preflight(
        ComparedSides(
            engine or rig.engine.engine, rig.trainer, partial(masters.probing, seed=0), check or (lambda: None)
        ),
        sequences,
        adapter=rig.publication.name,
        when=when,
        limits=limits_of,
        sampled=sampled or {},
    )
    return result


@pytest.mark.parametrize("adapter", ["LoRA", "OFT"])
def test_every_state_is_measured_and_nothing_of_it_stays(
    tmp_path: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A trainer whose passes go through the model's layers: otherwise every state's difference is 0.
    monkeypatch.setattr("orbit_runtime.policy.model.Policy._passes_directly", False)
    rig = Rig(tmp_path, adapter)
    rig.train(1, 0.01)
    rig.publish()
    before = (hold_state(rig.trainer), rig.engine.engine.adapters(), rig.store.list())
    slots = {name: set(layer.slots) for name, layer in rig.engine.layers.items()}
    result = measure(rig)
    check_preflight(result)
    assert result.random_effect > 10 * result.limit, "a random adapter is plainly visible"
    assert result.random != result.identity != result.policy
    assert (hold_state(rig.trainer), rig.engine.engine.adapters(), rig.store.list()) == before
    assert {name: set(layer.slots) for name, layer in rig.engine.layers.items()} == slots
    assert set(result.to_json()) >= {*GATED, "engine_floor", "trainer_floor", "limit", "passed"}


def test_the_floor_holds_the_engine_against_what_it_sampled(tmp_path: Path) -> None:
    """Decode steps are passes of another shape than those that score."""
    rig = Rig(tmp_path, "LoRA")
    publication = rig.publish()
    (scored,) = rig.engine.engine.score(SEQUENCES[1], [publication.name])
    result = measure(rig, sampled={1: [each + 1e-4 for each in scored.logprobs_T[-5:]]})
    assert (result.engine_floor.tokens, result.limit) == (5, pytest.approx(4e-4, rel=0.01))


def test_the_floor_holds_the_trainers_own_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with a shared prompt, as it trains, against whole ones: in BF16 an engine against itself shows no noise."""
    rig = Rig(tmp_path, "LoRA")
    rig.publish()
    column, shared = rig.trainer.column, []

    def apart(name: str, samples: Sequence[Sample]) -> list[list[float]]:
        shared.extend(each.prefix_length for each in samples)
        return [[value + 1e-4 for value in each] for each in column(name, samples)]

    monkeypatch.setattr(rig.trainer, "column", apart)
    result = measure(rig)
    assert (shared, result.limit) == ([len(each) // 2 for each in SEQUENCES], pytest.approx(4e-4, rel=0.01))


def test_a_stop_request_is_looked_at_between_passes_and_leaves_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "LoRA")
    rig.publish()
    before = (hold_state(rig.trainer), rig.engine.engine.adapters())
    passes = 0

    def count() -> None:
        nonlocal passes
        passes += 1

    measure(rig, check=count)
    assert passes > 6
    for last in range(1, passes + 1):
        left = iter(range(last - 1))

        def stop(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise StoppedOnRequest("SIGTERM")

        with pytest.raises(StoppedOnRequest):
            measure(rig, check=stop, when=f"stopped-{last}")
        assert (hold_state(rig.trainer), rig.engine.engine.adapters()) == before


class StopsAt(SilentProgress):
    def __init__(self, part: str) -> None:
        self.part = part

    def stage(self, name: str) -> None:
        if name == self.part:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("part", ["the engine completes prompts", "both sides score them"])
def test_a_run_tells_the_parts_of_its_preflight_and_ends_in_the_one_in_which_it_is_stopped(
    tmp_path: Path, part: str
) -> None:
    made = OrbitRun.model_validate(small_manifest(steps=1))
    with pytest.raises(StoppedOnRequest, match=f"SIGTERM during this: preflight, {part}"):
        run(made, out=str(tmp_path), progress=StopsAt(f"preflight, {part}"))


def test_sequences_that_are_scored_together_have_the_readings_of_each_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "LoRA")
    rig.train(1, 0.01)
    name = rig.publish().name
    engine, trainer = rig.engine.engine, rig.trainer
    for together, alone in (
        (engine.score_together(SEQUENCES, [name, None]), [engine.score(each, [name, None]) for each in SEQUENCES]),
        (trainer.score_together(SEQUENCES), [trainer.score(each) for each in SEQUENCES]),
    ):
        for mine, theirs in zip(chain(*together), chain(*alone), strict=True):
            assert mine.logprobs_T == pytest.approx(theirs.logprobs_T, abs=1e-5)
            assert (mine.applied_digest, mine.top_T) == (theirs.applied_digest, theirs.top_T)


def test_a_real_models_sequences_take_few_passes(tmp_path: Path) -> None:
    """Most of a pass over a few short rows is reading the weights: what is alike goes through them together."""
    rig = Rig(tmp_path, "LoRA")
    rig.publish()
    passes: list[int] = []
    hook = rig.policy.model.get_input_embeddings().register_forward_hook(
        lambda _module, _given, embedded: passes.append(embedded.shape[-2])
    )
    try:
        measure(rig, sequences=[*SEQUENCES, *([3, 4, 5, each] for each in range(6, 11)), range(3, 35)])
    finally:
        hook.remove()
    # A batch of the engine takes a prefill and two decode steps, and this one has room for eight rows: two sequences
    # alone, 18 rows, two times four under untrained adapters. Of the trainer: all, their halves, and twice four.
    assert len(passes) <= 3 * (2 + 3 + 2) + 4


def test_masters_come_back_after_an_error_as_well(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "LoRA")
    rig.train(1, 0.01)
    before = hold_state(rig.trainer)

    def fail_within() -> None:
        with rig.masters_owner.probing("random", 0):
            assert hold_state(rig.trainer) != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert hold_state(rig.trainer) == before


def test_an_engine_that_loses_a_tensor_shows_only_with_a_random_adapter(tmp_path: Path) -> None:
    """At the start of a run LoRA's B is 0: what an engine does with A cannot be seen at identity."""
    rig = Rig(tmp_path, "LoRA")
    rig.publish()
    rig.engine.spoil = zero_one
    result = measure(rig, rig.engine)
    assert max(result.base.mean, result.identity.mean, result.policy.mean) <= result.limit < result.random.mean
    with pytest.raises(GateError, match="random adapter"):
        check_preflight(result)


@pytest.mark.parametrize("name", GATED)
def test_each_state_is_gated_and_a_nan_fails(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path, "LoRA")
    rig.publish()
    healthy = measure(rig)
    check_preflight(healthy)
    for mean in (1.0, math.nan):
        with pytest.raises(GateError, match=GATED[name]):
            check_preflight(replace(healthy, **{name: replace(healthy.base, mean=mean)}))
    statistics = (("p99", "p99", 0.9), ("k3", "k3", 0.9), ("outside", "ratios outside", 0.9), ("top1", "top-1", 0.1))
    for statistic, says, bad in statistics:
        few = replace(healthy.base, **{statistic: bad}, tokens=TAIL_TOKENS - 1)
        check_preflight(replace(healthy, **{name: few}))
        for value in (bad, math.nan):
            many = replace(healthy.base, **{statistic: value}, tokens=TAIL_TOKENS)
            with pytest.raises(GateError, match=says) as caught:
                check_preflight(replace(healthy, **{name: many}))
            assert GATED[name] in caught.value.message
    with pytest.raises(GateError, match="not applied"):
        check_preflight(replace(healthy, random_effect=0.0))


def test_sequences_are_prompts_with_completions_and_one_of_the_longest_length() -> None:
    made = build_sequences([(1, 2), (3, 4, 5), (6,)], {0: (7,), 1: (8, 9)}, 11)
    assert made == ((1, 2, 7), (3, 4, 5, 8, 9), (6,), (1, 2, 7, 3, 4, 5, 8, 9, 6, 1, 2))
