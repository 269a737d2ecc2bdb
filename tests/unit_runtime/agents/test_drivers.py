"""Synthesis, the trainer's walk, and evolution."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import orbit_runtime.agents as agents
from orbit_runtime.agents import (
    DefaultStrategy,
    EvolutionConfig,
    EvolutionPhase,
    EvolutionPipeline,
    EvolutionResult,
    EvolutionStrategy,
    RewardSpec,
    SynthesisConfig,
    SynthesisPipeline,
    TemplateSynthesiser,
    TrainConfig,
    Trainer,
    TrainerState,
    TrainMetrics,
    TrajectoryDataset,
    TrajectoryItem,
    VeRLAlgorithm,
    VeRLConfig,
    VeRLTrainer,
    augment_add_noise,
)
from orbit_runtime.errors import DataError, OrbitError, OutputError, UsageError

NAMES = [
    "TrajectoryItem",
    "TrajectoryDataset",
    "TrajectoryStrategy",
    "DefaultStrategy",
    "SynthesisConfig",
    "SynthesisPipeline",
    "DataSynthesiser",
    "TemplateSynthesiser",
    "augment_add_noise",
    "augment_swap_io",
    "filter_by_score",
    "deduplicate",
    "split_dataset",
    "Trainer",
    "TrainConfig",
    "TrainerState",
    "TrainMetrics",
    "EvolutionConfig",
    "EvolutionPipeline",
    "EvolutionStrategy",
    "EvolutionPhase",
    "VeRLConfig",
    "VeRLTrainer",
    "VeRLAlgorithm",
    "RewardSpec",
    "EvolutionEpoch",
    "EvolutionResult",
    "SynthesisResult",
]


def test_the_public_names_are_these() -> None:
    assert sorted(agents.__all__) == sorted(NAMES)
    assert all(hasattr(agents, name) for name in NAMES)


def test_the_package_loads_nothing_heavy() -> None:
    source = "import sys, orbit_runtime.agents; print(*(name.split('.')[0] for name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert not set(ended.stdout.split()) & {"torch", "numpy", "transformers", "pydantic"}


def test_templates_give_as_many_as_asked_and_repeat_only_then() -> None:
    templates = TemplateSynthesiser(["{a}+{b}=", {"state": "2*{a}", "action": "{a}{a}"}], {"a": [1, 2], "b": [3, 4, 5]})
    items = asyncio.run(templates.generate(8))
    assert len({item.state for item in items}) == 8
    assert len(asyncio.run(templates.generate(20))) == 20
    assert asyncio.run(templates.generate(8)) == items
    assert asyncio.run(templates.generate(0)) == []
    with pytest.raises(UsageError, match="'c' has no values"):
        TemplateSynthesiser(["{c}"], {"a": [1]})


def test_a_pipeline_counts_what_it_made_and_what_it_left_out() -> None:
    config = SynthesisConfig(target_size=6, min_score=0.5, dedup_threshold=1.0)
    template = TemplateSynthesiser([{"state": "{a}", "action": "x", "reward": 1.0}], {"a": ["one", "three"]})
    pipeline = SynthesisPipeline(config).add_step(template)
    seeds = [TrajectoryItem("seed", "x", 0.9), TrajectoryItem("bad", "x", 0.1)]
    result = asyncio.run(pipeline.run(seeds))
    assert (result.generated_count, result.filtered_count) == (4, 3)
    assert sorted(item.state for item in result.items) == ["one", "seed", "three"]
    assert len(seeds) == 2


def test_steps_may_be_functions_plain_or_async_and_nothing_else() -> None:
    async def twice(data: list[Any]) -> list[Any]:
        return data + augment_add_noise(data, 0.3)

    pipeline = SynthesisPipeline(SynthesisConfig(dedup_threshold=None)).add_step(twice).add_step(lambda data: data[1:])
    assert asyncio.run(pipeline.run([TrajectoryItem("some words", "x")])).generated_count == 0
    with pytest.raises(UsageError, match=r"steps\[2\]"):
        pipeline.add_step(3)  # type: ignore[arg-type]

    class Plain:
        def generate(self, count: int) -> list[Any]:
            return []

    with pytest.raises(UsageError, match=r"steps\[2\]\.generate: this function is not async"):
        pipeline.add_step(Plain())  # type: ignore[arg-type]


class Walk(Trainer):
    def __init__(self, *args: Any, fails: str = "") -> None:
        self.walked: list[TrainerState] = []
        super().__init__(*args)
        self.seen: list[TrainerState] = []
        self.fails = fails

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state":
            self.walked.append(value)

    async def check_dataset(self) -> bool:
        self.seen.append(self.state)
        return self.fails != "check"

    async def train(self) -> TrainMetrics:
        self.seen.append(self.state)
        if self.fails == "train":
            raise ValueError("broken")
        return TrainMetrics(loss=1.0)

    async def evaluate(self) -> TrainMetrics:
        self.seen.append(self.state)
        return TrainMetrics(accuracy=0.5, reward=1.0)


def test_a_trainer_walks_its_states() -> None:
    trainer = Walk("agent", ["data"], len, TrainConfig())
    assert trainer.state is TrainerState.CREATED
    assert asyncio.run(trainer.run()) == TrainMetrics(accuracy=0.5, reward=1.0)
    assert trainer.state is TrainerState.COMPLETE
    assert [each.name for each in trainer.walked] == [
        "CREATED", "VALIDATING", "VALIDATED", "TRAINING", "TRAINED", "EVALUATING", "COMPLETE"
    ]  # fmt: skip
    assert trainer.seen == [TrainerState.VALIDATING, TrainerState.TRAINING, TrainerState.EVALUATING]


@pytest.mark.parametrize(("fails", "kind"), [("check", UsageError), ("train", ValueError)])
def test_a_trainer_that_fails_keeps_the_cause(fails: str, kind: type[Exception]) -> None:
    trainer = Walk("agent", ["data"], len, TrainConfig(), fails=fails)
    with pytest.raises(kind) as raised:
        asyncio.run(trainer.run())
    assert (trainer.state, trainer.error) == (TrainerState.ERROR, raised.value)


def test_a_trainer_whose_methods_are_plain_is_refused() -> None:
    class Plain(Walk):
        def train(self) -> TrainMetrics:  # type: ignore[override]
            return TrainMetrics()

    with pytest.raises(UsageError, match=r"Trainer\.train: this function is not async"):
        asyncio.run(Plain("agent", ["data"], len, TrainConfig()).run())


class Climb(EvolutionStrategy):
    def __init__(self) -> None:
        self.evaluated, self.under_way, self.most = 0, 0, 0
        self.fails_at = -1

    async def evaluate(self, individual: int) -> float:
        self.evaluated += 1
        if self.evaluated == self.fails_at:
            raise ConnectionError("down")
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.001)
        self.under_way -= 1
        return -abs(individual - 40)

    async def mutate(self, individual: int, mutation_rate: float) -> int:
        return individual + round(10 * mutation_rate)


CONFIG = EvolutionConfig(epochs=6, population_size=8, mutation_rate=0.5, concurrency=3)


def test_evolution_climbs_evaluates_together_and_tells_its_history() -> None:
    strategy = Climb()
    pipeline = EvolutionPipeline(CONFIG, strategy)
    assert pipeline.phase is EvolutionPhase.INIT
    result = asyncio.run(pipeline.run(list(range(8))))
    assert pipeline.phase is EvolutionPhase.COMPLETE
    assert (result.epochs_completed, result.best_score, result.best) == (6, -8, 32)
    assert [each.best_score for each in result.history] == [-33, -28, -23, -18, -13, -8]
    assert strategy.most == 3
    assert strategy.evaluated == 8 + 5 * 4, "a survivor is not evaluated again"


def test_evolution_goes_on_where_it_failed_in_this_process_and_in_another(tmp_path: Path) -> None:
    whole = asyncio.run(EvolutionPipeline(CONFIG, Climb()).run(list(range(8))))
    for is_new_process in (False, True):
        checkpoint = tmp_path / f"{is_new_process}.json"
        strategy = Climb()
        strategy.fails_at = 15
        pipeline = EvolutionPipeline(CONFIG, strategy, checkpoint=checkpoint)
        with pytest.raises(ConnectionError):
            asyncio.run(pipeline.run(list(range(8))))
        if is_new_process:
            pipeline = EvolutionPipeline(CONFIG, strategy, checkpoint=checkpoint)
        assert asyncio.run(pipeline.run(list(range(8)))) == whole
        assert strategy.evaluated <= 28 + 1 + CONFIG.concurrency, "only what failed and what was under way is repeated"
    other = EvolutionConfig(epochs=6, population_size=9, mutation_rate=0.5)
    with pytest.raises(OutputError, match="population_size"):
        asyncio.run(EvolutionPipeline(other, Climb(), checkpoint=checkpoint).run([1, 2]))


class Killed(BaseException):
    """What no strategy catches."""


class Watched(Climb):
    """Keeps what stands in the checkpoint at each point where a kill may come, and is killed at one of them."""

    def __init__(self, checkpoint: Path, dies_at: int = -1) -> None:
        super().__init__()
        self.checkpoint, self.dies_at, self.calls = checkpoint, dies_at, 0
        self.finished: list[int] = []

    async def _point(self) -> None:
        self.calls += 1
        if self.calls == self.dies_at:
            raise Killed
        await asyncio.sleep(0)

    async def evaluate(self, individual: int) -> float:
        await self._point()
        score = await super().evaluate(individual)
        await self._point()
        self.finished.append(individual)
        return score

    async def select(self, population: list[int], scores: list[float], selection_ratio: float) -> list[int]:
        await self._point()
        chosen = await super().select(population, scores, selection_ratio)
        await self._point()
        return chosen

    async def mutate(self, individual: int, mutation_rate: float) -> int:
        await self._point()
        child = await super().mutate(individual, mutation_rate)
        await self._point()
        return child


def evolve(checkpoint: Path, strategy: Watched, epochs: int = 4) -> EvolutionResult:
    config = EvolutionConfig(epochs=epochs, population_size=5, mutation_rate=0.5, concurrency=2)
    return asyncio.run(EvolutionPipeline(config, strategy, checkpoint=checkpoint).run(range(5)))


def test_a_kill_at_any_await_counts_no_population_twice_and_evaluates_nobody_who_has_a_score(tmp_path: Path) -> None:
    undisturbed = Watched(tmp_path / "whole.json")
    whole = evolve(undisturbed.checkpoint, undisturbed)
    assert undisturbed.calls > 50
    for at in range(1, undisturbed.calls + 1):
        checkpoint = tmp_path / f"{at}.json"
        first, second = Watched(checkpoint, at), Watched(checkpoint)
        with pytest.raises(Killed):
            evolve(checkpoint, first)
        assert evolve(checkpoint, second) == whole, at
        # Two evaluations were under way at most: what one of them had finished may have had no time to be kept.
        assert len(first.finished) + len(second.finished) <= len(undisturbed.finished) + 2, at


def test_an_evolution_that_ended_goes_on_with_more_epochs_as_if_it_had_had_them(tmp_path: Path) -> None:
    ended, whole = Watched(tmp_path / "ended.json"), Watched(tmp_path / "whole.json")
    evolve(ended.checkpoint, ended, epochs=2)
    assert evolve(ended.checkpoint, ended, epochs=4) == evolve(whole.checkpoint, whole, epochs=4)
    assert len(ended.finished) == len(whole.finished)


def test_a_checkpoint_of_an_older_version_that_ended_goes_on_too(tmp_path: Path) -> None:
    ended, whole = Watched(tmp_path / "ended.json"), Watched(tmp_path / "whole.json")
    evolve(ended.checkpoint, ended, epochs=2)
    content = json.loads(ended.checkpoint.read_text())
    del content["is_counted"]
    ended.checkpoint.write_text(json.dumps(content))
    assert evolve(ended.checkpoint, ended, epochs=4) == evolve(whole.checkpoint, whole, epochs=4)


def test_a_population_of_one_and_a_score_that_is_none_are_refused() -> None:
    with pytest.raises(UsageError, match=r"EvolutionConfig\.population_size"):
        EvolutionConfig(population_size=1)
    with pytest.raises(DataError, match="a population of 1"):
        asyncio.run(EvolutionPipeline(CONFIG, Climb()).run([1]))

    class Lost(Climb):
        async def evaluate(self, individual: int) -> float:
            return float("nan")

    with pytest.raises(DataError, match=r"population\[0\]: the score nan"):
        asyncio.run(EvolutionPipeline(CONFIG, Lost()).run([1, 2]))


def test_a_plain_strategy_is_refused() -> None:
    class Plain(Climb):
        def evaluate(self, individual: int) -> float:  # type: ignore[override]
            return 1.0

    with pytest.raises(UsageError, match=r"strategy\.evaluate: this function is not async"):
        EvolutionPipeline(CONFIG, Plain())


async def late(output: str) -> float:
    return 1.0


def test_an_async_reward_of_a_trainer_is_refused_before_it_trains() -> None:
    trainer = Walk("agent", ["data"], late, TrainConfig())
    with pytest.raises(UsageError, match=r"Trainer\.reward: this function is async"):
        asyncio.run(trainer.run())
    assert trainer.seen == [TrainerState.VALIDATING]


def test_an_async_reward_of_verl_is_refused_before_it_trains() -> None:
    class Late:
        async def __call__(self, output: str) -> float:
            return 1.0

    for fn in (late, Late()):
        with pytest.raises(UsageError, match=r"RewardSpec 'n': fn: this function is async"):
            asyncio.run(VeRLTrainer(VeRLConfig(), [RewardSpec("n", 1.0, fn)]).train([{"state": "1", "action": "2"}]))  # type: ignore[arg-type]


def test_a_reward_of_a_trainer_that_only_looks_plain_is_refused_where_it_is_called() -> None:
    class Rewarding(Walk):
        async def train(self) -> TrainMetrics:
            return TrainMetrics(reward=self.reward_fn("four"))

    assert Rewarding("agent", ["data"], len, TrainConfig()).reward_fn("four") == 4
    trainer = Rewarding("agent", ["data"], lambda output: late(output), TrainConfig())
    with pytest.raises(UsageError, match=r"Trainer\.reward: the call returned an awaitable"):
        asyncio.run(trainer.run())
    assert trainer.state is TrainerState.ERROR


@pytest.mark.parametrize(
    "make",
    [
        lambda: RewardSpec("late", 1.0, late),
        lambda: RewardSpec("none", 1.0),
        lambda: VeRLConfig(algorithm="dpo"),  # type: ignore[arg-type]
        lambda: VeRLConfig(batch_size=0),
        lambda: VeRLConfig(group_size=1),
        lambda: TrajectoryDataset(strategy=DefaultStrategy),  # type: ignore[arg-type]
        lambda: VeRLTrainer(VeRLConfig(), []),
        lambda: asyncio.run(VeRLTrainer(VeRLConfig(), RewardSpec("n", 1.0, len)).train([])),
        lambda: asyncio.run(VeRLTrainer(VeRLConfig(), RewardSpec("n", 1.0, len)).train([{"state": 3}])),
        lambda: TrainConfig(epochs=0),
        lambda: SynthesisConfig(target_size=-1),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Any) -> None:
    with pytest.raises(OrbitError) as raised:
        make()
    assert raised.value.where
    assert raised.value.fix


def test_the_algorithms_have_their_values() -> None:
    assert [each.value for each in VeRLAlgorithm] == ["ppo", "grpo"]
    assert VeRLConfig(algorithm="ppo").algorithm is VeRLAlgorithm.PPO  # type: ignore[arg-type]
