"""The policies and real SGLang servers that the engine tests ask.

Belongs here: how they are made. Does not belong here: how long they live (`conftest`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.rollout.sglang import SGLangEngine
from orbit_runtime.rollout.sglang_server import PYTHON_VARIABLE, ServerSettings, SGLangServer, lora_targets
from tests.integration.tiny_models import TARGETS

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)
OFT = AdapterConfig(type="OFT", targets=TARGETS, block_size=16)
Adder = tuple[Policy, ChatTokenizer]


def load_adder(config: AdapterConfig) -> Adder:
    """The shipped model in INT4, as a run loads it."""
    folder = builtin_folder("tiny-adder", "INT4")
    return load_policy(folder, config), ChatTokenizer(folder)


def start_server(
    adder: Adder, folder: Path, *, oft_block_size: int, base: Path | None = None
) -> Iterator[SGLangEngine]:
    """Args: base: the model's folder; the shipped one, unpacked, unless given."""
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    policy, tokenizer = adder
    if base is None:
        base = folder / "base"
        convert(builtin_folder("tiny-adder", "INT4"), base, Target("BF16"), show=lambda *_: None)
    settings = ServerSettings(
        model=base,
        device="cpu",
        dtype="float32",
        targets=lora_targets(tuple(policy.injected.layers)),
        max_running_requests=32,
        max_sequence_length=256,
        seed=0,
        lora_rank=4,
        oft_block_size=oft_block_size,
    )
    server = SGLangServer(settings, log=folder / "sglang.log")
    try:
        engine = SGLangEngine(server, tokenizer, folder=folder / "adapters", max_running_requests=16, taps=server.taps)
    except BaseException:
        server.stop()
        raise
    yield engine
    engine.close()


def server_of(engine: SGLangEngine) -> SGLangServer:
    server = engine._server
    assert isinstance(server, SGLangServer)
    return server
