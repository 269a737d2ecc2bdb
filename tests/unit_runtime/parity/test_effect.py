"""Proofs by log-probs alone, at the noise of BF16 engines: what is wrong is never called proven, what is right never
called wrong. The engine is simulated; the noise is that of published measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from orbit_runtime.parity.effect import noise_of, weigh
from orbit_runtime.parity.liveness import Limits, Proof, Reading, prove
from orbit_runtime.types import AdapterFiles, Scored

TOKENS = 512
CANARY = tuple(range(TOKENS))
LIMITS = Limits(change=0.25, base=0.1)
Effects = dict[str, list[float]]


def test_the_scale_is_the_least_squares_one_and_its_margin_covers_its_standard_error() -> None:
    generator = np.random.default_rng(0)
    expected = generator.normal(0, 0.1, 2000)
    noise = 0.05
    scales = []
    for _ in range(300):
        found = 0.7 * expected + generator.normal(0, noise, 2000)
        effect = weigh(expected.tolist(), found.tolist(), noise)
        solution = np.linalg.lstsq(expected[:, None], found, rcond=None)[0][0]
        assert effect.scale == pytest.approx(solution, abs=1e-12)
        scales.append(effect.scale)
    # Greene, "Econometric Analysis", 4.3: sigma / |c|.
    error = noise / np.linalg.norm(expected)
    assert np.std(scales) == pytest.approx(error, rel=0.15)
    assert 6 * error < effect.margin < 6 * error + 0.26


def test_nothing_is_told_apart_where_nothing_is_expected_and_a_nan_never_agrees() -> None:
    nothing = weigh([0.0] * 4, [0.1] * 4, 0.01)
    assert not nothing.is_resolved
    assert not weigh([0.1, 0.2], [math.nan, 0.2], 0.0).agrees
    assert math.isnan(noise_of([0.1], [math.nan]))
    assert noise_of([3.0, -4.0], [0.1]) == pytest.approx(math.sqrt(2) * 5 / math.sqrt(2))
    assert noise_of() == 0.0


@dataclass
class NoisyServer:
    """A served copy without our plug-in, simulated: log-probs are base + effect of what it applies + noise."""

    noise: np.random.Generator
    mean: float
    """Of |noise| of one reading."""
    effects: Effects
    applies: Callable[[str], Sequence[float]]
    """What it adds for the adapter that is asked for."""
    name: str = "the server"
    reads_back: bool = False
    asked: list[str | None] = field(default_factory=list)

    def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], prefix_length: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:  # fmt: skip
        self.asked += adapters
        return [self._read(None if each is None else self.applies(each)) for each in adapters]

    def _read(self, effect: Sequence[float] | None) -> Scored:
        return read(effect, self.noise, self.mean)

    def adapter_digest(self, name: str) -> None:
        return None

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        return ""


def read(effect: Sequence[float] | None, noise: np.random.Generator, mean: float) -> Scored:
    """Most tokens differ little and a few much: normal noise, ten per cent of it four times as wide."""
    sigma = mean / (math.sqrt(2 / math.pi) * (0.9 + 0.1 * 4))
    wide = np.where(noise.random(TOKENS) < 0.1, 4.0, 1.0)
    values = -2.0 - np.arange(TOKENS) % 7 + noise.normal(0, 1, TOKENS) * wide * sigma
    values += 0.0 if effect is None else np.asarray(effect)
    return Scored((0.0, *values[1:].tolist()), None)


def draw_effect(seed: int, size: float) -> list[float]:
    found: list[float] = np.random.default_rng(seed).normal(0, size, TOKENS).tolist()
    return [0.0, *found[1:]]


def publish(
    server: NoisyServer, version: int, effects: Effects, previous: Reading | None, mean: float
) -> tuple[Proof, Reading]:
    name = f"policy-v{version}"
    adapter = AdapterFiles(version, {}, f"sha256:{version}")
    # The trainer's own reading has noise too, but far less: it is the same program at every publish.
    adapted, base = read(effects[name], server.noise, mean / 4), read(None, server.noise, mean / 4)
    told = Scored(adapted.logprobs_T, f"applied:{version}")
    return prove(
        adapter, name, server, (told, base), CANARY, limits=LIMITS, previous=previous, expected=f"applied:{version}"
    )


FAULTS: dict[str, Callable[[Effects, str, str], list[float]]] = {
    "not applied": lambda effects, now, before: [0.0] * TOKENS,
    "stale": lambda effects, now, before: effects[before],
    "scale doubled": lambda effects, now, before: [2 * x for x in effects[now]],
    "scale halved": lambda effects, now, before: [0.5 * x for x in effects[now]],
    "sign turned": lambda effects, now, before: [-x for x in effects[now]],
    "another run's adapter": lambda effects, now, before: draw_effect(99, 0.1),
    "rows in another order": lambda effects, now, before: effects[now][::-1],
    "twice on top of each other": lambda effects, now, before: [
        x + y for x, y in zip(effects[now], effects[before], strict=True)
    ],
    "half of the layers": lambda effects, now, before: [
        x * 0.5 + y for x, y in zip(effects[now], draw_effect(7, 0.03), strict=True)
    ],
}


@pytest.mark.parametrize("mean", [0.01, 0.03])
@pytest.mark.parametrize("size", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_at_the_noise_of_bf16_is_caught_or_unproven_and_never_proven(
    fault: str, size: float, mean: float
) -> None:
    verdicts = []
    for seed in range(8):
        effects: Effects = {"policy-v1": draw_effect(2 * seed + 1000, size)}
        effects["policy-v2"] = [
            x + y for x, y in zip(effects["policy-v1"], draw_effect(2 * seed + 1001, size), strict=True)
        ]
        server = NoisyServer(np.random.default_rng(seed), mean, effects, lambda name, effects=effects: effects[name])
        _, reading = publish(server, 1, effects, None, mean)
        spoiled = FAULTS[fault](effects, "policy-v2", "policy-v1")
        server.applies = lambda name, effects=effects, spoiled=spoiled: (
            spoiled if name == "policy-v2" else effects[name]
        )
        proof, _ = publish(server, 2, effects, reading, mean)
        verdicts.append(proof.verdict)
    assert not {"proven", "whole"} & set(verdicts)
    if size == 0.4 and mean == 0.01 and fault != "scale halved":
        assert set(verdicts) == {"failed"}, "an effect far above the noise is told"


@pytest.mark.parametrize("mean", [0.003, 0.01, 0.03])
def test_500_healthy_publishes_at_the_noise_of_bf16_raise_no_alarm_and_most_are_proven_where_the_effect_is_large(
    mean: float,
) -> None:
    server = NoisyServer(np.random.default_rng(11), mean, {}, lambda name: server.effects[name])
    reading: Reading | None = None
    effect = [0.0] * TOKENS
    verdicts = []
    for version in range(500):
        if version:
            step = draw_effect(version, 0.05)
            # It wanders, and is drawn back: an adapter does not grow without bound.
            effect = [0.98 * x + y for x, y in zip(effect, step, strict=True)]
        server.effects = {
            name: values for name, values in server.effects.items() if name == f"policy-v{version - 1}"
        } | {f"policy-v{version}": effect}
        proof, reading = publish(server, version, server.effects, reading, mean)
        assert not proof.failures, (version, proof.failures)
        verdicts.append(proof.verdict)
    if mean == 0.003:
        assert verdicts.count("whole") > 450
    gaps = [len(run) for run in "".join("x" if each == "whole" else "." for each in verdicts).split("x")]
    assert max(gaps) <= 16, "changes add up until they are told apart"


def test_an_engine_that_stays_at_an_old_version_is_caught_once_the_changes_add_up() -> None:
    effects: Effects = {"policy-v0": draw_effect(5, 0.3)}
    server = NoisyServer(np.random.default_rng(3), 0.01, effects, lambda name: effects["policy-v0"])
    proof, reading = publish(server, 0, effects, None, 0.01)
    assert proof.verdict == "whole", "without its bytes nothing is proven in every part"
    for version in range(1, 60):
        before = effects[f"policy-v{version - 1}"]
        effects[f"policy-v{version}"] = [x + y for x, y in zip(before, draw_effect(1000 + version, 0.01), strict=True)]
        proof, reading = publish(server, version, effects, reading, 0.01)
        assert not proof.may_run
        if proof.verdict == "failed":
            break
    assert proof.verdict == "failed"
    assert version > 1, "one change alone is far below the noise"
