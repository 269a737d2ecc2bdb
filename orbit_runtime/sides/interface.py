"""The interface to a run's two sides, trainer and engine.

Belongs here: what the loop asks of them, and the records that pass between. Does not belong here: building sides in
this process (`trainers`, `engines`), sides in others (`services`).
"""

from __future__ import annotations

from collections.abc import Buffer, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orbit_runtime.spec import MachineFacts, Resolved
from orbit_runtime.storage import Execution, Store
from orbit_runtime.types import Engine, Probe, Tokenizer, Trainer
from orbit_runtime.workers.child.signals import StopFlag

if TYPE_CHECKING:
    from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
    from orbit_runtime.policy.facts import PolicyFacts
    from orbit_runtime.policy.model import Policy
    from orbit_runtime.policy.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Opened:
    """The run that opens its sides."""

    model: str
    """The model's name in published files."""
    store: Store
    """The run folder."""
    execution: Execution
    weights: str
    """Digest of the model's tensors on disk."""
    teacher: str | None = None
    """Digest of the teacher's adapter; None if there is none."""


@dataclass(frozen=True)
class EngineOrder:
    """What an engine is built from, wherever it computes."""

    resolved: Resolved
    facts: PolicyFacts
    tokenizer: Tokenizer
    folder: Path
    """The model's."""
    sequences: Sequence[Sequence[int]]
    """Real prompts as token ids."""
    closing: ExitStack
    """What must outlive the engine is pushed here; the caller closes the engine itself."""
    is_resumed: bool = False
    """Another execution of the run was there before, and may have left adapters on attached servers."""


@dataclass(frozen=True)
class TrainerStart:
    """Callbacks and resources that a starting trainer needs."""

    note: Callable[[str], None]
    closing: ExitStack
    """Ranks are ended there."""
    check: Callable[[], None] = lambda: None
    """Called while ranks start; they end with what it raises."""


@dataclass(frozen=True)
class TrainerSide:
    """The trainer, and what a run asks of the model behind it."""

    trainer: Trainer
    facts: PolicyFacts
    begin: Callable[[AdapterFolder, str], None]
    """Gives the trainer an adapter to begin with, before its first step. Arguments: the adapter, and the digest of its
    files."""
    base_digest: Callable[[], str]
    """Digest of the frozen base as it lies in memory: equal before and after a run, however it is divided. If all
    weights train: digest of what the run began with."""
    probing: Callable[[Probe], AbstractContextManager[None]]
    """Context in which the trainer holds an untrained adapter, for preflight."""
    snapshot: Callable[..., Snapshot] | None
    """`policy.snapshot.take_snapshot` of this side; None if its layers cannot be inspected from here."""
    policy: Policy | None
    """What the torch engine samples with; None if the trainer is not in this process."""
    rounding: Mapping[str, str]
    """Facts that decide the order of its sums, hence a run's last bits."""
    is_over: Callable[[], bool] = lambda: False
    """Whether no call can succeed any more after an error: ranks that failed are not started again."""
    explain: Callable[[Mapping[str, Buffer]], str] | None = None
    """Describes how what the newest `score` applied differs from these published files; None if it cannot tell."""


class Sides(Protocol):
    """Trainer and engine in other processes."""

    @property
    def machine(self) -> MachineFacts:
        """Facts of their machines, from which `Auto` is resolved."""
        ...

    def watch(self, stop: StopFlag, note: Callable[[str], None]) -> None:
        """Sets where to send progress notes, and the flag on which to stop waiting."""
        ...

    def open(self, resolved: Resolved, opened: Opened, closing: ExitStack) -> TrainerSide:
        """Brings the sides into the state that a run's first step expects.

        Raises:
            OrbitError: a side is unreachable, or belongs to another manifest.
        """
        ...

    def build_engine(self, order: EngineOrder) -> Engine:
        """The engine, once the sides are open. Errors: as of `engines.build_engine`."""
        ...
