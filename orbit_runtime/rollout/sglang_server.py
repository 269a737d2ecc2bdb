"""An SGLang server started by Orbit: its arguments, its start, its end.

Belongs here: which arguments follow from a run. Does not belong here: requests (`sglang_api`), processes (`workers`),
what is refused (`planner.support`).

On a CPU SGLang runs no packed format, so it gets the base dequantised by our codecs: the same values.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orbit_runtime.model_info.weights import SGLANG_TARGETS
from orbit_runtime.planner.support.kernels import EXPERTS_FLAG, LORA_RUNNERS, EngineKernels
from orbit_runtime.planner.support.served import LORA_LAYOUTS
from orbit_runtime.ports.guard import local_host
from orbit_runtime.rollout.server_types import Sleeping
from orbit_runtime.rollout.sglang_api import RoutedLayers
from orbit_runtime.rollout.wire import is_serving, requires_token
from orbit_runtime.workers.child.run_token import new_token
from orbit_runtime.workers.servers import protocol
from orbit_runtime.workers.servers.process import (
    AGENT_VARIABLE,
    VERSION_VARIABLE,
    PortTakenError,
    ServerProcess,
    WatchedServer,
    launch_command,
    launch_environment,
)
from orbit_runtime.workers.servers.remote import RemoteProcess
from orbit_runtime.workers.system import VARIABLE, HeldPort, wait_asleep

_log = logging.getLogger(__name__)

START_SECONDS = 900.0
PORT_TRIES = 3
MIN_PROBE_SECONDS, MAX_PROBE_SECONDS = 2.0, 30.0
"""A busy server needs long to answer; but another process may have taken its port, and never answer."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a run's own server."""

    model: Path
    device: str
    dtype: str
    targets: tuple[str, ...]
    """Targets of the adapters, LoRA or OFT."""
    max_running_requests: int
    max_sequence_length: int
    seed: int
    gpu: int = 0
    """The first of its GPUs on this machine. Not run on hardware."""
    tensor_parallel: int = 1
    """Consecutive GPUs it uses, one process each; on a CPU the number of processes. On GPUs not run on hardware."""
    lora_rank: int = 1
    """The largest rank; OFT needs none."""
    oft_block_size: int = 0
    """0 if OFT is refused."""
    experts: str = "None"
    """Layout of the adapters of routed experts."""
    expert_formats: tuple[str, ...] = ()
    """Formats that these experts are packed in."""
    sleep: Literal["None", "Cache", "All"] = "None"
    """Resources that it must be able to release while it sleeps. Not run on hardware."""
    deterministic: bool = False
    """Whether each request brings the seed of its draws. Not run on hardware."""
    adapter_slots: int = 4
    """Adapters on the device at the same time: the newest policy, those still running, preflight's, the bare base."""
    kv_tokens: int | None = None
    """Capacity of its KV cache; None: what free memory allows, or on a CPU enough for every running sequence."""
    memory_fraction: float | None = None
    """Share of the GPU memory free at its start, for base, adapter slots and KV cache. None: SGLang's own choice."""
    kernels: EngineKernels | None = None
    """The base's kernels; None on a CPU, where nothing is packed."""
    extra: tuple[str, ...] = ()
    """Arguments from the manifest, as `spec.engine_arguments.argument_flags` writes them."""
    engine_version: Literal["Pinned", "Any"] = "Pinned"
    """`Any`: it also starts with a version of SGLang other than Orbit's pinned one."""
    attention: str | None = None
    """SGLang's attention back end on a GPU; None for its own choice."""
    reports_experts: bool = False
    """Whether completions report the experts of their tokens."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, if not the model's."""


class SGLangServer:
    """One server; `start` after its death creates a new one on a new port."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        log: Path,
        token: str | None = None,
        host: str = LOOPBACK,
        routed: RoutedLayers | None = None,
    ) -> None:
        """
        Args:
            token: the run's token, which every request needs. None: one of its own.
            host: the address of this machine to listen on.
            routed: layers whose experts completions report, for a caller of its API; None for none.
        """
        self._settings = settings
        self._host = host
        self.routed = routed
        self._token = token or new_token()
        self._log = log
        self.taps = log.parent / "taps"
        """Folder for requests to the plug-in about a pass, and its answers."""
        self._process: WatchedServer | None = None
        self._is_ended = False
        self.port = 0
        self.headers = {"Authorization": f"Bearer {self._token}"}
        self.deterministic = settings.deterministic
        self._probe_seconds = MIN_PROBE_SECONDS

    @property
    def url(self) -> str:
        """Its address on this machine."""
        return f"http://{local_host(self._host)}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of a server that Orbit started directly; not available if an agent started it."""
        assert isinstance(self._process, ServerProcess)
        return self._process.pid

    def start(self) -> None:
        """Starts it in the engine's container if there is one, or else here.

        A port that another process took before the server listened on it is replaced by another.

        Raises EngineDiedError, with the end of the log, if it never responds, or if it is ended meanwhile.
        """
        for tries in range(1, PORT_TRIES + 1):
            try:
                with HeldPort() as self.port:
                    self._start()
            except PortTakenError as error:
                self.stop()
                if tries == PORT_TRIES or self._is_ended:
                    raise
                _log.warning("%s; starting it again on another", error.message)
            else:
                return

    def _start(self) -> None:
        self.taps.mkdir(parents=True, exist_ok=True)
        self._probe_seconds = MIN_PROBE_SECONDS
        arguments = server_arguments(self._settings, self.port, self._host)
        own = server_variables(self._settings, self.taps)
        agent = os.environ.get(AGENT_VARIABLE)
        if agent:
            self._process = RemoteProcess(agent, "SGLang", arguments, environment=own, log=self._log, token=self._token)
        else:
            self._process = ServerProcess(
                "SGLang", launch_command(arguments), environment=launch_environment(own), log=self._log,
                token=self._token,
            )  # fmt: skip
        if self._is_ended:
            self._process.stop()
        self._process.wait_until(self._answers, seconds=START_SECONDS, port=self.port)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.exit_status() is None

    def describe(self) -> str:
        return self._process.tail() if self._process else "it never started"

    def stop(self) -> None:
        if self._process:
            self._process.stop()

    def end(self) -> None:
        """Stops it permanently, from any thread: a start in progress fails, and so does every later one."""
        self._is_ended = True
        self.stop()

    def memory_bytes(self) -> int | None:
        if self._process is None:
            return None
        if self._settings.device == "cpu":
            return self._process.resident_bytes()
        first = self._settings.gpu
        if isinstance(self._process, RemoteProcess):
            return self._process.gpu_bytes(first, self._settings.tensor_parallel)
        import torch

        memory = [torch.cuda.mem_get_info(gpu) for gpu in range(first, first + self._settings.tensor_parallel)]
        return sum(total - free for free, total in memory)

    def _answers(self) -> bool:
        started = time.monotonic()
        found = is_serving(self.url, seconds=self._probe_seconds)
        if time.monotonic() - started >= self._probe_seconds:
            self._probe_seconds = min(MAX_PROBE_SECONDS, 2 * self._probe_seconds)
        if not found:
            return False
        is_ours = requires_token(self.url, seconds=self._probe_seconds, headers=self.headers)
        if is_ours is False:
            raise PortTakenError(
                f"SGLang cannot listen on port {self.port}: another server answers there",
                where=str(self._log),
                fix="start again: each start chooses a free port",
            )
        return bool(is_ours)


def server_arguments(settings: ServerSettings, port: int, host: str = LOOPBACK) -> list[str]:
    """Arguments of `sglang.launch_server`."""
    arguments = [
        "--model-path", str(settings.model), "--host", host, "--port", str(port),
        "--dtype", settings.dtype, "--random-seed", str(settings.seed),
        "--context-length", str(settings.max_sequence_length),
        "--max-running-requests", str(settings.max_running_requests), "--enable-metrics",
        "--incremental-streaming-output",
        "--enable-lora", "--max-lora-rank", str(settings.lora_rank),
        "--max-loras-per-batch", str(settings.adapter_slots), "--max-loaded-loras", str(2 * settings.adapter_slots),
        "--lora-target-modules", *settings.targets,
    ]  # fmt: skip
    if settings.dtype == "bfloat16":
        # As the trainer computes them (`policy.logprobs`).
        arguments += ["--enable-fp32-lm-head"]
    if settings.tokenizer:
        arguments += ["--tokenizer-path", str(settings.tokenizer)]
    if settings.tensor_parallel > 1:
        arguments += ["--tp-size", str(settings.tensor_parallel)]
    arguments += settings.extra
    arguments += settings.kernels.arguments if settings.kernels else ()
    arguments += expert_arguments(settings.experts, settings.device, settings.expert_formats)
    if settings.reports_experts:
        arguments += ["--enable-return-routed-experts"]
    if settings.deterministic:
        # SGLang 0.5.23 sets the rest itself (`attention_hook.py`, `overrides.py`): PyTorch's sampler; FlashAttention 3,
        # or on Blackwell FlashInfer, with which it turns the radix cache off. CUDA graphs and LoRA's kernels stay.
        arguments += ["--enable-deterministic-inference"]
    if settings.device == "cpu":
        # Enough for every running sequence at full length, which tiny models on a CPU can afford.
        tokens = min(settings.max_running_requests * settings.max_sequence_length, 2**20)
        arguments += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--lora-backend", "torch_native", "--disable-overlap-schedule", "--mem-fraction-static", "0.3",
            "--max-total-tokens", str(tokens),
            # Otherwise an idle server busy-waits on a core that the trainer needs.
            "--sleep-on-idle",
        ]  # fmt: skip
        return arguments
    if settings.memory_fraction is not None:
        arguments += ["--mem-fraction-static", str(settings.memory_fraction)]
    if settings.kv_tokens is not None:
        arguments += ["--max-total-tokens", str(settings.kv_tokens)]
    if settings.attention:
        arguments += ["--attention-backend", settings.attention]
    if {"gate_proj", "up_proj", "down_proj"} & set(settings.targets):
        # Otherwise some models run shared experts as one more routed expert, to which no adapter is applied.
        arguments += ["--disable-shared-experts-fusion"]
    if settings.gpu:
        arguments += ["--base-gpu-id", str(settings.gpu)]
    if settings.sleep != "None":
        arguments += ["--enable-memory-saver"]
    if settings.sleep == "All":
        arguments += ["--enable-weights-cpu-backup"]
    return arguments


def expert_arguments(experts: str, device: str, formats: Collection[str]) -> list[str]:
    """Flags for adapters of routed experts, whose layouts `planner.support.served` has found one runner for."""
    if experts not in LORA_LAYOUTS:
        return []
    # Without an adapter to look at, SGLang would assume the second.
    shared = "--experts-shared-outer-loras" if experts == "SharedOuter" else "--no-experts-shared-outer-loras"
    if device == "cpu":
        return [shared]
    runners = {LORA_RUNNERS[form] for form in formats}
    assert len(runners) == 1, formats
    return [shared, "--lora-backend", "triton", EXPERTS_FLAG, *runners]


def deterministic_attention(family: str, capability: tuple[int, int]) -> str | None:
    """The attention back end to set in deterministic mode; None if SGLang's own choice fits.

    For gpt-oss and for latent attention on a B200 SGLang picks TensorRT-LLM's, then refuses to start because its sums
    depend on the batch (0.5.23: `model_overrides/gpt_oss.py`, `deepseek_v2.py`, `choices.py`).

    Args:
        capability: CUDA's, major and minor.
    """
    return "triton" if family in ("gpt_oss", "deepseek_v3", "kimi_k2") and capability[0] == 10 else None


def sleeping_parts(sleep: str) -> tuple[Sleeping, ...]:
    """The parts that a server releases with this setting."""
    parts: dict[str, tuple[Sleeping, ...]] = {"Cache": ("cache",), "All": ("cache", "weights", "graphs")}
    return parts.get(sleep, ())


def server_variables(settings: ServerSettings, taps: Path) -> dict[str, str]:
    """Variables for the plug-in and SGLang, in addition to the environment it is started in."""
    own = {
        protocol.VARIABLE: "1",
        protocol.OFT_VARIABLE: str(settings.oft_block_size),
        protocol.EXPERTS_VARIABLE: settings.experts,
        protocol.TAPS_VARIABLE: str(taps),
        VERSION_VARIABLE: settings.engine_version,
        "SGLANG_PLUGINS": "orbit",
    }
    own |= settings.kernels.variables if settings.kernels else {}
    if settings.device == "cpu" and settings.tensor_parallel > 1:
        # Otherwise SGLang wants a NUMA node for each process. Without its own CPU kernels it binds none in any case.
        every_core = f"0-{(os.cpu_count() or 1) - 1}"
        own |= {"SGLANG_CPU_OMP_THREADS_BIND": "|".join([every_core] * settings.tensor_parallel)}
    if settings.device == "cpu" and VARIABLE not in os.environ:
        wait_asleep(own)
    return own


def lora_targets(modules: Collection[str]) -> tuple[str, ...]:
    """SGLang names targets by the last part of a module's name; a server must know all that an adapter's file names.

    Its command line accepts only names it knows: DeepSeek-V4's layers go by the names that the plug-in gives them.
    """
    leaves = {name.rpartition(".")[2] for name in modules}
    return tuple(sorted({SGLANG_TARGETS.get(leaf, leaf) for leaf in leaves}))
