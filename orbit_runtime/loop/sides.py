"""Where trainer and engine run, and what the caller of a run passes besides its manifest.

Belongs here: the interface to sides in other processes. Does not belong here: those processes (`services`), building
sides in this one (`trainers`, `engines`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orbit_runtime.spec import MachineFacts, Resolved
from orbit_runtime.storage import Execution, Store
from orbit_runtime.types import Engine, Tokenizer
from orbit_runtime.workers.signals import StopFlag

if TYPE_CHECKING:
    from orbit_runtime.loop.trainers import TrainerSide
    from orbit_runtime.policy.facts import PolicyFacts


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
    """What a trainer's start says, leaves to be ended, and is given up for."""

    note: Callable[[str], None]
    closing: ExitStack
    """Ranks are ended there."""
    check: Callable[[], None] = lambda: None
    """Called while ranks start; they end with what it raises."""


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


@dataclass(frozen=True)
class Given:
    """What a caller passes besides the manifest."""

    rewards: Mapping[str, Callable[..., Any]] | None = None
    """Functions by reward name."""
    loss: Callable[..., Any] | None = None
    """Replaces the function that `spec.algorithm.entrypoint` names."""
    advantages: Callable[..., Any] | None = None
    """Replaces the function that `spec.algorithm.advantage.entrypoint` names."""
    search_path: Sequence[str] = field(default=())
    """Folders searched for entry points after `environment.code`."""
    sides: Sides | None = None
    """None if both run in this process or are started by it."""

    @property
    def functions(self) -> list[str]:
        """Descriptions of the functions given from Python."""
        found = [f"reward {name}" for name in sorted(self.rewards or {})]
        return [*found, *(name for name in ("loss", "advantages") if getattr(self, name) is not None)]
