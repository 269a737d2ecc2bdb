"""The engine of a server if this process holds no model: SGLang servers, started or attached."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UsageError
from orbit_runtime.planner.assumptions import SERVER_SLOTS
from orbit_runtime.planner.support.sampling import Kind
from orbit_runtime.policy import Policy
from orbit_runtime.rollout.streaming import StreamingEngine
from orbit_runtime.serve.policies import BaseReplacement
from orbit_runtime.sides.checkpoint_facts import facts_of_checkpoint
from orbit_runtime.sides.engines import all_headers, build_servers
from orbit_runtime.sides.interface import EngineOrder
from orbit_runtime.spec import Resolved

PROBE = [{"role": "user", "content": "Name three rivers of Africa, then add 17 and 26."}]
"""Text on which the tokenizers of Orbit and of attached servers must agree."""
MOST_ADAPTERS = 2 * SERVER_SLOTS - 1
"""Servers hold twice as many adapters as they compute with at a time; beyond that SGLang drops one by itself. One place
is kept for the next adapter, which is proven before it replaces another."""


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
    """The parts needed to replace the base, likewise."""
    most_adapters: int | None = None
    watch: Callable[[], None] = lambda: None


def open_servers(
    resolved: Resolved,
    config: AdapterConfig,
    folder: Path,
    tokenizer: ChatTokenizer,
    adapters: int,
    closing: ExitStack,
) -> ServedBase:
    """
    Args:
        config: describes the adapters.
        adapters: number of adapters to serve.
        closing: receives what must be ended.

    Raises:
        UsageError: there are more adapters than servers hold.
        OrbitError: servers cannot apply these adapters, do not start, or do not respond.
    """
    if adapters >= MOST_ADAPTERS:
        raise UsageError(
            f"{adapters} adapters were requested, and SGLang's servers hold at most {MOST_ADAPTERS - 1}",
            where="--adapter",
            fix="serve fewer, or start another server for the others",
        )
    spec = resolved.run.spec
    all_headers("spec.rollout.endpoints", spec.rollout.endpoints, os.environ)
    facts = facts_of_checkpoint(folder, config, resolved.compute_dtype)
    sequences = [tokenizer.encode_chat(PROBE)]
    engine = build_servers(EngineOrder(resolved, facts, tokenizer, folder, sequences, closing))
    return ServedBase(
        engine=engine,
        config=facts.adapter,
        vocabulary=facts.vocabulary,
        compute_dtype=facts.compute_dtype,
        kind=_kind(resolved, engine.kinds()),
        most_adapters=MOST_ADAPTERS,
        watch=engine.revive if resolved.engine == "SGLang" else lambda: None,
    )


def _kind(resolved: Resolved, found: set[str]) -> Kind:
    """The kind of the servers, for `planner.support.sampling`."""
    if "vLLM" in found:
        return "vLLM"
    if resolved.run.spec.rollout.deterministic:
        return "SGLang, deterministic"
    return "SGLang without plug-in" if "SGLang without plug-in" in found else "SGLang"
