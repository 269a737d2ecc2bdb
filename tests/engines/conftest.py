"""The engines of the contract: the torch engine, and a real SGLang server that the tests start once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.dequantized import write_dequantized
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.sglang import SGLangEngine
from orbit_runtime.rollout.sglang_server import PYTHON_VARIABLE, ServerSettings, SGLangServer, lora_targets
from orbit_runtime.types import Engine
from tests.integration.tiny_models import TARGETS

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)


@pytest.fixture(scope="session")
def adder() -> tuple[Policy, ChatTokenizer]:
    """The shipped model in INT4, as a run loads it."""
    folder = builtin_folder("tiny-adder", "INT4")
    return load_policy(folder, LORA), ChatTokenizer(folder)


@pytest.fixture(scope="session")
def sglang(adder: tuple[Policy, ChatTokenizer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    policy, tokenizer = adder
    folder = tmp_path_factory.mktemp("sglang")
    settings = ServerSettings(
        model=write_dequantized(builtin_folder("tiny-adder", "INT4"), folder / "base"),
        device="cpu",
        dtype="float32",
        lora_rank=4,
        lora_targets=lora_targets(tuple(policy.injected.layers)),
        max_running_requests=32,
        max_sequence_length=256,
        seed=0,
    )
    server = SGLangServer(settings, log=folder / "sglang.log")
    try:
        engine = SGLangEngine(server, tokenizer, folder=folder / "adapters", max_running_requests=16)
    except BaseException:
        server.stop()
        raise
    yield engine
    engine.close()


@pytest.fixture(params=["Torch", "SGLang"])
def engine(request: pytest.FixtureRequest, adder: tuple[Policy, ChatTokenizer]) -> Iterator[Engine]:
    """Without adapters, before and after."""
    made: Engine = (
        TorchEngine(*adder, max_running_requests=16) if request.param == "Torch" else request.getfixturevalue("sglang")
    )
    yield made
    for name in made.adapters():
        made.unload_adapter(name)


@pytest.fixture(scope="session")
def new_name() -> Callable[[], str]:
    """Adapter names that no test used before: an engine never takes one twice."""
    names = (f"policy-v{number}" for number in range(10_000))
    return lambda: next(names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(900))
