"""The trainer of a run: a policy in this process, or ranks that hold it in parts.

Belongs here: what a manifest asks of a trainer, and what each kind is made of. Does not belong here: the rest of a run
(`build`), what trainers do (`training`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.errors import OrbitError, UnsupportedError
from orbit_runtime.planner.sampling import sampling_of
from orbit_runtime.spec import Resolved
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Probe, Trainer

if TYPE_CHECKING:
    from orbit_runtime.adapters.config import AdapterConfig
    from orbit_runtime.algorithms.table import Algorithm
    from orbit_runtime.policy.facts import PolicyFacts
    from orbit_runtime.policy.model import Policy
    from orbit_runtime.policy.recompute import Recompute
    from orbit_runtime.policy.snapshot import Snapshot
    from orbit_runtime.training.settings import TrainerSettings


@dataclass(frozen=True)
class TrainerSide:
    """The trainer, and what a run asks of the model behind it."""

    trainer: Trainer
    facts: PolicyFacts
    base_digest: Callable[[], str]
    """Of the frozen base as it lies in memory: equal before and after a run, whatever way it is divided."""
    probing: Callable[[Probe], AbstractContextManager[None]]
    """A context within which the trainer holds an adapter that nobody trained, for preflight."""
    snapshot: Callable[..., Snapshot]
    """`policy.snapshot.take_snapshot` of this side."""
    policy: Policy | None
    """In this process: what the torch engine samples with."""


def build_torch_side(resolved: Resolved, folder: Path, base_model: str, note: Callable[[str], None]) -> TrainerSide:
    """Args: base_model: named in published files."""
    from orbit_runtime.policy.facts import describe
    from orbit_runtime.policy.snapshot import take_snapshot

    policy = build_policy(resolved, folder, note)
    trainer, _ = build_trainer(resolved, policy, base_model=base_model)
    seed = resolved.run.spec.data.seed
    return TrainerSide(
        trainer,
        describe(policy),
        base_digest=policy.base_digest,
        probing=partial(policy.injected.masters.probing, seed=seed),
        snapshot=partial(take_snapshot, policy),
        policy=policy,
    )


def build_policy(resolved: Resolved, folder: Path, note: Callable[[str], None]) -> Policy:
    """The frozen base with a new adapter. Raises UnsupportedError (78) where torch is not installed."""
    _check_torch()
    from orbit_runtime.policy.load import load_policy

    policy = load_policy(
        folder,
        _adapter_config(resolved.run.spec),
        **_policy_settings(resolved),
        announce=lambda report: note(report.text()),
    )
    recompute = _choose_recompute(resolved, folder)
    if recompute != "None":
        note(f"layers are computed again in the backward pass: training.recompute is {recompute}")
    policy.recompute(recompute)
    return policy


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "training needs torch, which is not installed", fix="pip install 'orbit-rl[train]'"
        ) from None


def _adapter_config(spec: RunSpec) -> AdapterConfig:
    from orbit_runtime.adapters.config import AdapterConfig

    adapter = spec.adapter
    settings: dict[str, Any] = {}
    if adapter.lora:
        lora = adapter.lora
        settings = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "dropout": lora.dropout}
    if adapter.oft:
        oft = adapter.oft
        settings = {
            "block_size": oft.block_size,
            "parametrization": oft.parametrization,
            "neumann_terms": oft.neumann_terms,
            "coft": oft.coft,
            "coft_eps": oft.coft_eps,
        }
    return AdapterConfig(type=adapter.type, targets=tuple(adapter.targets or ()), experts=adapter.experts, **settings)


def _policy_settings(resolved: Resolved) -> dict[str, Any]:
    """Of `load_policy`; plain values."""
    import torch

    spec = resolved.run.spec
    return {
        "precision": spec.model.precision,
        "activation_precision": spec.model.activation_precision,
        "seed": spec.data.seed,
        "device": resolved.device,
        "compute_dtype": getattr(torch, resolved.compute_dtype),
        "kernel": spec.training.decided_attention(spec.model.max_sequence_length),
    }


def _choose_recompute(resolved: Resolved, folder: Path) -> Recompute:
    """`Auto` is what the plan says; a model that cannot be planned keeps everything."""
    from orbit_runtime.loop.machine import planned_machine
    from orbit_runtime.model_info.checkpoint import folder_facts
    from orbit_runtime.planner.verdict import plan_as_run

    asked = resolved.run.spec.training.recompute
    if asked != "Auto":
        return asked
    try:
        machine = planned_machine(resolved.run.spec.placement, resolved.device)
        return plan_as_run(resolved.asked, folder_facts(folder), machine).recompute
    except OrbitError:
        return "None"


def build_trainer(resolved: Resolved, policy: Policy, *, base_model: str) -> tuple[Trainer, Algorithm]:
    """As the first step finds it, in this process."""
    from orbit_runtime.training.torch_trainer import TorchTrainer

    algorithm = algorithm_of(resolved)
    return TorchTrainer(policy, _trainer_settings(resolved, base_model), algorithm.loss), algorithm


def algorithm_of(resolved: Resolved) -> Algorithm:
    from orbit_runtime.algorithms.table import ALGORITHMS

    return ALGORITHMS[resolved.run.spec.algorithm.type]


def _trainer_settings(resolved: Resolved, base_model: str) -> TrainerSettings:
    from orbit_runtime.algorithms.losses import PolicyLossSettings
    from orbit_runtime.training.settings import TrainerSettings

    spec = resolved.run.spec
    training, algorithm, sampling = spec.training, spec.algorithm, spec.rollout.sampling
    in_loss = algorithm.kl.placement == "Loss"
    loss = PolicyLossSettings(
        clip_low=algorithm.clip.low,
        clip_high=algorithm.clip.high,
        kl_coefficient=algorithm.kl.coefficient if in_loss else 0.0,
        kl_estimator=algorithm.kl.estimator,
    )
    importance = algorithm.importance_sampling
    return TrainerSettings(
        peak_learning_rate=training.learning_rate,
        schedule=training.schedule.type,
        warmup_steps=training.schedule.warmup_steps,
        decay_steps=resolved.decay_steps or training.steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        micro_batch_tokens=training.micro_batch_tokens,
        mini_batch_prompts=training.mini_batch_prompts,
        update_epochs=training.update_epochs,
        loss=loss,
        reduction=algorithm.reduction,
        constant_length=sampling.max_new_tokens,
        importance_cap=importance.cap if importance.type == "TokenTruncated" else None,
        sampling=sampling_of(spec),
        base_model=base_model,
        seed=spec.data.seed,
        router_replay=spec.rollout.router_replay,
    )


def check_replay(spec: RunSpec, facts: PolicyFacts) -> None:
    """Raises UnsupportedError (78) for a model whose tokens cannot be sent to given experts."""
    if spec.rollout.router_replay != "None" and facts.routed is None:
        raise UnsupportedError(
            "this model has no routed experts, or routers that no other choice can be given to",
            where="spec.rollout.routerReplay",
            fix="remove it",
        )
