"""The memory settings of an SGLang server on a GPU: the plan's allocation in SGLang's terms.

Belongs here: how SGLang 0.5.23 counts. Does not belong here: the amounts (`parts`, `search`), or the flags
(`rollout.sglang_server`).

SGLang measures the free memory M of a GPU before it loads a model, and sizes its cache so that base, adapter slots and
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
    """Tokens that its KV cache holds."""
    adapter_slots: int
    """Adapters that it can hold on the device at once; the plan counts unused slots too."""
    fraction: float
    """Fraction of the memory free at its start that base, adapter slots and KV cache take."""


def server_memory(choice: Choice) -> ServerMemory | None:
    """The settings of each server; None on a CPU, where its memory is the machine's, and without our own servers."""
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
    """Bytes that the trainer holds on the device while the engine samples."""
    names = ("base (trainer)", "base (trainer), replicated", "runtime (trainer)", "adapter", "optimizer")
    return sum(rollout.get(name, 0) for name in names)
