"""The policies and real SGLang servers that the engine tests ask.

Belongs here: how they are made. Does not belong here: how long they live (`conftest`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.rollout.attached import Endpoint, ServerRequirements, attach_engine
from orbit_runtime.rollout.served_engine import ServedEngine, start_engine
from orbit_runtime.rollout.sglang_server import ServerSettings, SGLangServer, lora_targets, server_arguments
from orbit_runtime.rollout.transport import FolderMailbox, Transport
from orbit_runtime.rollout.wire import is_serving
from orbit_runtime.types import Sampling
from orbit_runtime.workers.child.run_token import TOKEN_VARIABLE, run_token
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE, ServerProcess
from tests.fakes.ports import free_port
from tests.integration.tiny_models import TARGETS

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)
OFT = AdapterConfig(type="OFT", targets=TARGETS, block_size=16)
INSIDE = str(Path(__file__).parent / "inside")
CODE_VARIABLE = "ORBIT_TEST_CODE"
"""Variable with the code that processes which have `INSIDE` on their PYTHONPATH run."""
Adder = tuple[Policy, ChatTokenizer]


def load_adder(config: AdapterConfig) -> Adder:
    """The shipped model in INT4, as a run loads it."""
    folder = builtin_folder("tiny-adder", "INT4")
    return load_policy(folder, config), ChatTokenizer(folder)


def start_server(
    adder: Adder,
    folder: Path,
    *,
    oft_block_size: int,
    base: Path | None = None,
    replicas: int = 1,
    transport: Transport | None = None,
    tensor_parallel: int = 1,
    context: int = 256,
) -> Iterator[ServedEngine]:
    """Args: base: the model's folder; the shipped one, unpacked, unless given."""
    servers = build_servers(
        adder, folder, oft_block_size=oft_block_size, base=base, replicas=replicas, tensor_parallel=tensor_parallel,
        context=context,
    )  # fmt: skip
    desk = FolderMailbox(folder / "adapters", transport)
    engine = start_engine(servers, adder[1], desk=desk, max_running_requests=16, patience=10)
    yield engine
    engine.close()


def build_servers(
    adder: Adder, folder: Path, *, oft_block_size: int, base: Path | None = None, replicas: int = 1,
    tensor_parallel: int = 1, context: int = 256,
) -> list[SGLangServer]:  # fmt: skip
    """Not started yet."""
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    policy, _ = adder
    if base is None:
        base = folder / "base"
        convert(builtin_folder("tiny-adder", "INT4"), base, Target("BF16"), show=lambda *_: None)
    settings = ServerSettings(
        model=base,
        device="cpu",
        dtype="float32",
        targets=lora_targets(tuple(policy.injected.layers)),
        max_running_requests=32,
        max_sequence_length=context,
        seed=0,
        lora_rank=4,
        oft_block_size=oft_block_size,
        tensor_parallel=tensor_parallel,
    )
    # As one in 64 does, it begins with a dash, which no parser of arguments may take for a flag. An agent has its own.
    token = run_token() if os.environ.get(TOKEN_VARIABLE) else f"-{run_token()}"
    return [
        SGLangServer(replace(settings, seed=index), log=folder / f"replica-{index}" / "sglang.log", token=token)
        for index in range(replicas)
    ]


def attach(
    adder: Adder,
    urls: Sequence[str],
    folder: Path,
    method: Literal["Folder", "Upload"],
    headers: Mapping[str, str] | None = None,
) -> ServedEngine:
    """An engine over servers that are there already; they are not ended with the engine."""
    policy, tokenizer = adder
    wanted = ServerRequirements(
        adapter=policy.injected.config,
        targets=lora_targets(tuple(policy.injected.layers)),
        max_tokens=256,
        sampling=Sampling(),
        architectures=("Qwen3ForCausalLM",),
        probes=(tuple(tokenizer.encode_chat([{"role": "user", "content": "12+34="}])),),
        tolerance=1e-3,
    )
    endpoints = [Endpoint(url, method, headers or {}) for url in urls]
    return attach_engine(endpoints, wanted, tokenizer, folder=folder / "adapters", max_running_requests=16)


@contextmanager
def plain_servers(folder: Path, number: int, *, code: Path, context: int) -> Iterator[list[tuple[str, ServerProcess]]]:
    """Addresses and processes of SGLang's own servers, with nothing of Orbit in them (`plain_sglang`).

    Args:
        code: tests may run it inside of them (`inside_server`).
    """
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    base = folder / "base"
    convert(builtin_folder("tiny-adder", "INT4"), base, Target("BF16"), show=lambda *_: None)
    settings = ServerSettings(
        model=base, device="cpu", dtype="float32", targets=TARGETS, max_running_requests=8,
        max_sequence_length=context, seed=0, lora_rank=16,
    )  # fmt: skip
    command = [os.environ[PYTHON_VARIABLE], str(Path(__file__).parent / "plain_sglang.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORBIT", "PYTHONPATH"))}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": INSIDE, CODE_VARIABLE: str(code)}
    servers: list[tuple[str, ServerProcess]] = []
    try:
        for index in range(number):
            port = free_port()
            arguments = [*command, *server_arguments(settings, port)]
            server = ServerProcess("SGLang", arguments, environment=environment, log=folder / f"log-{index}")
            servers.append((f"http://127.0.0.1:{port}", server))
        for url, server in servers:
            server.wait_until(partial(is_serving, url, seconds=30), seconds=800)
        yield servers
    finally:
        for _, server in servers:
            server.stop()


def post_to(engine: ServedEngine, path: str, body: Mapping[str, Any], index: int = 0) -> httpx.Response:
    """Behind the engine's back, with the run's token."""
    server = server_of(engine, index)
    return httpx.post(f"{server.url}{path}", json=body, headers=dict(server.headers), timeout=120, trust_env=False)


def desk_of(engine: ServedEngine) -> FolderMailbox:
    assert isinstance(engine.desk, FolderMailbox)
    return engine.desk


def server_of(engine: ServedEngine, index: int = 0) -> SGLangServer:
    server = engine.replicas[index].server
    assert isinstance(server, SGLangServer)
    return server
