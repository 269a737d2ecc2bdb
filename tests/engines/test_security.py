"""A real server of a run answers the run alone: asked and looked at from inside a real reward worker."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import psutil
import pytest

from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.workers.user_code.confine import landlock_version
from orbit_runtime.workers.user_code.reward_pool import RewardPool
from orbit_runtime.workers.user_code.reward_protocol import RewardCall, RewardTarget
from tests.engines.servers import server_of

TESTS = str(Path(__file__).parents[1])
OPEN = ("/health", "/health_generate", "/metrics", "/ready")
"""SGLang answers these to anyone; they tell that it lives, and numbers."""


def test_without_the_token_a_server_says_only_that_it_lives(lora_server: ServedEngine) -> None:
    server = server_of(lora_server)
    paths = httpx.get(f"{server.url}/openapi.json", headers=dict(server.headers), trust_env=False).json()["paths"]
    assert len(paths) > 30
    answered = []
    for path, methods in paths.items():
        for method in methods:
            if "{" in path or path in OPEN:
                continue
            answer = httpx.request(method.upper(), f"{server.url}{path}", timeout=30, trust_env=False)
            if answer.status_code not in (401, 403):
                answered.append((method, path, answer.status_code))
    assert answered == []


def test_a_reward_finds_no_token_and_asks_and_stops_no_server(lora_server: ServedEngine, tmp_path: Path) -> None:
    server = server_of(lora_server)
    token = dict(server.headers)["Authorization"].removeprefix("Bearer ")
    found = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    log = server._log  # The file that a failed start is told from.
    arguments = {
        "report": str(tmp_path / "report.json"), "beginning": token[:16],
        "processes": [psutil.Process().pid, *(process.pid for process in found)],
        "files": [str(log), *map(str, log.parent.parent.rglob("*.json"))],
        "urls": [f"{server.url}/generate", f"{server.url}/load_lora_adapter", f"{server.url}/flush_cache"],
    }  # fmt: skip
    target = RewardTarget("look", "fakes.curious_rewards:look_around", arguments, timeout_seconds=120)
    with RewardPool([target], num_workers=1, search_path=[TESTS]) as pool:
        (result,) = pool.score([RewardCall("look", "x", [{"role": "user", "content": "q"}], {})])
    assert result.outcome == "value", result
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seen in"] == []
    assert "server_args=" in log.read_text(), "it tells its arguments there, and hides one"
    assert report["answers"] == [401, 401, 401]
    if landlock_version() < 6:
        pytest.skip("that a reward opens and signals no process of the run needs Landlock of Linux 6.12")
    assert (report["opened"], report["signalled"]) == ([], [])
