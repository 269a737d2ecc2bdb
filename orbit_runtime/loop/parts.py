"""The parts of a run, built and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orbit_runtime.algorithms.table import Algorithm
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
from orbit_runtime.data.stream import PromptStream
from orbit_runtime.environments.episodes import Environment
from orbit_runtime.evaluation.tasks import EvalTask
from orbit_runtime.loop.display import RunDisplay
from orbit_runtime.loop.keep import Checkpoints
from orbit_runtime.loop.own_code import NO_CODE, RunCode
from orbit_runtime.loop.publish import BackgroundWriter, PolicyVersions, Publisher
from orbit_runtime.sides.inputs import Inputs, Names
from orbit_runtime.sides.interface import TrainerSide
from orbit_runtime.spec import OrbitRun, Resolved, identity_digest
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage import Execution, Store
from orbit_runtime.types import Engine, Tokenizer, Trainer

if TYPE_CHECKING:
    from orbit_runtime.policy.facts import PolicyFacts
    from orbit_runtime.rollout.teacher_servers import ServedTeacher


@dataclass(frozen=True)
class HeldOut:
    """The held-out tasks that a run's policy is measured on."""

    tasks: tuple[EvalTask, ...]
    tokenizer: Tokenizer

    def settings(self) -> dict[str, Any]:
        return {task.name: task.to_json() for task in self.tasks}


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts common to all runs; all choices are made."""

    run: OrbitRun
    resolved: Resolved
    store: Store
    execution: Execution
    keeper: BackgroundWriter
    prompts: PromptStream
    side: TrainerSide
    algorithm: Algorithm
    names: Names
    content: Mapping[str, str]
    """Digests of the model, the prompts and the code, by name."""
    inputs: Inputs
    sequences: tuple[tuple[int, ...], ...]
    """Real prompts as token ids, on which preflight measures."""
    show: RunDisplay
    code: RunCode = NO_CODE

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def trainer(self) -> Trainer:
        return self.side.trainer

    @property
    def facts(self) -> PolicyFacts:
        return self.side.facts

    @property
    def identity(self) -> str:
        """Digest of all that changes the run's numbers: settings, model and prompts."""
        return identity_digest(self.run, self.content)

    @property
    def checkpoints(self) -> Checkpoints:
        asked = self.spec.checkpoint
        # Of demonstrations, only the best adapters are written.
        best = 0 if self.spec.algorithm.type == "SFT" else asked.keep_best.count
        return Checkpoints(self.store, self.execution, self.keeper, self.trainer, self.identity, asked.keep, best)


@dataclass(frozen=True, kw_only=True)
class Parts(RunParts):
    """Everything else that a loop of rollouts needs, built and checked."""

    environment: Environment
    engine: Engine
    publisher: Publisher
    versions: PolicyVersions
    text_of: Callable[[int], str]
    """The text of a token."""
    reference_fields: tuple[str, ...]
    """Columns of the prompts that hold the expected answer."""
    held_out: HeldOut | None = None
    """Tasks on which the policy is measured while it trains."""
    teacher: AdapterFolder | None = None
    """The teacher's adapter, as it was read."""
    served_teacher: ServedTeacher | None = None
    """The servers that teach."""
