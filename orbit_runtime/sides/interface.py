"""The interface to a run's two sides, trainer and engine.

Belongs here: what the loop asks of them, and the records that pass between. Does not belong here: building sides in
this process (`trainers`, `engines`), sides in others (`services`).
"""

from __future__ import annotations

from collections.abc import Buffer, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from orbit_runtime.spec import MachineFacts, Resolved
from orbit_runtime.spec.placement import Placement
from orbit_runtime.spec.rollout import Rollout
from orbit_runtime.storage import Execution, Store
from orbit_runtime.types import Engine, Probe, Tokenizer, Trainer
from orbit_runtime.workers.child.signals import StopFlag

if TYPE_CHECKING:
    from orbit_runtime.adapters.config import AdapterConfig
    from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
    from orbit_runtime.model_info.weights import ModelFacts
    from orbit_runtime.planner import Machine, Plan
    from orbit_runtime.policy.facts import PolicyFacts
    from orbit_runtime.policy.model import Policy
    from orbit_runtime.policy.snapshot import Snapshot


@dataclass(frozen=True)
class TrainerOrder:
    """The input for opening a trainer, wherever it computes."""

    resolved: Resolved
    """The result of `settle`."""
    folder: Path
    """The model's folder."""
    model: str
    """The model's name in published files."""
    closing: ExitStack
    """Receives everything that must outlive the sides."""
    teacher: AdapterFolder | None = None
    """The adapter that teaches."""


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine, all decided: from a manifest, or from the command line of a server without one."""

    adapter: AdapterConfig
    rollout: Rollout
    """Its `engine` and `adapter_transport` are decided."""
    max_sequence_length: int
    device: Literal["cpu", "cuda"]
    compute_dtype: Literal["float32", "bfloat16"]
    plan: Callable[[ModelFacts, Machine], Plan]
    """The plan that decides the servers' memory."""
    activation_precision: str = "WeightOnly"
    placement: Placement = field(default_factory=Placement)
    seed: int = 0


@dataclass(frozen=True)
class EngineOrder:
    """The input for building an engine, wherever it computes."""

    settings: EngineSettings
    tokenizer: Tokenizer
    folder: Path
    """The model's folder."""
    sequences: Sequence[Sequence[int]]
    """Real prompts as token ids."""
    closing: ExitStack
    """Receives everything that must outlive the engine; the caller closes the engine itself."""
    is_resumed: bool = False
    """Another execution of the run was there before, and may have left adapters on attached servers."""


@dataclass(frozen=True)
class TrainerSide:
    """The trainer, and what a run asks of the model behind it."""

    trainer: Trainer
    facts: PolicyFacts
    begin: Callable[[AdapterFolder, str], None]
    """Gives the trainer an adapter to begin with, before its first step. Arguments: the adapter, and the digest of its
    files."""
    base_digest: Callable[[], str]
    """Digest of the frozen base in memory: equal before and after a run, however it is divided. If all weights train:
    digest of the weights at the start.
    """
    probing: Callable[[Probe], AbstractContextManager[None]]
    """Context in which the trainer holds an untrained adapter, for preflight."""
    snapshot: Callable[..., Snapshot] | None
    """`policy.snapshot.take_snapshot` of this side; None if its layers cannot be inspected from here."""
    policy: Policy | None
    """The policy from which the torch engine samples; None if the trainer is not in this process."""
    rounding: Mapping[str, str]
    """Facts that decide the order of its sums, hence a run's last bits."""
    gives_same_bits: Callable[[], bool] = lambda: False
    """Whether a torch engine has the trainer's log-probs to the bit, so that any difference is a fault. Tries shapes,
    which takes seconds for a large output layer."""
    is_over: Callable[[], bool] = lambda: False
    """Whether all later calls must fail after an error: ranks that failed are not started again."""
    explain: Callable[[Mapping[str, Buffer]], str] | None = None
    """Describes how the values that the newest `score` applied differ from these published files; None if it cannot
    tell.
    """


class Sides(Protocol):
    """Trainer and engine of one run, wherever they are. The loop calls the methods in the order of their definition."""

    @property
    def loads_beside(self) -> bool:
        """Whether servers may load an adapter while the trainer computes its part of the proof."""

    @property
    def in_place(self) -> bool:
        """Whether checkpoints are read by another process, from the store."""

    def watch(self, stop: StopFlag, note: Callable[[str], None], store: Store, execution: Execution) -> None:
        """Sets the flag on which to stop waiting, where to send progress notes, and the run folder with its writer."""

    def machine(self, stage: Callable[[str], None]) -> MachineFacts:
        """Facts of their machines, from which `Auto` is resolved. May import torch, as a stage of its own."""

    def check(self, resolved: Resolved) -> None:
        """Raises UnsupportedError (78) for packages that are not installed; called before anything is fetched."""

    def load_loss(
        self, resolved: Resolved, search_path: Callable[[], Sequence[str]], given: Callable[..., Any] | None
    ) -> None:
        """Loads the loss where it will be computed. Args: given: replaces the function that the manifest names."""

    def settle(self, resolved: Resolved, folder: Path, longest_prompt: Callable[[], int] | None = None) -> Resolved:
        """Decides what the manifest left to the plan, once the model's folder is there.

        Args: longest_prompt: its tokens, counted only where memory is short; None if episodes have several turns.
        """

    @property
    def starts_engine(self) -> bool:
        """Whether the engine starts beside the trainer; known once settled."""

    def start_engine(self, order: EngineOrder) -> None:
        """Starts the engine before `open`, if it starts beside the trainer. Errors: as of `build_engine`."""

    def open(self, order: TrainerOrder) -> TrainerSide:
        """Brings the trainer into the state that a run's first step expects.

        Raises:
            OrbitError: a side is unreachable, cannot be built, or belongs to another manifest.
        """

    def build_engine(self, order: EngineOrder, facts: PolicyFacts) -> Engine:
        """The engine, once the sides are open. Errors: as of `engines.build_engine`.

        Args: facts: of the trainer's side.
        """
