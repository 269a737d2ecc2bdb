"""The engine of a run: the trainer's own process, SGLang servers that Orbit starts, or servers that are there already.

Belongs here: what a manifest asks of an engine, what each kind refuses, and servers that start while the trainer does.
Does not belong here: the trainer (`trainers`), what engines do (`rollout`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

from orbit_runtime.errors import CredentialsError, EngineDiedError
from orbit_runtime.planner.support.manifests import sampling_of
from orbit_runtime.planner.support.served import LORA_LAYOUTS, Place, check_served, served_experts
from orbit_runtime.sides.checkpoint_facts import facts_of_checkpoint
from orbit_runtime.sides.interface import EngineOrder, EngineSettings
from orbit_runtime.sides.trainers import TrainerLayout, adapter_config
from orbit_runtime.spec import Resolved
from orbit_runtime.spec.engine_arguments import argument_flags
from orbit_runtime.spec.rollout import Rollout, Server
from orbit_runtime.types import Engine, Tokenizer
from orbit_runtime.workers.servers.process import AGENT_VARIABLE

if TYPE_CHECKING:
    from orbit_runtime.model_info.weights import ModelFacts
    from orbit_runtime.planner.serving import ServerMemory
    from orbit_runtime.planner.support.kernels import EngineKernels
    from orbit_runtime.policy import Policy
    from orbit_runtime.policy.facts import PolicyFacts
    from orbit_runtime.rollout.served_engine import ServedEngine
    from orbit_runtime.rollout.sglang_api import RoutedLayers
    from orbit_runtime.rollout.sglang_server import SGLangServer
    from orbit_runtime.rollout.torch_engine import TorchEngine

PROBES = 4
"""Real prompts whose text both tokenizers must agree on."""


def engine_settings(resolved: Resolved) -> EngineSettings:
    """The settings of a manifest whose trainer and engine are decided."""
    from orbit_runtime.planner.verdict import plan_as_run

    spec = resolved.run.spec
    return EngineSettings(
        adapter_config(spec),
        spec.rollout,
        spec.model.max_sequence_length,
        resolved.device,
        resolved.compute_dtype,
        partial(plan_as_run, resolved.asked),
        spec.model.activation_precision,
        spec.placement,
        spec.data.seed,
    )


def build_engine(order: EngineOrder, facts: PolicyFacts, policy: Policy | None) -> Engine:
    """Builds the engine of a run.

    Args:
        policy: the trainer's, if it computes in this process.

    Raises:
        OrbitError: see `build_servers`.
    """
    if order.settings.rollout.engine != "Torch":
        return build_servers(order, facts)
    assert policy is not None, "the planner refuses the torch engine beside ranks"
    return build_torch_engine(policy, order.tokenizer, order.settings.rollout)


def build_torch_engine(
    policy: Policy, tokenizer: Tokenizer, rollout: Rollout, *, is_trained: bool = True
) -> TorchEngine:
    """Args: is_trained: whether its samples are trained on; only then are chosen experts noted."""
    from orbit_runtime.rollout.torch_engine import TorchEngine

    return TorchEngine(
        policy,
        tokenizer,
        max_running_requests=rollout.max_running_requests,
        notes_experts=is_trained and rollout.router_replay != "None",
    )


def build_servers(order: EngineOrder, facts: PolicyFacts) -> ServedEngine:
    """An engine of SGLang servers that are started here, or of endpoints that are attached.

    Raises:
        UnsupportedError: (78) servers cannot apply this adapter, or cannot be had here.
        EngineDiedError: (82) one does not come to answer.
    """
    check_served(facts.served(place_of(order.settings)))
    return _attach(order, facts) if order.settings.rollout.engine == "OpenAI" else _start(order, facts)


def place_of(settings: EngineSettings) -> Place:
    """Where the servers are, for the table of support."""
    return "attached" if settings.rollout.engine == "OpenAI" else "GPU" if settings.device == "cuda" else "CPU"


def _start(order: EngineOrder, facts: PolicyFacts) -> ServedEngine:
    from orbit_runtime.rollout.served_engine import start_engine
    from orbit_runtime.rollout.sglang_server import sleeping_parts
    from orbit_runtime.rollout.transport import FolderMailbox, shared_memory

    rollout = order.settings.rollout
    scratch = Path(order.closing.enter_context(TemporaryDirectory(prefix="orbit-sglang-")))
    servers = plan_servers(order.settings, facts, order.folder, scratch)
    for server in servers:
        order.closing.callback(server.end)
    return start_engine(
        servers,
        order.tokenizer,
        desk=FolderMailbox(
            scratch / "adapters", shared_memory if rollout.adapter_transport == "SharedMemory" else None
        ),
        max_running_requests=rollout.max_running_requests,
        at_once=starts_at_once(order.settings),
        sleeping=sleeping_parts(rollout.sleep),
    )


def starts_at_once(settings: EngineSettings) -> int:
    """Number of servers that start at the same time; on a CPU they would slow each other down."""
    return 1 if settings.device == "cpu" else settings.rollout.replicas


def plan_servers(
    settings: EngineSettings, facts: PolicyFacts, folder: Path, scratch: Path, host: str | None = None
) -> list[SGLangServer]:
    """SGLang servers as the plan of this machine has them, none of them started.

    Args:
        facts: of the policy, loaded or read from headers.
        folder: the model's.
        scratch: an empty folder for logs, a converted tokenizer and, on a CPU, the base in BF16.
        host: the address to listen on; None: only processes of this machine ask.

    Raises:
        UnsupportedError: (78) SGLang cannot apply this adapter or serve this base here.
    """
    from orbit_runtime.checkpoints.convert import convert
    from orbit_runtime.checkpoints.target import Target
    from orbit_runtime.data.tiktoken_model import is_tiktoken, save_converted
    from orbit_runtime.model_info.checkpoint import folder_facts
    from orbit_runtime.planner.assumptions import SERVER_SLOTS
    from orbit_runtime.rollout.sglang_server import LOOPBACK, ServerSettings, SGLangServer, lora_targets
    from orbit_runtime.workers.child.run_token import run_token

    # On a CPU nothing of it decides: SGLang serves BF16 there.
    model = None if settings.device == "cpu" else folder_facts(folder)
    kernels = _plan_kernels(settings, facts, model) if model else None
    attention = _check_device(settings, facts, folder, kernels)
    rollout, adapter, layers = settings.rollout, facts.adapter, facts.layers
    base = folder
    if settings.device == "cpu" and facts.precision != "BF16":
        base = scratch / "base"
        convert(folder, base, Target("BF16"), show=lambda *_: None)
    serving = _plan_serving(settings, model, folder)
    memory = serving.memory
    first = ServerSettings(
        model=base,
        device=settings.device,
        dtype=settings.compute_dtype,
        targets=lora_targets((*layers, *adapter.targets)),
        max_running_requests=rollout.max_running_requests,
        max_sequence_length=settings.max_sequence_length,
        seed=settings.seed,
        lora_rank=adapter.rank if adapter.type == "LoRA" else 1,
        oft_block_size=adapter.block_size if adapter.type == "OFT" else 0,
        experts=served_experts(adapter.expert_layout, layers),
        expert_formats=facts.expert_formats,
        sleep=rollout.sleep,
        deterministic=rollout.deterministic,
        kernels=kernels,
        extra=tuple(argument_flags(rollout.engine_arguments)),
        engine_version=rollout.engine_version,
        attention=attention,
        reports_experts=rollout.router_replay != "None",
        # SGLang would run the publisher's code for it.
        tokenizer=save_converted(folder, scratch / "tokenizer") if is_tiktoken(folder) else None,
        tensor_parallel=serving.server_gpus,
        kv_tokens=memory.kv_tokens if memory else None,
        memory_fraction=memory.fraction if memory else None,
        adapter_slots=memory.adapter_slots if memory else SERVER_SLOTS,
    )
    token = run_token()
    return [
        SGLangServer(
            # Of one seed, two servers would draw the same tokens for the same prompt.
            replace(first, seed=first.seed + index, gpu=serving.first_gpu + index * serving.server_gpus),
            log=scratch / f"replica-{index}" / "sglang.log",
            token=token,
            host=host or LOOPBACK,
            routed=routed_layers(facts) if first.reports_experts else None,
        )
        for index in range(rollout.replicas)
    ]


def _check_device(
    settings: EngineSettings, facts: PolicyFacts, folder: Path, kernels: EngineKernels | None
) -> str | None:
    """The attention back end to set; None for SGLang's own choice.

    Raises UnsupportedError (78) for what SGLang cannot do on this machine's device.
    """
    from orbit_runtime.rollout.fused_scales import check_fused_scales
    from orbit_runtime.rollout.sglang_server import deterministic_attention

    is_deterministic = settings.rollout.deterministic
    if kernels is None:
        check_served(facts.served("CPU", deterministic=is_deterministic))
        return None
    check_fused_scales(folder, keeps_fp8=kernels.keeps_fp8)
    import torch

    capability = torch.cuda.get_device_capability()
    check_served(facts.served("GPU", capability=capability, deterministic=is_deterministic))
    return deterministic_attention(kernels.family, capability) if is_deterministic else None


def routed_layers(facts: PolicyFacts) -> RoutedLayers | None:
    """Layers whose experts completions can report; None for none, or if only headers were read."""
    from orbit_runtime.rollout.sglang_api import RoutedLayers

    routed = facts.routed
    return None if routed is None else RoutedLayers(routed.num_layers, routed.layers, routed.experts_per_token)


@dataclass(frozen=True)
class ServerPlacement:
    """Where servers run, and the memory that they may take."""

    first_gpu: int
    """Index of the first server's GPU, counted by the driver in its container."""
    server_gpus: int
    """Number of GPUs of each server, and so of its tensor-parallel ranks; on a CPU the number of its processes."""
    memory: ServerMemory | None
    """Memory of a server on a GPU; None on a CPU."""


def _plan_kernels(settings: EngineSettings, facts: PolicyFacts, model: ModelFacts) -> EngineKernels:
    from orbit_runtime.planner.support.kernels import choose_kernels

    adapts_experts = served_experts(facts.adapter.expert_layout, facts.layers) in LORA_LAYOUTS
    return choose_kernels(
        model,
        settings.activation_precision,
        adapts_experts=adapts_experts,
        engine_arguments=settings.rollout.engine_arguments,
        reports_experts=settings.rollout.router_replay != "None",
    )


def _plan_serving(settings: EngineSettings, model: ModelFacts | None, folder: Path) -> ServerPlacement:
    """The placement that the plan chose. Raises UnsupportedError (78) for a model that cannot be divided so.

    Args:
        model: None on a CPU, where one process needs no facts about it.
    """
    from orbit_runtime.model_info.checkpoint import folder_facts
    from orbit_runtime.planner import Machine
    from orbit_runtime.planner.verdict import check_servers
    from orbit_runtime.sides.machine import gpu_machine

    if model is None:
        if settings.rollout.tensor_parallel is None:
            return ServerPlacement(0, 1, None)
        made = settings.plan(folder_facts(folder), Machine(None))
    else:
        made = settings.plan(model, gpu_machine(settings.placement))
    check_servers(made)
    # An agent's container has the engine's GPUs alone.
    first = 0 if model is None or os.environ.get(AGENT_VARIABLE) else made.devices.engine.start
    return ServerPlacement(first, made.server_gpus, made.server_memory)


def _attach(order: EngineOrder, facts: PolicyFacts) -> ServedEngine:
    from orbit_runtime.rollout.attached import Endpoint, ServerRequirements, attach_engine
    from orbit_runtime.rollout.sglang_server import lora_targets

    rollout, adapter = order.settings.rollout, facts.adapter
    shared = rollout.adapter_folder
    parent = order.closing.enter_context(TemporaryDirectory(prefix="orbit-adapters-", dir=shared))
    # The server may run as another user.
    Path(parent).chmod(0o755)
    headers = all_headers("spec.rollout.endpoints", rollout.endpoints, os.environ)
    endpoints = [
        Endpoint(each.url, "Folder" if shared and each.adapter_method == "Auto" else each.adapter_method, own)
        for each, own in zip(rollout.endpoints, headers, strict=True)
    ]
    wanted = ServerRequirements(
        adapter=adapter,
        targets=lora_targets((*facts.layers, *adapter.targets)),
        max_tokens=order.settings.max_sequence_length,
        sampling=sampling_of(rollout),
        architectures=tuple(json.loads((order.folder / "config.json").read_text()).get("architectures") or ()),
        probes=tuple(tuple(ids) for ids in order.sequences[:PROBES]),
        tolerance=change_limit(facts, order.settings.activation_precision),
        is_resumed=order.is_resumed,
        engine_version=rollout.engine_version,
    )
    return attach_engine(
        endpoints,
        wanted,
        order.tokenizer,
        folder=Path(parent) / "adapters",
        max_running_requests=rollout.max_running_requests,
    )


def all_headers(where: str, endpoints: Sequence[Server], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """`endpoint_headers` of each. Args: where: the manifest's list of them."""
    return [endpoint_headers(f"{where}[{index}]", each, environment) for index, each in enumerate(endpoints)]


def endpoint_headers(where: str, endpoint: Server, environment: Mapping[str, str]) -> dict[str, str]:
    """Headers of each request to the endpoint. Raises CredentialsError (77) for a variable that is not set."""
    named = {f"headers[{at}].valueEnv": header.value_env for at, header in enumerate(endpoint.headers)}
    for field, variable in {"apiKeyEnv": endpoint.api_key_env, **named}.items():
        if variable and not environment.get(variable):
            raise CredentialsError(
                f"the environment variable {variable} is not set",
                where=f"{where}.{field}",
                fix="set it, or remove the field; on a cluster it comes from a secret of placement.envFromSecrets",
            )
    headers = {each.name: each.value or environment[str(each.value_env)] for each in endpoint.headers}
    if endpoint.api_key_env:
        headers["Authorization"] = f"Bearer {environment[endpoint.api_key_env]}"
    return headers


def change_limit(facts: PolicyFacts, activation_precision: str) -> float:
    """Largest difference of the adapter's effect between the two sides' passes; larger where activations are rounded to
    BF16 or less."""
    from orbit_runtime.parity.liveness import CHANGE_LIMITS
    from orbit_runtime.parity.statistics import rounded_to

    return CHANGE_LIMITS[rounded_to(facts.compute_dtype, activation_precision)]


# --- servers that start while the ranks of the trainer do ---


def may_start_ahead(resolved: Resolved, division: TrainerLayout) -> bool:
    """Whether servers may start beside ranks; a run on demonstrations has none.

    On GPUs that both share they may not: a server counts what memory is free before and after it has loaded, and would
    take what the trainer loads meanwhile for its own.
    """
    is_sampled = resolved.run.spec.algorithm.type != "SFT"
    if not is_sampled or division.trainer != "Megatron" or resolved.engine != "SGLang":
        return False
    return resolved.device == "cpu" or resolved.run.spec.placement.layout == "Split"


class EngineAhead:
    """Starts servers in a thread, from the facts in the checkpoint's headers: neither side needs the other before the
    first publish."""

    def __init__(self, order: EngineOrder) -> None:
        """
        Raises:
            UnsupportedError: (78) servers cannot apply this adapter.
        """
        settings = order.settings
        facts = facts_of_checkpoint(order.folder, settings.adapter, settings.compute_dtype)
        check_served(facts.served(place_of(settings)))
        self._closing = _Closing()
        self._build = partial(build_servers, replace(order, closing=self._closing), facts)
        self._engine: Future[ServedEngine] = Future()
        # As a daemon it delays no exit of the process: an orderly one has called `close`.
        self._thread = Thread(target=self._start, name="engine-ahead", daemon=True)
        self._thread.start()

    def _start(self) -> None:
        try:
            self._engine.set_result(self._build())
        except BaseException as error:
            self._engine.set_exception(error)

    def check(self) -> None:
        """Raises what ended the start of the servers, if it has failed by now."""
        if self._engine.done():
            self._engine.result()

    def take(self) -> ServedEngine:
        """The engine, once its servers respond; the caller closes it. Raises: see `engines.build_servers`."""
        return self._engine.result()

    def close(self) -> None:
        """Ends the servers, also those that still start. Safe to call twice."""
        self._closing.close()
        self._thread.join()
        # An engine that nobody took still has a client.
        if self._engine.exception() is None:
            self._engine.result().close()


class _Closing(ExitStack):
    """May be closed by one thread while another pushes on it: what comes too late is closed at once."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False

    def close(self) -> None:
        self._is_over = True
        super().close()

    def enter_context[T](self, cm: AbstractContextManager[T, bool | None]) -> T:
        entered = super().enter_context(cm)
        self._check()
        return entered

    def callback(self, *arguments: Any, **named: Any) -> Any:
        pushed = super().callback(*arguments, **named)
        self._check()
        return pushed

    def _check(self) -> None:
        if self._is_over:
            super().close()
            raise EngineDiedError("the engine is not needed any more")
