"""Environments of SkyRL-Gym: text in, text out, with the package's own registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import skyrl_gym  # type: ignore[import-not-found, unused-ignore]

from orbit_runtime.workers.user_code.environment_protocol import Step


class SkyRLEpisode:
    """`skyrl_gym.make(name, env_config=arguments, extras=…)`; the extras are the other columns of the prompt's row.

    `postprocessed_action`, with which an environment may rewrite the completion, is ignored: the sampled tokens are
    what is trained on.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._arguments = dict(arguments)
        self._environment: Any = None

    def reset(self, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], seed: int) -> Any:
        self._environment = skyrl_gym.make(self._name, env_config=self._arguments, extras=dict(fields))
        messages, _ = self._environment.init([dict(message) for message in prompt])
        return messages

    def step(self, completion: str) -> Step:
        answered = self._environment.step(completion)
        done = bool(answered["done"])
        return Step(answered["observations"], float(answered["reward"]), done, self._metrics() if done else {})

    def finish(self) -> Step:
        return Step(done=True, parts=self._metrics())

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _metrics(self) -> dict[str, float]:
        """The numeric entries of its metrics."""
        found = self._environment.get_metrics()
        return {str(name): float(value) for name, value in found.items() if isinstance(value, int | float)}
