"""An SGLang server of our own: its arguments, its start, its end.

Belongs here: which arguments follow from a run. Does not belong here: requests (`sglang`), processes (`workers`).

On a CPU SGLang runs no packed format, so it is given the base dequantised by our codecs: the same values.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from orbit_runtime.workers.server_process import ServerProcess, free_port

PYTHON_VARIABLE = "ORBIT_SGLANG_PYTHON"
"""Interpreter of the environment that SGLang is installed in; this process's own unless set."""
START_SECONDS = 900.0
MAX_ADAPTERS = 4
"""Slots: the current policy, the one before it, one for preflight, and the bare base."""


@dataclass(frozen=True)
class ServerSettings:
    """What a run asks of its server."""

    model: Path
    device: str
    dtype: str
    lora_rank: int
    lora_targets: tuple[str, ...]
    max_running_requests: int
    max_sequence_length: int
    seed: int


class SGLangServer:
    """One server on the loopback device; `start` again after its death gives a new one on a new port."""

    def __init__(self, settings: ServerSettings, *, log: Path) -> None:
        self._settings = settings
        self._log = log
        self._process: ServerProcess | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Raises EngineDiedError with the log's end where it does not come to answer."""
        self._port = free_port()
        python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        command = [python, "-m", "orbit_runtime.sglang_plugin.launch", *server_arguments(self._settings, self._port)]
        self._process = ServerProcess("SGLang", command, environment=_environment(os.environ), log=self._log)
        self._process.wait_until(self._answers, seconds=START_SECONDS)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.exit_status() is None

    def describe(self) -> str:
        return self._process.tail() if self._process else "it never started"

    def stop(self) -> None:
        if self._process:
            self._process.stop()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=30, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def server_arguments(settings: ServerSettings, port: int) -> list[str]:
    """What follows `sglang.launch_server`."""
    arguments = [
        "--model-path", str(settings.model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", settings.dtype, "--random-seed", str(settings.seed),
        "--context-length", str(settings.max_sequence_length),
        "--max-running-requests", str(settings.max_running_requests), "--enable-metrics",
        "--enable-lora", "--max-lora-rank", str(settings.lora_rank), "--max-loras-per-batch", str(MAX_ADAPTERS),
        "--max-loaded-loras", str(2 * MAX_ADAPTERS), "--lora-target-modules", *settings.lora_targets,
    ]  # fmt: skip
    if settings.device == "cpu":
        # Enough for every running sequence at its longest, which tiny models on a CPU can afford.
        tokens = min(settings.max_running_requests * settings.max_sequence_length, 2**20)
        arguments += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--lora-backend", "torch_native", "--disable-overlap-schedule", "--mem-fraction-static", "0.3",
            "--max-total-tokens", str(tokens),
        ]  # fmt: skip
    return arguments


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, inherited.get("PYTHONPATH", ""))))
    return {**inherited, "PYTHONPATH": path, "ORBIT_SGLANG": "1", "HF_HUB_OFFLINE": "1", "SGLANG_PLUGINS": "orbit"}


def lora_targets(modules: Sequence[str]) -> tuple[str, ...]:
    """SGLang names targets by the last part of a module's name."""
    return tuple(sorted({name.rpartition(".")[2] for name in modules}))
