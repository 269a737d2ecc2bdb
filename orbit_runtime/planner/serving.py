"""Our own SGLang servers: how many GPUs each takes, over how many a model can be cut, and their memory settings.

Belongs here: how SGLang 0.5.23 cuts and counts. Does not belong here: bytes (`parts`), starting servers (`rollout`).

A column-parallel layer is cut by its rows, a row-parallel one by its columns; heads are distributed whole. SGLang
measures the free memory M of a GPU before it loads a model, and sizes its cache so that base, adapter slots and cache
together take `--mem-fraction-static` of M (`kv_pool_runtime.py`); `--max-total-tokens` bounds the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.weights import ModelFacts, StoredWeight
from orbit_runtime.planner import assumptions as known
from orbit_runtime.planner.adapter_size import adapted_weights
from orbit_runtime.planner.job import Job
from orbit_runtime.planner.parts import base_bytes
from orbit_runtime.planner.search import Candidate

ROW_PARALLEL = ("o_proj", "o_b_proj", "down_proj")
"""Targets whose input is cut; other linears are cut by their output."""
KEYS = ("k_proj", "v_proj")
CPU_MULTIPLE = 32
"""SGLang on a CPU pads inner widths to a multiple of this per process; adapters would then no longer fit."""
MARLIN_COLUMNS, MARLIN_FORMATS = 64, ("NVFP4", "INT4")
"""SGLang 0.5.23's Marlin kernel for experts multiplies that many columns at a time, and pads these formats to nothing
(`kernels/jit/csrc/gemm/marlin_moe`): other widths end the server at its first pass."""
TENSOR_PARALLEL, REPLICAS = "spec.rollout.tensorParallel", "spec.rollout.replicas"


def server_gpus(model: ModelFacts, job: Job, num_gpus: int) -> int:
    """GPUs of each server; on a CPU, its processes.

    If unset, as many as the machine has for it and as the model can be cut over: `replicas` alone requests servers.

    Args:
        num_gpus: number that servers may use; 0 for a CPU.
    """
    if job.engine != "SGLang":
        return 1
    if job.spec.rollout.tensor_parallel is not None:
        return job.spec.rollout.tensor_parallel
    most = max(1, num_gpus // job.spec.rollout.replicas)
    return next((size for size in range(most, 1, -1) if find_objection(model, job, size, num_gpus) is None), 1)


def find_objection(model: ModelFacts, job: Job, size: int, num_gpus: int) -> str | None:
    """Why there cannot be servers of this size; None if there can."""
    if job.engine != "SGLang":
        return None
    if num_gpus and job.spec.rollout.replicas * size > num_gpus:
        return f"{job.spec.rollout.replicas} x {size} GPUs are more than the {num_gpus} available to servers"
    return None if size == 1 else next(_objections(model, job, size, on_cpu=num_gpus == 0), None)


def find_refusal(model: ModelFacts, job: Job, num_gpus: int) -> UnsupportedError | None:
    """Why a manifest's servers are impossible, with the field and what to write instead."""
    why = find_objection(model, job, server_gpus(model, job, num_gpus), num_gpus)
    if why is None:
        return None
    if num_gpus and job.spec.rollout.replicas > num_gpus:
        return UnsupportedError(why, where=REPLICAS, fix=f"write replicas: {num_gpus} or less")
    sizes = range(1, (job.spec.rollout.tensor_parallel or 1) + 1)
    fitting = [str(size) for size in sizes if find_objection(model, job, size, num_gpus) is None]
    return UnsupportedError(why, where=TENSOR_PARALLEL, fix=f"write tensorParallel: {' or '.join(fitting)}")


def check_servers(model: ModelFacts, job: Job, num_gpus: int) -> int:
    """GPUs of each server, as `server_gpus`. Raises UnsupportedError (78) if that is impossible."""
    found = find_refusal(model, job, num_gpus)
    if found is not None:
        raise found
    return server_gpus(model, job, num_gpus)


def _objections(model: ModelFacts, job: Job, size: int, *, on_cpu: bool) -> Iterator[str]:
    shape = model.architecture
    if shape.num_heads % size:
        yield f"{shape.num_heads} attention heads cannot be divided among {size} GPUs"
    heads = shape.kv.heads
    if heads > 1 and heads % size and (size % heads or on_cpu):
        yield f"{heads} heads of keys and values can be neither divided among {size} GPUs nor repeated on them"
    for stored in model.weights:
        if stored.weight.is_linear and stored.weight.is_split and stored.weight.role not in ("mtp", "vision", "head"):
            yield from _cuts(stored, size, heads, on_cpu=on_cpu, family=shape.family)
    if job.spec.adapter.type == "OFT":
        for weight in adapted_weights(shape, job):
            width = weight.shape[-1]
            if weight.is_split and weight.target in ROW_PARALLEL and width // size % job.rank:
                yield (
                    f"each of {size} GPUs has {width // size} input features of {weight.module}, so blocks "
                    f"of {job.rank} would be on two"
                )


def _cuts(stored: StoredWeight, size: int, heads: int, *, on_cpu: bool, family: str) -> Iterator[str]:
    weight, (rows, columns) = stored.weight, stored.weight.shape[-2:]
    is_row_parallel = weight.target in ROW_PARALLEL
    if weight.target in KEYS:
        size = min(size, heads)
    width = columns if is_row_parallel else rows
    if width % size:
        yield f"the {width} {'columns' if is_row_parallel else 'rows'} of {weight.module} cannot be divided by {size}"
        return
    is_inner = weight.role in ("dense_mlp", "shared_expert", "routed_expert")
    if on_cpu and is_inner and width // size % CPU_MULTIPLE:
        yield (
            f"on a CPU SGLang cuts {weight.module} at multiples of {CPU_MULTIPLE}, but each of {size} processes would "
            f"have {width // size}"
        )
    by_marlin = weight.role == "routed_expert" and not on_cpu and stored.format in MARLIN_FORMATS
    if by_marlin and width // size % MARLIN_COLUMNS:
        yield (
            f"each of {size} GPUs has {width // size} {'columns' if is_row_parallel else 'rows'} of {weight.module}, "
            f"and Marlin multiplies {MARLIN_COLUMNS} at a time"
        )
    # On a CPU the base is unpacked; and SGLang cuts the experts of gpt-oss regardless of where blocks end.
    if stored.block is None or on_cpu or (family == "gpt_oss" and weight.role == "routed_expert"):
        return
    block = stored.block[1] if is_row_parallel else stored.block[0]
    if width // size % block:
        yield (
            f"each of {size} GPUs has {width // size} {'columns' if is_row_parallel else 'rows'} of {weight.module}, "
            f"a scale covers {block}"
        )


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


def server_memory(choice: Candidate) -> ServerMemory | None:
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
    tokens = (
        cache * setting.job.spec.model.max_sequence_length // sizes.kv_bytes_per_sequence
        if sizes.kv_bytes_per_sequence
        else 0
    )
    fraction = math.ceil(1000 * min(LARGEST_FRACTION, own / max(1, free) + SLACK)) / 1000
    return ServerMemory(tokens, known.SERVER_SLOTS, fraction)


def _trainer_bytes(rollout: dict[str, int]) -> int:
    """Bytes that the trainer holds on the device while the engine samples."""
    names = ("base (trainer)", "base (trainer), replicated", "runtime (trainer)", "adapter", "optimizer")
    return sum(rollout.get(name, 0) for name in names)
