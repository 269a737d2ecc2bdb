"""From a run folder, a manifest, or a model and adapters to the models that a server answers with.

Belongs here: what each of them says of base and adapters, loading them. Does not belong here: HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UsageError
from orbit_runtime.loop.inputs import Inputs
from orbit_runtime.loop.machine import machine_facts
from orbit_runtime.loop.resume import read_run_file
from orbit_runtime.loop.trainers import build_policy
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.content import kept_weights_digest
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.serve.names import POLICY
from orbit_runtime.serve.policies import Base, Policies, config_of, open_policy
from orbit_runtime.serve.requests import Limits
from orbit_runtime.spec import OrbitRun, load_manifest, resolve
from orbit_runtime.storage import open_store
from orbit_runtime.storage.bundles import list_bundles
from orbit_runtime.storage.cache import Cache, default_cache
from orbit_runtime.storage.download import Patience
from orbit_runtime.storage.inputs import fetch_input


@dataclass(frozen=True)
class Asked:
    """What is to be served. Example: `Asked(model="builtin://tiny-adder", adapters={"sums": "runs/a"})`"""

    source: str | None = None
    """A run folder, or the file of a manifest."""
    model: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    updates_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Opened:
    """Loaded, with every adapter proven live."""

    policies: Policies
    engine: TorchEngine
    limits: Limits
    folder: Path
    """The base's."""


def open_models(asked: Asked, limits: Limits, note: Callable[[str], None]) -> Opened:
    """
    Raises:
        UsageError: neither or both of a run and a model were named.
        OrbitError: model or adapter are missing or damaged, or an adapter could not be proven live.
    """
    if (asked.source is None) == (asked.model is None):
        raise UsageError(
            "what is served is a run or a model", fix="name a run folder, a manifest's file, or --model with --adapter"
        )
    if asked.source is None:
        folder, place, policy, config = _load_model(asked, note)
        adapters, sources = dict(asked.adapters), asked.updates_from
    else:
        run, inputs, uri, folder_of_manifest = _read_run(asked.source)
        resolved = resolve(run, machine_facts(), folder=folder_of_manifest)
        fetched = Inputs(resolved.run.spec, inputs, Patience(notice=note), [])
        folder, place = fetched.model(), resolved.run.spec.model.uri
        policy = build_policy(resolved, folder, "None", note)
        config = next(iter(policy.injected.layers.values())).config
        kept = list_bundles(open_store(uri, writable=False), "adapters") if _is_there(uri) else []
        adapters = {**({POLICY: uri} if kept else {}), **asked.adapters}
        sources = (uri, *asked.updates_from)
        limits = replace(limits, sequence=min(limits.sequence, run.spec.model.max_sequence_length))
    tokenizer = ChatTokenizer(folder)
    longest = getattr(policy.model.config, "max_position_embeddings", None)
    if longest:
        limits = replace(limits, sequence=min(limits.sequence, int(longest)))
    engine = TorchEngine(policy, tokenizer, max_running_requests=limits.running)
    weights = kept_weights_digest(folder, Cache(default_cache(os.environ)))
    name = place.rstrip("/").rpartition("/")[2] or place
    policies = Policies(Base(name, place, policy, tokenizer, config, weights), engine, sources)
    for adapter, where in adapters.items():
        served, proof = policies.load(adapter, where)
        note(f"{adapter}: {served.place}, {served.digest[:19]}…, {proof.verdict} live")
    return Opened(policies, engine, limits, folder)


def _load_model(asked: Asked, note: Callable[[str], None]) -> tuple[Path, str, Policy, AdapterConfig]:
    assert asked.model is not None
    uri = asked.model
    if uri.startswith("builtin://"):
        folder = builtin_folder(uri.removeprefix("builtin://"), "Auto")
    else:
        folder = fetch_input(uri, "model", "--model", patience=Patience(notice=note)).path
    found = [config_of(open_policy(where)) for where in asked.adapters.values()]
    config = found[0] if found else AdapterConfig(type="LoRA", targets=())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    policy = load_policy(folder, config, device=device, compute_dtype=dtype)
    return folder, uri, policy, next(iter(policy.injected.layers.values())).config


def _read_run(source: str) -> tuple[OrbitRun, Mapping[str, object], str, Path | None]:
    """The manifest, what its first start read, its run folder, and where its relative paths begin."""
    path = Path(source)
    if path.is_file():
        manifest = load_manifest(path, [])
        return manifest, {}, f"{manifest.spec.storage.uri.rstrip('/')}/{manifest.name}", path.resolve().parent
    before = read_run_file(open_store(source, writable=False))
    if before is None:
        raise UsageError("there is no run here", where=source, fix="name a run folder; `orbit ls` lists them")
    # Whoever trained it, one process serves it.
    spec = before["resolved"]["spec"]
    training = {**spec["training"], "trainer": "Torch"}
    run = OrbitRun.model_validate({**before["resolved"], "spec": {**spec, "training": training}})
    return run, before.get("inputs", {}), source, None


def _is_there(uri: str) -> bool:
    return "://" in uri or Path(uri).is_dir()
