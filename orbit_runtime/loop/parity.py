"""Compares trainer and engine on a run's own parts: at the start of a run, after a sleep, and alone for `orbit parity`.

Belongs here: comparing on the run's prompts, precision and limits; the engine's sleep while the trainer has the device,
with the check after the first wake. Does not belong here: the measurement (`parity`), how a server sleeps (`rollout`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from orbit_runtime.loop.build import CallerOptions, build_parts, open_episode_inputs
from orbit_runtime.loop.display import RunDisplay
from orbit_runtime.loop.fault_finder import APART
from orbit_runtime.loop.parts import Parts
from orbit_runtime.loop.publish import Publication
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.observability.progress import Progress
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.parity.preflight import ComparedSides, Preflight, build_sequences, check_preflight, measure_preflight
from orbit_runtime.parity.statistics import ParityLimits, base_limit, build_limits, resolve_limit, rounded_to
from orbit_runtime.planner.support.manifests import sampling_of
from orbit_runtime.rollout.requests import sample
from orbit_runtime.seeds import stream_key
from orbit_runtime.sides.inputs import Inputs, build_patience, resolve_names
from orbit_runtime.spec import MachineFacts, OrbitRun, resolve
from orbit_runtime.storage import claim_execution, open_store
from orbit_runtime.types import Probe, Request, Sampling
from orbit_runtime.workers.child.signals import stop_on_signals

if TYPE_CHECKING:
    from orbit_runtime.parity.locate import Location

COMPLETIONS, COMPLETION_TOKENS = 4, 256
"""Number of prompts that the engine completes before both sides are measured, and the longest completion in tokens."""


@dataclass(frozen=True)
class ParityComparison:
    """The result of `orbit parity`."""

    engine: str
    precision: str
    preflight: Preflight
    location: Location | None
    """None if no search was made, or this engine's layers cannot be inspected."""
    seconds: float
    """Seconds of the measurement alone, with models and servers already up."""

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "precision": self.precision,
            "seconds": self.seconds,
            "preflight": self.preflight.to_json(),
            "location": self.location.to_json() if self.location else None,
        }


def measure_parity(parts: Parts, publication: Publication, when: str = "preflight") -> list[Preflight]:
    """Measures every copy with the adapter that its slot holds now. At the start of a run, each part is a stage."""
    is_start = when == parts.show.current

    def tell(part: str) -> None:
        if is_start:
            parts.show.stage(f"{when}, {part}")

    def probing(probe: Probe) -> AbstractContextManager[None]:
        tell(f"both sides with an adapter of {probe} values")
        return parts.side.probing(probe)

    tell("the engine completes prompts")
    sequences, sampled = _sequences(parts, publication.name)
    tell("both sides score them")
    return measure_preflight(
        ComparedSides(parts.engine, parts.trainer, probing, parts.show.check),
        sequences,
        adapter=publication.name,
        limits=partial(_floor_limits, parts),
        sampled=sampled,
        when=when,
    )


def _floor_limits(parts: Parts, floor: float) -> ParityLimits:
    """The limits that follow from a floor."""
    absolute, asked, dtype = absolute_limits(parts), parts.spec.parity, parts.side.facts.compute_dtype
    if parts.publisher.change_limit == 0.0:  # both sides give the same bits
        return replace(absolute, mean=0.0)
    mean = resolve_limit(
        floor,
        factor=asked.floor_factor,
        absolute=absolute.mean,
        widest=asked.mean_limit or base_limit(parts.facts.precision, None, dtype),
        rounded=rounded_to(dtype, parts.spec.model.activation_precision),
    )
    return replace(absolute, mean=mean)


def _sequences(parts: Parts, adapter: str) -> tuple[tuple[tuple[int, ...], ...], Mapping[int, Sequence[float]]]:
    """Sequences to measure: prompts as training sees them, completions, and one of the maximum length. And by sequence,
    the log-probs of its completion as it was sampled, if nothing shapes the distribution."""
    tokens = min(parts.spec.new_tokens, COMPLETION_TOKENS)
    sampling = replace(sampling_of(parts.spec.rollout), max_new_tokens=tokens)
    requests = [
        Request(index, stream_key(parts.spec.data.seed, "parity", index), prompt, sampling, adapter)
        for index, prompt in enumerate(parts.sequences[:COMPLETIONS])
    ]
    answers = []
    for answer in sample(parts.engine, requests):
        parts.show.check()
        answers.append(answer)
    completions = {each.request_id: each.token_ids_T for each in answers}
    unshaped = Sampling(
        max_new_tokens=tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )
    sampled = {each.request_id: each.logprobs_T for each in answers if sampling == unshaped}
    # A server accepts one token less than its context, to leave room for one to sample.
    longest = max(map(len, parts.sequences)) + parts.spec.new_tokens
    longest = min(longest, parts.spec.model.max_sequence_length - 1)
    return build_sequences(parts.sequences, completions, longest), sampled


def absolute_limits(parts: Parts) -> ParityLimits:
    """The manifest's limits, or the defaults of the precision."""
    asked = parts.spec.parity
    return build_limits(
        parts.facts.precision,
        mean=asked.mean_limit,
        p99=asked.p99_limit,
        k3=asked.k3_limit,
        outside=asked.outside_limit,
    )


def step_limits(parts: Parts, state: RunState) -> ParityLimits:
    """Limits for a step's own rollouts; the limit of the mean is the one the run started with."""
    return replace(absolute_limits(parts), mean=state.parity_limit)


def check_again(parts: Parts, state: RunState, step: int) -> None:
    """Repeats the first measurement of both sides after every `parity.everySteps`-th step.

    Raises:
        GateError: see `check_sides`.
    """
    every = parts.spec.parity.every_steps
    if every is not None and step % every == 0:
        parts.show.stage("parity", step)
        check_sides(parts, state, f"step-{step:06d}")


def worst(preflights: Sequence[Preflight]) -> int:
    """Index of the first failed measurement, else 0."""
    return next((index for index, each in enumerate(preflights) if each.failures), 0)


def check_sides(parts: Parts, state: RunState, when: str) -> None:
    """Measures every copy against the trainer and stores the results as `parity/{when}-e…json`.

    Raises:
        GateError: they differ by more than the manifest allows; names the first layer that does, if it can be found.
    """
    assert state.publication is not None
    measured = measure_parity(parts, state.publication, when)
    copies = parts.engine.copies()
    for index, (each, copy) in enumerate(zip(measured, copies, strict=True)):
        key = f"parity/{when}-e{parts.execution.number:06d}{f'-{index}' if index else ''}.json"
        parts.store.put(key, json.dumps({**each.to_json(), "engine": copy.name}, indent=1).encode())
    index = worst(measured)
    # A resumed run keeps the limit it started with, so its rows equal those of an uninterrupted run.
    state.parity_limit = state.parity_limit or measured[index].limit
    if not measured[index].failures:
        return
    parts.show.stage("looking for the layer")
    location = parts.publisher.bisect.find(state.publication.name, state.publication.adapter)
    if location:
        keep_location(parts, location)
        parts.show.note(f"trainer and engine: {location.verdict()}")
    elif parts.side.snapshot is None:
        parts.show.note(APART)
    if parts.spec.parity.preflight == "Enforce":
        check_preflight(measured[index], location, copies[index].name if len(copies) > 1 else "")


def compare_sides(
    spec: OrbitRun, *, progress: Progress, manifest_folder: Path | None = None, layers: bool = False
) -> ParityComparison:
    """Builds both sides as a run would, measures them and shuts them down. Leaves nothing behind.

    Args:
        layers: search the layers even if all gates hold.

    Raises:
        OrbitError: the same errors that `run` raises before its first step.
        StoppedOnRequest: (75) a stop was requested before the last stage.
    """
    # As in a run, what the user can have got wrong is found before torch is imported.
    asked = resolve(spec, MachineFacts(has_cuda=False, num_gpus=0), folder=manifest_folder).run
    with ExitStack() as closing:
        store = open_store(closing.enter_context(TemporaryDirectory(prefix="orbit-parity-")))
        execution = claim_execution(store, run_name=spec.name)
        closing.callback(lambda: execution.release("done"))
        show = RunDisplay(progress, LiveStatus(spec.name, total=0), RunMetrics(run=spec.name))
        search_path = [str(folder) for folder in (manifest_folder, Path.cwd()) if folder]
        stop = closing.enter_context(stop_on_signals())
        stop.on_request, show.stop = show.stopping, stop
        patience = build_patience(show.note, show.status.beat, stop, store.deadline_seconds)
        inputs, given = Inputs(asked.spec, {}, patience, search_path), CallerOptions()
        materials = open_episode_inputs(asked, resolve_names(asked, None), inputs, given, show, closing)
        given.sides.watch(stop, show.note, store, execution)
        resolved = resolve(spec, given.sides.machine(show.stage), folder=manifest_folder)
        parts = build_parts(
            resolved, store, execution, show, given=given, inputs=inputs, materials=materials, closing=closing
        )
        show.stage("publishing an adapter")
        publication = parts.publisher.publish(0, None)
        show.stage("measuring both sides")
        started = time.monotonic()
        measured = measure_parity(parts, publication)
        preflight = measured[worst(measured)]
        seconds = time.monotonic() - started
        look = layers or bool(preflight.failures)
        if look:
            show.stage("looking for the layer")
        location = parts.publisher.bisect.find(publication.name, publication.adapter) if look else None
        return ParityComparison(resolved.engine, parts.facts.precision, preflight, location, seconds)


def keep_location(parts: Parts, location: Location) -> None:
    key = f"parity/location-e{parts.execution.number:06d}.json"
    parts.store.put(key, json.dumps(location.to_json(), indent=1).encode())


@contextmanager
def engine_asleep(parts: Parts, state: RunState) -> Iterator[None]:
    """Applies `rollout.sleep` of the manifest; the value `None` means no sleep.

    Raises:
        GateError: a server holds a different adapter after its sleep.
    """
    if parts.spec.rollout.sleep == "None":
        yield
        _give_back()
        return
    if state.sleep is None:
        state.sleep = _measured_sleep(parts)
    else:
        parts.engine.sleep()
    yield
    _give_back()
    parts.engine.wake()


def _give_back() -> None:
    """Frees torch's cached GPU memory, which the engine's cache is planned to use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_first_wake(parts: Parts, state: RunState) -> None:
    """Measures parity again, once, with the policy just published. Raises GateError."""
    if parts.spec.rollout.sleep != "None" and not state.woken:
        parts.show.stage("parity after the first wake")
        check_sides(parts, state, "wake")
        state.woken = True


def _measured_sleep(parts: Parts) -> dict[str, int]:
    awake = _memory(parts)
    parts.engine.sleep()
    asleep = _memory(parts)
    found = {"awake_bytes": awake, "asleep_bytes": asleep}
    parts.show.note(f"while it sleeps the engine keeps {asleep / 2**30:.2f} of {awake / 2**30:.2f} GiB", **found)
    return found


def _memory(parts: Parts) -> int:
    return sum(each.memory_bytes or 0 for each in parts.engine.read_servers())
