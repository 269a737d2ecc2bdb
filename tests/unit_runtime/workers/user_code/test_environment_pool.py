"""Environments and tools in their processes: what they answer, and that nothing they do reaches further than it may."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbit_runtime.errors import ManifestError
from orbit_runtime.workers.child.process import frame
from orbit_runtime.workers.user_code.environment_pool import TEMPLATE_MODULE, EnvironmentPool
from orbit_runtime.workers.user_code.environment_protocol import (
    EnvironmentFailed,
    EnvironmentLimits,
    EnvironmentTarget,
    ToolResult,
    checked_number,
)

TESTS = str(Path(__file__).resolve().parents[3])
BAD = "fakes.bad_environments"
LIMITS = EnvironmentLimits(step_seconds=1.0, memory_bytes=256 << 20, processes=4)
PROMPT = [{"role": "user", "content": "p"}]


@pytest.fixture(scope="module")
def tools() -> Iterator[EnvironmentPool]:
    target = EnvironmentTarget(tools=(f"{BAD}:add", f"{BAD}:slow", f"{BAD}:act"))
    with EnvironmentPool(target, limits=LIMITS, search_path=[TESTS]) as pool:
        yield pool


@pytest.fixture(scope="module")
def games() -> Iterator[EnvironmentPool]:
    target = EnvironmentTarget(f"{BAD}:ByText", {"word": "next"})
    with EnvironmentPool(target, limits=LIMITS, search_path=[TESTS]) as pool:
        yield pool


def play(pool: EnvironmentPool, *completions: str, **fields: Any) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        episode = pool.open_episode()
        try:
            answers = [await episode.reset(PROMPT, fields, 7)]
            return answers + [await episode.step(each) for each in completions]
        finally:
            await episode.close()

    return asyncio.run(run())


def call(pool: EnvironmentPool, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(pool.call_tool(name, arguments))


def test_an_episode_is_reset_and_stepped_until_it_is_done(games: EnvironmentPool) -> None:
    first, second, last = play(games, "hello", "done")
    assert first["messages"] == PROMPT
    assert (second["messages"], second["reward"]) == ([{"role": "user", "content": "next"}], 0.25)
    assert (last["reward"], last["done"], last["parts"]) == (1.0, True, {"letters": 4.0})


def test_an_environment_may_keep_the_prompt_or_end_at_once(games: EnvironmentPool) -> None:
    assert play(games, reset="nothing")[0]["messages"] == PROMPT
    (only,) = play(games, reset="end at once")
    assert (only["done"], only["reward"]) == (True, 0.5)


def test_asynchronous_environments_and_what_an_ended_episode_is_worth() -> None:
    async def run(pool: EnvironmentPool) -> list[dict[str, Any]]:
        episode = pool.open_episode()
        answers = [await episode.reset(PROMPT, {}, 7), await episode.step("x"), await episode.finish()]
        await episode.close()
        return answers

    with EnvironmentPool(EnvironmentTarget(f"{BAD}:Late"), limits=LIMITS, search_path=[TESTS]) as pool:
        first, second, last = asyncio.run(run(pool))
    assert first["messages"][0]["content"] == "seed 7"
    assert second["messages"][0]["content"] == "again"
    assert (last["reward"], last["done"]) == (0.5, True)


@pytest.mark.parametrize(
    ("what", "outcome", "reason"),
    [
        ("raise", "crash", "ZeroDivisionError: division by zero"),
        ("exit", "crash", "SystemExit: 4"),
        ("die", "crash", "its process exited with 3"),
        ("hang", "timeout", "no answer within 1 s; its process was killed"),
        ("spin", "timeout", "no answer within 1 s"),
        ("memory", "crash", "spec.environment.limits.memory was reached"),
        ("fork", "crash", "PermissionError"),
        ("a number", "crash", "returned int, and not orbit_runtime.environments.Step"),
        ("no role", "crash", "no message with 'role' and 'content'"),
        ("nan", "crash", "the reward of step is nan, and no finite number"),
        ("text as reward", "crash", "the reward of step is 'good', and no finite number"),
        ("much", "crash", "bytes at once, and 1,048,576 are allowed"),
        ("not json", "crash", "is not JSON"),
        ("rubbish", "crash", "it wrote to its process's socket; the process was killed"),
        ("an answer", "crash", "it wrote to its process's socket; the process was killed"),
    ],
)
def test_a_step_that_misbehaves_costs_its_episode_and_says_why(
    games: EnvironmentPool, what: str, outcome: str, reason: str
) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        play(games, what)
    assert failed.value.outcome == outcome
    assert reason in failed.value.reason
    assert play(games, "done")[1]["done"], "the next episode plays"


def test_a_step_that_stopped_leaves_where_it_stood(games: EnvironmentPool) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        play(games, "hang")
    assert "most recent call first" in failed.value.stack
    assert "bad_environments.py" in failed.value.stack
    with pytest.raises(EnvironmentFailed) as failed:
        play(games, "die")
    assert failed.value.stack == "", "it is gone, and did not stop"


def test_a_reset_that_gives_no_message_is_at_fault_itself(games: EnvironmentPool) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        play(games, reset="nothing to say")
    assert "reset gave no message" in failed.value.reason


def test_numbers_are_those_of_python_and_numpy() -> None:
    values = (1, 0.5, True, np.float32(0.5), np.int64(2), np.bool_(True), np.bool_(False))
    assert [checked_number(value, "it") for value in values] == [1.0, 0.5, 1.0, 0.5, 2.0, 1.0, 0.0]
    for wrong in ("1", None, np.array([1.0]), float("nan"), 1j):
        with pytest.raises(TypeError, match="no finite number"):
            checked_number(wrong, "it")


@pytest.mark.parametrize("what", ["raise", "die", "hang", "a number", "memory"])
def test_a_reset_that_misbehaves_is_told_apart_as_well(games: EnvironmentPool, what: str) -> None:
    with pytest.raises(EnvironmentFailed):
        play(games, reset=what)


def test_others_go_on_while_one_hangs(games: EnvironmentPool) -> None:
    async def one(word: str) -> str:
        episode = games.open_episode()
        try:
            await episode.reset(PROMPT, {}, 0)
            await episode.step(word)
            return "played"
        except EnvironmentFailed as failure:
            return failure.outcome
        finally:
            await episode.close()

    async def run() -> list[str]:
        return await asyncio.gather(*(one(word) for word in ("hang", *["done"] * 12, "die")))

    assert asyncio.run(run()) == ["timeout", *["played"] * 12, "crash"]


def test_megabytes_of_output_are_cut(games: EnvironmentPool, capfd: pytest.CaptureFixture[str]) -> None:
    play(games, "print", "done")
    deadline = time.monotonic() + 10
    printed = ""
    while "too much" not in printed and time.monotonic() < deadline:
        time.sleep(0.05)
        printed += capfd.readouterr().err
    assert "environments printed too much" in printed
    assert len(printed) < 1 << 19


def test_an_episode_that_is_given_up_ends_its_process(games: EnvironmentPool) -> None:
    async def run() -> None:
        episode = games.open_episode()
        await episode.reset(PROMPT, {}, 0)
        cell = episode._cell
        assert cell is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode.step("hang"), 0.2)
        await episode.close()
        while Path(f"/proc/{cell.pid}").exists():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_episodes_that_are_cancelled_at_any_moment_leave_as_many_places_as_there_were() -> None:
    async def cancelled(pool: EnvironmentPool, after: float) -> None:
        async def play() -> None:
            episode = pool.open_episode()
            try:
                await episode.reset(PROMPT, {}, 7)
                for _ in range(100):
                    await episode.step("hello")
            finally:
                await episode.close()

        playing = asyncio.create_task(play())
        await asyncio.sleep(after)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    async def all_of_them(pool: EnvironmentPool) -> None:
        await asyncio.gather(*(cancelled(pool, 0.004 * number) for number in range(30)))

    target = EnvironmentTarget(f"{BAD}:ByText", {"word": "next"})
    with EnvironmentPool(target, limits=LIMITS, search_path=[TESTS]) as pool:
        asyncio.run(all_of_them(pool))
        # Whatever was given up last is ended by then, as everything goes through the template in turn.
        assert [play(pool, "hello")[-1]["reward"] for _ in range(LIMITS.processes)] == [0.25] * LIMITS.processes
        deadline = time.monotonic() + 30
        while pool._places._value != LIMITS.processes:
            assert time.monotonic() < deadline, f"{pool._places._value} places of {LIMITS.processes}"
            time.sleep(0.01)
        assert len(pool._cells) == len(pool._free) <= LIMITS.processes
        assert set(pool._free) == pool._cells


def test_tools_are_described_by_signature_and_docstring(tools: EnvironmentPool) -> None:
    assert tools.tools[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first."},
                    "b": {"type": "integer", "description": "the second."},
                },
                "required": ["a"],
            },
        },
    }
    assert [tool["function"]["name"] for tool in tools.tools] == ["add", "slow", "act"]


def test_tools_answer_with_text(tools: EnvironmentPool) -> None:
    assert call(tools, "add", a=1, b=2) == ToolResult("3")
    assert call(tools, "slow", seconds=0.0) == ToolResult("waited")
    assert call(tools, "act", what="nothing special") == ToolResult('{"did": "nothing special"}')


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", {}, "Error: add: missing a required argument: 'a'"),
        ("add", {"a": 1, "c": 2}, "Error: add: got an unexpected keyword argument 'c'"),
        ("add", {"a": "x"}, "Error: TypeError: can only concatenate str"),
        ("act", {"what": "raise"}, "Error: ZeroDivisionError: division by zero"),
        ("act", {"what": "die"}, "Error: act: its process exited with 3"),
        ("act", {"what": "hang"}, "Error: act: no answer within 1 s"),
        ("act", {"what": "memory"}, "Error: act needed more memory than it may have"),
        ("act", {"what": "fork"}, "Error: PermissionError"),
        ("slow", {"seconds": 60}, "Error: slow: no answer within 1 s"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_an_answer(
    tools: EnvironmentPool, name: str, arguments: dict[str, Any], text: str
) -> None:
    result = call(tools, name, **arguments)
    assert result.is_error
    assert text in result.text


def test_half_a_character_becomes_one_that_a_tokenizer_takes(tools: EnvironmentPool, games: EnvironmentPool) -> None:
    assert call(tools, "act", what="half a character") == ToolResult("a?b")
    (first,) = play(games, reset="half a character")
    assert first["messages"] == [{"role": "user", "content": "a?b"}]


def test_a_call_waits_for_no_other(tools: EnvironmentPool) -> None:
    async def run() -> None:
        slow = [asyncio.create_task(tools.call_tool("slow", {"seconds": 60})) for _ in range(3)]
        await asyncio.sleep(0)
        assert await tools.call_tool("add", {"a": 1}) == ToolResult("1")
        assert not any(task.done() for task in slow)
        for result in await asyncio.gather(*slow):
            assert "no answer within 1 s" in result.text

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "where", "message"),
    [
        (EnvironmentTarget("fakes.nowhere:X"), "spec.environment.entrypoint", "no module 'fakes.nowhere'"),
        (EnvironmentTarget(f"{BAD}:Nothing"), "spec.environment.entrypoint", "has no 'Nothing'"),
        (EnvironmentTarget(f"{BAD}:not_callable"), "spec.environment.entrypoint", "is not a class but int"),
        (
            EnvironmentTarget("fakes.guide:write_files", {"guide": ""}),
            "spec.environment.entrypoint",
            r"cannot be called with spec.environment.arguments \(guide\): missing a required argument: 'folder'",
        ),
        (EnvironmentTarget("decimal:Context"), "spec.environment.entrypoint", "has no method `reset`"),
        (EnvironmentTarget(tools=(f"{BAD}:not_callable",)), "spec.environment.tools", "is not a function but int"),
        (
            EnvironmentTarget(f"{BAD}:ByText", {"words": 1}),
            "spec.environment.entrypoint",
            r"\(words\): got an unexpected",
        ),
        (
            EnvironmentTarget(f"{BAD}:add"),
            "spec.environment.entrypoint",
            r"\(\): missing a required",
        ),
        (EnvironmentTarget(f"{BAD}:NoReset"), "spec.environment.entrypoint", "NoReset' has no method `reset`"),
        (EnvironmentTarget(f"{BAD}:NoSeed"), "spec.environment.entrypoint", r"`reset` .* as \(prompt, fields, seed\)"),
        (EnvironmentTarget(f"{BAD}:NoPrompt"), "spec.environment.entrypoint", r"`play` .* as \(policy, prompt, fields"),
    ],
)
def test_what_cannot_be_imported_is_named(target: EnvironmentTarget, where: str, message: str) -> None:
    with pytest.raises(ManifestError, match=rf"^[^(\"].*{message}") as failed:
        EnvironmentPool(target, limits=LIMITS, search_path=[TESTS])
    assert failed.value.where == where
    assert not failed.value.message.startswith("("), "a sentence, not a tuple of the message and the target"


@pytest.mark.parametrize("name", ["Delegates", "Assigns", "Static"])
def test_methods_that_only_objects_have_are_called(name: str) -> None:
    with EnvironmentPool(EnvironmentTarget(f"{BAD}:{name}"), limits=LIMITS, search_path=[TESTS]) as pool:
        assert play(pool, "done")[-1]["done"]


def test_what_a_library_raises_is_said_with_the_line_that_called_it(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(
        "import json\n"
        "class Reads:\n"
        "    def reset(self, prompt, fields, seed): return None\n"
        "    def step(self, completion):\n"
        "        return json.loads(completion)\n"
    )
    with (
        EnvironmentPool(EnvironmentTarget("reads:Reads"), limits=LIMITS, search_path=[str(tmp_path)]) as pool,
        pytest.raises(EnvironmentFailed, match=r"JSONDecodeError: .* \(.*reads\.py:5\)"),
    ):
        play(pool, "no json")


def test_what_all_copies_share_is_prepared_once(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(
        "import os\n"
        "from orbit_runtime.environments import Step\n"
        "class Shared:\n"
        "    @classmethod\n"
        "    def prepare(cls, fail=False):\n"
        "        cls.made_by = os.getpid() // (not fail)\n"
        "    def __init__(self, fail=False): pass\n"
        "    def reset(self, prompt, fields, seed): return f'{self.made_by} {os.getppid()}'\n"
        "    def step(self, completion): return Step(done=True)\n"
    )
    target = EnvironmentTarget("shared:Shared", {"fail": False})
    with EnvironmentPool(target, limits=LIMITS, search_path=[str(tmp_path)]) as pool:
        made_by, parent = play(pool)[0]["messages"][0]["content"].split()
    assert made_by == parent
    with pytest.raises(ManifestError, match=r"Shared\.prepare fails: ZeroDivisionError"):
        EnvironmentPool(EnvironmentTarget("shared:Shared", {"fail": True}), search_path=[str(tmp_path)])


def test_what_an_environment_starts_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "starter.py").write_text(
        "import subprocess\n"
        "from orbit_runtime.environments import Step\n"
        "class Starter:\n"
        "    def reset(self, prompt, fields, seed): return None\n"
        "    def step(self, completion):\n"
        "        child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "        return Step(str(child.pid))\n"
    )
    limits = EnvironmentLimits(may_fork=True, processes=1)
    with EnvironmentPool(EnvironmentTarget("starter:Starter"), limits=limits, search_path=[str(tmp_path)]) as pool:
        pid = int(play(pool, "x")[1]["messages"][0]["content"])
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_template_whose_run_is_gone_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    head = {"environment": f"{BAD}:ByText", "arguments": {}, "tools": [], "path": [TESTS], "limits": asdict(LIMITS)}
    head["key"] = "k"
    command = [sys.executable, "-P", "-m", TEMPLATE_MODULE, str(theirs.fileno()), str(os.getpid())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as template:
        theirs.close()
        ours.sendall(frame(json.dumps(head).encode()))
        assert b"tools" in ours.recv(1 << 16)
        # It is told to end what is not there, and nobody hears its answer.
        ours.sendall(b"E" + (1 << 30).to_bytes(4, "big"))
        ours.close()
        assert template.stderr is not None
        said = template.stderr.read()
    assert (said, template.returncode) == (b"", 0)
