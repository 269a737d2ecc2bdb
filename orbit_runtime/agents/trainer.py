"""`Trainer`: a driver that takes your own training from its checks to its evaluation.

Belongs here: states, and the methods called in each. Does not belong here: Orbit's own training (`verl`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import Any

from orbit_runtime.agents.items import awaited, check_async, check_count, check_number, check_sync, plain
from orbit_runtime.errors import UsageError
from orbit_runtime.workers.user_code.entrypoints import is_async


class TrainerState(StrEnum):
    """The state of a trainer."""

    CREATED = "created"
    VALIDATING = "validating"
    VALIDATED = "validated"
    TRAINING = "training"
    TRAINED = "trained"
    EVALUATING = "evaluating"
    COMPLETE = "complete"
    ERROR = "error"


@dataclass(frozen=True)
class TrainConfig:
    """Settings that most trainers have."""

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only at the end."""

    def __post_init__(self) -> None:
        check_count("TrainConfig.epochs", self.epochs)
        check_count("TrainConfig.batch_size", self.batch_size)
        check_number("TrainConfig.learning_rate", self.learning_rate, low=0, high=1, above=True)
        check_count("TrainConfig.warmup_steps", self.warmup_steps, low=0)
        check_count("TrainConfig.eval_every", self.eval_every, low=0)


@dataclass(frozen=True)
class TrainMetrics:
    """The results of training; None for what was not measured."""

    loss: float | None = None
    accuracy: float | None = None
    reward: float | None = None
    steps: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Any other results."""


class Trainer(ABC):
    """Subclass it with `train` and `evaluate`, and override the checks that do not fit.

    A check raises or returns False if something is wrong. `self.reward_fn` is the given function; it raises UsageError
    if a call returns an awaitable, which detects async functions that look plain from outside, such as a lambda.
    """

    def __init__(self, agent: Any, dataset: Any, reward_fn: Callable[..., Any], config: TrainConfig) -> None:
        self.agent = agent
        self.dataset = dataset
        self.reward_fn = _valued(reward_fn)
        self.config = config
        self.state = TrainerState.CREATED
        self.error: BaseException | None = None
        """The exception that led to `ERROR`."""

    async def check_agent(self) -> bool | None:
        """Checks that there is an agent."""
        return self.agent is not None

    async def check_dataset(self) -> bool | None:
        """Checks that the dataset is not empty."""
        return self.dataset is not None and (not hasattr(self.dataset, "__len__") or len(self.dataset) > 0)

    async def check_reward(self) -> bool | None:
        """Checks that the reward can be called, and returns a value instead of an awaitable."""
        check_sync(self.reward_fn, "Trainer.reward")
        return True

    async def check_config(self) -> bool | None:
        """Checks that there is a config."""
        return self.config is not None

    @abstractmethod
    async def train(self) -> TrainMetrics:
        """Trains the agent."""

    @abstractmethod
    async def evaluate(self) -> TrainMetrics:
        """Measures the agent as it is now."""

    async def run(self) -> TrainMetrics:
        """Checks, trains and evaluates; returns the evaluation's results. May be called again after it has ended.

        Raises:
            Exception: raised by a check, the training or the evaluation; `state` is then ERROR, `error` the exception.
        """
        ended = (TrainerState.CREATED, TrainerState.COMPLETE, TrainerState.ERROR)
        if self.state not in ended:
            raise UsageError(
                f"it is already running: {self.state}", where="Trainer.run", fix="await the previous call first"
            )
        self.error = None
        try:
            return await self._walk()
        except BaseException as error:
            error.add_note(f"the trainer was {self.state}")
            self.state, self.error = TrainerState.ERROR, error
            raise

    async def _walk(self) -> TrainMetrics:
        self.state = TrainerState.VALIDATING
        for name in ("train", "evaluate", "check_agent", "check_dataset", "check_reward", "check_config"):
            check_async(getattr(self, name), f"Trainer.{name}")
        for name in ("agent", "dataset", "reward", "config"):
            if await awaited(getattr(self, f"check_{name}")(), f"Trainer.check_{name}") is False:
                raise UsageError(
                    f"check_{name} returned False", where=f"Trainer.{name}", fix="see what this check requires"
                )
        self.state = TrainerState.VALIDATED
        self.state = TrainerState.TRAINING
        trained = await awaited(self.train(), "Trainer.train")
        self.state = TrainerState.TRAINED
        self.state = TrainerState.EVALUATING
        evaluated = await awaited(self.evaluate(), "Trainer.evaluate")
        self.state = TrainerState.COMPLETE
        metrics: TrainMetrics = trained if evaluated is None else evaluated
        return metrics


def _valued(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, wrapped so that its calls must return a value; `check_reward` handles what is visible before."""
    if not callable(function) or is_async(function):
        return function

    @wraps(function, updated=())
    def valued(*args: Any, **kwargs: Any) -> Any:
        return plain(function(*args, **kwargs), "Trainer.reward")

    return valued
