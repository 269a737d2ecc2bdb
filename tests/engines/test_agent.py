"""An engine in another container of the pod: a real agent, the real SGLang server that it starts, and both are lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.ports import free_port

from orbit_runtime.adapters.files import expected_applied_digest
from orbit_runtime.rollout.requests import sample
from orbit_runtime.types import Sampling
from orbit_runtime.workers.child.run_token import TOKEN_VARIABLE
from orbit_runtime.workers.servers.process import AGENT_VARIABLE
from tests.engines.servers import Adder, server_of, start_server
from tests.engines.test_sglang_faults import canary
from tests.integration.engine_inputs import by_id, random_adapter, requests_for


@pytest.fixture
def start_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the agent as the kubelet does: again on the same port, with nothing left of the one before."""
    port = free_port()
    monkeypatch.setenv(AGENT_VARIABLE, f"http://127.0.0.1:{port}")
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-m", "orbit_runtime.cli", "agent", "--port", str(port)]))
        return started[-1]

    yield start
    for each in started:
        each.terminate()
        each.wait(60)


def test_an_engine_that_an_agent_starts_is_proven_and_after_the_agent_is_lost_proven_again(
    lora_adder: Adder, start_agent: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    policy, tokenizer = lora_adder
    agent = start_agent()
    for engine in start_server(lora_adder, tmp_path, oft_block_size=0):
        assert engine.replicas[0].reads_back
        assert (server_of(engine).memory_bytes() or 0) > 2**28, "of SGLang's processes, where they are"
        adapter = random_adapter(policy, 7)
        engine.load_adapter("policy", adapter)
        (scored,) = engine.copies()[0].score(canary(tokenizer), ["policy"])
        assert scored.applied_digest == expected_applied_digest(adapter.files)

        prompts = [f"{a}+{b}=" for a in range(10, 50) for b in (11, 47)]
        requests = requests_for(tokenizer, prompts, 8, sampling=Sampling(max_new_tokens=24), adapter="policy")

        def lose() -> None:
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            start_agent()

        lost = threading.Timer(0.5, lose)
        lost.start()
        completions = list(sample(engine, requests))
        lost.join()
        assert len(completions) == len(by_id(completions)) == len(requests)
        assert engine.replicas[0].restarts == 1
        assert engine.copies()[0].adapter_digest("policy") == adapter.digest
        (scored,) = engine.copies()[0].score(canary(tokenizer), ["policy"])
        assert scored.applied_digest == expected_applied_digest(adapter.files)
