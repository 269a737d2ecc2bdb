"""`VeRLTrainer`: trains an adapter on a dataset's prompts with your own rewards, through the loop of `orbit run`.

Belongs here: building a manifest from a few settings, and metrics from its report. Does not belong here: any training.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.agents.items import (
    PAIRS,
    check_count,
    check_items,
    check_number,
    check_sync,
    get,
    num_accepted,
    plain,
    seen_key,
)
from orbit_runtime.agents.trainer import TrainMetrics
from orbit_runtime.errors import DataError, UsageError
from orbit_runtime.workers.user_code.entrypoints import FROM_PYTHON

if TYPE_CHECKING:
    from orbit_runtime.spec import OrbitRun

BUILTIN_MODEL = "builtin://tiny-adder"


class VeRLAlgorithm(StrEnum):
    """How rewards become an update."""

    PPO = "ppo"
    GRPO = "grpo"


@dataclass(frozen=True)
class RewardSpec:
    """A function that scores an output; the reward is the weighted sum of all of them."""

    name: str
    weight: float = 1.0
    fn: Callable[..., float] | None = None
    """`fn(output: str) -> float`, a plain function. If it takes two arguments, it also gets the item of the dataset."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"{self.name!r} is not a name", where="RewardSpec.name", fix="give a text")
        check_number(f"RewardSpec {self.name!r}: weight", self.weight, low=-1e6, high=1e6)
        check_sync(self.fn, f"RewardSpec {self.name!r}: fn")


@dataclass(frozen=True)
class VeRLConfig:
    """Settings of a training run."""

    algorithm: VeRLAlgorithm = VeRLAlgorithm.GRPO
    """A member or its value, `"grpo"` or `"ppo"`."""
    epochs: int = 1
    """Number of times that each prompt is used."""
    batch_size: int = 32
    """Prompts per step."""
    learning_rate: float = 1e-3
    kl_coef: float = 0.0
    """Weight of the divergence from the base; 0 turns it off."""
    clip_range: float = 0.2
    """Distance from 1 at which the ratio of new to old probability is clipped."""
    group_size: int = 8
    """Outputs per prompt; GRPO compares them and needs two or more."""
    max_new_tokens: int = 32
    max_sequence_length: int = 256
    """Tokens of a prompt and its output together."""
    model: str = BUILTIN_MODEL
    """`builtin://`, a folder, `hf://org/name@revision`, as in a manifest."""
    out: str | None = None
    """The run folder, which contains the adapters and the report; by default a new temporary one. With the same folder,
    settings and data, training continues where it ended."""
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Any other field of a manifest's `spec`, by path: `{"adapter.lora.rank": 32}`."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "algorithm", VeRLAlgorithm(self.algorithm))
        except ValueError:
            fix = f"give one of {', '.join(VeRLAlgorithm)}"
            raise UsageError(f"{self.algorithm!r} is not an algorithm", where="VeRLConfig.algorithm", fix=fix) from None
        for name in ("epochs", "batch_size", "group_size", "max_new_tokens", "max_sequence_length"):
            check_count(f"VeRLConfig.{name}", getattr(self, name))
        if self.algorithm is VeRLAlgorithm.GRPO and self.group_size == 1:
            fix = "give 2 or more, or `algorithm=VeRLAlgorithm.PPO`"
            raise UsageError("GRPO compares the outputs of a prompt", where="VeRLConfig.group_size", fix=fix)
        check_number("VeRLConfig.learning_rate", self.learning_rate, low=0, high=1, above=True)
        check_number("VeRLConfig.kl_coef", self.kl_coef, low=0, high=1000)
        check_number("VeRLConfig.clip_range", self.clip_range, low=0, high=1)


class VeRLTrainer:
    """Args: rewards: one or more. Their functions run one call at a time, in a thread of this process."""

    def __init__(self, config: VeRLConfig, rewards: Sequence[RewardSpec] | RewardSpec) -> None:
        if not isinstance(config, VeRLConfig):
            raise UsageError(f"{config!r} is not a VeRLConfig", where="config", fix="give a VeRLConfig")
        self.config = config
        self.rewards = [rewards] if isinstance(rewards, RewardSpec) else check_items(rewards, "rewards")
        for index, each in enumerate(self.rewards):
            if not isinstance(each, RewardSpec):
                raise UsageError(f"{each!r} is not a RewardSpec", where=f"rewards[{index}]", fix="give a RewardSpec")
        if not self.rewards:
            raise UsageError("nothing scores the outputs", where="rewards", fix="give one RewardSpec or more")

    async def train(self, dataset: Iterable[Any]) -> TrainMetrics:
        """Trains on the states of a dataset of items, plain dicts or texts; in a thread, so other tasks can continue.

        Returns:
            `loss` and `reward` of the last step, `steps`, and in `extra` the reward of the first step (`reward_first`),
            the run folder (`uri`) and every step's row (`history`).

        Raises:
            OrbitError: as for `orbit run`, with the manifest's field that it concerns.
        """
        items = check_items(dataset, "dataset")
        rows = [_row(item, index) for index, item in enumerate(items)]
        if not rows:
            raise DataError("there are no prompts", where="dataset", fix="give one item or more")
        return await asyncio.to_thread(self._train, rows, items)

    def _train(self, rows: list[dict[str, Any]], items: list[Any]) -> TrainMetrics:
        from orbit_runtime.loop import run
        from orbit_runtime.observability.progress import SilentProgress
        from orbit_runtime.storage import open_store

        out = self.config.out or tempfile.mkdtemp(prefix="orbit-verl-")
        with tempfile.TemporaryDirectory() as folder:
            prompts = Path(folder, "prompts.jsonl")
            prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
            spec = build_spec(self.config, self.rewards, str(prompts), len(rows))
            functions = {each.name: _reward(each, items) for each in self.rewards}
            result = run(spec, out=out, rewards=functions, progress=SilentProgress())
        lines = open_store(result.uri).get("metrics.jsonl").decode().splitlines()
        history = [json.loads(line) for line in lines]
        last = history[-1]
        extra = {"reward_first": history[0]["reward_mean"], "uri": result.uri, "history": history}
        return TrainMetrics(loss=last["loss"], reward=last["reward_mean"], steps=len(history), extra=extra)


def build_spec(config: VeRLConfig, rewards: Sequence[RewardSpec], prompts: str, num_prompts: int) -> OrbitRun:
    """The equivalent manifest."""
    from orbit_runtime.spec import parse_manifest

    spec: dict[str, Any] = {
        "model": {"uri": config.model, "maxSequenceLength": config.max_sequence_length},
        "adapter": {"type": "LoRA"},
        "algorithm": {
            "type": config.algorithm.name,
            "groupSize": config.group_size,
            "kl": {"coefficient": config.kl_coef},
            "clip": {"low": min(config.clip_range, 0.999), "high": config.clip_range},
        },
        "data": {"prompts": [{"uri": prompts}], "epochs": config.epochs, "seed": config.seed},
        "environment": {
            "rewards": [{"name": each.name, "entrypoint": FROM_PYTHON, "weight": each.weight} for each in rewards]
        },
        "rollout": {"sampling": {"maxNewTokens": config.max_new_tokens}},
        "training": {
            "steps": -(-num_prompts * config.epochs // config.batch_size),
            "promptsPerStep": config.batch_size,
            "learningRate": config.learning_rate,
        },
        "storage": {"uri": "runs"},
        "observability": {"metricsPort": -1},
    }
    manifest = {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "agents"}, "spec": spec}
    overrides = [f"{path}={json.dumps(value)}" for path, value in config.settings.items()]
    return parse_manifest(json.dumps(manifest), name="VeRLConfig", overrides=overrides)


ITEM = "item"
"""Column of a prompt's row: the index of its item in the dataset."""


def _row(item: object, index: int) -> dict[str, Any]:
    where = f"dataset[{index}]"
    prompt = item if isinstance(item, str) else get(item, seen_key(item, where))
    is_chat = isinstance(prompt, list) and bool(prompt) and all(isinstance(each, Mapping) for each in prompt)
    if not (isinstance(prompt, str) and prompt) and not is_chat:
        raise DataError(
            f"{prompt!r} is not a prompt", where=f"{where}.{PAIRS[0][0]}", fix="give a text or a list of chat messages"
        )
    return {"prompt": prompt, ITEM: index}


def _reward(spec: RewardSpec, items: Sequence[Any]) -> Callable[..., float]:
    function = spec.fn
    assert function is not None
    takes_item = num_accepted(function, 2) == 2

    def reward(completion: str, prompt: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> float:
        given = (completion, items[fields[ITEM]]) if takes_item else (completion,)
        return float(plain(function(*given), f"RewardSpec {spec.name!r}: fn"))

    return reward
