"""Opens the models of a server from a run folder, a manifest, or a model and adapters.

Belongs here: what each of these says about base and adapters, loading them, what serving needs from servers beyond a
run. Does not belong here: HTTP, starting and calling servers (`rollout`, `sides.engines`), which name stands for which
adapter (`policies`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints.adapter_folder import split_address
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UsageError
from orbit_runtime.model_info.builtin_models import any_builtin_folder
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.model_info.settings import check_model_folder, load_settings
from orbit_runtime.planner.assumptions import SERVER_SLOTS
from orbit_runtime.planner.support.manifests import Kind
from orbit_runtime.planner.verdict import plan_served
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.streaming import StreamingEngine
from orbit_runtime.rollout.torch_engine import ReplaceableEngine
from orbit_runtime.serve.names import POLICY, check_one_source
from orbit_runtime.serve.policies import Base, BaseReplacement, Policies, config_of, open_policy
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.sides.checkpoint_facts import facts_of_checkpoint
from orbit_runtime.sides.engines import all_headers, build_servers, engine_settings
from orbit_runtime.sides.inputs import Inputs, fetch_model, progress_lines
from orbit_runtime.sides.interface import EngineOrder, EngineSettings
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.sides.trainers import adapter_config, build_policy
from orbit_runtime.spec import OrbitRun, load_manifest, resolve
from orbit_runtime.spec.adapter import OFT, Adapter, LoRA
from orbit_runtime.spec.data import Chat
from orbit_runtime.spec.resolve import in_one_process
from orbit_runtime.spec.rollout import Rollout
from orbit_runtime.spec.run import Model, upgrade_manifest
from orbit_runtime.storage import open_store, read_run_file
from orbit_runtime.storage.bundles import list_bundles
from orbit_runtime.storage.cache import Cache, RetryPolicy, default_cache

PROBE = [{"role": "user", "content": "Name three rivers of Africa, then add 17 and 26."}]
"""Text on which the tokenizers of Orbit and of attached servers must agree."""
MOST_ADAPTERS = 2 * SERVER_SLOTS - 1
"""Servers hold twice as many adapters as they compute with at a time; beyond that SGLang drops one by itself. One place
is kept for the next adapter, which is proven before it replaces another."""


EngineName = Literal["Auto", "Torch", "SGLang", "OpenAI"]


@dataclass(frozen=True)
class ServeRequest:
    """The models to serve. Example: `ServeRequest(model="builtin://tiny-adder", adapters={"sums": "runs/a"})`"""

    source: str | None = None
    """A run folder, or a manifest's file."""
    model: str | None = None
    folder: Path | None = None
    """The folder into which `model` was downloaded; None: it is fetched."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    updates_from: tuple[str, ...] = ()
    engine: EngineName = "Auto"
    """`Auto`: the run's own engine; without a run, `Torch`."""


@dataclass(frozen=True)
class ServedModels:
    """Loaded models, with every adapter proven live."""

    policies: Policies
    engine: StreamingEngine
    limits: ServeLimits
    folder: Path
    """The base's folder."""
    kind: Kind
    """Engine kind, which decides the supported sampling settings."""
    chat: Chat = field(default_factory=Chat)
    """How the run's messages become text."""
    started: float | None = None
    """See `ChatTokenizer`."""
    watch: Callable[[], None] = lambda: None
    """Called periodically: restarts servers that died while idle."""
    closing: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Ends the engine, and the servers that were started for it. Safe to call twice."""
        self.closing.close()


@dataclass(frozen=True)
class ServedBase:
    """An engine, and what is known of its base."""

    engine: StreamingEngine
    config: AdapterConfig
    vocabulary: int
    compute_dtype: str
    kind: Kind
    policy: Policy | None = None
    """The model, if it is in this process."""
    replacing: BaseReplacement | None = None
    """What replacing the base needs, likewise."""
    most_adapters: int | None = None
    watch: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Source:
    """Base and adapters, from a run or the command line."""

    folder: Path
    place: str
    config: AdapterConfig
    engine: str
    settings: Callable[[], EngineSettings]
    """For servers."""
    load: Callable[[Path], Policy]
    """The base in a folder, for the torch engine."""
    limits: ServeLimits
    adapters: Mapping[str, str]
    updates_from: tuple[str, ...]
    chat: Chat = field(default_factory=Chat)
    started: float | None = None
    """See `ChatTokenizer`."""


def open_models(asked: ServeRequest, limits: ServeLimits, note: Callable[[str], None]) -> ServedModels:
    """Loads the requested models; the caller closes the result.

    Raises:
        UsageError: neither or both of a run and a model were named.
        OrbitError: a model or adapter is missing or damaged, servers did not start, or an adapter could not be proven
            live.
    """
    check_one_source(asked.source, asked.model)
    source = _of_model(asked, limits, note) if asked.source is None else _of_run(asked, limits, note)
    tokenizer = ChatTokenizer(source.folder, source.chat, started=source.started)
    with ExitStack() as closing:
        if source.engine == "Torch":
            held = _open_torch(source, tokenizer)
            if held.policy is not None and held.policy.mode.said:
                note(held.policy.mode.said)
        else:
            note(f"starting {source.engine}" if source.engine == "SGLang" else "asking the endpoints")
            held = _open_servers(source, tokenizer, closing)
        closing.callback(held.engine.close)
        weights = cached_weights_digest(source.folder, Cache(default_cache(os.environ)))
        name = source.place.rstrip("/").rpartition("/")[2] or source.place
        base = Base(
            name, source.place, tokenizer, held.config, weights, held.vocabulary, held.compute_dtype, held.policy,
            held.most_adapters, held.replacing,
        )  # fmt: skip
        most = max(source.limits.models, 1 + len(source.adapters))
        policies = Policies(base, held.engine, source.updates_from, most=most)
        for adapter, where in source.adapters.items():
            served, proof = policies.load(adapter, where)
            why = f" ({served.chosen})" if served.chosen else ""
            note(f"{adapter}: {served.place}{why}, {served.digest[:19]}…, {proof.verdict} live")
        return ServedModels(
            policies, held.engine, source.limits, source.folder, held.kind, source.chat, source.started, held.watch,
            closing.pop_all(),
        )  # fmt: skip


def _open_torch(source: _Source, tokenizer: ChatTokenizer) -> ServedBase:
    def build(policy: Policy) -> TorchEngine:
        return TorchEngine(policy, tokenizer, max_running_requests=source.limits.running)

    policy = source.load(source.folder)
    engine = ReplaceableEngine(build(policy))
    return ServedBase(
        engine=engine,
        config=next(iter(policy.injected.layers.values())).config,
        vocabulary=policy.vocabulary,
        compute_dtype=str(policy.compute_dtype).removeprefix("torch."),
        kind="Torch",
        policy=policy,
        replacing=BaseReplacement(source.folder, engine, source.load, build),
    )


def _open_servers(source: _Source, tokenizer: ChatTokenizer, closing: ExitStack) -> ServedBase:
    """
    Args:
        closing: receives what must be ended.

    Raises:
        UsageError: there are more adapters than servers hold.
        OrbitError: servers cannot apply these adapters, do not start, or do not respond.
    """
    if len(source.adapters) >= MOST_ADAPTERS:
        raise UsageError(
            f"{len(source.adapters)} adapters were requested, and SGLang's servers hold at most {MOST_ADAPTERS - 1}",
            where="--adapter",
            fix="serve fewer, or start another server for the others",
        )
    settings = source.settings()
    all_headers("spec.rollout.endpoints", settings.rollout.endpoints, os.environ)
    facts = facts_of_checkpoint(source.folder, settings.adapter, settings.compute_dtype)
    sequences = [tokenizer.encode_chat(PROBE)]
    engine = build_servers(EngineOrder(settings, tokenizer, source.folder, sequences, closing), facts)
    return ServedBase(
        engine=engine,
        config=facts.adapter,
        vocabulary=facts.vocabulary,
        compute_dtype=facts.compute_dtype,
        kind=_kind(settings.rollout, engine.kinds()),
        most_adapters=MOST_ADAPTERS,
        watch=engine.revive if source.engine == "SGLang" else lambda: None,
    )


def _kind(rollout: Rollout, found: set[str]) -> Kind:
    """The kind of the servers, for `planner.support.manifests`."""
    if "vLLM" in found:
        return "vLLM"
    if rollout.deterministic:
        return "SGLang, deterministic"
    return "SGLang without plug-in" if "SGLang without plug-in" in found else "SGLang"


def _of_model(asked: ServeRequest, limits: ServeLimits, note: Callable[[str], None]) -> _Source:
    assert asked.model is not None
    if asked.engine == "OpenAI":
        raise UsageError("the addresses of servers are in a manifest", where="--engine", fix="name the manifest's file")
    uri = asked.model
    if uri.startswith("builtin://"):
        folder = any_builtin_folder(uri.removeprefix("builtin://"), "Auto")
    else:
        folder = asked.folder or fetch_model(uri, note)
        check_model_folder(folder, "correct --model")
    found = [config_of(open_policy(where)) for where in asked.adapters.values()]
    config = found[0] if found else AdapterConfig(type="LoRA", targets=())
    engine = "Torch" if asked.engine == "Auto" else asked.engine
    limits = _within(limits, folder)
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    load = partial(load_policy, adapter=config, device=device, compute_dtype=dtype, longest=limits.sequence)
    settings = partial(_without_run, uri, config, engine, limits)
    return _Source(folder, uri, config, engine, settings, load, limits, asked.adapters, asked.updates_from)


def _without_run(place: str, config: AdapterConfig, engine: EngineName, limits: ServeLimits) -> EngineSettings:
    """Servers of a model on this machine, with a run's defaults for what nobody said."""
    rollout = Rollout(engine=engine, adapter_transport="SharedMemory", max_running_requests=limits.running)
    lora = LoRA(rank=config.rank, alpha=config.alpha) if config.type == "LoRA" else None
    oft = OFT(block_size=config.block_size) if config.type == "OFT" else None
    adapter = Adapter(type=config.type, targets=config.targets or None, lora=lora, oft=oft)
    plan = partial(plan_served, Model(uri=place, max_sequence_length=limits.sequence), adapter, rollout)
    if torch.cuda.is_available():
        return EngineSettings(config, rollout, limits.sequence, "cuda", "bfloat16", plan)
    return EngineSettings(config, rollout, limits.sequence, "cpu", "float32", plan)


def _within(limits: ServeLimits, folder: Path) -> ServeLimits:
    """No sequence is longer than the model's own limit."""
    settings = load_settings(folder / "config.json")
    longest = settings.get("max_position_embeddings") or settings.get("n_positions")
    return replace(limits, sequence=min(limits.sequence, int(longest))) if longest else limits


def _of_run(asked: ServeRequest, limits: ServeLimits, note: Callable[[str], None]) -> _Source:
    """The source that a run folder or a manifest describes."""
    assert asked.source is not None
    run, inputs, uri, folder = _read_run(asked.source)
    run = in_one_process(run, rollout=_served(run.spec.rollout, asked.engine))
    resolved = resolve(run, machine_facts(), folder=folder)
    spec = resolved.run.spec
    fetched = Inputs(spec, inputs, RetryPolicy(notice=note, tell=progress_lines(note)), [])
    store = open_store(uri, writable=False) if _is_there(uri) else None
    kept = list_bundles(store, "adapters") if store else []
    started = (read_run_file(store) or {}).get("started") if store else None
    named = split_address(asked.source)[1]
    adapters = {**({POLICY: f"{uri}@{named}" if named else uri} if kept else {}), **asked.adapters}
    model = fetched.model()
    limits = _within(limits, model)
    # What is served may be longer than what was trained.
    longest = max(limits.sequence, spec.model.max_sequence_length)
    longer = spec.model.model_copy(update={"max_sequence_length": longest})
    spec = spec.model_copy(update={"model": longer})
    resolved = replace(resolved, run=resolved.run.model_copy(update={"spec": spec}))
    config, settings = adapter_config(spec), partial(engine_settings, resolved)
    return _Source(
        model, spec.model.uri, config, resolved.engine, settings, partial(build_policy, resolved, recompute="None"),
        limits, adapters, (uri, *asked.updates_from), spec.data.chat, started,
    )  # fmt: skip


def _served(rollout: Rollout, engine: EngineName) -> Rollout:
    """A run's settings without those that only training needs; of another engine, what is not the run's engine's."""
    if engine == "Auto":
        engine = "Torch" if rollout.engine == "Auto" else rollout.engine
    if engine == rollout.engine:
        return rollout.model_copy(update={"sleep": "None", "router_replay": "None"})
    return Rollout(engine=engine, sampling=rollout.sampling, max_running_requests=rollout.max_running_requests)


def _read_run(source: str) -> tuple[OrbitRun, Mapping[str, object], str, Path | None]:
    """The manifest, the inputs of its first start, its run folder, and the base of its relative paths."""
    source = split_address(source)[0]
    path = Path(source)
    if path.is_file():
        manifest = load_manifest(path, [])
        return manifest, {}, f"{manifest.spec.storage.uri.rstrip('/')}/{manifest.name}", path.resolve().parent
    before = read_run_file(open_store(source, writable=False))
    if before is None:
        raise UsageError("there is no run here", where=source, fix="name a run folder; `orbit ls` lists them")
    return OrbitRun.model_validate(upgrade_manifest(before["resolved"])), before.get("inputs", {}), source, None


def _is_there(uri: str) -> bool:
    return "://" in uri or Path(uri).is_dir()
