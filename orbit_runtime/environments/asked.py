"""What a manifest asks of prompts and rewards: which functions, which columns, and whether those of this machine exist.

Belongs here: reading `spec.data` and `spec.environment`, without torch. Does not belong here: fetching inputs, or
scoring (`workers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orbit_runtime.data.demonstrations import read_demonstrations
from orbit_runtime.data.prompts import check_fields, load_prompts
from orbit_runtime.data.rows import PromptSource, needs_arrow
from orbit_runtime.environments.rewards import REWARDS
from orbit_runtime.errors import UnsupportedError
from orbit_runtime.spec.data import Prompts
from orbit_runtime.spec.quantities import read_quantity
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage.inputs import code_digest
from orbit_runtime.workers.environment_pool import EnvironmentPool
from orbit_runtime.workers.environment_protocol import EnvironmentLimits, EnvironmentTarget
from orbit_runtime.workers.reward_pool import RewardPool
from orbit_runtime.workers.reward_protocol import RewardTarget


def reward_targets(spec: RunSpec, functions: Mapping[str, Callable[..., Any]]) -> list[RewardTarget]:
    """One per reward of the manifest; `functions` replace those of their name."""
    return [
        RewardTarget(
            reward.name,
            functions.get(reward.name) or reward.entrypoint or REWARDS[str(reward.type)],
            reward.arguments,
            reward.timeout_seconds,
        )
        for reward in spec.environment.rewards
    ]


BRIDGES = {
    "Gymnasium": "orbit_runtime.environments.bridges.gymnasium_text:GymnasiumEpisode",
    "SkyRLGym": "orbit_runtime.environments.bridges.skyrl:SkyRLEpisode",
    "Verifiers": "orbit_runtime.environments.bridges.verifiers_rollout:VerifiersEpisode",
}
"""`environment.type` → what plays such a package's environments."""
EXTRAS = {"Gymnasium": ("gymnasium", "gym"), "SkyRLGym": ("skyrl_gym", "gym"), "Verifiers": ("verifiers", "verifiers")}
"""The module that it needs, and the extra that brings it."""


def environment_target(spec: RunSpec) -> EnvironmentTarget | None:
    """What the processes of the environment import; None: the policy is answered by nothing."""
    environment = spec.environment
    if environment.type == "SingleTurn":
        return None
    if environment.type in BRIDGES:
        module, extra = EXTRAS[environment.type]
        if find_spec(module) is None:
            raise UnsupportedError(
                f"`type: {environment.type}` needs the package {module.replace('_', '-')}, which is not installed",
                where="spec.environment.type",
                fix=f"pip install 'orbit-rl[{extra}]'",
            )
        arguments = {"name": environment.name, "arguments": environment.arguments}
        return EnvironmentTarget(BRIDGES[environment.type], arguments)
    return EnvironmentTarget(environment.entrypoint, environment.arguments, environment.tools)


def process_limits(spec: RunSpec) -> EnvironmentLimits:
    limits = spec.environment.limits
    return EnvironmentLimits(
        limits.start_seconds, limits.step_seconds, read_quantity(limits.memory), limits.processes, limits.may_fork
    )


READS = {"ExactMatch": "answer", "Math": "answer", "MultipleChoice": "answer", "Code": "tests"}
"""Shipped reward → the column that it reads where its arguments name none."""


def fields_read(spec: RunSpec, functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Column → the reward that reads it. Known of the shipped rewards only; what a user's function reads is its own."""
    shipped = [each for each in spec.environment.rewards if each.type and each.name not in functions]
    read = [(each.arguments.get("field", READS.get(str(each.type))), each.name) for each in shipped]
    return {str(field): name for field, name in read if field is not None}


def check_local_inputs(spec: RunSpec, folders: Sequence[str]) -> list[str]:
    """Opens the prompts and imports the reward functions that this machine holds; returns what it left unopened.

    Nothing is downloaded, and no code of the user's runs in this process: a reward worker imports it.

    Args:
        spec: with absolute paths.
        folders: where entry points are looked for, after `environment.code`.

    Raises:
        DataError: prompts are missing, unreadable, or lack a column.
        ManifestError, UsageError: a reward function, or the folder of its code, is not there or cannot be called.
    """
    here = [each for each in spec.data.prompts if _is_here(each.uri) and can_open(_source(each))]
    unopened = [each.uri for each in spec.data.prompts if each not in here]
    if here:
        local = [_source(each) for each in here]
        table = load_prompts(local, limit=spec.data.limit)
        if spec.algorithm.type == "SFT":
            read_demonstrations(table, here, last_only=spec.data.chat.answers == "Last")
        else:
            check_fields(table, fields_read(spec, {}))
    written = [target for target in reward_targets(spec, {}) if _is_entrypoint(spec, target)]
    code = spec.environment.code
    if code is not None and not _is_here(code.uri):
        return [*unopened, code.uri]
    search_path = [*code_path(spec), *folders]
    if written:
        RewardPool(written, num_workers=1, search_path=search_path).close()
    target = environment_target(spec)
    if target is not None:
        EnvironmentPool(target, limits=process_limits(spec), search_path=search_path).close()
    return unopened


def can_open(source: PromptSource) -> bool:
    """False of Parquet and Arrow where nothing reads them: a light install checks and plans all the same."""
    return find_spec("pyarrow") is not None or not needs_arrow(source)


def _source(prompts: Prompts) -> PromptSource:
    return PromptSource(prompts.uri, prompts.format, prompts.prompt_field)


def code_path(spec: RunSpec) -> list[str]:
    """Where this machine holds the code that the manifest names; empty where it names none, or it is elsewhere.

    Raises:
        UsageError: it is not there.
    """
    code = spec.environment.code
    if code is None or not _is_here(code.uri):
        return []
    path = Path(code.uri.removeprefix("file://"))
    code_digest(path, "spec.environment.code.uri")
    return [str(path)]


def _is_entrypoint(spec: RunSpec, target: RewardTarget) -> bool:
    return any(reward.name == target.name and reward.entrypoint for reward in spec.environment.rewards)


def _is_here(uri: str) -> bool:
    return "://" not in uri or uri.startswith(("file://", "builtin://"))
