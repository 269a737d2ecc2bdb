"""The state that changes during a run, and the part of it that a checkpoint stores as facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orbit_runtime.loop.buffer import EpisodeSnapshot
from orbit_runtime.loop.publish import Publication
from orbit_runtime.observability.metrics import MetricsRow


@dataclass
class ValidationHistory:
    """Held-out loss over the course of a run."""

    first: float | None = None
    """Loss before training."""
    best: float = math.inf
    best_step: int = 0

    def take(self, step: int, loss: float) -> bool:
        """Records a loss; returns whether it is the best so far."""
        self.first = loss if self.first is None else self.first
        is_best = loss < self.best
        if is_best:
            self.best, self.best_step = loss, step
        return is_best


@dataclass
class RunState:
    """Mutable on purpose: the loop is the only writer."""

    step: int = 0
    """Steps finished."""
    publishes: int = 0
    publishes_proven: int = 0
    resumed: int = 0
    """Number of times that this run was continued from a checkpoint."""
    policy_version: int = 0
    """Version to publish first: 0, or the checkpoint's."""
    expected_digest: str | None = None
    """Digest of the checkpoint's adapter: a resumed trainer must publish exactly these bytes."""
    publication: Publication | None = None
    checkpoint_step: int = 0
    """Newest durable step."""
    checkpoint_begun: int = 0
    """Newest step whose checkpoint is written or being written."""
    kept: tuple[EpisodeSnapshot, ...] = ()
    """Rollouts of later steps, from the checkpoint that this execution began with."""
    evaluated: Mapping[str, Any] | None = None
    """Evaluation of the active policy that its adapter's manifest does not hold yet."""
    row: MetricsRow | None = None
    """The newest step's row, including the cost of keeping it; stored with the next step, or at the end."""
    rows: dict[int, str] = field(default_factory=dict)
    """Digests of the rows so far, by step."""
    parity_limit: float = 0.0
    base_digest: str = ""
    base_digest_after: str | None = None
    trainable_parameters: int = 0
    warnings: list[str] = field(default_factory=list)
    validated: ValidationHistory = field(default_factory=ValidationHistory)
    """Results on held-out demonstrations so far."""
    sleep: dict[str, int] | None = None
    """Bytes that the engine held before its first sleep and during it, in this execution."""
    woken: bool = False
    """Whether parity was measured after the first wake of this execution."""

    @property
    def version(self) -> int:
        return self.publication.adapter.version if self.publication else self.policy_version

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def facts(self) -> dict[str, Any]:
        """The facts for the report; `restore` reads those from which a resumed run continues."""
        return {
            "publishes": self.publishes,
            "publishes_proven": self.publishes_proven,
            "resumed": self.resumed,
            "parity_limit": self.parity_limit,
            "base_digest_before": self.base_digest,
            "base_digest_after": self.base_digest_after,
            "trainable_parameters": self.trainable_parameters,
            "warnings": list(self.warnings),
            "sleep": self.sleep,
            **({} if self.validated.first is None else {"validated": asdict(self.validated)}),
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        self.publishes = int(facts["publishes"])
        self.publishes_proven = int(facts["publishes_proven"])
        self.resumed = int(facts["resumed"]) + 1
        self.parity_limit = float(facts["parity_limit"])
        self.warnings = list(facts["warnings"])
        told = facts.get("validated", {})
        self.validated = ValidationHistory(**{name: told[name] for name in ("first", "best", "best_step") if told})
