"""Local models that an evaluation measures on the torch engine: the base, and adapters that a run kept."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from orbit_runtime.adapters.files import files_digest
from orbit_runtime.checkpoints.adapter_folder import NamedAdapter, open_adapter
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.prompts import check_lengths
from orbit_runtime.evaluation.tasks import EvalTask
from orbit_runtime.loop.measure import CountedTokenSource
from orbit_runtime.loop.multiplexer import OnePolicy, requesting_one
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.sides.engines import build_torch_engine
from orbit_runtime.sides.inputs import Inputs
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.sides.trainers import build_policy
from orbit_runtime.spec import OrbitRun, resolve
from orbit_runtime.storage.cache import Cache, RetryPolicy, default_cache
from orbit_runtime.types import BASE_VERSION, AdapterFiles, Engine


@dataclass(frozen=True)
class LocalSubject:
    """A policy on this machine. Its adapter is in the engine only within `asking`."""

    name: str
    tokenizer: ChatTokenizer
    engine: Engine
    weights: str
    """Digest of the base model's files."""
    version: int = BASE_VERSION
    adapter: AdapterFiles | None = None

    def to_json(self) -> dict[str, Any]:
        adapter = self.adapter.digest if self.adapter else None
        return {"kind": "local", "weights": self.weights, "adapter": adapter}

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Callable[[], CountedTokenSource]]:
        slot = f"evaluated-{self.name}" if self.adapter else None
        if self.adapter and slot:
            self.engine.load_adapter(slot, self.adapter)
        try:
            async with requesting_one(self.engine, OnePolicy(slot, self.version)) as asking:
                yield lambda: CountedTokenSource(asking)
        finally:
            if slot:
                self.engine.unload_adapter(slot)


def open_models(
    run: OrbitRun,
    tasks: Sequence[EvalTask],
    kept: Sequence[NamedAdapter],
    note: Callable[[str], None],
    *,
    base: bool,
    started: float | None,
) -> list[LocalSubject]:
    """Opens the base, if requested, and every adapter, all on one engine.

    Args:
        run: has absolute paths; its `adapter` describes every adapter.
        started: see `ChatTokenizer`.

    Raises:
        DataError: a prompt leaves no room for an answer.
        ModelError: the base or an adapter is unusable, or they do not belong together.
    """
    resolved = resolve(run, machine_facts())
    spec = resolved.run.spec
    folder = Inputs(spec, {}, RetryPolicy(), ()).model()
    tokenizer = ChatTokenizer(folder, spec.data.chat, started=started)
    for task in tasks:
        longest = spec.model.max_sequence_length - task.sampling.max_new_tokens
        encode = partial(tokenizer.encode_many, tools=task.pool.tools if task.pool else ())
        check_lengths(task.table, encode, max_prompt_tokens=longest)
    weights = cached_weights_digest(folder, Cache(default_cache(os.environ)))
    adapters = [(each, open_adapter(each.uri)) for each in kept]
    for each, adapter in adapters:
        adapter.check_base(
            weights,
            who="this adapter",
            ours="the manifest's is",
            where=each.uri,
            fix="write the model and precision that it was trained on",
        )
    policy = build_policy(resolved, folder, "None")
    if policy.mode.said:
        note(policy.mode.said)
    engine = build_torch_engine(policy, tokenizer, spec.rollout, is_trained=False)
    subjects = [LocalSubject("base", tokenizer, engine, weights)] if base else []
    for version, (each, adapter) in enumerate(adapters):
        files = AdapterFiles(version, adapter.files, files_digest(adapter.files))
        subjects.append(LocalSubject(each.name, tokenizer, engine, weights, version, files))
    return subjects
