"""The engines of the contract: the torch engine, and real SGLang servers that the tests start once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.ports import free_port

from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.wire import is_serving
from orbit_runtime.types import Engine
from orbit_runtime.workers.servers.process import ServerProcess
from tests.engines.inside_server import inside_environment, run_inside_of
from tests.engines.servers import LORA, OFT, Adder, attach, load_adder, server_of, start_server

VLLM_PYTHON = "ORBIT_VLLM_PYTHON"


@pytest.fixture(scope="session")
def lora_adder() -> Adder:
    return load_adder(LORA)


@pytest.fixture(scope="session")
def oft_adder() -> Adder:
    return load_adder(OFT)


@pytest.fixture(scope="session")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of code that servers started from now on run inside of them."""
    code = tmp_path_factory.mktemp("inside") / "code.py"
    with pytest.MonkeyPatch.context() as environment:
        for name, value in inside_environment(code).items():
            environment.setenv(name, value)
        yield code


@pytest.fixture(scope="session")
def lora_server(lora_adder: Adder, inside: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    yield from start_server(lora_adder, tmp_path_factory.mktemp("sglang"), oft_block_size=0)


@pytest.fixture(scope="session")
def oft_server(oft_adder: Adder, inside: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """It serves LoRA as well."""
    yield from start_server(oft_adder, tmp_path_factory.mktemp("sglang-oft"), oft_block_size=OFT.block_size)


@pytest.fixture(scope="session")
def attached(
    lora_adder: Adder, lora_server: ServedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The same server, as one that somebody else started; adapters go as folders."""
    server = server_of(lora_server)
    engine = attach(lora_adder, [server.url], tmp_path_factory.mktemp("attached"), "Folder", server.headers)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def uploading(
    lora_adder: Adder, lora_server: ServedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The same, and adapters go as tensors in the request."""
    server = server_of(lora_server)
    engine = attach(lora_adder, [server.url], tmp_path_factory.mktemp("uploading"), "Upload", server.headers)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM server. vLLM is no dependency of Orbit: name the interpreter of an environment that has it."""
    if not os.environ.get(VLLM_PYTHON):
        pytest.skip(f"needs vLLM, whose CPU build will do: {VLLM_PYTHON} names no interpreter")
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    convert(builtin_folder("tiny-adder", "INT4"), folder / "base", Target("BF16"), show=lambda *_: None)
    # More slots than adapters: on a CPU vLLM gives a request without one, in one batch with others, the last slot's.
    command = [
        os.environ[VLLM_PYTHON], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "base"),
        "--dtype", "float32", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "64", "--max-model-len", "256",
        "--max-num-seqs", "32", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORBIT", "PYTHONPATH"))}
    environment |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    server = ServerProcess("vLLM", command, environment=environment, log=folder / "log")
    address = f"http://127.0.0.1:{port}"

    try:
        server.wait_until(lambda: is_serving(address, seconds=30), seconds=800)
        yield address
    finally:
        server.stop()


@pytest.fixture(scope="session")
def vllm(lora_adder: Adder, vllm_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    engine = attach(lora_adder, [vllm_url], tmp_path_factory.mktemp("vllm-adapters"), "Folder")
    yield engine
    engine.close()


@pytest.fixture(params=["Torch", "Torch-OFT", "SGLang", "SGLang-OFT", "Attached", "Attached-upload", "vLLM"])
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adder(case: str, request: pytest.FixtureRequest) -> Adder:
    """The policy whose adapters the engine of the case serves."""
    found: Adder = request.getfixturevalue("oft_adder" if case.endswith("OFT") else "lora_adder")
    return found


@pytest.fixture
def engine(case: str, adder: Adder, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Without adapters, before and after."""
    made: Engine
    if case.startswith("Torch"):
        made = TorchEngine(*adder, max_running_requests=16)
    else:
        names = {"SGLang": "lora_server", "SGLang-OFT": "oft_server", "Attached": "attached", "vLLM": "vllm"}
        made = request.getfixturevalue(names.get(case, "uploading"))
    yield made
    for name in made.adapters():
        made.unload_adapter(name)


@pytest.fixture
def close(case: str) -> float:
    """How near log-probs must be; vLLM's attention on a CPU rounds otherwise than torch's."""
    return 5e-4 if case == "vLLM" else 5e-5


@pytest.fixture(scope="session")
def new_name() -> Callable[[], str]:
    """Adapter names that no test used before: an engine never takes one twice."""
    names = (f"policy-v{number}" for number in range(10_000))
    return lambda: next(names)


@pytest.fixture
def run_inside(inside: Path) -> Callable[..., None]:
    """Runs code in the server's process that holds the adapters, with its LoRAManager as `manager`."""

    def run(engine: ServedEngine, code: str, index: int = 0) -> None:
        run_inside_of(engine, inside, code, index)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))
