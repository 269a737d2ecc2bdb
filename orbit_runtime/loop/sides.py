"""Where trainer and engine are, and what else the caller of a run gives beside its manifest.

Belongs here: the seam for sides that other processes hold. Does not belong here: those processes (`services`), building
sides in this one (`trainers`, `engines`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from orbit_runtime.loop.signals import StopFlag
from orbit_runtime.spec import MachineFacts, Resolved
from orbit_runtime.storage import Execution, Store
from orbit_runtime.types import Engine

if TYPE_CHECKING:
    from orbit_runtime.loop.trainers import TrainerSide


@dataclass(frozen=True, slots=True)
class Opened:
    """The run that asks for its sides."""

    model: str
    """Named in published files."""
    store: Store
    """The run folder."""
    execution: Execution
    teacher: str | None = None
    """Digest of the adapter that teaches."""


class Sides(Protocol):
    """Trainer and engine in other processes."""

    @property
    def machine(self) -> MachineFacts:
        """What `Auto` is decided from: theirs."""
        ...

    def watch(self, stop: StopFlag, note: Callable[[str], None]) -> None:
        """Whom to tell, and when to give up waiting."""
        ...

    def open(self, resolved: Resolved, opened: Opened, closing: ExitStack) -> TrainerSide:
        """The sides as a run's first step finds them.

        Raises:
            OrbitError: a side is not there, or is not this manifest's.
        """
        ...

    @property
    def engine(self) -> Engine:
        """Not of a run that samples nothing."""
        ...


@dataclass(frozen=True)
class Given:
    """Beside the manifest."""

    rewards: Mapping[str, Callable[..., Any]] | None = None
    """Functions by reward name."""
    loss: Callable[..., Any] | None = None
    """Instead of the one that `spec.algorithm.entrypoint` names."""
    advantages: Callable[..., Any] | None = None
    """Instead of those that `spec.algorithm.advantage.entrypoint` names."""
    search_path: Sequence[str] = field(default=())
    """Folders of entry points, after `environment.code`."""
    sides: Sides | None = None
    """None: both are in this process, or are started by it."""

    @property
    def functions(self) -> list[str]:
        """What was given from Python, in words."""
        found = [f"reward {name}" for name in sorted(self.rewards or {})]
        return [*found, *(name for name in ("loss", "advantages") if getattr(self, name) is not None)]
