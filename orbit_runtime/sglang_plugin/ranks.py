"""Collectives of one server's processes: each drives one GPU, but SGLang responds with rank 0's result alone.

All ranks call `gather` and `agree_on_load`, for the same request. SGLang passes every request to every rank, and each
processes the same ones in the same order.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from orbit_runtime.storage.process import current_process

_machines: set[str] = set()
"""Machines of all ranks, from the newest load."""


def count() -> int:
    return int(_group().world_size)


def own_rank() -> int:
    return int(_group().rank_in_group)


def gather(own: Any) -> list[Any] | None:
    """The values of all ranks, in order; None on all but the first. Sent as a pickle through SGLang's own group."""
    group = _group()
    if group.world_size == 1:
        return [own]
    is_first = group.rank_in_group == 0
    found = [None] * group.world_size if is_first else None
    dist.gather_object(None if is_first else own, found, dst=group.ranks[0], group=group.cpu_group)
    return None if found is None else [own, *found[1:]]


def are_on_one_machine() -> bool:
    """Whether all ranks may map each other's memory. False before the first load."""
    return len(_machines) == 1


def agree_on_load(result: Any, manager: Any, reference: Any, *_: Any, **__: Any) -> Any:
    """Call after a load on this rank: a load that failed on any rank has failed, and is undone on the others.

    SGLang responds with rank 0's result. A rank without an adapter that the others have would end the server at the
    first batch.
    """
    group = _group()
    if group.world_size == 1:
        return result
    told: list[Any] = [None] * group.world_size
    own = (None if result.success else str(result.error_message), _machine())
    dist.all_gather_object(told, own, group=group.cpu_group)
    _machines.clear()
    _machines.update(machine for _, machine in told)
    every = [error for error, _ in told]
    failed = {rank: error for rank, error in enumerate(every) if error is not None}
    if not failed:
        return result
    if result.success:
        manager._unload_lora_adapter(reference)
    sentences = [f"rank {rank}: {error}" for rank, error in failed.items()]
    if len(set(every)) == 1:
        sentences = [every[0]]
    return manager.create_lora_update_result(success=False, error_message="; ".join(sentences))


def _machine() -> str:
    """Processes with the same one find each other's memory below /proc."""
    here = current_process()
    return f"{here.boot_id} {here.pid_namespace}" if here.boot_id and here.pid_namespace else f"process {here.pid}"


def _group() -> Any:
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()
