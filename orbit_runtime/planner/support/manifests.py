"""Combinations that no machine supports: a whole model's weights, replayed routers, three processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.support import SupportRow, Words, check_rows
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.workers.user_code.entrypoints import FROM_PYTHON

ADAPT = "train an adapter (adapter.type: LoRA)"


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """A manifest, and what is known of its model by then."""

    spec: RunSpec
    precision: str = "Auto"
    """The checkpoint's; `Auto` if only the manifest is known."""
    num_experts: int = 0
    replays: bool = True
    """Whether tokens can be sent to given experts, or that is not known yet."""
    trainer: str = ""
    """`Auto` decided; empty if it is not yet."""


def read_manifest(spec: RunSpec, model: ModelFacts, trainer: str) -> ManifestFacts:
    """The manifest's facts, with those from the headers of a checkpoint."""
    shape = model.architecture
    replays = bool(shape.num_experts) and shape.family != "deepseek_v4"
    return ManifestFacts(spec, model.precision, shape.num_experts, replays, trainer)


def _whole(when: Callable[[ManifestFacts], bool | Words | None], why: str, fix: str) -> SupportRow[ManifestFacts]:
    return SupportRow("adapter.type", "Full", lambda asked: asked.spec.adapter.type == "Full" and when(asked), why, fix)


def _packed(asked: ManifestFacts) -> Words | None:
    precision = asked.spec.model.precision if asked.precision == "Auto" else asked.precision
    return None if precision in ("Auto", "BF16") else {"precision": precision}


def _sampled(asked: ManifestFacts) -> Words | None:
    kind = asked.spec.algorithm.type
    return None if kind == "SFT" else {"kind": kind}


MANIFESTS: tuple[SupportRow[ManifestFacts], ...] = (
    _whole(_sampled, "a whole model is trained only on demonstrations: with algorithm.type {kind} an engine would need "
           "every weight at each publish",
           f"{ADAPT}; or write algorithm.type: SFT, and start the run with rewards from the resulting model"),
    _whole(_packed, "{precision} weights are packed and frozen: they cannot be trained",
           f"name a BF16 checkpoint in spec.model, or {ADAPT}"),
    _whole(lambda asked: bool(asked.num_experts), "this version trains no routed experts as a whole", ADAPT),
    _whole(lambda asked: asked.spec.training.trainer == "Megatron",
           "ranks divide a frozen base: they hold no masters of its weights",
           f"write training.trainer: Torch where one GPU is enough, or {ADAPT}"),
    _whole(lambda asked: asked.spec.algorithm.kl.coefficient > 0,
           "no base is left beside the model to keep it close to", f"remove algorithm.kl, or {ADAPT}"),
    _whole(lambda asked: asked.spec.adapter.targets is not None,
           "adapter.targets applies to an adapter, but with `Full` there is none", "remove it"),
    _whole(lambda asked: asked.spec.adapter.init_from is not None,
           "adapter.initFrom applies to an adapter, but with `Full` there is none",
           "name the model to start from in spec.model.uri"),
    SupportRow("rollout.routerReplay", "models without routed experts",
        lambda asked: asked.spec.rollout.router_replay != "None" and not asked.replays and _sampled(asked) is not None,
        "this model has no routed experts, or routers that no other choice can be given to", "remove it"),
    SupportRow("algorithm.entrypoint", "ranks",
        lambda asked: asked.spec.algorithm.entrypoint == FROM_PYTHON and asked.trainer == "Megatron",
        "ranks import a loss by its name, and this one was passed from Python",
        "name it `module:function`, or write `trainer: Torch` in spec.training"),
)  # fmt: skip

APART: tuple[SupportRow[RunSpec], ...] = (
    SupportRow("rollout.sleep", "three processes", lambda spec: spec.rollout.sleep != "None",
        "a server sleeps to make room for the trainer on its GPU, and a trainer in another process does not give back "
        "what it took before the server wakes", "write None, or use `orbit run`"),
    SupportRow("rollout.sampling.maxNewTokens", "three processes",
        lambda spec: spec.rollout.sampling.max_new_tokens is None and spec.algorithm.type != "SFT",
        "a run decides it from its prompts: three processes would each have to", "write a number, or use `orbit run`"),
    SupportRow("training.trainer", "three processes",
        lambda spec: spec.training.trainer == "Auto" and spec.placement.nodes > 1,
        "three processes read `Auto` as Torch, which does not use several nodes",
        "write Megatron, or placement.nodes: 1"),
    SupportRow("adapter.type", "three processes", lambda spec: spec.adapter.type == "Full",
        "the whole of a model is trained in one process: each of its states would pass through the orchestrator",
        "use `orbit sft`, or train an adapter (adapter.type: LoRA)"),
)  # fmt: skip


def check_manifest(asked: ManifestFacts) -> None:
    """Raises UnsupportedError (78) for what no machine would mend."""
    check_rows(MANIFESTS, asked)


def check_apart(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) for what this version supports in one process only."""
    check_rows(APART, spec)


def check_adapted(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) if a run's adapters are requested but it trains the model itself."""
    if spec.adapter.type == "Full":
        raise UnsupportedError(
            "a run that trains a whole model has no adapters: its result is a model",
            where="spec.adapter.type",
            fix="name that model, <run folder>/models/policy-v…: `orbit serve --model`, or `spec.model.uri` of a "
            "manifest with an adapter",
        )
