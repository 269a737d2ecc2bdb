"""Environments that nobody here wrote, unchanged: Gymnasium's, SkyRL-Gym's, and a published one of verifiers.

Needs an environment with these packages: `make test-bridges`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.environments.targets import BRIDGES
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.environment_protocol import EnvironmentFailed, EnvironmentLimits, EnvironmentTarget

pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("gymnasium", "skyrl_gym", "verifiers")), reason="make test-bridges"
    ),
    pytest.mark.timeout(600),  # these packages take a while to import, in each process that does
]
ROOT = Path(__file__).resolve().parents[2]
PROMPT = [{"role": "user", "content": "go"}]


def pool(kind: str, name: str, **arguments: Any) -> EnvironmentPool:
    target = EnvironmentTarget(BRIDGES[kind], {"name": name, "arguments": arguments})
    return EnvironmentPool(
        target, limits=EnvironmentLimits(start_seconds=300.0), search_path=[str(Path(__file__).parent)]
    )


def play(opened: EnvironmentPool, fields: dict[str, Any], *completions: str | None) -> list[dict[str, Any]]:
    """None: the episode is ended from outside."""

    async def run() -> list[dict[str, Any]]:
        episode = opened.open_episode()
        try:
            answers = [await episode.reset(PROMPT, fields, 7)]
            for each in completions:
                answers.append(await (episode.finish() if each is None else episode.step(each)))
            return answers
        finally:
            await episode.close()

    return asyncio.run(run())


def text(answer: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in answer["messages"])


def test_frozen_lake_is_walked_by_numbers_in_text() -> None:
    with pool("Gymnasium", "FrozenLake-v1", render_mode="ansi", is_slippery=False) as lake:
        first, wrong, *way = play(lake, {}, "north", "I go 1", "1", "2", "2", "1", "2")
    assert text(first) == "go\n\n[S]FFF\nFHFH\nFFFH\nHFFG", "the player is seen, whom a terminal shows by colour"
    assert text(wrong) == "Not an action. Answer with a number from 0 to 3."
    assert text(way[0]) == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [step["done"] for step in way] == [False] * 4 + [True] if len(way) == 5 else [False] * 5 + [True]
    assert (way[-1]["reward"], way[-1]["parts"]) == (1.0, {"invalid_actions": 1.0})


def test_a_gymnasium_environment_that_is_not_there_is_a_crash_with_its_words() -> None:
    with pool("Gymnasium", "NoSuchLake-v1") as lake, pytest.raises(EnvironmentFailed, match="NoSuchLake"):
        play(lake, {})


def test_gsm8k_of_skyrl_rewards_each_turn() -> None:
    fields = {"reward_spec": {"ground_truth": "4"}, "extra_info": {"max_turns": 3}}
    with pool("SkyRLGym", "gsm8k_multi_turn") as gsm8k:
        first, second, last = play(gsm8k, fields, "#### 3", "#### 4")
    assert first["messages"] == PROMPT
    assert "#### ANSWER" in text(second)
    assert second["reward"] == pytest.approx(0.2 / 3)
    assert (last["reward"], last["done"], last["parts"]) == (1.0, True, {"steps": 2.0})


POEM = "An old silent pond\nA frog jumps into the pond\nSplash! Silence again"


def test_a_published_environment_of_verifiers_asks_and_scores() -> None:
    with pool("Verifiers", "stardata.envs.constraint_gym", forms=["haiku"]) as haiku:
        first, last = play(haiku, {"example": 1}, POEM)
        _, cut = play(haiku, {"example": 1}, None)
    assert "Write a haiku" in text(first)
    assert first["messages"][0]["role"] == "user"
    assert (last["done"], cut["done"]) == (True, True)
    assert last["reward"] == last["parts"]["prosody_reward"] == scored_by_the_package_alone()


def scored_by_the_package_alone() -> float:
    """Scores by the package's own client, of a server that says the same."""
    import verifiers  # type: ignore[import-not-found]
    from verifiers.clients import OpenAIChatCompletionsClient  # type: ignore[import-not-found]
    from verifiers.types import ClientConfig  # type: ignore[import-not-found]

    class Poet(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            message = {"role": "assistant", "content": POEM}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = {"id": "a", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    server = ThreadingHTTPServer(("127.0.0.1", 0), Poet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        client = OpenAIChatCompletionsClient(ClientConfig(api_base_url=url, api_key_var="NO_KEY"))
        haiku = verifiers.load_environment("stardata.envs.constraint_gym", forms=["haiku"])
        output = asyncio.run(haiku.run_rollout(dict(haiku.get_dataset()[1]), client, "m", {}))
    finally:
        server.shutdown()
        server.server_close()
    assert output["error"] is None
    return float(output["reward"])


def test_tools_of_a_verifiers_environment_are_called_by_the_environment(tmp_path: Path) -> None:
    """Its own ToolEnv and rubric; only the two functions are ours."""
    with pool("Verifiers", "verifiers_tools") as tools:
        call = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
        first, second, last = play(tools, {"example": 0}, call, "42")
    assert [tool["function"]["name"] for tool in first["tools"]] == ["double"]
    assert [(each["role"], each["content"]) for each in second["messages"]] == [("tool", "42")]
    assert (last["reward"], last["done"]) == (1.0, True)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("<tool_call>\n<function=double>\n<parameter=x>\n21\n</parameter>\n</function>\n</tool_call>", None),
        ("<tool_call>double\n<arg_key>x</arg_key>\n<arg_value>21</arg_value>\n</tool_call>", None),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.double:0<|tool_call_argument_begin|>"
            '{"x": 21}<|tool_call_end|><|tool_calls_section_end|>',
            "functions.double:0",
        ),
        ('<|channel|>commentary to=functions.double <|constrain|>json<|message|>{"x": 21}', None),
    ],
)
def test_an_environment_of_tools_reads_calls_of_every_family(tmp_path: Path, call: str, given: str | None) -> None:
    with pool("Verifiers", "verifiers_tools") as tools:
        _, second, _ = play(tools, {"example": 0}, call, "42")
    (result,) = second["messages"]
    assert (result["role"], result["content"]) == ("tool", "42")
    assert given is None or result["tool_call_id"] == given


def test_a_verifiers_environment_is_asked_with_the_manifests_prompts_where_none_of_its_own_is_named() -> None:
    with pool("Verifiers", "verifiers_tools") as tools:
        first, wrong = play(tools, {"answer": "42"}, "41")
        _, right = play(tools, {"answer": "42"}, "42")
    assert first["messages"] == PROMPT
    assert (wrong["reward"], right["reward"]) == (0.0, 1.0)


MANIFEST = """\
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata: {{name: bridge}}
spec:
  model: {{uri: builtin://tiny-adder, precision: BF16, maxSequenceLength: {length}}}
  algorithm: {{groupSize: 4}}
  data: {{prompts: [{{uri: prompts.jsonl}}]}}
  environment: {environment}
  rollout: {{sampling: {{maxNewTokens: 4}}}}
  training: {{steps: 1, promptsPerStep: 2}}
"""


@pytest.mark.parametrize(
    ("environment", "row", "length"),
    [
        (
            {
                "type": "Gymnasium",
                "name": "FrozenLake-v1",
                "arguments": {"render_mode": "ansi", "is_slippery": False},
                "limits": {"turns": 3},
                "rewards": [],
            },
            {"prompt": "1+1="},
            512,
        ),
        (
            {"type": "SkyRLGym", "name": "gsm8k_multi_turn", "rewards": []},
            {"prompt": "1+1=", "reward_spec": {"ground_truth": "2"}, "extra_info": {"max_turns": 2}},
            512,
        ),
        (
            {
                "type": "Verifiers",
                "name": "stardata.envs.constraint_gym",
                "arguments": {"forms": ["haiku"]},
                "rewards": [],
            },
            {"prompt": "1+1=", "example": 0},
            1024,
        ),
    ],
    ids=["gymnasium", "skyrl-gym", "verifiers"],
)
def test_it_runs_from_a_manifest(environment: dict[str, Any], row: dict[str, Any], length: int, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    (tmp_path / "run.yaml").write_text(MANIFEST.format(environment=json.dumps(environment), length=length))
    done = subprocess.run(
        [sys.executable, "-m", "orbit_runtime", "run", "run.yaml", "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    row_of_step = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert row_of_step["reward_value"] == 8
    assert row_of_step["turns_mean"] >= 1.0
