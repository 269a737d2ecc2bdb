"""The memory that an SGLang server on a GPU is told to take: what the plan gave it, in SGLang's own terms.

Belongs here: SGLang 0.5.23's way to count. Does not belong here: how much that is (`parts`, `search`), or the flags
(`rollout.sglang_server`).

SGLang measures what is free on a GPU before it loads a model, M, and sizes its cache so that base, adapter slots and
cache together take `--mem-fraction-static` of M (`kv_pool_runtime.py`); `--max-total-tokens` bounds the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orbit_runtime.planner import assumptions as known
from orbit_runtime.planner.parts import base_bytes
from orbit_runtime.planner.search import Choice

LARGEST_FRACTION = 0.98
SLACK = 0.01
"""Added to the fraction: the tokens bound the cache, and the fraction must not fall short of them."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Example: 65,536 tokens in what is left beside a 4B model's trainer: `ServerMemory(65536, 4, 0.61)`."""

    kv_tokens: int
    """That its KV cache holds."""
    adapter_slots: int
    """Adapters that it holds on the device at a time, counted in the plan whether they are in use or not."""
    fraction: float
    """Of what is free when it starts: base, adapter slots and KV cache."""


def server_memory(choice: Choice) -> ServerMemory | None:
    """Of each server; None on a CPU, where its memory is the machine's, and without servers of ours."""
    setting, sizes = choice.setting, choice.sizes
    if not setting.job.samples:
        return None
    if setting.machine.gpu is None or setting.job.engine != "SGLang" or choice.capacity is None:
        return None
    rollout = sizes.phases["rollout"]
    cache = rollout.get("KV cache", 0)
    own = base_bytes(setting, "engine") + rollout.get("adapter slots", 0) + cache
    beside = 0 if setting.job.is_split else _trainer_bytes(rollout)
    free = choice.capacity - beside - rollout.get("runtime (engine)", 0)
    tokens = cache * setting.job.max_sequence // sizes.kv_bytes_per_sequence if sizes.kv_bytes_per_sequence else 0
    fraction = math.ceil(1000 * min(LARGEST_FRACTION, own / max(1, free) + SLACK)) / 1000
    return ServerMemory(tokens, known.SERVER_SLOTS, fraction)


def _trainer_bytes(rollout: dict[str, int]) -> int:
    """What the trainer holds of the device while the engine samples."""
    names = ("base (trainer)", "base (trainer), replicated", "runtime (trainer)", "adapter", "optimizer")
    return sum(rollout.get(name, 0) for name in names)
