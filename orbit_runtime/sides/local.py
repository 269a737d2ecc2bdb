"""The sides that this process opens: a trainer of its own or ranks, an engine of its own or servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.sides.engines import EngineAhead, build_engine, may_start_ahead
from orbit_runtime.sides.interface import EngineOrder, TrainerOrder, TrainerSide
from orbit_runtime.sides.machine import find_machine
from orbit_runtime.sides.trainers import (
    TrainerLayout,
    build_side,
    check_rank_packages,
    decide_by_size,
    decide_division,
    load_loss,
)
from orbit_runtime.spec import MachineFacts, Resolved
from orbit_runtime.spec.resolve import with_trainer
from orbit_runtime.storage import Execution, Store
from orbit_runtime.types import Engine
from orbit_runtime.workers.child.signals import StopFlag

if TYPE_CHECKING:
    from orbit_runtime.policy.facts import PolicyFacts
    from orbit_runtime.policy.model import Policy


class LocalSides:
    """`Sides` of one run: its methods are called once each, in the interface's order."""

    loads_beside = True
    in_place = False

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self._stop = StopFlag()
        self._note = note
        self._loss: Callable[..., Any] | None = None
        self._division: TrainerLayout | None = None
        self.starts_engine = False
        self._ahead: EngineAhead | None = None
        self._policy: Policy | None = None

    def watch(self, stop: StopFlag, note: Callable[[str], None], store: Store, execution: Execution) -> None:
        self._stop, self._note = stop, note

    def machine(self, stage: Callable[[str], None]) -> MachineFacts:
        return find_machine(stage, self._stop)

    def check(self, resolved: Resolved) -> None:
        if resolved.run.spec.training.trainer == "Megatron":
            check_rank_packages()

    def load_loss(
        self, resolved: Resolved, search_path: Callable[[], Sequence[str]], given: Callable[..., Any] | None
    ) -> None:
        self._loss = load_loss(resolved, search_path, given)

    def settle(self, resolved: Resolved, folder: Path, longest_prompt: Callable[[], int] | None = None) -> Resolved:
        self._division = decide_division(resolved, folder, longest_prompt)
        spec = resolved.run.spec
        for field, asked, taken in (
            ("training.microBatchTokens", spec.training.micro_batch_tokens, self._division.micro_batch_tokens),
            ("rollout.maxRunningRequests", spec.rollout.max_running_requests, self._division.running),
        ):
            if taken < asked and self._division.trainer == "Torch":
                self._note(f"{asked} do not fit in the memory of this machine: {field} is {taken}")
        resolved = decide_by_size(with_trainer(resolved, self._division.trainer), folder)
        if resolved.asked.spec.training.learning_rate is None:
            self._note(f"training.learningRate is not set: this run takes {resolved.run.spec.training.decided_rate:g}")
        is_auto = resolved.asked.spec.model.compute_precision == "Auto"
        if is_auto and resolved.device == "cpu" and resolved.compute_dtype == "bfloat16":
            self._note("products are computed in BF16, for which this machine has instructions")
        self.starts_engine = may_start_ahead(resolved, self._division)
        return resolved

    def start_engine(self, order: EngineOrder) -> None:
        if self.starts_engine:
            self._ahead = EngineAhead(order)
            order.closing.callback(self._ahead.close)

    def open(self, order: TrainerOrder) -> TrainerSide:
        assert self._division is not None
        assert self._loss is not None
        check = (lambda: None) if self._ahead is None else self._ahead.check
        side = build_side(order, self._division, self._loss, self._note, check)
        self._policy = side.policy
        return side

    def build_engine(self, order: EngineOrder, facts: PolicyFacts) -> Engine:
        if self._ahead is not None:
            return self._ahead.take()
        if self._division is not None and order.settings.rollout.engine == "Torch":
            rollout = order.settings.rollout.model_copy(update={"max_running_requests": self._division.running})
            order = replace(order, settings=replace(order.settings, rollout=rollout))
        return build_engine(order, facts, self._policy)
