"""What this version cannot combine with training all weights of a model (`spec.adapter.type: Full`).

Belongs here: those limits, for `orbit plan`, the operator and a run. Does not belong here: bytes (`parts`).
"""

from __future__ import annotations

from collections.abc import Iterator

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.planner.support import Problem
from orbit_runtime.spec.run import RunSpec

FIELD = "spec.adapter.type"
ADAPT = "train an adapter (adapter.type: LoRA)"


def whole_problems(spec: RunSpec, precision: str | None = None, num_experts: int = 0) -> Iterator[Problem]:
    """Args: precision, num_experts: the checkpoint's; if omitted, only the manifest is known."""
    if spec.adapter.type != "Full":
        return
    if spec.algorithm.type != "SFT":
        yield Problem(
            f"a whole model is trained only on demonstrations: with algorithm.type {spec.algorithm.type} an engine "
            "would need every weight at each publish",
            FIELD,
            f"{ADAPT}; or write algorithm.type: SFT, and start the run with rewards from the resulting model",
        )
    precision = precision or spec.model.precision
    if precision not in ("Auto", "BF16"):
        yield Problem(
            f"{precision} weights are packed and frozen: they cannot be trained",
            FIELD,
            f"name a BF16 checkpoint in spec.model, or {ADAPT}",
        )
    if num_experts:
        yield Problem("this version trains no routed experts as a whole", FIELD, ADAPT)
    if spec.training.trainer == "Megatron":
        yield Problem(
            "ranks divide a frozen base: they hold no masters of its weights",
            FIELD,
            f"write training.trainer: Torch where one GPU is enough, or {ADAPT}",
        )
    if spec.algorithm.kl.coefficient > 0:
        yield Problem("no base is left beside the model to keep it close to", FIELD, f"remove algorithm.kl, or {ADAPT}")
    for field, value, fix in (
        ("targets", spec.adapter.targets, "remove it"),
        ("initFrom", spec.adapter.init_from, "name the model to start from in spec.model.uri"),
    ):
        if value is not None:
            yield Problem(f"adapter.{field} applies to an adapter, but with `Full` there is none", FIELD, fix)


def check_whole(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) with the first problem."""
    for problem in whole_problems(spec):
        raise UnsupportedError(problem.message, where=problem.where, fix=problem.fix)


def check_adapted(spec: RunSpec) -> None:
    """Raises UnsupportedError (78) if a run's adapters are requested but it trains the model itself."""
    if spec.adapter.type == "Full":
        raise UnsupportedError(
            "a run that trains a whole model has no adapters: its result is a model",
            where=FIELD,
            fix="name that model, <run folder>/models/policy-v…: `orbit serve --model`, or `spec.model.uri` of a "
            "manifest with an adapter",
        )
