"""The engine behind a server that no model of this process stands behind: SGLang's servers, started or attached.

Belongs here: what serving asks of them that a run does not. Does not belong here: starting and asking them (`rollout`,
`loop.engines`), which name is which adapter (`policies`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UsageError
from orbit_runtime.loop.checkpoint_facts import facts_of_checkpoint
from orbit_runtime.loop.engines import build_servers, endpoint_headers
from orbit_runtime.planner.assumptions import SERVER_SLOTS
from orbit_runtime.planner.sampling import Kind
from orbit_runtime.policy import Policy
from orbit_runtime.rollout.news import StreamingEngine
from orbit_runtime.spec import Resolved

PROBE = [{"role": "user", "content": "Name three rivers of Africa, then add 17 and 26."}]
"""Both tokenizers must agree on it, where servers are attached."""
MOST_ADAPTERS = 2 * SERVER_SLOTS - 1
"""Servers hold twice as many as they compute with at a time; beyond that SGLang drops one by itself. One place is for
the next, which is proven before it takes the place of another."""


@dataclass(frozen=True)
class Held:
    """An engine and what is known of the base that it holds."""

    engine: StreamingEngine
    config: AdapterConfig
    vocabulary: int
    compute_dtype: str
    kind: Kind
    policy: Policy | None = None
    """The model, where it is in this process."""
    most_adapters: int | None = None
    watch: Callable[[], None] = lambda: None


def open_servers(
    resolved: Resolved,
    config: AdapterConfig,
    folder: Path,
    tokenizer: ChatTokenizer,
    adapters: int,
    closing: ExitStack,
) -> Held:
    """
    Args:
        config: of the adapters.
        adapters: how many are to be served.
        closing: ends what was started.

    Raises:
        UsageError: more adapters than servers hold.
        OrbitError: servers cannot apply these adapters, do not start, or do not answer.
    """
    if adapters >= MOST_ADAPTERS:
        raise UsageError(
            f"{adapters} adapters are asked for, and SGLang's servers hold {MOST_ADAPTERS - 1} beside each other",
            where="--adapter",
            fix="serve fewer, or start another server for the others",
        )
    spec = resolved.run.spec
    for index, endpoint in enumerate(spec.rollout.endpoints):
        endpoint_headers(index, endpoint, os.environ)
    facts = facts_of_checkpoint(folder, config, resolved.compute_dtype)
    sequences = [tokenizer.encode_chat(PROBE)]
    engine = build_servers(resolved, facts, tokenizer, folder, sequences, closing)
    return Held(
        engine=engine,
        config=facts.adapter,
        vocabulary=facts.vocabulary,
        compute_dtype=facts.compute_dtype,
        kind=_kind(resolved, engine.kinds()),
        most_adapters=MOST_ADAPTERS,
        watch=engine.revive if resolved.engine == "SGLang" else lambda: None,
    )


def _kind(resolved: Resolved, found: set[str]) -> Kind:
    """What the servers are, for `planner.sampling`."""
    if "vLLM" in found:
        return "vLLM"
    if resolved.run.spec.rollout.deterministic:
        return "SGLang, deterministic"
    return "SGLang without plug-in" if "SGLang without plug-in" in found else "SGLang"
