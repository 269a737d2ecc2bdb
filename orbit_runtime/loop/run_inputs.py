"""The inputs of a run, opened before torch is imported: a wrong path or a missing reward is reported in a second.

Belongs here: what the caller passes besides the manifest, prompts or demonstrations, the processes of rewards and
environment, and their order. Does not belong here: reading files (`data`), starting processes (`workers`), the model
(`build`).
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
from orbit_runtime.data.demonstrations import Demonstration, read_demonstrations
from orbit_runtime.data.prompts import PromptTable, check_fields, hold_out, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.environments.build import build_scorer
from orbit_runtime.environments.targets import environment_target, fields_read, process_limits
from orbit_runtime.evaluation.tasks import EvalTask
from orbit_runtime.loop.display import RunDisplay
from orbit_runtime.loop.measure import open_held_out
from orbit_runtime.sides.content import PREFIX, Names
from orbit_runtime.sides.inputs import Inputs
from orbit_runtime.sides.interface import Sides
from orbit_runtime.sides.local import LocalSides
from orbit_runtime.sides.teacher import check_servers, open_teacher
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Prompt
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.reward_protocol import RewardScorer


@dataclass(frozen=True)
class CallerOptions:
    """Values that a caller passes besides the manifest."""

    rewards: Mapping[str, Callable[..., Any]] | None = None
    """Functions by reward name."""
    loss: Callable[..., Any] | None = None
    """Replaces the function that `spec.algorithm.entrypoint` names."""
    advantages: Callable[..., Any] | None = None
    """Replaces the function that `spec.algorithm.advantage.entrypoint` names."""
    search_path: Sequence[str] = field(default=())
    """Folders searched for entry points after `environment.code`."""
    sides: Sides = field(default_factory=LocalSides)

    @property
    def functions(self) -> list[str]:
        """Descriptions of the functions given from Python."""
        found = [f"reward {name}" for name in sorted(self.rewards or {})]
        return [*found, *(name for name in ("loss", "advantages") if getattr(self, name) is not None)]

    def digests(self) -> dict[str, str]:
        """Name → digest of each function's own source; what it calls or closes over is not covered."""
        functions = {f"environment.rewards.{name}": function for name, function in (self.rewards or {}).items()}
        functions |= {
            f"algorithm.{name}": function
            for name, function in (("loss", self.loss), ("advantages", self.advantages))
            if function is not None
        }
        return {f"{PREFIX}{name}": _source_digest(function) for name, function in functions.items()}


def _source_digest(function: Callable[..., Any]) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        # A function typed at the interpreter's prompt, for example, or a callable object.
        return "unknown"
    return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Opened and checked."""

    names: Names
    """Names that the first start gave to model and prompts."""
    table: PromptTable


@dataclass(frozen=True, slots=True)
class EpisodeInputs(RunInputs):
    """The inputs of a run with rewards."""

    scorer: RewardScorer
    pool: EnvironmentPool | None
    """Processes of the environment or of the tools; None: it needs none."""
    reference_fields: tuple[str, ...]
    """Columns that the shipped rewards read."""
    held_out: tuple[EvalTask, ...]
    """Tasks by which the policy is evaluated while it trains."""
    teacher: AdapterFolder | None
    """The adapter that teaches, as it was read."""


@dataclass(frozen=True, slots=True)
class DemonstrationInputs(RunInputs):
    """The inputs of a run that learns from demonstrations."""

    demonstrations: Sequence[Demonstration]
    trained: PromptTable
    """The rows of the table that are trained on."""
    measured: Sequence[Prompt]
    """The others, which the policy is measured on."""


def open_episode_inputs(
    run: OrbitRun, names: Names, inputs: Inputs, given: CallerOptions, show: RunDisplay, closing: ExitStack
) -> EpisodeInputs:
    """Fetches and reads the prompts, and starts rewards and environment, also of the run's evaluations. Pushes what
    must be closed on `closing`.

    Args: run: with absolute paths; its `Auto` fields have no effect here.

    Raises:
        DataError, ManifestError, UsageError: see `environments.targets.check_local_inputs`.
        UnsupportedError: (78) the package of the environment's type is not installed.
        ModelError: (66) there is no adapter that teaches.
        CredentialsError: (77) a variable that an endpoint needs is not set.
        StorageError: an input cannot be fetched.
    """
    spec = run.spec
    check_servers(spec)
    show.stage("reading prompts")
    table = load_prompts(_prompt_sources(spec, names, inputs), limit=spec.data.limit)
    rewards = given.rewards or {}
    read = fields_read(spec, rewards)
    check_fields(table, read)
    show.stage("starting rewards")
    search_path = inputs.search_path()
    scorer = closing.enter_context(build_scorer(spec, rewards, search_path))
    target, pool = environment_target(spec), None
    if target is not None:
        pool = closing.enter_context(EnvironmentPool(target, limits=process_limits(spec), search_path=search_path))
    held_out = open_held_out(run, inputs, rewards, closing)
    return EpisodeInputs(names, table, scorer, pool, tuple(read), held_out, open_teacher(spec))


def open_demonstration_inputs(spec: RunSpec, names: Names, inputs: Inputs, show: RunDisplay) -> DemonstrationInputs:
    """Like `open_episode_inputs`."""
    show.stage("reading demonstrations")
    table = load_prompts(_prompt_sources(spec, names, inputs), limit=spec.data.limit)
    read = read_demonstrations(table, spec.data.prompts, last_only=spec.data.chat.answers == "Last")
    trained, measured = hold_out(table, spec.data.validation.share if spec.data.validation else 0.0, spec.data.seed)
    return DemonstrationInputs(names, table, read, trained, measured)


def _prompt_sources(spec: RunSpec, names: Names, inputs: Inputs) -> list[PromptSource]:
    """`data.prompts`, fetched."""
    return [
        PromptSource(each.uri, each.format, each.prompt_field, name, inputs.prompts(index))
        for index, (each, name) in enumerate(zip(spec.data.prompts, names.prompts, strict=True))
    ]
