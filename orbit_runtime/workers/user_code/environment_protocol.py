"""Messages between a run and the processes of its environments and tools, and the classes that an environment uses.

Belongs here: records, messages, branches of conversations, and what is visible of an environment's class before an
object of it exists. Does not belong here: processes (`environment_pool`), tokens, which only the run holds
(`environments.branching`), or what an episode is (`environments`). Light on purpose: every such process imports it.

An environment that asks the policy itself sends `{"ask": {"parent", "first", "count", "messages", "tools"}}`: answers
number `first` and up to the branch `parent` after these messages. It receives `{"answers": [{"path", "text",
"finish_reason", "is_over"}]}`. A path is the number of the opening, then the number of each answer on the way.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

from orbit_runtime.workers.user_code.entrypoints import TargetError
from orbit_runtime.workers.user_code.reward_protocol import is_number

MAX_MESSAGE = 1 << 20
"""Maximum bytes of one response of an environment or a tool."""
CALLS = {"reset": ("prompt", "fields", "seed"), "step": ("completion",)}
"""Method → what it is called with, of an environment that answers the policy."""
PLAY_CALLS = {"play": ("policy", "prompt", "fields", "seed")}
"""The same of one that asks the policy itself."""
WANTED = "reset(prompt, fields, seed) and step(completion), or play(policy, prompt, fields, seed)"


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's response to a completion.

    Example: `Step("too high, guess again")`, and at the end `Step(reward=1.0, done=True)`
    """

    messages: str | Sequence[Mapping[str, Any]] = ()
    """The policy's next input: chat messages, or text, which becomes one user message."""
    reward: float = 0.0
    """Reward of this turn; the rollout's is the sum over its turns."""
    done: bool = False
    """Whether the episode is over; `messages` is then ignored."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to keep with the rollout under their names; later turns override earlier ones."""


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """Limits of one process."""

    start_seconds: float = 120.0
    """Time for importing everything, once."""
    step_seconds: float = 30.0
    """Time for one response of an environment, or one tool call."""
    memory_bytes: int = 1 << 30
    """Memory allocated beyond what importing took."""
    processes: int = 256
    """Maximum processes at a time."""
    may_fork: bool = False
    """Whether it may start processes of its own."""


@dataclass(frozen=True, slots=True)
class EnvironmentTarget:
    """Objects that the processes import.

    Example: `EnvironmentTarget("my_games:Guess", {"highest": 9})`, or `EnvironmentTarget(tools=("my_tools:add",))`
    """

    environment: str | None = None
    """The environment, as `module:Class`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class, for each episode."""
    tools: tuple[str, ...] = ()
    """The tools, each as `module:function`."""
    variables: tuple[str, ...] = ()
    """Variables of the run that its processes get, beside those that all do."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call."""

    text: str
    """Text for the policy: the result, or the error."""
    is_error: bool = False


class EnvironmentFailed(Exception):
    """An environment ran out of time, or ended abnormally: its episode is lost, not scored."""

    def __init__(self, outcome: Literal["timeout", "crash"], reason: str, stack: str = "") -> None:
        """Args: stack: stack of its process, if it ran out of time."""
        super().__init__(reason)
        self.stack = stack
        self.outcome: Literal["timeout", "crash"] = outcome
        self.reason = reason


def checked_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Chat messages of what an environment gave; text becomes one user message. Raises TypeError for anything else."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence):
        raise TypeError(f"{where} gave {type(value).__name__} for messages, which are text or a list")
    for message in value:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not isinstance(message.get("content"), str | list):
            raise TypeError(f"{where} gave {repr(message)[:80]}, which is no message with 'role' and 'content'")
    return [dict(message) for message in value]


def checked_number(value: Any, what: str) -> float:
    """Raises TypeError for what is no finite number."""
    if not is_number(value) or not math.isfinite(value):
        raise TypeError(f"the {what} is {repr(value)[:80]}, and no finite number")
    return float(value)


def check_environment(environment: Any, target: str, arguments: Mapping[str, Any]) -> None:
    """Checks a class, or a function that makes environments, without calling it.

    A class that finds its methods by `__getattr__` or sets them in `__init__`, and whatever has no signature, show
    their mistakes in the first episode only.

    Args:
        target: its name in messages.
        arguments: what each object will be made with.

    Raises:
        TargetError: it is nothing to call, does not take `arguments`, lacks a method, or has one that takes others.
    """
    if not callable(environment):
        raise TargetError(f"{target!r} is not a class but {type(environment).__name__}")
    if isinstance(environment, type) and not hasattr(environment, "play"):
        for name in CALLS:
            if not hasattr(environment, name) and not _sets(environment, name):
                raise TargetError(f"{target!r} has no method `{name}`")
    try:
        inspect.signature(environment).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments)
        raise TargetError(f"{target!r} cannot be called with spec.environment.arguments ({given}): {error}") from error
    except ValueError:
        pass  # built in C without a signature: the first episode will tell
    for name, names in (PLAY_CALLS if hasattr(environment, "play") else CALLS).items():
        _check_method(environment, name, names, target)


def _check_method(environment: Any, name: str, names: tuple[str, ...], target: str) -> None:
    method = inspect.getattr_static(environment, name, None)
    if not isinstance(environment, type) or not isinstance(method, FunctionType):
        return
    try:
        inspect.signature(method).bind("self", *names)
    except TypeError as error:
        raise TargetError(f"`{name}` of {target!r} cannot be called as ({', '.join(names)}): {error}") from error


def _sets(environment: type, name: str) -> bool:
    """Whether its objects may have the attribute although the class does not."""
    if hasattr(environment, "__getattr__"):
        return True
    code = getattr(environment.__init__, "__code__", None)  # type: ignore[misc]  # only its names are looked at
    return code is not None and name in code.co_names


Path = tuple[int, ...]


class Policy:
    """The policy, as `play` is given it. For one episode."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._numbers: Counter[Path] = Counter()
        """Number of answers requested so far, by branch; openings under the empty path."""
        self._waiting: dict[Path, asyncio.Future[Mapping[str, Any]]] = {}

    def begin(self, messages: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Branch:
        """A new conversation. Args: tools: schemas that the chat template shows to the policy."""
        opening = (self._next((), 1),)
        return Branch(self, opening, tuple(checked_messages(messages, "begin")), tuple(map(dict, tools)))

    def hear(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Called by the process that runs the environment."""
        for answer in answers:
            waiting = self._waiting.pop(tuple(answer["path"]), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _next(self, parent: Path, count: int) -> int:
        first = self._numbers[parent]
        self._numbers[parent] += count
        return first

    async def _ask(self, branch: Branch, count: int) -> list[Branch]:
        first = self._next(branch._path, count)
        paths = [(*branch._path, number) for number in range(first, first + count)]
        loop = asyncio.get_running_loop()
        waited = [loop.create_future() for _ in paths]
        self._waiting |= dict(zip(paths, waited, strict=True))
        ask = {"parent": branch._path, "first": first, "count": count}
        self._send({"ask": ask | {"messages": branch._messages, "tools": branch._tools}})
        told = await asyncio.gather(*waited)
        return [branch._after(path, answer) for path, answer in zip(paths, told, strict=True)]


@dataclass(frozen=True)
class Branch:
    """A conversation up to some point. It is immutable: each continuation is another branch, and there may be several.

    Example: `plans = await policy.begin("Plan.").answers(4)`, then `await plans[0].say("Go on.").answer()`
    """

    _policy: Policy = field(repr=False)
    _path: Path
    """The last answer; after a limit, the answer that would have been the next."""
    _messages: tuple[Mapping[str, Any], ...]
    """Messages added after it."""
    _tools: tuple[Mapping[str, Any], ...] = field(repr=False)
    text: str = ""
    """The last answer; empty before the first, and if a limit left no room for it."""
    finish_reason: str = "stop"
    """`stop`, or what cut the last answer off: `length`, or `deadline` for the episode's seconds."""
    is_over: bool = False
    """Whether a limit was reached, or the last answer was cut off: `say` and `answers` then return this branch."""

    def say(self, messages: str | Sequence[Mapping[str, Any]]) -> Branch:
        """This branch with new input for the policy: chat messages, or text for one user message."""
        if self.is_over:
            return self
        more = checked_messages(messages, "say")
        return Branch(self._policy, self._path, (*self._messages, *more), self._tools)

    async def answers(self, count: int) -> list[Branch]:
        """This branch with each of `count` answers, sampled at the same time, each from random draws of its own.

        Raises:
            ValueError: nothing was said since the last answer, or `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"{count} answers were asked for")
        if self.is_over:
            return [self] * count
        if not self._messages:
            raise ValueError("nothing was said since the last answer: `say` something first")
        return await self._policy._ask(self, count)

    async def answer(self) -> Branch:
        (one,) = await self.answers(1)
        return one

    def _after(self, path: Path, answer: Mapping[str, Any]) -> Branch:
        told = (str(answer["text"]), str(answer["finish_reason"]), bool(answer["is_over"]))
        return Branch(self._policy, path, (), self._tools, *told)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rollout of an episode: everything from its opening to the last answer of `branch`."""

    branch: Branch
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to keep with the rollout under their names."""


def choice_to_json(value: Any, cohorts: Sequence[str]) -> list[dict[str, Any]]:
    """The result of `play` as JSON. Raises TypeError if it is not one `Chosen` for each rollout of the episode."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, Chosen) for each in value):
        raise TypeError("play returns a list of orbit_runtime.environments.Chosen")
    if len(value) != len(cohorts):
        raise TypeError(f"play returned {len(value)} rollouts, and `rollouts` says {len(cohorts)}")
    return [
        {
            "path": each.branch._path,
            "reward": checked_number(each.reward, f"reward of rollout {number}"),
            "parts": {str(name): checked_number(value, f"part {name!r}") for name, value in each.parts.items()},
        }
        for number, each in enumerate(value)
    ]
