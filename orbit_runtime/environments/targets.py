"""Prompts and rewards that a manifest asks for: which functions, which columns, and whether local ones exist.

Belongs here: reading `spec.data` and `spec.environment`, without torch. Does not belong here: fetching inputs, or
scoring (`workers`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orbit_runtime.data.chat import Messages
from orbit_runtime.data.demonstrations import read_demonstrations
from orbit_runtime.data.prompts import check_fields, encoded_rows, load_prompts
from orbit_runtime.data.rows import PromptSource, needs_arrow
from orbit_runtime.environments.rewards import REWARDS
from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.spec.data import Prompts
from orbit_runtime.spec.placement import read_quantity
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage.inputs import code_digest
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentLimits, EnvironmentTarget
from orbit_runtime.workers.user_code.reward_pool import RewardPool
from orbit_runtime.workers.user_code.reward_protocol import RewardTarget

NAMING = ("apiKeyEnv", "valueEnv", "api_key_env")
"""Fields and arguments whose value is the name of a variable with a key."""


def reward_targets(spec: RunSpec, functions: Mapping[str, Callable[..., Any]]) -> list[RewardTarget]:
    """One target for each reward of the manifest; `functions` replace rewards of the same name."""
    variables = named_variables(spec)
    return [
        RewardTarget(
            reward.name,
            functions.get(reward.name) or reward.entrypoint or REWARDS[str(reward.type)],
            reward.arguments,
            reward.timeout_seconds,
            variables,
        )
        for reward in spec.environment.rewards
    ]


def named_variables(spec: RunSpec) -> tuple[str, ...]:
    """Variables that the manifest names for code of a user's: `environment.variables`, and those of keys."""
    named, unread = list(spec.environment.variables), [spec.model_dump(by_alias=True)]
    while unread:
        block = unread.pop()
        named += [value for key, value in block.items() if key in NAMING and isinstance(value, str)]
        values = [each for value in block.values() for each in (value if isinstance(value, list | tuple) else [value])]
        unread += [each for each in values if isinstance(each, dict)]
    return tuple(dict.fromkeys(named))


BRIDGES = {
    "Gymnasium": "orbit_runtime.environments.bridges.gymnasium_text:GymnasiumEpisode",
    "SkyRLGym": "orbit_runtime.environments.bridges.skyrl:SkyRLEpisode",
    "Verifiers": "orbit_runtime.environments.bridges.verifiers_rollout:VerifiersEpisode",
}
"""`environment.type` → the class that plays environments of that package."""
EXTRAS = {"Gymnasium": ("gymnasium", "gym"), "SkyRLGym": ("skyrl_gym", "gym"), "Verifiers": ("verifiers", "verifiers")}
"""The module that a bridge needs, and the extra that installs it."""


def environment_target(spec: RunSpec) -> EnvironmentTarget | None:
    """What the environment's processes import; None for a single turn, where nothing responds to the policy."""
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
        return EnvironmentTarget(BRIDGES[environment.type], arguments, variables=named_variables(spec))
    return EnvironmentTarget(environment.entrypoint, environment.arguments, environment.tools, named_variables(spec))


def process_limits(spec: RunSpec) -> EnvironmentLimits:
    limits = spec.environment.limits
    return EnvironmentLimits(
        limits.start_seconds, limits.step_seconds, read_quantity(limits.memory), limits.processes, limits.may_fork
    )


READS = {"ExactMatch": "answer", "Math": "answer", "MultipleChoice": "answer", "Code": "tests"}
"""Shipped reward → the column that it reads unless its arguments name one."""


def fields_read(spec: RunSpec, functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Column → the reward that reads it. Covers only shipped rewards; what a user's function reads is unknown."""
    shipped = [each for each in spec.environment.rewards if each.type and each.name not in functions]
    read = [(each.arguments.get("field", READS.get(str(each.type))), each.name) for each in shipped]
    return {str(field): name for field, name in read if field is not None}


def check_arguments(spec: RunSpec, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Checks what shipped rewards are given against what they take; a worker checks a user's function.

    Raises:
        ManifestError: an argument that the reward does not have, or one missing that it needs.
    """
    for index, reward in enumerate(spec.environment.rewards):
        # Those that read a column need nothing else.
        if reward.type is None or reward.name in functions or (not reward.arguments and reward.type in READS):
            continue
        taken = keyword_arguments(REWARDS[reward.type])
        where, known = f"spec.environment.rewards[{index}].arguments", ", ".join(f"`{name}`" for name in taken)
        for name in reward.arguments:
            if name not in taken:
                raise ManifestError(f"{reward.type} has no argument `{name}`", where=where, fix=f"it takes {known}")
        missing = [name for name, is_needed in taken.items() if is_needed and name not in reward.arguments]
        if missing:
            raise ManifestError(
                f"{reward.type} needs the argument `{missing[0]}`", where=where, fix=f"add it; it takes {known}"
            )


def keyword_arguments(target: str) -> dict[str, bool]:
    """Argument → whether it is needed, of a function `module:name`, by its source.

    Its module is not imported: what that imports takes seconds, and only workers need it.
    """
    module, _, name = target.partition(":")
    found = find_spec(module)
    assert found is not None
    assert isinstance(found.loader, InspectLoader)
    tree = ast.parse(found.loader.get_source(module) or "")
    function = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    arguments = function.args
    return {
        each.arg: default is None for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


def check_local_inputs(spec: RunSpec, folders: Sequence[str]) -> list[str]:
    """Opens the prompts and imports the reward functions that are on this machine; returns the URIs left unopened.

    Nothing is downloaded, and no user code runs in this process: a reward worker imports it.

    Args:
        spec: has absolute paths.
        folders: folders searched for entry points after `environment.code`.

    Raises:
        DataError: prompts are missing, unreadable, or lack a column.
        ManifestError, UsageError: a reward function, or the folder of its code, is missing or cannot be called so.
    """
    here = _openable(spec)
    unopened = [each.uri for each in spec.data.prompts if each not in here]
    if here:
        table = load_prompts([_source(each) for each in here], limit=spec.data.limit)
        if spec.algorithm.type == "SFT":
            read_demonstrations(table, here, last_only=spec.data.chat.answers == "Last")
        else:
            check_fields(table, fields_read(spec, {}))
    check_arguments(spec, {})
    names = {reward.name for reward in spec.environment.rewards if reward.entrypoint}
    written = [target for target in reward_targets(spec, {}) if target.name in names]
    code = spec.environment.code
    if code is not None and not _is_here(code.uri):
        return [*unopened, code.uri]
    search_path = [*code_path(spec), *folders]
    if written:
        RewardPool(written, num_workers=1, search_path=search_path).close()
    target = environment_target(spec)
    if target is not None:
        with EnvironmentPool(target, limits=process_limits(spec), search_path=search_path) as pool:
            check_group_size(spec.algorithm.group_size, len(pool.cohorts or ("",)))
    return unopened


def check_tokens(spec: RunSpec, encode_many: Callable[[Sequence[Messages]], list[list[int]]]) -> None:
    """Encodes the prompts and demonstrations that are on this machine. Raises what `encode_many` raises, with the place
    of the row."""
    if here := _openable(spec):
        table = load_prompts([_source(each) for each in here], limit=spec.data.limit)
        rows: Sequence[Any] = table.prompts_P
        if spec.algorithm.type == "SFT":
            rows = read_demonstrations(table, here, last_only=spec.data.chat.answers == "Last")
        encoded_rows(rows, lambda asked: encode_many([row.messages for row in asked]), table.prompts_P.place_of)


def _openable(spec: RunSpec) -> list[Prompts]:
    """Without Parquet and Arrow where pyarrow is missing: a light install still checks and plans the rest."""
    reads_arrow = find_spec("pyarrow") is not None
    here = [each for each in spec.data.prompts if _is_here(each.uri)]
    return [each for each in here if reads_arrow or not needs_arrow(_source(each))]


def check_group_size(group_size: int, rollouts: int) -> None:
    """Raises ManifestError if the rollouts of an episode do not divide a group."""
    if group_size % rollouts:
        raise ManifestError(
            f"an episode of the environment gives {rollouts} rollouts, and a group has {group_size}",
            where="spec.algorithm.groupSize",
            fix=f"write a multiple of {rollouts}",
        )


def _source(prompts: Prompts) -> PromptSource:
    return PromptSource(prompts.uri, prompts.format, prompts.prompt_field)


def code_path(spec: RunSpec) -> list[str]:
    """The local path of the code that the manifest names; empty if it names none, or the code is elsewhere.

    Raises:
        UsageError: the path does not exist.
    """
    code = spec.environment.code
    if code is None or not _is_here(code.uri):
        return []
    path = Path(code.uri.removeprefix("file://"))
    code_digest(path, "spec.environment.code.uri")
    return [str(path)]


def _is_here(uri: str) -> bool:
    return "://" not in uri or uri.startswith(("file://", "builtin://"))
