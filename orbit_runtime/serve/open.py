"""Opens the models of a server from a run folder, a manifest, or a model and adapters.

Belongs here: what each of these says about base and adapters, loading them. Does not belong here: HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UsageError
from orbit_runtime.model_info.builtin_models import any_builtin_folder
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.model_info.settings import check_model_folder, load_settings
from orbit_runtime.planner.support.sampling import Kind
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.streaming import StreamingEngine
from orbit_runtime.rollout.torch_engine import ReplaceableEngine
from orbit_runtime.serve.names import POLICY, check_one_source
from orbit_runtime.serve.policies import Base, BaseReplacement, Policies, config_of, open_policy
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.served_base import ServedBase, open_servers
from orbit_runtime.sides.inputs import Inputs, fetch_model, progress_lines
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.sides.trainers import adapter_config, build_policy
from orbit_runtime.spec import OrbitRun, Resolved, load_manifest, resolve
from orbit_runtime.spec.run import upgrade_manifest
from orbit_runtime.storage import open_store, read_run_file
from orbit_runtime.storage.bundles import list_bundles
from orbit_runtime.storage.cache import Cache, default_cache
from orbit_runtime.storage.download import RetryPolicy

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
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the run's chat template."""
    watch: Callable[[], None] = lambda: None
    """Called periodically: restarts servers that died while idle."""
    closing: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Ends the engine, and the servers that were started for it. Safe to call twice."""
        self.closing.close()


@dataclass(frozen=True)
class _Source:
    """Base and adapters, from a run or the command line."""

    folder: Path
    place: str
    config: AdapterConfig
    resolved: Resolved | None
    """None if there is no run."""
    engine: str
    adapters: Mapping[str, str]
    updates_from: tuple[str, ...]


def open_models(asked: ServeRequest, limits: ServeLimits, note: Callable[[str], None]) -> ServedModels:
    """Loads the requested models; the caller closes the result.

    Raises:
        UsageError: neither or both of a run and a model were named.
        OrbitError: a model or adapter is missing or damaged, servers did not start, or an adapter could not be proven
            live.
    """
    check_one_source(asked.source, asked.model)
    source = _of_model(asked, note) if asked.source is None else _of_run(asked, note)
    template = source.resolved.run.spec.data.chat.template_arguments if source.resolved else {}
    if source.resolved:
        limits = replace(limits, sequence=min(limits.sequence, source.resolved.run.spec.model.max_sequence_length))
    longest = load_settings(source.folder / "config.json").get("max_position_embeddings")
    if longest:
        limits = replace(limits, sequence=min(limits.sequence, int(longest)))
    tokenizer = ChatTokenizer(source.folder, template)
    with ExitStack() as closing:
        if source.engine == "Torch":
            held = _open_torch(source, tokenizer, limits)
        else:
            note(f"starting {source.engine}" if source.engine == "SGLang" else "asking the endpoints")
            held = open_servers(
                source.resolved or _run_of(source, limits), source.config, source.folder, tokenizer,
                len(source.adapters), closing,
            )  # fmt: skip
        closing.callback(held.engine.close)
        weights = cached_weights_digest(source.folder, Cache(default_cache(os.environ)))
        name = source.place.rstrip("/").rpartition("/")[2] or source.place
        base = Base(
            name, source.place, tokenizer, held.config, weights, held.vocabulary, held.compute_dtype, held.policy,
            held.most_adapters, held.replacing,
        )  # fmt: skip
        policies = Policies(base, held.engine, source.updates_from)
        for adapter, where in source.adapters.items():
            served, proof = policies.load(adapter, where)
            note(f"{adapter}: {served.place}, {served.digest[:19]}…, {proof.verdict} live")
        return ServedModels(
            policies, held.engine, limits, source.folder, held.kind, template, held.watch, closing.pop_all()
        )  # fmt: skip


def _open_torch(source: _Source, tokenizer: ChatTokenizer, limits: ServeLimits) -> ServedBase:
    def load(folder: Path) -> Policy:
        if source.resolved is not None:
            return build_policy(source.resolved, folder, "None")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return load_policy(folder, source.config, device=device, compute_dtype=dtype, longest=limits.sequence)

    def build(policy: Policy) -> TorchEngine:
        return TorchEngine(policy, tokenizer, max_running_requests=limits.running)

    policy = load(source.folder)
    engine = ReplaceableEngine(build(policy))
    return ServedBase(
        engine=engine,
        config=next(iter(policy.injected.layers.values())).config,
        vocabulary=policy.vocabulary,
        compute_dtype=str(policy.compute_dtype).removeprefix("torch."),
        kind="Torch",
        policy=policy,
        replacing=BaseReplacement(source.folder, engine, load, build),
    )


def _of_model(asked: ServeRequest, note: Callable[[str], None]) -> _Source:
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
    return _Source(folder, uri, config, None, engine, asked.adapters, asked.updates_from)


def _run_of(source: _Source, limits: ServeLimits) -> Resolved:
    """A manifest for servers without a run, equivalent to that of a run with this base and adapter."""
    adapter: dict[str, Any] = {"type": source.config.type, "targets": list(source.config.targets) or None}
    if source.config.type == "LoRA":
        adapter["lora"] = {"rank": source.config.rank, "alpha": source.config.alpha}
    else:
        adapter["oft"] = {"blockSize": source.config.block_size}
    prompts = [{"uri": "builtin://addition"}]
    run = OrbitRun.model_validate(
        {
            "apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "serve"},
            "spec": {
                "model": {"uri": source.place, "maxSequenceLength": limits.sequence}, "data": {"prompts": prompts},
                "adapter": {name: value for name, value in adapter.items() if value is not None},
                "rollout": {"engine": source.engine, "maxRunningRequests": limits.running},
                "training": {"trainer": "Torch"},
            },
        }
    )  # fmt: skip
    return resolve(run, machine_facts())


def _of_run(asked: ServeRequest, note: Callable[[str], None]) -> _Source:
    """The source that a run folder or a manifest describes."""
    assert asked.source is not None
    run, inputs, uri, folder = _read_run(asked.source)
    resolved = resolve(_for_serving(run, asked.engine), machine_facts(), folder=folder)
    fetched = Inputs(resolved.run.spec, inputs, RetryPolicy(notice=note, tell=progress_lines(note)), [])
    kept = list_bundles(open_store(uri, writable=False), "adapters") if _is_there(uri) else []
    adapters = {**({POLICY: uri} if kept else {}), **asked.adapters}
    spec = resolved.run.spec
    return _Source(
        fetched.model(), spec.model.uri, adapter_config(spec), resolved, resolved.engine, adapters,
        (uri, *asked.updates_from),
    )  # fmt: skip


def _for_serving(run: OrbitRun, engine: EngineName) -> OrbitRun:
    """The manifest without engine settings that only a trainer needs and, if another engine is chosen, without settings
    of the manifest's engine."""
    manifest = run.to_manifest()
    spec = manifest["spec"]
    rollout = dict(spec.get("rollout") or {})
    given = rollout.get("engine", "Auto")
    if engine == "Auto":
        engine = "Torch" if given == "Auto" and spec.get("training", {}).get("trainer", "Auto") == "Auto" else given
    if engine != given:
        rollout = {name: value for name, value in rollout.items() if name in ("sampling", "maxRunningRequests")}
    rollout = {name: value for name, value in rollout.items() if name not in ("sleep", "routerReplay")}
    # Nothing is trained here, so the original trainer does not matter.
    training = {**(spec.get("training") or {}), "trainer": "Torch"}
    return OrbitRun.model_validate(
        {**manifest, "spec": {**spec, "rollout": {**rollout, "engine": engine}, "training": training}}
    )


def _read_run(source: str) -> tuple[OrbitRun, Mapping[str, object], str, Path | None]:
    """The manifest, the inputs of its first start, its run folder, and the base of its relative paths."""
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
