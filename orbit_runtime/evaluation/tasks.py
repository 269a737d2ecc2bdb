"""Tasks for a model: an environment with its prompts and rewards, opened on this machine.

Belongs here: turning a manifest's blocks into episodes, and the digests that distinguish their versions.
Does not belong here: the models (`api_model`; `loop` for engines), playing (`player`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from orbit_runtime.data.prompts import PromptTable, check_fields, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.environments.build import build_environment, build_scorer
from orbit_runtime.environments.episodes import Environment
from orbit_runtime.environments.targets import environment_target, fields_read, process_limits
from orbit_runtime.errors import OrbitError
from orbit_runtime.planner.support.manifests import sampling_of
from orbit_runtime.seeds import stream_key
from orbit_runtime.spec.environment import Environment as EnvironmentSpec
from orbit_runtime.spec.resolve import EMPTY
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage.cache import RetryPolicy
from orbit_runtime.storage.inputs import fetch_input
from orbit_runtime.types import Prompt, Sampling, Tokenizer
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.reward_protocol import RewardScorer

PACKAGES = {"Gymnasium": "gymnasium", "SkyRLGym": "skyrl-gym", "Verifiers": "verifiers"}
"""`environment.type` → the distribution whose version is the environment's."""
MAX_EXPECTED = 500


@dataclass(frozen=True)
class EvalTask:
    """One environment, opened."""

    name: str
    spec: RunSpec
    """The run's spec with this environment, these prompts, and the requested number of samples for each."""
    table: PromptTable
    sampling: Sampling
    scorer: RewardScorer
    pool: EnvironmentPool | None
    versions: Mapping[str, str]
    """Digests of the code, and versions of the packages, that play and score."""
    expected_fields: tuple[str, ...]
    search_path: Sequence[str] = ()
    """Folders that its entry points are imported from."""

    def environment(self, tokenizer: Tokenizer) -> Environment:
        return build_environment(
            self.name, self.spec, tokenizer, self.scorer, self.pool, self.sampling, only_first=True
        )  # fmt: skip

    def expected(self, prompt: Prompt) -> str:
        """The expected answer from the prompt's row, for display."""
        row = prompt.fields
        return "\n".join(str(row[name]) for name in self.expected_fields if row.get(name) is not None)[:MAX_EXPECTED]

    def to_json(self) -> dict[str, Any]:
        """Everything that determines the samples, for comparison with a later start."""
        environment = self.spec.environment.model_dump(mode="json", by_alias=True, exclude_none=True)
        # These only determine where it is computed and how patiently.
        for name in ("limits", "code", "failureLimit"):
            environment.pop(name, None)
        limits = self.spec.environment.limits
        return {
            "environment": environment,
            "limits": {"turns": limits.turns, "tokens": limits.tokens, "seconds": limits.seconds},
            "prompts": self.table.digest,
            "versions": dict(self.versions),
            "sampling": {
                "samples": self.spec.algorithm.group_size,
                "seed": self.spec.data.seed,
                **{name: getattr(self.sampling, name) for name in Sampling.__dataclass_fields__},
            },
        }


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Settings for sampling every prompt of an evaluation."""

    samples: int = 1
    temperature: float | None = None
    """The run's own if None; 0 for greedy decoding."""
    max_new_tokens: int | None = None
    """The run's own if None."""
    limit: int | None = None
    """Use only this many of the first prompts of each environment."""
    seed: int = 0


def open_task(
    name: str,
    spec: RunSpec,
    settings: EvaluationSettings,
    folders: Sequence[str],
    closing: ExitStack,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    patience: RetryPolicy | None = None,
) -> EvalTask:
    """Reads prompts, and starts the environment and rewards. Anything to be closed is pushed on `closing`.

    Args:
        spec: with absolute paths; its `data.prompts` and `environment` are this task's.
        folders: where to look for entry points after `environment.code`.
        rewards: functions given from Python, by reward name; they replace the manifest's rewards of that name.

    Raises:
        OrbitError: prompts, rewards or environment cannot be used.
    """
    patience = patience or RetryPolicy()
    given = rewards or {}
    functions = {each.name: given[each.name] for each in spec.environment.rewards if each.name in given}
    fetched = [
        None if each.uri.startswith("builtin://") else fetch_input(
            each.uri, "prompts", f"spec.data.prompts[{index}].uri", patience=patience).path
        for index, each in enumerate(spec.data.prompts)
    ]  # fmt: skip
    sources = [
        PromptSource(each.uri, each.format, each.prompt_field, local=path)
        for each, path in zip(spec.data.prompts, fetched, strict=True)
    ]
    table = load_prompts(sources, limit=settings.limit or spec.data.limit)
    read = fields_read(spec, functions)
    check_fields(table, read)
    code = spec.environment.code
    code_input = fetch_input(code.uri, "code", "spec.environment.code.uri", patience=patience) if code else None
    path = [*([str(code_input.path)] if code_input else []), *folders]
    versions = environment_versions(spec, path)
    if code_input and code_input.digest:
        versions["code"] = code_input.digest
    scorer = closing.enter_context(build_scorer(spec, functions, path))
    target = environment_target(spec)
    pool = None
    if target is not None:
        pool = closing.enter_context(EnvironmentPool(target, limits=process_limits(spec), search_path=path))
    sampling = sampling_of(with_sampling(spec, settings).rollout)
    return EvalTask(
        name, with_samples(spec, settings), table, sampling, scorer, pool, versions, tuple(read) or ("answer",), path,
    )  # fmt: skip


def with_samples(spec: RunSpec, settings: EvaluationSettings) -> RunSpec:
    """The requested number of samples of each prompt, from random streams that training never uses."""
    seed = stream_key(settings.seed, "evaluation")
    algorithm = spec.algorithm.model_copy(update={"group_size": settings.samples})
    return spec.model_copy(update={"algorithm": algorithm, "data": spec.data.model_copy(update={"seed": seed})})


def with_sampling(spec: RunSpec, settings: EvaluationSettings) -> RunSpec:
    named = {"temperature": settings.temperature, "max_new_tokens": settings.max_new_tokens}
    changed = {name: value for name, value in named.items() if value is not None}
    sampling = spec.rollout.sampling.model_copy(update=changed)
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"sampling": sampling})})


def environment_versions(spec: RunSpec, folders: Sequence[str]) -> dict[str, str]:
    """Versions of what plays and scores: of a package, or the digest of a module of the user's."""
    environment = spec.environment
    found = {}
    if environment.type in PACKAGES:
        package = PACKAGES[environment.type]
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    for target in environment_entrypoints(environment):
        module = target.partition(":")[0]
        source = _module_file(module, folders)
        if source is not None:
            found[module] = f"sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}"
    return found


def environment_entrypoints(environment: EnvironmentSpec, given: Mapping[str, object] = EMPTY) -> list[str]:
    """What an environment imports by name. Args: given: rewards that are functions of this process, by name."""
    rewards = [reward.entrypoint for reward in environment.rewards if reward.name not in given]
    return [target for target in (environment.entrypoint, *environment.tools, *rewards) if target]


def _module_file(module: str, folders: Sequence[str]) -> Path | None:
    """Digest of a module in one of these folders; None for a module that is installed or in an archive."""
    parts = module.split(".")
    for folder in folders:
        base = Path(folder).joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def evaluation_settings(spec: RunSpec) -> EvaluationSettings:
    """The settings in `spec.evaluation`."""
    evaluation = spec.evaluation
    return EvaluationSettings(
        evaluation.samples,
        evaluation.temperature,
        evaluation.max_new_tokens,
        evaluation.limit,
        evaluation.seed,
    )


@contextmanager
def naming_fields(spec: RunSpec, name: str) -> Iterator[None]:
    """Makes errors of the task with this name point to the field of the run's manifest that holds it.

    Args: spec: the run's own, if the task's spec has its prompts and environment elsewhere.
    """
    try:
        yield
    except OrbitError as error:
        for index, each in enumerate(spec.evaluation.environments):
            if each.name != name:
                continue
            field = f"spec.evaluation.environments[{index}]"
            moved = {"spec.data.prompts": f"{field}.prompts"}
            if each.environment is not None:
                moved["spec.environment"] = f"{field}.environment"
            for there, here in moved.items():
                error.where = error.where and error.where.replace(there, here)
                error.fix = error.fix and error.fix.replace(there, here)
        raise


def task_specs(run: str, spec: RunSpec) -> dict[str, RunSpec]:
    """Environment → the run's spec with its prompts, environment and rewards; without any, the run's own."""
    environments = {}
    for each in spec.evaluation.environments:
        # The run's `limit` applies to its own prompts only.
        data = spec.data.model_copy(update={"prompts": each.prompts, "limit": None})
        environment = each.environment or spec.environment
        environments[each.name] = spec.model_copy(update={"data": data, "environment": environment})
    return environments or {run: spec}
