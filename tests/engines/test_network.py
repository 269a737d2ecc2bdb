"""The network between Orbit and a server of somebody else is cut: a real SGLang in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.rollout import replica, sglang_api
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.sglang_server import ServerSettings, server_arguments
from orbit_runtime.rollout.wire import is_serving
from orbit_runtime.types import Sampling
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE, ServerProcess
from tests.engines.servers import Adder, attach
from tests.engines.test_contract import policy_logprobs
from tests.integration.engine_inputs import by_id, random_adapter, requests_for
from tests.integration.tiny_models import TARGETS

ROOT = Path(__file__).parents[2]
HERE, THERE, PORT = "10.213.77.1", "10.213.77.2", 30000
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="a network namespace needs root and iproute2"
    ),
]


@dataclass(frozen=True)
class Namespace:
    """Joined to this one by a pair of virtual devices."""

    name: str

    def open(self) -> None:
        ours, theirs = f"{self.name}a", f"{self.name}b"
        _ip("netns", "add", self.name)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", self.name)
        _ip("addr", "add", f"{HERE}/30", "dev", ours)
        _ip("link", "set", ours, "up")
        self._inside("addr", "add", f"{THERE}/30", "dev", theirs)
        self._inside("link", "set", theirs, "up")
        self._inside("link", "set", "lo", "up")

    def cut_for(self, seconds: float) -> None:
        """Packets vanish, in both directions and without an answer."""
        self._inside("link", "set", f"{self.name}b", "down")
        time.sleep(seconds)
        self._inside("link", "set", f"{self.name}b", "up")

    def close(self) -> None:
        subprocess.run(["ip", "link", "del", f"{self.name}a"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def _inside(self, *words: str) -> None:
        _ip("-n", self.name, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    made = Namespace(f"orbit{os.getpid() % 10**6}")
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture
def engine(namespace: Namespace, lora_adder: Adder, tmp_path: Path) -> Iterator[ServedEngine]:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    convert(builtin_folder("tiny-adder", "INT4"), tmp_path / "base", Target("BF16"), show=lambda *_: None)
    settings = ServerSettings(
        model=tmp_path / "base", device="cpu", dtype="float32", targets=TARGETS, max_running_requests=16,
        max_sequence_length=256, seed=0, lora_rank=4,
    )  # fmt: skip
    launch = [os.environ[PYTHON_VARIABLE], "-m", "orbit_runtime.sglang_plugin.launch"]
    arguments = ["0.0.0.0" if each == "127.0.0.1" else each for each in server_arguments(settings, PORT)]
    environment = {**os.environ, "ORBIT_SGLANG": "1", "SGLANG_PLUGINS": "orbit", "PYTHONPATH": str(ROOT),
                   "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    server = ServerProcess(
        "SGLang", ["ip", "netns", "exec", namespace.name, *launch, *arguments], environment=environment,
        log=tmp_path / "log",
    )  # fmt: skip
    try:
        server.wait_until(lambda: is_serving(f"http://{THERE}:{PORT}", seconds=30), seconds=800)
        attached = attach(lora_adder, [f"http://{THERE}:{PORT}"], tmp_path / "attached", "Folder")
        yield attached
        attached.close()
    finally:
        server.stop()


@pytest.mark.parametrize("seconds", [4.0, 30.0], ids=["shorter than patience", "longer"])
def test_a_cut_loses_and_doubles_no_rollout(
    engine: ServedEngine,
    namespace: Namespace,
    lora_adder: Adder,
    new_name: Callable[[], str],
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The short one is TCP's to mend; in the long one the server counts as lost, and is asked again once it answers."""
    monkeypatch.setattr(sglang_api, "PROGRESS_SECONDS", 2.0)
    for each in engine.replicas:
        monkeypatch.setattr(each, "_patience", 3.0)
    policy, tokenizer = lora_adder
    name, adapter = new_name(), random_adapter(policy, 5)
    engine.load_adapter(name, adapter)
    requests = requests_for(
        tokenizer, [f"{a}+{b}=" for a in range(10, 40) for b in (11, 47)], 8, sampling=Sampling(max_new_tokens=24),
        adapter=name,
    )  # fmt: skip
    cut = threading.Timer(0.5, namespace.cut_for, [seconds])
    started = time.monotonic()
    cut.start()
    completions = list(sample(engine, requests))
    took = time.monotonic() - started
    cut.join()
    assert took > seconds, "it was cut while it sampled"
    assert len(completions) == len(by_id(completions)) == len(requests)
    for request in requests[::60]:
        answer = by_id(completions)[request.request_id]
        expected = policy_logprobs(policy, adapter, request.prompt_ids_T, answer.token_ids_T)
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=5e-5)
    (one,) = engine.replicas
    lost = seconds > replica.CHECKS * (3.0 + 2.0)
    assert one.restarts == int(lost)
